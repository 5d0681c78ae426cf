"""Reading what a run left in its folder: configuration, scalars, grader. It imports no torch."""
