"""Games to learn from."""
