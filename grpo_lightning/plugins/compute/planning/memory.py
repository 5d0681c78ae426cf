"""Estimates the memory that each device of a run needs.

Weights, gradients and caches follow from formulas. Activations are found by the run's own passes on fake tensors, which
have shapes and no numbers.
"""

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.maths.entropy import NoEntropy
from grpo_lightning.maths.kl import KLEstimator
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.compute.fast.fast_compute import Fast, has_full_attention
from grpo_lightning.plugins.compute.fast.shared_prefix import ATTENTION
from grpo_lightning.plugins.compute.fast.token_logp import logits_at_once
from grpo_lightning.plugins.engines.native import kv_memory
from grpo_lightning.plugins.engines.native.kv_memory import GIB
from grpo_lightning.plugins.engines.native.linear_copies import copied_bytes
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import model_class
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.training.module import GRPOModule

PHASES = ("exploring", "log-probs", "updating")
"""Sampling completions; passes without gradients over them; forward, backward and optimizer."""
HEAP_PIECES = 0.6
"""What the heap of a CPU cannot use, as a fraction of the activations: free pieces between an adapter's small tensors.

A rule of thumb: runs with rank 16 on glibc measured 0.57 with 8 layers in float32, 0.43 in bfloat16, and 0 with 2
layers; passes alone 0.3 to 0.8. `docs/how_to/memory.md` says how to give these pieces back.
"""


@dataclass
class Devices:
    """The devices of a run, and how the trainer uses them."""

    kind: str = "cpu"
    """`cpu` or `cuda`."""
    count: int = 1
    """Number of devices over all nodes."""
    strategy: str = "auto"
    """`fsdp2` shards the weights. With every other strategy each device has all of them."""
    precision: str = "32-true"
    """As `trainer.precision`."""
    process: float = 0
    """Bytes that a process takes besides what the run holds."""


