"""The paths of a GPU on a machine without one: exploration, updates, validation and checkpoints on `other_device`."""

import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import Digits, fit, scalars
from helpers.other_device import TRAINER, OtherDevice, on_device, other_device
from helpers.tiny import policy_of, prompts_of
from torch import Tensor

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.advantages import LeaveOneOut
from grpo_lightning.maths.kl_penalty import KLPenalty
from grpo_lightning.maths.masks import TopEntropy, Truncated
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.sequence_surrogates import SequenceClipped
from grpo_lightning.maths.stopping import FirstOf, KLAbove, ObjectivePlateau
from grpo_lightning.maths.target_probability import TargetProbability
from grpo_lightning.maths.weightings import Unweighted
from grpo_lightning.plugins.fast import attention
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.plugins.fast.slab import SlabLayer
from grpo_lightning.plugins.learned.reward import LearnedReward
from grpo_lightning.policy.policy import recompute_activations
from grpo_lightning.policy.snapshots import FrozenCopy, MovingAverage
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.dynamic_sampling import DynamicSampling
from grpo_lightning.training.preparation import Preparation
from grpo_lightning.types import RandomKey, Request


@pytest.fixture
def other() -> Iterator[OtherDevice]:
    with other_device() as mode:
        yield mode


# The device itself

REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda there, here: there + here,
    "into a CPU tensor": lambda there, here: here.add_(there),
    "CPU vector and a number elsewhere": lambda there, here: here * there.sum(),
    "concatenation": lambda there, here: torch.cat([there, here]),
    "where": lambda there, here: torch.where(there > 0, there, here),
    "gather": lambda there, here: there.gather(0, here.long()),
    "values of another device": lambda there, here: there.__setitem__(here.long(), here),
    "indices of another device": lambda there, here: here[there.long()],
    "generator": lambda there, here: torch.rand(3, generator=torch.Generator(), device=there.device),
}
ALLOWED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float]]] = {
    "a number's tensor": (lambda there, here: there + here.sum(), [3.0, 4.0, 5.0]),
    "CPU indices": (lambda there, here: there[here.long()], [0.0, 1.0, 2.0]),
    "a list of indices": (lambda there, here: there[[2, 0]], [2.0, 0.0]),
    "a number under a mask": (lambda there, here: there.masked_fill(there > 0, 7.0), [0.0, 7.0, 7.0]),
    "a move": (lambda there, here: there + here.to(there.device), [0.0, 2.0, 4.0]),
    "new tensors": (lambda there, here: there + there.new_tensor([1.0]) + torch.ones_like(there), [2.0, 3.0, 4.0]),
}


def test_what_cuda_refuses_is_refused_and_what_it_takes_is_taken(other):
    here = torch.tensor([0.0, 1.0, 2.0])
    for refused in REFUSED.values():
        with pytest.raises(RuntimeError, match=r"same device|for generator"):
            refused(here.to(other.device), here.clone())
    for function, expected in ALLOWED.values():
        found = function(here.to(other.device), here)
        assert on_device(found) and found.device == other.device
        assert found.tolist() == expected


def test_what_waits_for_the_device_is_noted_with_its_line(other):
    there = torch.arange(4, device=other.device)
    assert len(other.syncs) == 0
    for function, name in (
        (lambda: bool(there.any()), "_local_scalar_dense"),
        (lambda: there.tolist(), "to host"),
        (lambda: there[there > 1], "index by a mask"),
        (lambda: there.nonzero(), "nonzero"),
        (lambda: there.unique(), "_unique2"),
        (lambda: there.repeat_interleave(there), "repeat_interleave"),
        (lambda: torch.empty(4, dtype=torch.int64).copy_(there), "copy_ to host"),
        (lambda: torch.tensor([1], device=other.device), "upload"),
        (lambda: there[torch.tensor([1])], "upload of an index"),
    ):
        other.syncs.clear()
        function()
        assert [(event.operation, event.line.split(":")[0]) for event in other.syncs.events] == [
            (name, "training/test_other_device.py")
        ]
    other.syncs.clear()
    _ = there * 2, there.cumsum(0), there[there[:2]], there.masked_fill(there > 1, 0), there[1:], there[:, None]
    there.repeat_interleave(2), there.repeat_interleave(there, output_size=6), torch.zeros(3, device=other.device)
    there[0] = 3
    torch.tensor([1]).to(other.device, non_blocking=True)
    assert len(other.syncs) == 0, str(other.syncs)


# Engines

ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "native": lambda: NativeEngine(max_rows=8, check_every=4),
    "transformers": PlainEngine,
}


