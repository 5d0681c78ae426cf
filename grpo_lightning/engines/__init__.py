"""Rollout engines: prompts in, groups of completions with their log-probs out."""
