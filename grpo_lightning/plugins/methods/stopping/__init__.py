"""Rules that stop the passes over a step."""
