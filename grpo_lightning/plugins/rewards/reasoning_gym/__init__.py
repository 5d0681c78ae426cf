"""The puzzles of reasoning-gym: a source of questions, and their own scorers."""
