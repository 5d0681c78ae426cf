"""OneStepOffPolicy is StaleSource(lag=1), bit for bit; and what it refuses."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.elsewhere import Elsewhere, ScriptedElsewhere
from helpers.fitting import Digits, EarlyDigits, checkpoint_of, fit, resumes_exactly, scalars
from helpers.tiny import prompts_of, read_policy
from helpers.vllm_server_stand_in import StandIn

from grpo_lightning import Proximal, StaleSource, VLLMServerEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.grpo.source import RolloutSource
from grpo_lightning.maths.filters import DynamicSampling
from grpo_lightning.plugins.looking.inspector import read
from grpo_lightning.plugins.looking.inspector.inspector import Inspector
from grpo_lightning.plugins.sources.asynchronous.background_sampling import samples_from_state, samples_to_state
from grpo_lightning.plugins.sources.asynchronous.one_step_off_policy import OneStepOffPolicy
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.types import FinishReason, Sample, UsageError

NATIVE = "native"
JOINS = {"limit_val_batches": 1, "check_val_every_n_epoch": 3, "enable_checkpointing": True}


def script(request: Any, text: str) -> str:
    return "7a3b9c"[: 1 + (request.sample + request.prompt_id) % 6]


def some_digits() -> EarlyDigits:
    """1 where most characters are digits: some groups agree."""
    return EarlyDigits(change=lambda sample, share: float(share > 0.5))


def engine_of(kind: str, served: str, server: StandIn) -> dict[str, Any]:
    """Arguments of `fit` for an engine that draws elsewhere."""
    if kind == "scripted":
        return {"engine": ScriptedElsewhere(script), "old_policy": Proximal()}
    if kind == "server":
        return {"engine": VLLMServerEngine([server.url]), "policy": read_policy(served)}
    return {"engine": Elsewhere(0.02)}


def run(folder: Path, source: RolloutSource, options: dict[str, Any], **more: Any) -> Any:
    """A fit, after which nothing is drawn any more; its weights and the optimizer's states."""
    loop, trainer = {"source": source} | more.pop("loop", {}), {"max_epochs": 20} | more.pop("trainer", {})
    callbacks = [StepCheckpoint()] if trainer.get("enable_checkpointing") else []
    try:
        module = fit(folder, callbacks, loop, trainer, **options, **more)
    finally:
        assert not [thread for thread in threading.enumerate() if thread.name == "grpo-sampling"]
    optimizer: Any = module.optimizers()
    return module.policy.state_dict(), optimizer.state_dict()["state"]


def check_stale(folder: Path, options: Callable[[], dict[str, Any]], **more: Any) -> None:
    """Asserts that StaleSource(1) and OneStepOffPolicy learn the same, bit for bit; their runs are in `0` and `1`."""
    runs = [
        run(folder / f"{index}", source, options() | {"optimizer": partial(torch.optim.Adam, lr=3e-3)}, **more)
        for index, source in enumerate((StaleSource(1), OneStepOffPolicy()))
    ]
    (weights, states), (expected_weights, expected_states) = runs
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())
    assert repr(states) == repr(expected_states) and "tensor" in repr(states)
    assert repr(sorted(scalars(folder / "0").items())) == repr(sorted(scalars(folder / "1").items()))


@pytest.mark.parametrize(
    ("kind", "mu", "trainer", "steps"),
    [
        (NATIVE, 1, {}, 20),
        (NATIVE, 2, {}, 20),
        (NATIVE, 2, JOINS, 20),
        ("scripted", 1, JOINS, 20),
        ("scripted", 2, {}, 20),
        ("server", 2, {}, 4),
    ],
    ids=str,
)
def test_it_is_a_lag_of_one_step(
    kind: str, mu: int, trainer: dict[str, Any], steps: int, served: str, server: StandIn, tmp_path: Path
) -> None:
    rewards = [EarlyDigits(), Digits(weight=0.5, name="late")]
    check_stale(
        tmp_path,
        lambda: {**engine_of(kind, served, server), "rewards": rewards},
        loop={"mu": mu, "num_minibatches": mu},
        trainer={**trainer, "max_epochs": steps},
    )
    metrics = scalars(tmp_path / "1", without=())
    assert [*metrics["rollout/lag"].values()] == [0] + [1] * (steps - 1)
    assert 0 < max(list(metrics["async/overlap"].values())[1:]) <= 1
    assert min(min(values.values()) for name, values in metrics.items() if name.startswith("async/")) >= 0
    fractions = [values for name, values in metrics.items() if name.startswith("time/fraction")]
    assert max(sum(values.get(step, 0) for values in fractions) for step in range(steps)) < 1.01


def test_further_rounds_of_dynamic_sampling_have_the_weights_of_the_first(tmp_path: Path) -> None:
    check_stale(
        tmp_path,
        lambda: {"engine": Elsewhere(), "rewards": [some_digits()]},
        loop={"dynamic_sampling": DynamicSampling(max_rounds=3)},
        trainer=JOINS | {"max_epochs": 8},
    )
    assert max(scalars(tmp_path / "1")["rollout/rounds"].values()) > 1


