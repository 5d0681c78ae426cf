"""What a user sees in the terminal: help, lines of progress, mistakes, a first project, ranks."""
