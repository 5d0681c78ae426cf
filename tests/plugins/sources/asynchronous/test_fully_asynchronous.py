"""FullyAsynchronous: with a staleness of one step it is OneStepOffPolicy; with more, weights come while servers draw, and nothing is lost."""

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

KEPT = {"enable_checkpointing": True}


def parts_of(folder: str, server: StandIn) -> dict[str, Any]:
    return {"policy": read_policy(folder), "engine": VLLMServerEngine([server.url], timeout=60)}


def test_one_step_is_ahead(tmp_path: Path) -> None:
    trainer = KEPT | {"max_epochs": 20, "limit_val_batches": 1, "check_val_every_n_epoch": 6}
    for name, source in (("ahead", OneStepOffPolicy()), ("stream", FullyAsynchronous(1))):
        callbacks = [StepCheckpoint(every_n_steps=20)]
        fit(tmp_path / name, callbacks, {"source": source, "mu": 2}, trainer, engine=Elsewhere())
    assert same(tmp_path / "ahead", tmp_path / "stream")
    assert repr(scalars(tmp_path / "ahead")) == repr(scalars(tmp_path / "stream"))


def test_weights_come_while_servers_draw_and_every_prompt_is_trained_in_order(
    served: str, server: StandIn, tmp_path: Path
) -> None:
    staleness, steps, rest = 3, 8, 4
    server.seconds_per_token = 0.004

    def explorations(end: int, **more: Any) -> list[Exploration]:
        seen = Steps()
        callbacks, trainer = [seen, StepCheckpoint(every_n_steps=100)], {"max_epochs": end, **KEPT}
        objective = {"objective": Objective(correction=TruncatedRatio()), "old_policy": Proximal()}
        fit(
            tmp_path,
            callbacks,
            {"source": FullyAsynchronous(staleness)},
            trainer,
            **objective,
            **parts_of(served, server),
            **more,
        )
        return seen.explorations

    explored, mixed = explorations(steps), 0
    for index, exploration in enumerate(explored):
        versions = exploration.rollouts.columns["version"].tolist()
        assert versions == [version for sample in exploration.samples for version in sample.versions or []]
        for sample in exploration.samples:
            # One update per step: the version is the step that began with it.
            assert sample.versions == sorted(sample.versions or [])
            assert len(sample.versions or []) == len(sample.token_ids)
            assert all(0 <= index - version <= staleness for version in sample.versions or [])
            mixed += len({*(sample.versions or [])}) > 1
    lags = scalars(tmp_path)
    for index, exploration in enumerate(explored):
        lag = index - float(exploration.rollouts.columns["version"].mean())
        assert lags["rollout/lag"][index] == pytest.approx(lag, abs=1e-5)
    assert mixed > 0 and lags["rollout/lag"][0] == 0 and max(lags["rollout/lag_max"].values()) <= staleness
    assert max(lags["rollout/lag"].values()) > 1 and min(lags["mismatch/gap"].values()) >= 0
    draws = checkpoint_of(tmp_path)["callbacks"]["GRPOLoop"]["source"]["draws"]
    assert [draw["step"] for draw in draws] == [steps, steps + 1, steps + 2]
    # It goes on from there.
    explored += explorations(steps + rest, ckpt_path="last")
    samples = explored[steps].samples
    assert [id for one in samples for id in one.token_ids] == draws[0]["rounds"][0]["tokens"]["token_ids"].tolist()
    ids = [sample.prompt.id for exploration in explored for sample in exploration.samples]
    assert ids == [id for id in range(4 * (steps + rest)) for _ in range(4)]


@pytest.mark.parametrize(
    ("staleness", "loop", "message"),
    [
        (2, {}, "max_staleness=2: Elsewhere takes no weights while it samples. Use model.engine=VLLMServerEngine"),
        (2, {"dynamic_sampling": DynamicSampling()}, "FullyAsynchronous: loop.dynamic_sampling needs the scores of a step before"),
        (0, {}, "max_staleness=0: give 1 or more"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_the_run(
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
    small, parts = partial(torch.optim.SGD, lr=5e-6), parts_of(served, server)  # an update moves log-probs by 2e-5
    with pytest.raises(UsageError, match=r"nats on average, after .* at first .*its weights fall behind"):
        fit(tmp_path, trainer={"max_epochs": 9}, optimizer=small, **parts)
    assert 2 <= len(scalars(tmp_path)["policy/logp_gap"]) < 9
    assert parts["engine"].policy is None  # closed, though Lightning tears nothing down
