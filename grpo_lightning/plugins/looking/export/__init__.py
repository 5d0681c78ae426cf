"""A run's policy as a model for transformers and vLLM."""
