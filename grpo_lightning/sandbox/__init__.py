"""Processes that can be killed: they parse model output and run users' functions."""
