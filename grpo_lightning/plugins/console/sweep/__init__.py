"""`grpo sweep`: the runs of an experiment, several at a time, and their report."""
