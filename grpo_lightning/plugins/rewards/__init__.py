"""Rewards beyond the core's: verifiers, programs, judges, reward models."""
