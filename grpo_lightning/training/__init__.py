"""Training on Lightning: exploration, preparation, the update, evaluation and the loop."""
