"""Reward functions that were written for TRL."""
