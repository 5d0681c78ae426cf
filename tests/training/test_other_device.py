"""The paths of a GPU on a machine without one: exploration, updates, validation and checkpoints on `other_device`."""

import copy
import inspect
import random
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.contracts import VARIANTS, make, members
from helpers.fitting import Digits, fit, scalars
from helpers.other_device import TRAINER, DeviceTensor, OtherDevice, on_device, other_device
from helpers.tiny import branching_rollouts, model_of, policy_of, prompts_of, rollouts_of
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from grpo_lightning.engines import philox
from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.slab import SlabLayer
from grpo_lightning.maths import ragged
from grpo_lightning.maths.advantages import LeaveOneOut
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.kl import KLEstimator
from grpo_lightning.maths.kl_penalty import KLPenalty
from grpo_lightning.maths.masks import TokenMask, TopEntropy, Truncated
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.sequence_surrogates import SequenceClipped
from grpo_lightning.maths.stopping import FirstOf, KLAbove, ObjectivePlateau, StopRule
from grpo_lightning.maths.surrogates import Surrogate
from grpo_lightning.maths.target_probability import TargetProbability
from grpo_lightning.maths.weightings import BatchSize, TokenWeighting, Unweighted
from grpo_lightning.policy import attention
from grpo_lightning.policy.copies import Copies
from grpo_lightning.policy.padded_rows import PaddedRows
from grpo_lightning.policy.policy import recompute_activations
from grpo_lightning.policy.snapshots import FrozenCopy, MovingAverage
from grpo_lightning.rewards.learned.reward import LearnedReward
from grpo_lightning.training.callbacks.checkpoint import AtomicCheckpointIO
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
    "sum the other way round": lambda there, here: here + there,
    "in place": lambda there, here: there.add_(here),
    "into a CPU tensor": lambda there, here: here.add_(there),
    "a number's tensor changed": lambda there, here: here.sum().add_(there.sum()),
    "CPU vector and a number elsewhere": lambda there, here: here * there.sum(),
    "product of matrices": lambda there, here: there[None] @ here[:, None],
    "concatenation": lambda there, here: torch.cat([there, here]),
    "stack of numbers": lambda there, here: torch.stack([there.sum(), here.sum()]),
    "where": lambda there, here: torch.where(there > 0, there, here),
    "index_select": lambda there, here: there.index_select(0, here.long()),
    "gather": lambda there, here: there.gather(0, here.long()),
    "index_add_": lambda there, here: there.index_add_(0, here.long(), there),
    "values of another device": lambda there, here: there.__setitem__(here.long(), here),
    "indices of another device": lambda there, here: here[there.long()],
    "searchsorted": lambda there, here: torch.searchsorted(there, here),
    "isin": lambda there, here: torch.isin(there, here),
    "embedding": lambda there, here: torch.nn.functional.embedding(here.long(), there[:, None]),
    "generator": lambda there, here: torch.rand(3, generator=torch.Generator(), device=there.device),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(other, name):
    with pytest.raises(RuntimeError, match=r"same device|for generator"):
        REFUSED[name](torch.tensor([0.0, 1.0, 2.0], device=other.device), torch.tensor([0.0, 1.0, 2.0]))


