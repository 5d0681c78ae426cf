"""Runs that distil, for test_distilling_runs; as a script, `distilling.py FOLDER` does them on two ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.teachers import Teachers
from grpo_lightning.maths.kl import K2
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Reinforce
from grpo_lightning.plugins.data.conversations.prompt_data import PromptDataModule
from grpo_lightning.plugins.methods.distillation.full_vocabulary import FullVocabulary
from grpo_lightning.plugins.methods.distillation.no_advantage import NoAdvantage
from grpo_lightning.plugins.methods.distillation.self_teacher import SelfTeacher
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.tasks.task import Task
from grpo_lightning.types import Question
from helpers import two_ranks
from helpers.fast import fit, policy_of
from helpers.fitting import Gradients
from helpers.tiny import model_of, tokenizer

RUNS = ("sampled", "exact", "teachers", "self", "adapter")
MODELS = {"a": ("llama", 1, 48), "b": ("qwen2", 2, 64)}
"""Shape, seed and width of the teachers."""


class Subjects(Task):
    """Questions of different lengths, of one subject or the other."""

    def questions(self, split: str) -> list[Question]:
        texts = ["3" * (1 + row % 5) + "ab" for row in range(24)]
        return [
            Question(text, str(row), f"row:{row}", {"subject": "ab"[row % 3 % 2]}) for row, text in enumerate(texts)
        ]


def policy_with(adapter: LoRA | None) -> Policy:
    """The tiny policy that `fit` trains by default, with an adapter on it whose second half is not 0."""
    torch.manual_seed(0)
    policy = Policy.from_model(model_of("llama", scale=0.05), tokenizer(), adapter=adapter)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return policy


def runs(folder: Path, parts: bool, **trainer: Any) -> dict[str, Any]:
    """The gradients of the updates of two steps, in micro-batches of one or two rows or whole minibatches."""
    paths = {name: str(folder.parent / name) for name in MODELS}
    exact, found = Objective(Reinforce(), FullVocabulary("jensen_shannon", top_k=8), beta=1.0), {}
    options: dict[str, dict[str, Any]] = {
        "sampled": {"objective": Objective(Reinforce(), K2(), beta=1.0), "reference": Teacher(paths["b"])},
        "exact": {"objective": exact, "reference": Teacher(paths["b"])},
        "teachers": {"objective": exact, "reference": Teachers(paths, "subject")},
        # Large weights and float64: the gradient is a small difference of two forwards, and would be their rounding.
        "self": {"objective": exact, "reference": SelfTeacher("{answer}{question}", FrozenCopy())}
        | {"policy": policy_of(scale=0.2)},
        "adapter": {"objective": exact, "reference": Teacher(paths["a"]), "policy": policy_with(LoRA(rank=4))},
    }
    for name in RUNS:
        seen = Gradients()
        fit(
            folder / name,
            [seen],
            loop={"max_tokens": 30 if parts else 0, "num_minibatches": 2},
            trainer={"max_epochs": 2, "precision": "64-true" if name == "self" else "32-true"} | trainer,
            data=PromptDataModule(Subjects()),
            advantage=NoAdvantage(),
            **options[name],
        )
        found[name] = seen.updates
    return found


def gradient(policy: Policy, reference: Any, rollouts: Rollouts, **options: Any) -> dict[str, Tensor]:
    """That of a whole-vocabulary distillation of the rollouts."""
    objective = Objective(Reinforce(), FullVocabulary(**options), beta=1.0)
    rollouts = rollouts.with_columns({"advantage": torch.zeros(rollouts.num_tokens)})
    policy.zero_grad()
    scored = policy(rollouts, read=objective.kl.reading(reference, policy, rollouts))
    objective(scored.logp, scored.entropy, rollouts, scored.read)[0].backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def in_every_way(folder: Path) -> dict[str, dict[str, Any]]:
    """What the runs find in whole minibatches, in parts, and on two ranks with ddp and fsdp2."""
    for name, (shape, seed, width) in MODELS.items():
        policy_of(shape, seed, scale=0.1, hidden_size=width).save_pretrained(folder / name)
    return two_ranks.in_every_way(__file__, folder, runs)


if __name__ == "__main__":
    two_ranks.as_program(runs)
