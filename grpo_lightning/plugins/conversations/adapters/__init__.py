"""Environments of other libraries, each behind an extra."""
