"""The policy: a causal language model, its forward over ragged rollouts, and its snapshots."""
