"""The memory that each device of a run needs: by formulas, and by passes of its own code on tensors without numbers."""

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
from transformers import AutoModelForCausalLM
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
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.training.module import GRPOModule

# Sampling completions; passes without gradients over them; forward, backward and optimizer.
PHASES = ("exploring", "log-probs", "updating")
HEAP_PIECES = 0.6
"""What the heap of a CPU cannot use, as a fraction of the activations: free pieces between an adapter's small tensors.

A rule of thumb: runs with rank 16 on glibc measured 0.57 with 8 layers in float32, 0.43 in bfloat16, and 0 with 2
layers; passes alone 0.3 to 0.8. `docs/memory.md` says how to give these pieces back.
"""


@dataclass
class Devices:
    """`cpu` or `cuda`, how many over all nodes, how the trainer uses them, and the bytes of a process by itself."""

    kind: str = "cpu"
    count: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    process: float = 0


@dataclass
class Plan:
    """What a run holds on one device, in bytes, given its longest prompt and how many prompts it validates at once."""

    model: GRPOModule
    loop: GRPOLoop
    trainer: Devices
    prompt_tokens: int
    validated: int = 0

    def __post_init__(self) -> None:
        self.policy, self.engine = Policy.__new__(Policy), self.model.explorer.engine
        # A sharded policy is of another class, which cannot be copied.
        vars(self.policy).update(vars(self.model.policy))

    def changed(self, key: str, value: Any) -> "Plan":
        """The plan with another value for a key such as `loop.max_tokens`."""
        plan, (part, *path) = copy.copy(self), key.removeprefix("model.").split(".")
        owner, name = plan, path[-1]
        for step in (part, *path[:-1]):
            setattr(owner, step, copy.copy(getattr(owner, step)))
            owner = getattr(owner, step)
        setattr(owner, name, value)
        lost = ("rows",) if part == "engine" or name == "strategy" else ("rows", "fake", "teachers", "passes")
        plan.__dict__ = {name: value for name, value in vars(plan).items() if name not in lost}
        return plan

    @cached_property
    def fake(self) -> Policy:
        """The policy without numbers."""
        return without_numbers(self.policy, self._dtype(self.policy), self.trainer.kind)

    @cached_property
    def teachers(self) -> list[Policy]:
        """Other models that are the reference, without numbers; the one of the most weights first."""
        found = []
        for teacher in (one for one in self.snapshots if isinstance(one, Teacher)):
            own = Policy.__new__(Policy)
            vars(own).update(vars(teacher.policy) | {"compute": self.policy.compute})
            found.append(without_numbers(own, self._dtype(own), self.trainer.kind, beside=self.fake))
        return sorted(found, key=lambda one: -sum(map(torch.numel, one.parameters())))

    @property
    def snapshots(self) -> list[nn.Module]:
        """The old policy and the reference, and what they are made of."""
        return [one for part in (self.model.old_policy, self.model.reference) if part for one in part.modules()]

    def _dtype(self, policy: Policy) -> torch.dtype:
        return torch.float64 if self.trainer.precision.startswith("64") else policy.dtype

    @cached_property
    def passes(self) -> tuple[int, int, int, int]:
        """Tokens and rows of the fullest pack; bytes of a forward over it without gradients, and with its backward."""
        loop, mixed = self.loop, self.trainer.precision.startswith(("bf16", "16"))
        entropy = not isinstance(self.model.objective.entropy, NoEntropy)
        prompts = max(1, loop.prompts_per_step // self.trainer.count // loop.num_minibatches)
        group = [row // loop.group_size for row in range(prompts * loop.group_size)]
        prompt, longest = [0] * self.prompt_tokens, self._longest(self.model.sampling)
        micro_batches: list[Rollouts] = []
        # Shorter completions may fill a micro-batch that has room for one and a half groups of the longest.
        for n in (8, 7, 6, 5, 4):
            rollouts = Rollouts.from_lists([prompt] * prompts, group, [[0] * max(1, longest * n // 8)] * len(group))
            micro_batches += rollouts.micro_batches(loop.max_tokens, self.fake.compute.shares_prefix)
        micro_batch = max(micro_batches, key=lambda one: len(one.all_token_ids))
        kl = self.model.objective.kl if self.model.objective.kl.reads_distributions else None
        scored = max(peak_of(one, micro_batch, False, mixed, entropy) for one in (self.fake, *self.teachers))
        updated = peak_of(self.fake, micro_batch, True, mixed, entropy, kl, next(iter(self.teachers), None))
        return len(micro_batch.all_token_ids), len(micro_batch), scored, updated

    def _longest(self, sampling: Sampling) -> int:
        """Most tokens of a completion; of a conversation, as many as its limits allow."""
        sampler = self.model.explorer.sampler
        most = getattr(getattr(sampler, "limits", None), "max_tokens", None) or sampler.longest(sampling)
        return max(1, min(most, (self.policy.context_length or sys.maxsize) - self.prompt_tokens))

    @property
    def decoding(self) -> tuple[int, int, int]:
        """Rows decoded at once, tokens of each, and bytes of their cache and logits, in training or validation."""
        found, config, model = [(0, 0, 0)], self.policy.config, self.model
        limit = getattr(self.engine, "max_cache_gib", None)
        mixed = self.trainer.precision.startswith(("bf16", "16"))
        dtype = torch.bfloat16 if mixed else self.fake.model.dtype  # float16 has as many bytes
        memory = sys.maxsize if limit is None else int(limit * GIB)
        prompts = max(1, self.loop.prompts_per_step // self.trainer.count)
        trained = (prompts * self.loop.group_size, model.sampling)
        validations = [(self.validated * one.num_samples, one.sampling) for one in model.evaluations.values()]
        for wanted, sampling in (trained, *validations):
            # An engine with weights of its own has a memory of its own.
            if wanted and self.engine.shares_weights:
                tokens, most = self.prompt_tokens + self._longest(sampling), getattr(self.engine, "max_rows", wanted)
                row_bytes = kv_memory.row_bytes(config, dtype, tokens)
                rows = max(1, min(most, wanted, memory // row_bytes))
                found.append((rows, tokens, rows * row_bytes))
        return max(found, key=lambda one: one[2])

    @property
    def sampling_copies(self) -> int:
        """Bytes of the copies of linear layers that the engine samples with."""
        mixed = self.trainer.precision.startswith(("bf16", "16"))
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):  # float16 has as many bytes
            dtype = self.engine.copy_dtype(self.fake) if isinstance(self.engine, NativeEngine) else None
        return copied_bytes(self.fake.model, dtype, self.trainer.kind) if dtype else 0

    @cached_property
    def rows(self) -> list[tuple[str, tuple[float, ...], str]]:
        """What takes memory: its name, its bytes in each of PHASES, and a note."""
        fake, model, cuda = self.fake, self.model, self.trainer.kind == "cuda"
        shards = self.trainer.count if self.trainer.strategy == "fsdp2" else 1
        whole = sum(one.nbytes for one in (*fake.parameters(), *fake.buffers()))
        trained = [parameter for parameter in fake.parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for parameter in trained) / shards
        exchanged = self.trainer.count > 1 and shards == 1
        state = state_ratio(model.optimizer, trained[0].dtype)
        # The update comes when the activations are gone. On a GPU torch's optimizers update all parameters at once.
        stepping = gradients if cuda else max(parameter.nbytes for parameter in trained) / shards
        copies = sum(isinstance(one, FrozenCopy) and not isinstance(one, Teacher) for one in self.snapshots)
        copied = (copies + self.loop.source.num_copies) * (whole / shards if fake.adapter is None else gradients)
        # While exploring all weights are gathered; in a pass those in no layer, and two layers with their gradients.
        gathered = gathered_bytes(fake) if shards > 1 else 0
        held = sum(one.nbytes for teacher in self.teachers for one in (*teacher.parameters(), *teacher.buffers()))
        reading = max(map(gathered_bytes, self.teachers)) if shards > 1 and self.teachers else 0
        both = gathered + min(gathered, gradients * shards)
        rows, tokens, cache = self.decoding
        total, own = sum(map(torch.numel, fake.parameters())), sum(map(torch.numel, trained))
        packed, in_rows, scored, updated = self.passes
        pieces = 0 if cuda or fake.adapter is None else HEAP_PIECES * updated
        found = [
            ("process", (self.trainer.process,) * 3, "CUDA context" if cuda else "Python and libraries"),
            ("weights", (whole / shards,) * 3, f"{total / 1e6:.2f} M parameters, {own / 1e6:.2f} M trained"),
            ("gradients", (0, 0, gradients * (1 + exchanged)), "and a copy to exchange" if exchanged else ""),
            ("optimizer", (state * gradients,) * 3, f"{state:.2g} x the gradients"),
            ("frozen copies", (copied,) * 3, "reference, old policies"),
            ("teachers", (held / shards, held / shards + reading, held / shards + reading), "the reference"),
            ("gathered weights", (whole - whole / shards, gathered, both), f"of {shards} shards"),
            ("copies for sampling", (self.sampling_copies, 0, 0), "in the type of the products"),
            ("key-value cache", (cache, 0, 0), f"{rows} rows x {tokens} tokens, and logits"),
            ("activations, logits", (scored, scored, max(updated, stepping)), f"{packed} tokens in {in_rows} rows"),
            ("pieces of the heap", (0, 0, pieces), "free between an adapter's small tensors"),
        ]
        return [row for row in found if any(row[1])]

    @property
    def sums(self) -> tuple[float, ...]:
        """The sum of each phase."""
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

    def within(self, has: float | None) -> "Plan":
        """The plan on a device of `has` bytes; an engine that bounds its cache takes a part of what is free."""
        if has is None or self.sums[0] <= has or getattr(self.engine, "max_cache_gib", 0) is not None:
            return self
        part = kv_memory.CUDA_FRACTION if self.trainer.kind == "cuda" else kv_memory.CPU_FRACTION
        return self.changed("model.engine.max_cache_gib", max(0, (has - self.sums[0] + self.decoding[2]) * part / GIB))


def gathered_bytes(fake: Policy) -> int:
    """Bytes of the weights that a pass gathers of shards at once: those in no layer, and two layers."""
    layers = [layer for layer in fake.modules() if isinstance(layer, GradientCheckpointingLayer)]
    sizes = [sum(one.nbytes for one in layer.parameters()) for layer in layers]
    whole = sum(one.nbytes for one in (*fake.parameters(), *fake.buffers()))
    return whole - sum(sizes) + 2 * max(sizes) if sizes else 0


def state_ratio(optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Bytes of an optimizer's state per byte of its parameters, found by an update of a small one."""
    parameter = nn.Parameter(torch.ones(64, 96, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    stepping = optimizer([parameter])
    stepping.step()
    state = stepping.state[parameter].values()
    return sum(one.nbytes for one in state if isinstance(one, Tensor) and one.ndim) / parameter.nbytes


def remedies(plan: Plan, phase: str) -> Iterator[str]:
    """Keys that lower the sum of a phase, each as it is found: those first that need no passes."""
    index, policy, trainer, exploring = PHASES.index(phase), plan.policy, plan.trainer, phase == "exploring"
    checkpoints = policy.compute.gradient_checkpointing
    held, half, tokens = plan.sums[index], plan.decoding[2] / 2 / GIB, max(1, plan.passes[0] // 2)
    tried = [
        ("trainer.strategy=fsdp2", "fsdp2", trainer.count > 1 and trainer.strategy != "fsdp2"),
        (f"model.engine.max_cache_gib={half:.2g}", half, exploring and hasattr(plan.engine, "max_cache_gib")),
        (f"loop.max_tokens={tokens}", tokens, not exploring),
        ("model.policy.compute.gradient_checkpointing=true", True, phase == "updating" and not checkpoints),
        ("trainer.precision=bf16-mixed", "bf16-mixed", not trainer.precision.startswith(("bf16", "16", "64"))),
        ("model.policy.adapter=LoRA", LoRA(), policy.adapter is None),
    ]
    for text, value in [(text, value) for text, value, helps in tried if helps]:
        with suppress(Exception):  # not every model takes an adapter
            saved = held - plan.changed(text.split("=")[0], value).sums[index]
            if saved > 0.01 * (held - trainer.process):
                yield f"{text} saves {amount(saved)}"


def amount(size: float) -> str:
    """1.5 * 2**30 -> 1.50 GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were made under it; views and `known` tensors cost nothing."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # Fake tensors work out their shapes by tensors of the device `meta`.
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and not leaf.is_meta]
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage not in self._seen:
                self._seen.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return made

    def _freed(self, size: int) -> None:
        self.live -= size


def without_numbers(policy: Policy, dtype: torch.dtype, device: str, beside: Policy | None = None) -> Policy:
    """A policy of the same settings and shape, loaded or not, without numbers; as on a device of this kind.

    Its tensors go together with those of the one `beside` it.
    """
    fake = copy.copy(policy)
    fake._modules = {}
    compute = fake.compute = copy.copy(policy.compute)
    if isinstance(compute, Fast):
        compute.products = "torch"  # oneDNN computes with numbers
        compute.logits_at_once = logits_at_once(device)
    if hasattr(policy, "model"):
        attention = str(policy.model.config._attn_implementation)
    else:  # What models do as a rule: the policy tries it when it has its weights.
        own = ATTENTION if isinstance(compute, Fast) else "sdpa"
        attention = "eager" if compute.attention == "eager" else own
        if isinstance(compute, Fast):
            compute.needs_mask = compute.attention != "sdpa" or not has_full_attention(policy.config)
            compute.shares_prefix = compute.share_prefix and not compute.needs_mask
    with torch.device("meta"):
        fake.model = AutoModelForCausalLM.from_config(
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
    """Most bytes at once beside weights and gradients: of a forward over `pack`, and perhaps its backward.

    A `kl` that reads distributions compares those of `fake` with those of `reference`, by default of its own shape.
    """
    reference = reference or fake
    fake.model.train(backward)
    with fake.__dict__["_mode"]:
        for parameter in fake.parameters():
            parameter.grad = torch.zeros_like(parameter) if backward and parameter.requires_grad else None
    grads = [parameter.grad for parameter in fake.parameters() if parameter.grad is not None]
    live = LiveBytes([*fake.parameters(), *fake.buffers(), *reference.parameters(), *reference.buffers(), *grads])

    def transformer(trunk: nn.Module, **inputs: Any) -> Any:
        # What the transformer makes itself must be fake too; packs and their layouts must not.
        with fake.__dict__["_mode"], live:
            return trunk(**inputs, use_cache=False)

    def scored(policy: Policy, rollouts: Rollouts, read: Any = None) -> Any:
        return Policy.forward(reference, rollouts, read=read)

    for one in (fake, reference):
        vars(one.compute)["call"] = transformer
    with live, torch.autocast("cpu", torch.bfloat16, enabled=autocasts), torch.set_grad_enabled(backward):
        # No module of it is sharded.
        snapshot: Any = SimpleNamespace(scored=scored, modules=list)
        read = kl.reading(snapshot, fake, micro_batch) if kl is not None else None
        found = Policy.forward(fake, micro_batch, entropy_gradient, read=read)
        if backward:
            (found.logp + found.entropy + (0 if read is None else found.read)).sum().backward()
    return live.peak
