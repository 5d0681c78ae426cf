"""Explains a mistake in one line: key, value, allowed names, and the name that was probably meant."""
