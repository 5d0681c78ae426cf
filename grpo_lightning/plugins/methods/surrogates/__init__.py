"""Surrogate objectives of other papers."""
