"""A mistake in the options, a class or a file as one line: key, value, what there is, and the nearest name."""
