"""Rewards by a judge: another model, which scores completions by a rubric."""
