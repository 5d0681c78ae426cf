"""Runs of conversations; as a script, `conversations_of_ranks.py STRATEGY FOLDER` does them on two ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

import grpo_lightning.training.strategy  # noqa: F401  # registers `fsdp2`
from grpo_lightning import ranks
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.environments.running import Limits
from grpo_lightning.maths.objective import Objective
from grpo_lightning.rewards.environment import EnvironmentReward
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import Completion
from helpers.fitting import Gradients, fit, scalars
from helpers.gradient_of_ranks import Another, Elsewhere, Vowels, cases
from helpers.guessing import Guess
from helpers.tiny import policy_of
from helpers.two_ranks import on_two_ranks

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
"""End a turn. One that has none of them in two tokens is cut off, and ends its conversation: some are short."""
SOMETIMES = (
    "{% for m in messages %}{{ '§' if m.role == 'assistant' and not loop.last and m.content[:1] in 'abcdefgh0123' }}"
    "{{ m.content }}{% endfor %}"
)
"""Rewrites turns with some beginnings: the policy has no token for the mark."""


class Counting(NativeEngine):
    """Counts the turns that it was asked for."""

    turns = 0

    def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        self.turns += 1
        return super().generate(*args, **kwargs)


class Every(L.Callback):
    """Another case of `gradient_of_ranks` in every step, so that each surrogate and weighting has its turns."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        case = cases()[trainer.current_epoch * 6 % 50]
        pl_module.objective, pl_module.advantage, pl_module.reward_kl = case.objective, case.advantage, case.reward_kl


def runs(folder: Path, max_tokens: int, **trainer: Any) -> dict[str, Any]:
    """The gradients of every update, and what was logged and how many turns each rank drew."""
    found: dict[str, Any] = {}

    def run(name: str, callbacks: Sequence[L.Callback], steps: int, **options: Any) -> None:
        seen, policy, engine = Gradients(), policy_of(scale=0.05), Counting()
        policy.tokenizer.chat_template = SOMETIMES
        fit(
            folder / name,
            [*callbacks, seen],
            loop={"max_tokens": max_tokens, "num_minibatches": 2, "group_size": 3},
            trainer={"max_epochs": steps} | trainer,
            data=PromptDataModule(Guess(), chat=True, limits=Limits(max_turns=10)),
            rewards=[EnvironmentReward(), Vowels(weight=0.5)],
            sampling=Sampling(max_new_tokens=2, stop=LETTERS),
            policy=policy,
            engine=engine,
            **options,
        )
        found[name] = {"gradients": seen.updates, "turns": ranks.gather(engine.turns), "logged": scalars(folder / name)}

    still = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    run(
        "objectives", [Every()], 10, objective=Objective(beta=0.1), old_policy=Elsewhere(), reference=Another(), **still
    )
    run("learning", [], 3)
    return found


if __name__ == "__main__":
    on_two_ranks(runs, max_tokens=60)
