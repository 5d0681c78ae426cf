"""Rollouts of an earlier policy, to study staleness by itself."""
