"""Configurations of other libraries, translated."""
