"""Advantages from the rewards of segments."""
