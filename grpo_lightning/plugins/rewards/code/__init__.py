"""A reward for programs: tests decide, in a process that reaches nothing."""
