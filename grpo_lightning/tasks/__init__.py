"""Sources of questions."""
