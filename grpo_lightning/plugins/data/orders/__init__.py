"""Orders of questions that depend on rewards."""
