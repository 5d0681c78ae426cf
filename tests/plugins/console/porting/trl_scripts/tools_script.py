"""A script for TRL with a tool: a function that the policy may call."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: A number.
        b: Another number.
    """
    return a * b


def calls(completions, **kwargs):
    """The number of turns, of which the answers of the tool are some."""
    return [float(len(completion)) for completion in completions]


if __name__ == "__main__":
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12}
    options_of_tools = {"max_tool_calling_iterations": 2, "chat_template_kwargs": {"enable_thinking": False}}
    trainer = GRPOTrainer(
        model="policy",
        reward_funcs=[calls],
        args=GRPOConfig("runs/tools", max_steps=2, use_cpu=True, bf16=False, **options, **options_of_tools),
        train_dataset=load_dataset("json", data_files="chat.jsonl", split="train"),
        tools=[multiply],
    )
    trainer.train()
