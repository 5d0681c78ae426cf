"""A penalty for completions that are nearly too long."""
