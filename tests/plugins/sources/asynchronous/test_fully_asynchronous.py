"""FullyAsynchronous: with a staleness of one step it is OneStepOffPolicy; with more, weights come midway."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.elsewhere import Elsewhere
from helpers.fitting import Steps, checkpoint_of, fit, same, scalars
from helpers.tiny import read_policy
from helpers.vllm_server_stand_in import StandIn

from grpo_lightning import Proximal, TruncatedRatio, VLLMServerEngine
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.maths.filters import DynamicSampling
from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.sources.asynchronous.fully_asynchronous import FullyAsynchronous
from grpo_lightning.plugins.sources.asynchronous.one_step_off_policy import OneStepOffPolicy
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.types import UsageError

CHECKPOINTS = {"enable_checkpointing": True}


def served_by(server: StandIn, folder: str) -> dict[str, Any]:
    return {"policy": read_policy(folder), "engine": VLLMServerEngine([server.url], timeout=60)}


def test_a_staleness_of_one_step_is_one_step_off_policy(tmp_path: Path) -> None:
    trainer = CHECKPOINTS | {"max_epochs": 20, "limit_val_batches": 1, "check_val_every_n_epoch": 6}
    folders = [tmp_path / "one_step", tmp_path / "fully"]
    for folder, source in zip(folders, (OneStepOffPolicy(), FullyAsynchronous(1)), strict=True):
        fit(folder, [StepCheckpoint(every_n_steps=20)], {"source": source, "mu": 2}, trainer, engine=Elsewhere())
    assert same(*folders)
    assert repr(scalars(folders[0])) == repr(scalars(folders[1]))


def test_weights_come_midway_and_prompts_are_trained_in_order(served: str, server: StandIn, tmp_path: Path) -> None:
    staleness, num_steps, num_resumed = 3, 8, 4
    server.seconds_per_token = 0.004

    def explorations(max_epochs: int, **options: Any) -> list[Exploration]:
        steps = Steps()
        callbacks, trainer = [steps, StepCheckpoint(every_n_steps=100)], {"max_epochs": max_epochs, **CHECKPOINTS}
        options |= {"objective": Objective(correction=TruncatedRatio()), "old_policy": Proximal()}
        fit(
            tmp_path,
            callbacks,
            {"source": FullyAsynchronous(staleness)},
            trainer,
            **served_by(server, served),
            **options,
        )
        return steps.explorations

    explored, num_mixed = explorations(num_steps), 0
    metrics = scalars(tmp_path)
    for step, exploration in enumerate(explored):
        # One update per step: the version is the step that began with it.
        versions = [sample.versions or [] for sample in exploration.samples]
        column = exploration.rollouts.columns["version"]
        assert column.tolist() == [version for row in versions for version in row]
        for sample, row in zip(exploration.samples, versions, strict=True):
            assert row == sorted(row) and len(row) == len(sample.token_ids)
            assert all(0 <= step - version <= staleness for version in row)
            num_mixed += len({*row}) > 1
        assert metrics["rollout/lag"][step] == pytest.approx(step - float(column.mean()), abs=1e-5)
    assert num_mixed > 0 and metrics["rollout/lag"][0] == 0 and max(metrics["rollout/lag_max"].values()) <= staleness
    assert max(metrics["rollout/lag"].values()) > 1 and min(metrics["mismatch/gap"].values()) >= 0
    states = checkpoint_of(tmp_path)["callbacks"]["GRPOLoop"]["source"]["draws"]
    assert [state["step"] for state in states] == [num_steps, num_steps + 1, num_steps + 2]

    # A resumed run trains on the completions of the checkpoint.
    explored += explorations(num_steps + num_resumed, ckpt_path="last")
    token_ids = [id for sample in explored[num_steps].samples for id in sample.token_ids]
    assert token_ids == states[0]["rounds"][0]["tokens"]["token_ids"].tolist()
    ids = [sample.prompt.id for exploration in explored for sample in exploration.samples]
    assert ids == [id for id in range(4 * (num_steps + num_resumed)) for _ in range(4)]


@pytest.mark.parametrize(
    ("staleness", "loop", "message"),
    [
        (2, {}, "max_staleness=2: Elsewhere takes no weights while it samples. Use model.engine=VLLMServerEngine"),
        (
            2,
            {"dynamic_sampling": DynamicSampling()},
            "FullyAsynchronous: loop.dynamic_sampling needs the scores of a step before",
        ),
        (0, {}, "max_staleness=0: give 1 or more"),
    ],
)
def test_what_cannot_be_sampled_midway_is_refused(
    staleness: int, loop: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        fit(tmp_path, [], {"source": FullyAsynchronous(staleness), **loop}, engine=Elsewhere())
    assert not scalars(tmp_path)


def test_a_server_that_falls_behind_in_a_run_stops_it(served: str, server: StandIn, tmp_path: Path) -> None:
    load, loads = server.load, [0]

    def stuck(path: Path) -> None:
        loads[0] += 1
        if loads[0] <= 5:  # three at setup, and those of two steps
            load(path)

    server.load = stuck  # type: ignore[method-assign]
    small, options = partial(torch.optim.SGD, lr=5e-6), served_by(server, served)  # an update moves log-probs by 2e-5
    with pytest.raises(UsageError, match=r"nats on average, after .* at first .*its weights fall behind"):
        fit(tmp_path, trainer={"max_epochs": 9}, optimizer=small, **options)
    assert 2 <= len(scalars(tmp_path)["policy/logp_gap"]) < 9
    assert options["engine"].policy is None  # closed, though Lightning tears nothing down
