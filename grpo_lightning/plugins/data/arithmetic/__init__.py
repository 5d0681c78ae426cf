"""Generated sums: a task that needs no data."""
