"""Steps whose environment fails on so many questions that some minibatches have no completion, on any rank."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.command import OPTIONS, Grpo, arguments
from helpers.fitting import checkpoint_of, of_updates, scalars
from helpers.programs import programs

from grpo_lightning import Environment, Question, Task, Turn


class Failing(Environment, Task):
    """Answers one question in so many; on the others it fails."""

    def __init__(self, every: int = 4) -> None:
        self.every = every

    def questions(self, split: str) -> Sequence[Question]:
        return [Question(f"{number}", answer=f"{number}") for number in range(1, 17)]

    def reset(self, question: Question) -> list[dict[str, Any]]:
        if int(question.answer) % self.every:
            raise RuntimeError("no answer")
        return [{"role": "user", "content": question.text}]

    def step(self, message: dict[str, Any]) -> Turn:
        return Turn([], reward=float(len(message["content"]) % 2), done=True)


GAME = [
    *(f"--{key}!" for key in OPTIONS if key.startswith("data.task")),
    "--data.task=test_empty_minibatches.Failing",
    "--model.rewards=[EnvironmentReward]",
    "--model.guard.max_failed_rewards=1",
    "--model.optimizer.lr=0.01",
    "--model.lr_scheduler={class_path: StepLR, init_args: {step_size: 1, gamma: 0.5}}",
    "--loop.prompts_per_step=8",
    "--loop.group_size=2",
    "--data.limits.num_workers=2",
    "--loop.num_minibatches=4",
    "--trainer.max_epochs=3",
    "--trainer.limit_val_batches=0",
    "--inspect.every_n_steps=1",
    "--trainer.callbacks+=helpers.fitting.EachUpdate",
]


def checked(folder: Path) -> dict[str, dict[int, float]]:
    """What the run logged: as many updates as there are minibatches with a completion, in the optimizer too."""
    seen = scalars(folder)
    left = [round(8 * (1 - value)) for value in seen["rollout/environment_failed"].values()]
    made = sum(min(4, prompts) for prompts in left)
    assert len(left) == 3 and 0 < made < 12, "some minibatches are empty"
    saved = checkpoint_of(folder)
    assert {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()} == {made}
    # The schedule halves the rate at every update that is made.
    rates = of_updates(folder, "optim/lr")
    assert [len(step) for step in rates] == [min(4, prompts) for prompts in left]
    assert [rate for step in rates for rate in step] == pytest.approx([0.01 * 0.5**update for update in range(made)])
    means = {index: sum(step) / len(step) for index, step in enumerate(rates) if step}
    assert seen["optim/lr"] == pytest.approx(means)
    assert all(math.isfinite(value) for values in seen.values() for value in values.values())
    return seen


def test_an_update_without_completions_moves_nothing_and_the_run_goes_on(grpo: Grpo, tmp_path: Path) -> None:
    grpo.ok("fit", *GAME)
    alone = checked(tmp_path / "run")
    two = arguments("fit", *GAME, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.default_root_dir=two")
    with programs({"two": two}, tmp_path, together=True) as started:
        assert started["two"].wait() == 0, started["two"].errors
    both = checked(tmp_path / "two")
    for name in ("policy/objective", "optim/grad_norm", "reward/mean"):
        assert both[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)  # sums in another order


def test_a_step_without_any_completion_leaves_the_policy_as_it_is(grpo: Grpo, tmp_path: Path) -> None:
    grpo.ok("fit", *GAME, "--data.task.every=99", "--trainer.max_epochs=1")
    seen = scalars(tmp_path / "run")
    assert seen["rollout/environment_failed"] == {0: 1.0} and "optim/lr" not in seen
    saved = checkpoint_of(tmp_path / "run")
    assert saved["global_step"] == 0 and not saved["optimizer_states"][0]["state"]
    grpo.ok("fit", *GAME, "--trainer.max_epochs=2", "--ckpt_path=last")
    assert "optim/lr" in scalars(tmp_path / "run")
