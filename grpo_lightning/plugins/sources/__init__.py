"""Sources of rollouts beyond the synchronous one: asynchronous, stale, with demonstrations."""
