"""Advantages from rewards of segments."""