@dataclass
class Plan:
    """The memory that a run takes on one device, in bytes."""

    model: GRPOModule
    """The parts of the run. Their weights need not be read."""
    loop: GRPOLoop
    """Numbers of prompts and completions, and tokens of a micro-batch."""
    trainer: Devices
    """What the run runs on."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    validated: int = 0
    """Prompts validated at once on each device."""

    def __post_init__(self) -> None:
        self.policy = Policy.__new__(Policy)
        self.engine = self.model.explorer.engine
        # A sharded policy is of another class, which cannot be copied.
        vars(self.policy).update(vars(self.model.policy))

    def changed(self, key: str, value: Any) -> "Plan":
        """Returns the plan with another value for a key such as `loop.max_tokens`."""
        plan = copy.copy(self)
        section, *path, name = key.removeprefix("model.").split(".")
        # Every object on the way to the value is copied: the run keeps its own.
        owner = plan
        for attribute in (section, *path):
            setattr(owner, attribute, copy.copy(getattr(owner, attribute)))
            owner = getattr(owner, attribute)
        setattr(owner, name, value)
        # Results that the value may change are computed again.
        keeps_passes = section == "engine" or name == "strategy"
        stale = ("rows",) if keeps_passes else ("rows", "fake", "teachers", "passes")
        plan.__dict__ = {key: value for key, value in vars(plan).items() if key not in stale}
        return plan

    @cached_property
    def fake(self) -> Policy:
        """The policy, made of fake tensors."""
        return without_numbers(self.policy, self._dtype(self.policy), self.trainer.kind)

    @cached_property
    def teachers(self) -> list[Policy]:
        """The other models that serve as reference, made of fake tensors; the model with the most weights first."""
        fakes = []
        for teacher in self.snapshots:
            if isinstance(teacher, Teacher):
                policy = Policy.__new__(Policy)
                vars(policy).update(vars(teacher.policy) | {"compute": self.policy.compute})
                fakes.append(without_numbers(policy, self._dtype(policy), self.trainer.kind, beside=self.fake))
        return sorted(fakes, key=lambda fake: -sum(map(torch.numel, fake.parameters())))

    @property
    def snapshots(self) -> list[nn.Module]:
        """The old policy and the reference, and the modules that they consist of."""
        roots = (self.model.old_policy, self.model.reference)
        return [module for root in roots if root for module in root.modules()]

    @property
    def autocasts(self) -> bool:
        """True if products are computed in 16 bits and weights are not."""
        return self.trainer.precision.startswith(("bf16", "16"))

    def _dtype(self, policy: Policy) -> torch.dtype:
        return torch.float64 if self.trainer.precision.startswith("64") else policy.dtype

    @cached_property
    def passes(self) -> tuple[int, int, int, int]:
        """Tokens and rows of the largest micro-batch; peak bytes of a forward without gradients, and of an update."""
        loop = self.loop
        objective = self.model.objective
        prompts = max(1, loop.prompts_per_step // self.trainer.count // loop.num_minibatches)
        group = [row // loop.group_size for row in range(prompts * loop.group_size)]
        prompt = [0] * self.prompt_tokens
        longest = self._longest(self.model.sampling)
        micro_batches: list[Rollouts] = []
        # Shorter completions may fill a micro-batch that has room for one and a half groups of the longest.
        for eighths in (8, 7, 6, 5, 4):
            completion = [0] * max(1, longest * eighths // 8)
            rollouts = Rollouts.from_lists([prompt] * prompts, group, [completion] * len(group))
            micro_batches += rollouts.micro_batches(loop.max_tokens, self.fake.compute.shares_prefix)
        largest = max(micro_batches, key=lambda micro_batch: len(micro_batch.all_token_ids))

        # Both passes over it. An update may compare its distributions with a teacher's.
        has_entropy = not isinstance(objective.entropy, NoEntropy)
        kl = objective.kl if objective.kl.reads_distributions else None
        models = (self.fake, *self.teachers)
        scored = max(peak_of(fake, largest, False, self.autocasts, has_entropy) for fake in models)
        teacher = next(iter(self.teachers), None)
        updated = peak_of(self.fake, largest, True, self.autocasts, has_entropy, kl, teacher)
        return len(largest.all_token_ids), len(largest), scored, updated

    def _longest(self, sampling: Sampling) -> int:
        """Returns the most tokens of a completion; of a conversation, as many as its limits allow."""
        sampler = self.model.explorer.sampler
        max_tokens = getattr(getattr(sampler, "limits", None), "max_tokens", None) or sampler.longest(sampling)
        return max(1, min(max_tokens, (self.policy.context_length or sys.maxsize) - self.prompt_tokens))

    @property
    def decoding(self) -> tuple[int, int, int]:
        """Rows decoded at once, tokens of each, and bytes of their cache and logits, in training or validation."""
        if not self.engine.shares_weights:
            # An engine that has its own weights has memory of its own, too.
            return 0, 0, 0
        limit = getattr(self.engine, "max_cache_gib", None)
        memory = sys.maxsize if limit is None else int(limit * GIB)
        dtype = torch.bfloat16 if self.autocasts else self.fake.model.dtype  # float16 has as many bytes
        prompts = max(1, self.loop.prompts_per_step // self.trainer.count)
        evaluations = self.model.evaluations.values()
        workloads = [(prompts * self.loop.group_size, self.model.sampling)]
        workloads += [(self.validated * evaluation.num_samples, evaluation.sampling) for evaluation in evaluations]
        sizes = [(0, 0, 0)]
        for completions, sampling in workloads:
            if completions:
                tokens = self.prompt_tokens + self._longest(sampling)
                row_bytes = kv_memory.row_bytes(self.policy.config, dtype, tokens)
                max_rows = getattr(self.engine, "max_rows", completions)
                rows = max(1, min(max_rows, completions, memory // row_bytes))
                sizes.append((rows, tokens, rows * row_bytes))
        return max(sizes, key=lambda size: size[2])

    @property
    def sampling_copies(self) -> int:
        """Bytes of the copies of linear layers that the engine samples with."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocasts):  # float16 has as many bytes
            dtype = self.engine.copy_dtype(self.fake) if isinstance(self.engine, NativeEngine) else None
        return copied_bytes(self.fake.model, dtype, self.trainer.kind) if dtype else 0

    @cached_property
    def rows(self) -> list[tuple[str, tuple[float, ...], str]]:
        """The rows of the table: what takes memory, its bytes in each of PHASES, and a note."""
        fake = self.fake
        is_cuda = self.trainer.kind == "cuda"
        shards = self.trainer.count if self.trainer.strategy == "fsdp2" else 1

        # The policy, what an update adds to it, and frozen copies of it.
        weights = bytes_of(fake)
        trained = [parameter for parameter in fake.parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for parameter in trained) / shards
        exchanges = self.trainer.count > 1 and shards == 1
        ratio = state_ratio(self.model.optimizer, trained[0].dtype)
        # The update comes when the activations are gone. On a GPU torch's optimizers update all parameters at once.
        stepping = gradients if is_cuda else max(parameter.nbytes for parameter in trained) / shards
        copies = sum(isinstance(module, FrozenCopy) and not isinstance(module, Teacher) for module in self.snapshots)
        copied = (copies + self.loop.source.num_copies) * (weights / shards if fake.adapter is None else gradients)

        # While exploring all weights are gathered; in a pass the weights in no layer, and two layers with gradients.
        gathered = gathered_bytes(fake) if shards > 1 else 0
        gathered_with_gradients = gathered + min(gathered, gradients * shards)
        teachers = sum(map(bytes_of, self.teachers))
        gathered_teacher = max(map(gathered_bytes, self.teachers)) if shards > 1 and self.teachers else 0
        reading = teachers / shards + gathered_teacher

        num_decoded, tokens, cache = self.decoding
        num_tokens, num_rows, scored, updated = self.passes
        pieces = 0 if is_cuda or fake.adapter is None else HEAP_PIECES * updated
        millions, millions_trained = (sum(map(torch.numel, tensors)) / 1e6 for tensors in (fake.parameters(), trained))
        rows = [
            ("process", (self.trainer.process,) * 3, "CUDA context" if is_cuda else "Python and libraries"),
            ("weights", (weights / shards,) * 3, f"{millions:.2f} M parameters, {millions_trained:.2f} M trained"),
            ("gradients", (0, 0, gradients * (1 + exchanges)), "and a copy to exchange" if exchanges else ""),
            ("optimizer", (ratio * gradients,) * 3, f"{ratio:.2g} x the gradients"),
            ("frozen copies", (copied,) * 3, "reference, old policies"),
            ("teachers", (teachers / shards, reading, reading), "the reference"),
            (
                "gathered weights",
                (weights - weights / shards, gathered, gathered_with_gradients),
                f"of {shards} shards",
            ),
            ("copies for sampling", (self.sampling_copies, 0, 0), "in the type of the products"),
            ("key-value cache", (cache, 0, 0), f"{num_decoded} rows x {tokens} tokens, and logits"),
            (
                "activations, logits",
                (scored, scored, max(updated, stepping)),
                f"{num_tokens} tokens in {num_rows} rows",
            ),
            ("pieces of the heap", (0, 0, pieces), "free between an adapter's small tensors"),
        ]
        return [row for row in rows if any(row[1])]

    @property
    def sums(self) -> tuple[float, ...]:
        """Bytes of all rows in each of PHASES."""
        return tuple(map(sum, zip(*(values for _, values, _ in self.rows), strict=True)))

    @property
    def phase(self) -> str:
        """The phase with the largest sum."""
        return PHASES[self.sums.index(max(self.sums))]

    def __str__(self) -> str:
        unit, size = ("GiB", GIB) if max(self.sums) >= 8 * GIB else ("MiB", 2**20)
        lines = [f"{f'memory of each device, {unit}':<34}" + "".join(f"{phase:>11}" for phase in PHASES)]
        for name, values, note in [*self.rows, ("sum", self.sums, "")]:
            numbers = "".join(f"{value / size:>11.2f}" if value else f"{'-':>11}" for value in values)
            lines.append(f"  {name:<32}{numbers}  {note}".rstrip())
        return "\n".join(lines)

    def within(self, device_bytes: float | None) -> "Plan":
        """Returns the plan for a device of this memory, in which an unlimited cache takes a part of the rest."""
        is_unbounded = getattr(self.engine, "max_cache_gib", 0) is None
        if device_bytes is None or self.sums[0] <= device_bytes or not is_unbounded:
            return self
        fraction = kv_memory.CUDA_FRACTION if self.trainer.kind == "cuda" else kv_memory.CPU_FRACTION
        free = device_bytes - self.sums[0] + self.decoding[2]
        return self.changed("model.engine.max_cache_gib", max(0, free * fraction / GIB))


