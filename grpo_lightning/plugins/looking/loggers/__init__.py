"""Completions as tables, and a logger for Trackio."""
