"""Asynchronous runs: rollouts of later steps are drawn while a step is trained."""