@pytest.mark.parametrize(("shape", "engine"), [("gpt2", "native"), ("llama", "native"), ("llama", "transformers")])
def test_engines_draw_the_same_elsewhere(shape, engine):
    policy, prompts = policy_of(shape), prompts_of([5, 1, 7])
    for sampling in (Sampling(max_new_tokens=6), Sampling(max_new_tokens=6, top_p=0.9, top_k=20, min_p=0.01)):
        policy.to("cpu")
        here, there = ENGINES[engine](), ENGINES[engine]()
        here.sync(policy)
        expected = here.complete(Request.from_prompts(prompts, 4), sampling, RandomKey())
        with other_device() as other:
            moved = copy.deepcopy(policy).to(other.device)
            if shape == "llama" and not sampling.top_k:
                there.check(moved, sampling)
            there.sync(moved)
            actual = there.complete(Request.from_prompts(prompts, 4), sampling, RandomKey())
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
        for left, right in zip(actual, expected, strict=True):
            assert left.logp == pytest.approx(right.logp, abs=1e-5)


# The maths


# Runs


def reward_model(folder: Path) -> LearnedReward:
    policy_of().save_pretrained(folder)
    return LearnedReward(str(folder), Digits(), lr=3e-3, max_forgetting=1.0)


def by_rows() -> Any:
    policy = policy_of(scale=0.05)
    policy.shares_prefix = False
    recompute_activations(policy.model)
    return policy


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "packs, minibatches, passes, every kind of log-prob, a learned reward": lambda folder: {
        "loop": {"prompts_per_step": 2, "mu": 2, "num_minibatches": 2, "max_tokens": 60, "steps_per_iteration": 1},
        "objective": Objective(SequenceClipped(), beta=0.1, masks=[Truncated(), TopEntropy(0.5)], entropy_bonus=0.01),
        "reference": MovingAverage(0.5),
        "old_policy": FrozenCopy(),
        "reward_kl": KLPenalty(),
        "advantage": LeaveOneOut(),
        "rewards": [Digits(), reward_model(folder)],
    },
    "rows, targets, a stop rule, dynamic sampling, AdamW with a schedule": lambda folder: {
        "policy": by_rows(),
        "loop": {
            "prompts_per_step": 2,
            "mu": 2,
            "max_tokens": 60,
            "stop": FirstOf([KLAbove(1e-3), ObjectivePlateau()]),
            "dynamic_sampling": DynamicSampling(),
        },
        "objective": Objective(TargetProbability(), weighting=Unweighted()),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer),
        "grad_clip": 0.01,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_elsewhere(name, tmp_path):
    """With a validation, and a second step that goes on from the checkpoint of the first."""

    def found(folder: Path, **more: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, float]]]:
        for steps in (1, 2):
            options = {"sampling": Sampling(max_new_tokens=6)} | RUNS[name](tmp_path / "reward_model")
            trainer = {"max_epochs": steps, "limit_val_batches": 1, "enable_checkpointing": True} | more
            path = "last" if steps == 2 else None
            module = fit(folder, [StepCheckpoint()], trainer=trainer, ckpt_path=path, **options)
        return {name: value.detach().cpu() for name, value in module.policy.named_parameters()}, scalars(folder)

    here, logged_here = found(tmp_path / "here")
    with other_device():
        there, logged_there = found(tmp_path / "there", **TRAINER)
    for parameter, value in here.items():
        torch.testing.assert_close(there[parameter], value, rtol=1e-4, atol=1e-5)
    assert logged_there.keys() == logged_here.keys()
    for metric, values in logged_here.items():
        assert logged_there[metric] == pytest.approx(values, rel=1e-3, abs=1e-4), metric
    state = torch.load(tmp_path / "there" / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    assert all(type(value) is Tensor and value.device.type == "cpu" for value in state.values())


# Mistakes

MISTAKES: list[tuple[Callable[..., Any], str, str]] = [
    (attention.fold_mask, ", device=device", ""),
    (SlabLayer._allocate, "keys.new_empty(", "torch.empty("),
    (Preparation._per_token, "values.cpu()", "values"),
]


@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_forgotten_device_is_found(function, right, wrong, tmp_path, monkeypatch):
    source = textwrap.dedent(inspect.getsource(function))
    assert right in source, "the line was changed: give another mistake"
    namespace: dict[str, Any] = {}
    exec(source.replace(right, wrong), function.__globals__, namespace)
    mistaken = namespace[function.__name__]
    monkeypatch.setattr(function, "__code__", getattr(mistaken, "__func__", mistaken).__code__)
    with other_device(), pytest.raises(RuntimeError) as raised:
        fit(
            tmp_path,
            loop={"num_minibatches": 2, "max_tokens": 16},
            sampling=Sampling(max_new_tokens=6),
            objective=Objective(SequenceClipped(), beta=0.1),
            trainer={"max_epochs": 1} | TRAINER,
        )
    # Lightning moves the module to the CPU after an error, which this device does not bear in the middle of a pass.
    errors, error = [], raised.value
    while error is not None:
        errors.append(str(error))
        error = error.__context__
    assert any("same device" in message for message in errors), errors
