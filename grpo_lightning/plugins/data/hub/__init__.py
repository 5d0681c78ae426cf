"""Questions from datasets of the Hugging Face Hub."""
