"""Rewards that count only where another reward is high enough."""
