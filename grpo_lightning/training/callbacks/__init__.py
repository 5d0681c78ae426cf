"""Lightning callbacks: checkpoints, completions, predictions, progress."""
