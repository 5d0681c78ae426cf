"""Rewards that another model gives, by a rubric."""