def bytes_of(module: nn.Module) -> int:
    """Returns the bytes of the parameters and buffers of a module."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def gathered_bytes(fake: Policy) -> int:
    """Returns the most bytes that a pass gathers from shards at once: weights in no layer, and two layers."""
    layers = [layer for layer in fake.modules() if isinstance(layer, GradientCheckpointingLayer)]
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    return bytes_of(fake) - sum(sizes) + 2 * max(sizes) if sizes else 0


def state_ratio(optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Returns the bytes of an optimizer's state per byte of its parameters, measured by updating a small parameter."""
    parameter = nn.Parameter(torch.ones(64, 96, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    stepping = optimizer([parameter])
    stepping.step()
    state = stepping.state[parameter].values()
    return sum(value.nbytes for value in state if isinstance(value, Tensor) and value.ndim) / parameter.nbytes


def remedies(plan: Plan, phase: str) -> Iterator[str]:
    """Yields keys that lower the sum of a phase, as they are found: first the keys that need no passes to try."""
    trainer = plan.trainer
    is_exploring = phase == "exploring"
    phase_bytes = plan.sums[PHASES.index(phase)]
    half_cache = plan.decoding[2] / 2 / GIB
    half_tokens = max(1, plan.passes[0] // 2)
    recomputes = plan.policy.compute.gradient_checkpointing
    has_32_bits = not trainer.precision.startswith(("bf16", "16", "64"))
    candidates = [
        ("trainer.strategy=fsdp2", "fsdp2", trainer.count > 1 and trainer.strategy != "fsdp2"),
        (
            f"model.engine.max_cache_gib={half_cache:.2g}",
            half_cache,
            is_exploring and hasattr(plan.engine, "max_cache_gib"),
        ),
        (f"loop.max_tokens={half_tokens}", half_tokens, not is_exploring),
        ("model.policy.compute.gradient_checkpointing=true", True, phase == "updating" and not recomputes),
        ("trainer.precision=bf16-mixed", "bf16-mixed", has_32_bits),
        ("model.policy.adapter=LoRA", LoRA(), plan.policy.adapter is None),
    ]
    for text, value, is_possible in candidates:
        if is_possible:
            with suppress(Exception):  # not every model takes an adapter
                changed = plan.changed(text.split("=")[0], value)
                saved = phase_bytes - changed.sums[PHASES.index(phase)]
                if saved > 0.01 * (phase_bytes - trainer.process):
                    yield f"{text} saves {amount(saved)}"


def amount(size: float) -> str:
    """Writes a number of bytes: 1.5 * 2**30 -> 1.50 GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live tensors that were made inside it. A view costs nothing.

    Args:
        existing: Tensors that are not counted, even where an operation inside returns them.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes at once so far."""
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # Fake tensors compute their shapes with tensors of the device `meta`, which hold nothing.
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not leaf.is_meta]
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage not in self._storages:
                self._storages.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return output

    def _freed(self, size: int) -> None:
        self.live -= size


def without_numbers(policy: Policy, dtype: torch.dtype, device: str, beside: Policy | None = None) -> Policy:
    """Returns a policy of the same settings and shapes, made of fake tensors.

    Args:
        policy: A policy, whose weights need not be read.
        dtype: Type of the weights.
        device: `cpu` or `cuda`: the kind of device whose memory is estimated.
        beside: A policy of fake tensors that will meet the tensors of the new policy in an operation.
    """
    fake = copy.copy(policy)
    fake._modules = {}
    compute = fake.compute = copy.copy(policy.compute)
    is_fast = isinstance(compute, Fast)
    if isinstance(compute, Fast):
        compute.products = "torch"  # oneDNN computes with numbers
        compute.logits_at_once = logits_at_once(device)
    if hasattr(policy, "model"):
        attention = str(policy.model.config._attn_implementation)
    else:
        # As with most models. The policy tries it when it has its weights.
        attention = "eager" if compute.attention == "eager" else ATTENTION if is_fast else "sdpa"
        if isinstance(compute, Fast):
            compute.needs_mask = compute.attention != "sdpa" or not has_full_attention(policy.config)
            compute.shares_prefix = compute.share_prefix and not compute.needs_mask
    with torch.device("meta"):
        fake.model = model_class(policy.config).from_config(
            copy.deepcopy(policy.config),
            dtype=dtype,
            # Flash attention cannot be made without a GPU; it holds what sdpa's fused kernels hold.
            attn_implementation=ATTENTION if "flash" in attention else attention,
            trust_remote_code=policy.trust_remote_code,
        )
        fake.prepare(fake.model)
    mode = beside.__dict__["_mode"] if beside else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake.model.to_empty(device="cpu")
    fake.model.tie_weights()
    fake.__dict__["_mode"] = mode
    return fake


def peak_of(
    fake: Policy,
    micro_batch: Rollouts,
    backward: bool,
    autocasts: bool,
    entropy_gradient: bool = False,
    kl: KLEstimator | None = None,
    reference: Policy | None = None,
) -> int:
    """Returns the most bytes at once beside weights and gradients: of a forward, and perhaps its backward.

    Args:
        fake: A policy of fake tensors.
        micro_batch: The completions of the pass.
        backward: Add the backward pass.
        autocasts: Compute products in 16 bits.
        entropy_gradient: Let gradients flow through the entropies.
        kl: An estimator that reads distributions; None reads none.
        reference: The model that `kl` compares `fake` with, made of fake tensors; None takes `fake`.
    """
    reference = reference or fake
    fake.model.train(backward)
    with fake.__dict__["_mode"]:
        for parameter in fake.parameters():
            parameter.grad = torch.zeros_like(parameter) if backward and parameter.requires_grad else None
    grads = [parameter.grad for parameter in fake.parameters() if parameter.grad is not None]
    live = LiveBytes([*fake.parameters(), *fake.buffers(), *reference.parameters(), *reference.buffers(), *grads])

    def scored(policy: Policy, rollouts: Rollouts, read: Any = None) -> Any:
        return Policy.forward(reference, rollouts, read=read)

    with live, torch.autocast("cpu", torch.bfloat16, enabled=autocasts), torch.set_grad_enabled(backward):
        # A snapshot without modules: nothing of it is sharded.
        snapshot: Any = SimpleNamespace(scored=scored, modules=list)
        read = kl.reading(snapshot, fake, micro_batch) if kl is not None else None
        output = Policy.forward(fake, micro_batch, entropy_gradient, read=read)
        if backward:
            (output.logp + output.entropy + (0 if read is None else output.read)).sum().backward()
    return live.peak
