"""Gold completions: supervised fine-tuning, and demonstrations among GRPO's completions."""
