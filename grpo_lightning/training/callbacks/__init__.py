"""Lightning callbacks: checkpoints."""