@pytest.mark.parametrize("loop", [{}, {"dynamic_sampling": DynamicSampling(max_rounds=3)}], ids=["once", "rounds"])
def test_a_resumed_run_has_what_was_sampled_ahead(loop: dict[str, Any], tmp_path: Path) -> None:
    resumes_exactly(
        tmp_path,
        lambda: {"engine": Elsewhere(), "rewards": [some_digits()], "loop": {"source": OneStepOffPolicy(), **loop}},
        steps=4,
        cut=2,
    )
    (state,) = checkpoint_of(tmp_path / "cut")["callbacks"]["GRPOLoop"]["source"]["draws"]
    assert (state["step"], state["begun"], state["version"]) == (4, 3, 3)
    assert len(state["rounds"][0]["rows"]) == 16


def test_samples_in_a_checkpoint_are_flat_tensors_and_come_back_by_prompt() -> None:
    prompts, end = prompts_of([3, 2]), FinishReason.STOP
    samples = [
        Sample(prompts[0], "a", [7, 8], end, logp=[-0.1, -1e-17], versions=[3, 4]),
        Sample(prompts[1], "b", [9], end),
        Sample(prompts[0], "c", [6], end, "c", logp=[-2.0], versions=[2**40]),
    ]
    rows, tokens = samples_to_state(samples)
    assert {name: values.tolist() for name, values in tokens.items()} == {
        "token_ids": [7, 8, 9, 6],
        "logp": [-0.1, -1e-17, -2.0],
        "versions": [3, 4, 2**40],
    }
    assert samples_from_state(rows, tokens, prompts) == [samples[0], samples[2], samples[1]]
    assert samples_from_state(rows, tokens, prompts[1:]) == samples[1:2]


def test_the_inspector_has_the_version_of_each_token(tmp_path: Path) -> None:
    fit(tmp_path, [Inspector(every_n_steps=1)], {"source": OneStepOffPolicy()}, {"max_epochs": 4}, engine=Elsewhere())
    versions = {
        record.step: {*one.tokens.columns["version"].tolist()}
        for record in read(tmp_path)
        for group in record.groups
        if group.kind == "train"
        for one in group.completions
    }
    assert versions == {1: {0.0}, 2: {0.0}, 3: {1.0}, 4: {2.0}}


# What can go wrong


class AtTheEnd(OneStepOffPolicy):
    """A mistake: rollouts have the version of the weights when they are taken."""

    def next(self, step: int) -> Any:
        return replace(super().next(step), policy_version=self.inputs.policy.version)


def test_rollouts_that_claim_to_be_of_newer_weights_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the engine does not sample from this policy"):
        run(tmp_path, AtTheEnd(), {"engine": Elsewhere()}, trainer={"max_epochs": 4})


@pytest.mark.parametrize(
    ("options", "loop", "message"),
    [
        (
            {"engine": PlainEngine()},
            {},
            "PlainEngine samples with what the training computes with. Use model.engine=VLLM",
        ),
        ({}, {"dynamic_sampling": DynamicSampling()}, r"these rewards score later: \['digits'\]"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused_before_the_run(
    options: dict[str, Any], loop: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"loop\.source=OneStepOffPolicy: .*{message}"):
        run(tmp_path, OneStepOffPolicy(), {"engine": Elsewhere(), **options}, loop=loop)
    assert not scalars(tmp_path)


def test_a_failure_of_the_thread_stops_the_run_with_its_own_message(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the server is gone"):
        run(tmp_path, OneStepOffPolicy(), {"engine": Elsewhere(fails_at=2)}, trainer={"max_epochs": 5})
    assert len(scalars(tmp_path)["rollout/lag"]) == 2


@pytest.mark.parametrize("sizes", [{"group_size": 8}, {"prompts_per_step": 2}])
def test_a_resume_with_other_sizes_samples_anew(tmp_path: Path, sizes: dict[str, int], caplog: Any) -> None:
    for steps, path, size in ((2, None, {}), (4, "last", sizes)):
        loop = {"source": OneStepOffPolicy(), "prompts_per_step": 4, "group_size": 4} | size
        trainer = {"max_epochs": steps, "enable_checkpointing": True}
        fit(tmp_path, [StepCheckpoint()], trainer=trainer, ckpt_path=path, loop=loop, engine=Elsewhere())
    assert "sampled anew" in caplog.text
    assert list(scalars(tmp_path)["rollout/lag"].values()) == [0, 1, 0, 1]


def test_a_grader_beside_the_rewards_grades_what_is_sampled_ahead(tmp_path: Path) -> None:
    def shaped() -> dict[str, Any]:
        rewards = [EarlyDigits(name="shaped", change=lambda sample, share: 0.2 + 0.1 * share)]
        return {
            "loop": {"source": OneStepOffPolicy()},
            "engine": Elsewhere(),
            "rewards": rewards,
            "grader": some_digits(),
        }

    resumes_exactly(tmp_path, shaped)
    seen = scalars(tmp_path / "cut")
    assert 0 < seen["reward/early_digits/mean"][1] < 1
    assert seen["rollout/length_right"] and seen["rollout/length_wrong"].keys() == {0, 1, 2}
