"""Corrections in whole runs: with an exact engine, with one that rounds, and with rollouts of an earlier policy."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fitting import Gradients, Minibatches, fit, relative, resumes_exactly, scalars
from helpers.tiny import policy_of
from torch import Tensor

from grpo_lightning import FrozenCopy, Minibatch, Objective, Policy, Proximal, Sampling, ScriptedEngine, UsageError
from grpo_lightning.maths.corrections import NoCorrection
from grpo_lightning.plugins.methods.token_weights.mismatch_masks import RatioMask
from grpo_lightning.plugins.methods.token_weights.truncated_ratio import TruncatedRatio
from grpo_lightning.plugins.sources.stale.stale_source import EarlierWeights, StaleSource


def expected_objective(minibatch: Minibatch, cap: float) -> float:
    """Σ weight min(π_θ/μ, cap) Â of an update that finds π_θ at π_old, in float64."""
    total = 0.0
    for micro_batch in minibatch.micro_batches:
        rollouts = micro_batch.rollouts
        columns = (micro_batch.scored.logp, rollouts.sampler_logp, rollouts.weight, rollouts.advantage)
        for logp, sampler, weight, advantage in zip(*(column.tolist() for column in columns), strict=True):
            total += weight * min(math.exp(logp) / math.exp(sampler), cap) * advantage
    return total


def test_sampling_in_bfloat16_is_corrected(tmp_path: Path) -> None:
    micro_batches, gradients = Minibatches(), {}
    for name, correction in (("plain", NoCorrection()), ("cap", TruncatedRatio(1.0)), ("mask", RatioMask(0.99, 1.01))):
        gradients[name] = Gradients()
        fit(
            tmp_path / name,
            [gradients[name], *([micro_batches] if name == "cap" else [])],
            trainer={"max_epochs": 1, "precision": "bf16-mixed"},
            policy=policy_of(),
            objective=Objective(correction=correction),
        )
    seen = {name: {key: value[0] for key, value in scalars(tmp_path / name).items()} for name in gradients}
    # bfloat16 rounds, so the mismatch is measured without a correction too; it is the same of all three.
    for name in ("kl", "gap", "ess"):
        assert len({found[f"mismatch/{name}"] for found in seen.values()}) == 1
    assert seen["plain"]["mismatch/kl"] > 1e-6 and seen["plain"]["mismatch/corrected"] == 0
    assert 0 < seen["cap"]["mismatch/corrected"] < 1 and seen["cap"]["mismatch/masked"] == 0
    assert 0 < seen["mask"]["mismatch/masked"] < 1
    # A masked token is none of those that were corrected only.
    assert seen["mask"]["mismatch/masked"] == seen["mask"]["mismatch/corrected"]
    assert seen["cap"]["policy/objective"] == pytest.approx(expected_objective(micro_batches.seen[0], 1.0), abs=1e-6)
    assert abs(seen["cap"]["policy/objective"] - seen["plain"]["policy/objective"]) > 1e-5
    for name in ("cap", "mask"):
        assert relative(gradients[name].updates[0], gradients["plain"].updates[0]) > 1e-3


class Weights(L.Callback):
    """The policy's log-probs of the step's completions under the policies of all steps so far, before its updates."""

    def __init__(self) -> None:
        self.policies: list[Policy] = []
        self.logp: list[list[Tensor]] = []
        self.batches: list[Minibatch] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
        copy = FrozenCopy()
        copy.refresh(pl_module.policy)
        self.policies.append(copy.policy)
        rollouts = batch.step.exploration.rollouts
        with torch.no_grad():
            self.logp.append([policy(rollouts).logp for policy in self.policies])
        self.batches.append(batch)


def test_rollouts_are_exactly_as_old_as_the_lag(tmp_path: Path) -> None:
    weights = Weights()
    module = fit(tmp_path, [weights], {"source": StaleSource(2)}, {"max_epochs": 5}, old_policy=Proximal())
    seen = scalars(tmp_path)
    assert list(seen["rollout/lag"].values()) == [0, 1, 2, 2, 2]
    for step, (logp, batch) in enumerate(zip(weights.logp, weights.batches, strict=True)):
        exploration = batch.step.exploration
        assert exploration.policy_version == max(0, step - 2)
        gaps = [float((one - exploration.rollouts.sampler_logp).abs().max()) for one in logp]
        # It is that policy to rounding, and none of the others.
        assert gaps[max(0, step - 2)] < 1e-5
        assert all(gap > 1e-3 for number, gap in enumerate(gaps) if number != max(0, step - 2))
        if step:
            assert seen["mismatch/gap"][step] == pytest.approx(gaps[-1], rel=1e-4)
            assert seen["mismatch/kl"][step] > 1e-6
    assert 0 not in seen["mismatch/gap"]  # the first step is on policy, with an exact engine
    assert module.policy.version == 5


def test_a_resumed_run_has_the_old_weights(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        objective = Objective(correction=TruncatedRatio())
        return {"loop": {"source": StaleSource(3)}, "objective": objective, "old_policy": Proximal()}

    resumes_exactly(tmp_path, options, steps=5, cut=2)
    whole = scalars(tmp_path / "whole")
    assert whole["rollout/lag"][4] == 3 and whole["mismatch/kl"][4] > 1e-6


# What is refused


LATE = {"loop": {"source": StaleSource(1)}}
CORRECTED = {"objective": Objective(correction=TruncatedRatio())}
TOP_K = {"sampling": Sampling(max_new_tokens=6, top_k=5)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CORRECTED | {"engine": ScriptedEngine(lambda *_: "abc")}, "=TruncatedRatio: the engine recorded no log-probs"),
        (CORRECTED | TOP_K, r"correction=TruncatedRatio: set model\.sampling\.top_k=0"),
        (LATE | {"objective": Objective(correction=RatioMask())}, r"=RatioMask: set model\.old_policy=Proximal"),
        (LATE | TOP_K, r"model\.sampling: set top_k=0, top_p=1 and min_p=0"),
    ],
)
def test_what_a_correction_or_pi_old_cannot_do_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        fit(tmp_path, **options)
    assert not scalars(tmp_path)


def test_a_proximal_pi_old_goes_with_filters(tmp_path: Path) -> None:
    fit(tmp_path, **LATE, **TOP_K, old_policy=Proximal())


def test_a_failed_exploration_leaves_the_policy_its_own_weights() -> None:
    policy = policy_of()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    zeros = {name: torch.zeros_like(value) for name, value in policy.trained_state_dict().items()}
    earlier = EarlierWeights(step=0, version=-5, weights=zeros)

    def explore() -> None:
        with earlier.put_into(policy):
            assert policy.version == -5
            assert not policy.state_dict()["model.lm_head.weight"].any()
            raise RuntimeError("no completions today")

    with pytest.raises(RuntimeError, match="no completions today"):
        explore()
    assert policy.version == 0
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