ALLOWED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float]]] = {
    "a number's tensor": (lambda there, here: there + here.sum(), [3.0, 4.0, 5.0]),
    "a number": (lambda there, here: torch.where(there > 1, there, 5.0), [5.0, 5.0, 2.0]),
    "CPU indices": (lambda there, here: there[here.long()], [0.0, 1.0, 2.0]),
    "a list of indices": (lambda there, here: there[[2, 0]], [2.0, 0.0]),
    "a number under a mask": (lambda there, here: there.masked_fill(there > 0, 7.0), [0.0, 7.0, 7.0]),
    "a copy": (lambda there, here: there.copy_(here + 1), [1.0, 2.0, 3.0]),
    "a move": (lambda there, here: there + here.to(there.device), [0.0, 2.0, 4.0]),
    "new tensors": (lambda there, here: there + there.new_tensor([1.0]) + torch.ones_like(there), [2.0, 3.0, 4.0]),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_takes_is_taken(other, name):
    function, expected = ALLOWED[name]
    found = function(torch.tensor([0.0, 1.0, 2.0], device=other.device), torch.tensor([0.0, 1.0, 2.0]))
    assert on_device(found) and found.device == other.device
    assert found.tolist() == expected


def test_views_share_memory_and_gradients_flow(other):
    base = torch.zeros(3, 4, device=other.device)
    base[:, 1:3][1] += 1
    base.view(-1)[0] = 5
    assert base.tolist() == [[5, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    weight = torch.nn.Parameter(torch.full((2,), 3.0, device=other.device))
    (weight * torch.tensor([1.0, 2.0], device=other.device)).square().sum().backward()
    assert on_device(weight.grad)
    assert weight.grad.tolist() == [6.0, 24.0]


def test_a_module_keeps_its_parameters_and_ties_when_it_moves(other):
    model = model_of("gpt2")
    head = model.lm_head.weight
    model.to(other.device)
    assert isinstance(head, DeviceTensor) and isinstance(head, torch.nn.Parameter)
    assert model.lm_head.weight is head is model.transformer.wte.weight
    twin = copy.deepcopy(model)
    assert isinstance(twin.lm_head.weight, DeviceTensor) and twin.lm_head.weight is not head
    assert all(on_device(value) for value in twin.state_dict().values())


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


@pytest.mark.parametrize("lengths", [[5, 1, 7], [4, 4]], ids=["ragged", "equal"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_engines_draw_the_same_elsewhere(shape, engine, lengths):
    policy, prompts = policy_of(shape), prompts_of(lengths)
    for sampling in (Sampling(max_new_tokens=12), Sampling(max_new_tokens=6, top_p=0.9, top_k=20, min_p=0.01)):
        policy.to("cpu")
        here, there = ENGINES[engine](), ENGINES[engine]()
        here.sync(policy)
        expected = here.complete(Request.from_prompts(prompts, 4), sampling, RandomKey())
        with other_device() as other:
            moved = copy.deepcopy(policy).to(other.device)
            there.sync(moved)
            actual = there.complete(Request.from_prompts(prompts, 4), sampling, RandomKey())
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
        for left, right in zip(actual, expected, strict=True):
            assert left.logp == pytest.approx(right.logp, abs=1e-5)


# The maths

SURROGATES = {cls.__name__: lambda cls=cls: make(cls) for cls in members(Surrogate)} | VARIANTS


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_are_the_same_elsewhere(name):
    def found(rollouts: Rollouts) -> tuple[Tensor, Tensor, list[float]]:
        objective = Objective(surrogate=SURROGATES[name](), beta=0.1, entropy_bonus=0.1)
        rollouts.add_columns(objective.surrogate.prepare(rollouts))
        logp = (rollouts.old_logp - 0.05).requires_grad_()
        value, diagnostics = objective(logp, rollouts.old_logp.exp(), rollouts)
        value.backward()
        numbers = [float(getattr(diagnostics, field)) for field in diagnostics.__slots__]
        return value.detach().cpu(), logp.grad.cpu(), numbers

    value, gradient, numbers = found(branching_rollouts())
    with other_device() as other:
        there = found(branching_rollouts().to(other.device))
    torch.testing.assert_close(there[0], value)
    torch.testing.assert_close(there[1], gradient)
    assert there[2] == pytest.approx(numbers, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("cls", members(KLEstimator) + members(TokenWeighting) + members(TokenMask))
def test_kl_weightings_and_masks_are_the_same_elsewhere(cls):
    def found(rollouts: Rollouts) -> Tensor:
        part = make(cls)
        if isinstance(part, KLEstimator):
            return part(rollouts.old_logp, rollouts.ref_logp, rollouts.sampler_logp)
        objective = Objective(masks=[part]) if isinstance(part, TokenMask) else Objective(weighting=part)
        return objective.token_weight(rollouts, BatchSize(5, 3, rollouts.num_tokens))

    rollouts = rollouts_of([3, 1, 4, 2, 5], [2, 3, 1])
    with other_device() as other:
        torch.testing.assert_close(found(rollouts.to(other.device)).cpu(), found(rollouts))


@pytest.mark.parametrize("cls", members(StopRule))
def test_stop_rules_decide_the_same_elsewhere(cls):
    rng = random.Random(0)
    numbers = [{field: rng.random() for field in Diagnostics.__slots__} for _ in range(6)]

    def found(device: torch.device | str) -> list[bool]:
        rule = make(cls)
        updates = [Diagnostics(**{n: torch.tensor(v, device=device) for n, v in update.items()}) for update in numbers]
        return [rule(updates[:count], 2) for count in range(2, 7)]

    with other_device() as other:
        assert found(other.device) == found("cpu")


# Runs

RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "as by default, with validation": lambda: {"trainer": {"limit_val_batches": 1}},
    "packs, minibatches, passes and every kind of log-prob": lambda: {
        "loop": {"mu": 2, "num_minibatches": 2, "max_tokens": 60, "steps_per_iteration": 1},
        "objective": Objective(SequenceClipped(), beta=0.1, masks=[Truncated(), TopEntropy(0.5)], entropy_bonus=0.01),
        "reference": MovingAverage(0.5),
        "old_policy": FrozenCopy(),
        "reward_kl": KLPenalty(),
        "advantage": LeaveOneOut(),
    },
    "rows, targets, a stop rule, dynamic sampling": lambda: {
        "policy": by_rows(),
        "loop": {
            "mu": 3,
            "max_tokens": 60,
            "stop": FirstOf([KLAbove(1e-3), ObjectivePlateau()]),
            "dynamic_sampling": DynamicSampling(),
        },
        "objective": Objective(TargetProbability(), weighting=Unweighted()),
    },
    "PlainEngine, AdamW with a schedule, recomputed activations": lambda: {
        "engine": PlainEngine(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer),
        "policy": recomputing(),
        "grad_clip": 0.01,
    },
}


def by_rows() -> Any:
    policy = policy_of(scale=0.05)
    policy.shares_prefix = False
    return policy


def recomputing() -> Any:
    policy = policy_of(scale=0.05)
    recompute_activations(policy.model)
    return policy


def weights(policy: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_elsewhere(name, tmp_path):
    def found(folder: Path, **trainer: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, float]]]:
        options = {"sampling": Sampling(max_new_tokens=8)} | RUNS[name]()
        options["trainer"] = {"max_epochs": 1} | options.get("trainer", {}) | trainer
        return weights(fit(folder, **options).policy), scalars(folder)

    here, logged_here = found(tmp_path / "here")
    with other_device():
        there, logged_there = found(tmp_path / "there", **TRAINER)
    for parameter, value in here.items():
        torch.testing.assert_close(there[parameter], value, rtol=1e-4, atol=1e-5)
    assert logged_there.keys() == logged_here.keys()
    for metric, values in logged_here.items():
        assert logged_there[metric] == pytest.approx(values, rel=1e-3, abs=1e-4), metric


def test_mixed_precision_elsewhere(tmp_path):
    def found(folder: Path, device: str, **trainer: Any) -> dict[str, Tensor]:
        plugins = [AtomicCheckpointIO(), MixedPrecision("bf16-mixed", device)]
        options = {"loop": {"num_minibatches": 2}, "objective": Objective(beta=0.1)}
        return weights(fit(folder, trainer={"max_epochs": 1, "plugins": plugins} | trainer, **options).policy)

    here = found(tmp_path / "here", "cpu")
    with other_device() as other:
        there = found(tmp_path / "there", other.device.type, **TRAINER)
    for parameter, value in here.items():
        assert there[parameter].dtype == torch.float32
        torch.testing.assert_close(there[parameter], value, rtol=0.1, atol=0.02)


def test_a_learned_reward_lives_elsewhere_too(tmp_path):
    policy_of().save_pretrained(tmp_path / "reward_model")
    learned = LearnedReward(str(tmp_path / "reward_model"), Digits(), lr=3e-3, max_forgetting=1.0)
    with other_device():
        fit(tmp_path, rewards=[Digits(), learned], trainer={"max_epochs": 2} | TRAINER)
    assert {0.0, 1.0} >= set(scalars(tmp_path)["reward/learned_reward/accepted"].values())


def test_the_command_line_elsewhere(tmp_path, policy_folder, command: Grpo, monkeypatch):
    """fit, checkpoint, resume, validate and predict."""
    rows = "".join(f'{{"question": "{row}", "answer": "{row}"}}\n' for row in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    shutil.copytree(policy_folder, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    device = [f"--trainer.{name}={value}" for name, value in TRAINER.items()]
    last = "--ckpt_path=last"
    with other_device():
        for line in (
            ["fit"],
            ["fit", last, "--trainer.max_epochs=2"],
            ["validate", last],
            ["predict", last, "--data.task.predict=rows.jsonl"],
        ):
            code, _, error = command(*line, *device)
            assert code == 0, error
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    assert all(type(value) is Tensor and value.device.type == "cpu" for value in state.values())
    assert max(scalars(tmp_path / "run")["policy/objective"]) == 1


def test_a_deterministic_run_elsewhere(tmp_path):
    """Operations for which CUDA has no deterministic algorithm raise: a sum of floats so far is one."""
    try:
        with other_device():
            sampling = Sampling(max_new_tokens=6, top_p=0.9)
            fit(tmp_path, sampling=sampling, trainer={"max_epochs": 1, "deterministic": True} | TRAINER)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(scalars(tmp_path)["policy/objective"]) == 0


# Mistakes

MISTAKES: list[tuple[Callable[..., Any], str, str]] = [
    (ragged.segment_sum, ", device=values.device", ""),
    (ragged.segments, ", device=lengths.device", ""),
    (philox.uniforms, ", device=prompt.device", ""),
    (attention.fold_mask, ", device=device", ""),
    (Copies.from_lengths.__func__, "filled=filled.to(device)", "filled=filled"),
    (PaddedRows.from_rollouts.__func__, "before.to(device)", "before"),
    (SlabLayer._allocate, "keys.new_empty(", "torch.empty("),
    (Rollouts.to, "else values.to(device)", "else values"),
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
