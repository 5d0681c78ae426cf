"""What the command line says: its commands, its help, and one line per mistake."""
