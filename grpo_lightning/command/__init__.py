"""The commands, and the parser of their options."""
