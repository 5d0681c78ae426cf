"""Asynchronous runs: rollouts of later steps are sampled while a step is trained."""
