"""Rewards: the value of a completion."""
