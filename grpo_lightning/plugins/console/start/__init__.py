"""Where a user begins: a project to change, and the versions for a bug report."""
