"""The engine that samples with the policy itself, with a cache of keys and values."""
