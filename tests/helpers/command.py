"""The command line of grpo_lightning as a test calls it."""

from collections.abc import Callable

OPTIONS = {
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": "1",
    "trainer.default_root_dir": "run",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "memory.show": "false",
    "model.policy.path": "policy",
    "model.rewards": "[FormatReward]",
    "model.sampling.max_new_tokens": "4",
    "model.val_samples": "2",
    "data.task": "JsonPrompts",
    "data.task.train": "rows.jsonl",
    "data.task.val": "rows.jsonl",
    "data.task.test": "rows.jsonl",
    "loop.group_size": "2",
    "loop.prompts_per_step": "2",
}
"""A run of one step in a folder that has rows.jsonl and a tiny model in it."""

Grpo = Callable[..., tuple[int, str, str]]
"""A subcommand and options in, exit code, stdout and stderr out."""


def arguments(subcommand: str, *options: str) -> list[str]:
    """`--key value` of OPTIONS; `options` override them, and `--key!` takes one away."""
    gone = {option.removeprefix("--").removesuffix("!") for option in options if option.endswith("!")}
    base = [f"--{key}={value}" for key, value in OPTIONS.items() if key not in gone]
    return [subcommand, *base, *(option for option in options if not option.endswith("!"))]
