"""A script for TRL at its simplest: a file of prompts, one reward, everything at the top."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

LENGTH = 8


def digits(completions, **kwargs):
    """The fraction of characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


dataset = load_dataset("json", data_files="train.jsonl", split="train").shuffle(seed=1)

training_args = GRPOConfig(
    output_dir="runs/plain",
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=LENGTH,
    max_prompt_length=2 * LENGTH,
    num_train_epochs=1,
    warmup_ratio=0.5,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
)
trainer = GRPOTrainer(model="policy", reward_funcs=digits, args=training_args, train_dataset=dataset)
trainer.train()
trainer.save_model(training_args.output_dir)
