"""What a run shows while it goes and when it has ended: lines, a bar, TensorBoard's first page, completions."""
