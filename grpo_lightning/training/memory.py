"""The memory that a run needs on one device, estimated before any of it is used."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grpo_lightning.engines.kv_memory import cache_bytes_per_token, rows_at_once
from grpo_lightning.engines.linear_copies import numbers_in_copies
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.training.simulation import (
    DEPTHS,
    Held,
    LiveBytes,
    Twin,
    layers_are_alike,
    layers_of,
    most,
    of_depth,
)

PHASES = ("exploring", "log-probs", "updating")
"""Sampling completions, passes without gradients over them, and forward, backward and optimizer."""

CUDA_CONTEXT = 600 * 2**20
"""Bytes of a GPU that CUDA, its libraries and kernels take before the first tensor, as the tools of NVIDIA report."""

FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in nf4: 4 bits, a scale of 8 bits per 64 weights, and one of 32 bits per 256 scales (QLoRA)."""

BYTES_PER_TOKEN = {"cpu": 190, "cuda": 100}
"""Bytes per completion token in `Rollouts`, in the packs and, on a CPU, in lists of ids and log-probs."""

LENGTHS = ((1.0,), (1.0, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4), (1.0, *[0.1] * 31))
"""Completions as fractions of the longest: all of them, spread like a lognormal, and one that never ends."""


@dataclass(frozen=True)
class Spread:
    """How weights, gradients and optimizer state are spread over the devices."""

    world_size: int = 1
    shards: int = 1
    """Number of shards of each; every device holds one."""
    copies_gradients: bool = False
    """Whether gradients are exchanged in buckets beside them."""

    @classmethod
    def single(cls) -> "Spread":
        """One device."""
        return cls()

    @classmethod
    def replicated(cls, world_size: int) -> "Spread":
        """DDP: everything on every device."""
        return cls(world_size, copies_gradients=world_size > 1)

    @classmethod
    def sharded(cls, world_size: int) -> "Spread":
        """FSDP2: everything is sharded, and gathered where it is needed."""
        return cls(world_size, shards=world_size)


@dataclass(frozen=True)
class Job:
    """Everything that decides how much memory a run needs. Sizes are those of one device."""

    config: PreTrainedConfig
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    sampling: Sampling
    group_size: int
    prompts_per_step: int
    """Prompts of one step on this device."""
    num_minibatches: int
    max_tokens: int
    prompt_tokens: int
    """Longest prompt."""
    max_rows: int
    """Completions decoded at once."""
    refills: bool = False
    """Whether those that wait begin where others have ended: then groups are cut, and fewer rows stay empty."""
    validated_prompts: int = 0
    """Prompts validated at once, with `val_samples` completions each."""
    val_samples: int = 0
    val_sampling: Sampling | None = None
    """The sampling of validation; None is `sampling`."""
    max_cache: float | None = None
    """Bytes that decoding may take, cache and logits; None sets no limit."""
    bounds_cache: bool = False
    """Whether the engine decodes only as many rows as fit into free memory."""
    packs: bool = False
    """Whether the engine decodes with packed copies of the linear layers."""
    copied_dtype: torch.dtype | None = None
    """Type of the engine's copies of the linear layers, if it has one of its own."""
    threads: int = 1
    """Packs passed at once in an update."""
    dtype: torch.dtype = torch.float32
    precision: str = "32-true"
    attention: str = "sdpa"
    shares_prefix: bool = True
    recomputes: bool = False
    """Gradient checkpointing."""
    offloads: bool = False
    """Whether activations are kept in main memory, and that is not the device's."""
    fused: bool = True
    """Whether the policy's `fused` is on."""
    dropout: bool = False
    """Whether the dropout of the model is kept: attention with dropout has no fused kernel on a CPU."""
    entropy_gradient: bool = False
    frozen_copies: int = 0
    """Frozen policies of the same size: the reference, an old policy with weights, earlier ones to sample from."""
    adapter: LoRA | None = None
    """What is trained in place of the weights; None trains all."""
    spread: Spread = field(default_factory=Spread.single)
    device: str = "cpu"
    process: int = 0
    """Bytes of the process itself: Python and its libraries; on a GPU, the CUDA context."""
    trust_remote_code: bool = False

    @property
    def weight_dtype(self) -> torch.dtype:
        """Type of the weights once the trainer has converted them."""
        return torch.float64 if self.precision == "64-true" else self.dtype

    @property
    def trained_dtype(self) -> torch.dtype:
        """Type of what is trained: an adapter is float32 whatever the weights."""
        return self.weight_dtype if self.adapter is None or self.precision == "64-true" else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of the arithmetic, where it is not that of the weights."""
        return torch.bfloat16 if self.precision == "bf16-mixed" else None

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return self.autocast or self.weight_dtype

    @property
    def rows(self) -> int:
        """Completions of one step on this device."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True)
class Decoded:
    """Completions that are decoded at once."""

    prompts: int
    rows: int
    tokens: int
    """Of the longest prompt and completion together."""
    sampling: Sampling


class Estimate:
    """The bytes of each thing that a job holds.

    Args:
        job: What is run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def changed(self, **changes: Any) -> "Estimate":
        """The estimate of the job with some fields changed; what they do not affect is not computed again."""
        other = Estimate(replace(self.job, **changes))
        kept = set.intersection(*({*UNTOUCHED.get(name, ())} for name in changes))
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name in kept})
        return other

    @cached_property
    def model(self) -> PreTrainedModel:
        """The whole model without numbers, with its adapter."""
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.job.config, dtype=self.job.weight_dtype, trust_remote_code=self.job.trust_remote_code
            )
            if self.job.adapter is not None:
                self.job.adapter.add(model)
        return model

    @property
    def quantised(self) -> dict[int, Tensor]:
        """The weights that are kept in 4 bits, by their ids: those of linear layers, the head excepted."""
        if self.job.adapter is None or self.job.adapter.quantise is None:
            return {}
        head = self.model.get_output_embeddings()
        linear = [module for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        return {id(one.weight): one.weight for one in linear if one is not head and not one.weight.requires_grad}

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the policy; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained(self) -> int:
        """Parameters that have a gradient."""
        return self.num_parameters if self.job.adapter is None else sum(map(torch.numel, self._trained))

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def weights(self) -> float:
        """Bytes of one copy of the policy's parameters and buffers, whole."""
        small, everything = self.quantised, [*self.model.parameters(), *self.model.buffers()]
        return sum(tensor.numel() * FOUR_BITS if id(tensor) in small else nbytes(tensor) for tensor in everything)

    @property
    def copied(self) -> float:
        """Bytes of a frozen copy of the policy: of an adapter, the trained tensors alone."""
        return self.weights if self.job.adapter is None else self.gradients

    @property
    def dequantised(self) -> float:
        """Bytes of the largest weight of 4 bits in the type of the products, as a layer makes it for itself."""
        return max(map(nbytes, self.quantised.values()), default=0)

    @property
    def described(self) -> str:
        """How many parameters of which type, and how many of them are trained."""
        kind = "nf4" if self.quantised else name_of(self.job.weight_dtype)
        text = f"{millions(self.num_parameters)} {kind}"
        return text if self.job.adapter is None else f"{text}, {millions(self.num_trained)} trained"

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the trained parameters, whole."""
        return self.num_trained * self.job.trained_dtype.itemsize

    @cached_property
    def optimizer(self) -> tuple[float, float]:
        """Bytes of the optimizer state, and of what it holds besides during an update, whole."""
        state, first, others = optimizer_bytes(self.job.optimizer, self.job.trained_dtype, self.job.device)
        largest = min(max(map(nbytes, self._trained)), self.gradients)
        return state * self.gradients, first * largest + others * (self.gradients - largest)

    @property
    def gathered(self) -> float:
        """Bytes of sharded weights that are whole during a forward: those outside of layers, and two layers."""
        if self.job.spread.shards == 1:
            return 0
        layers = [sum(map(nbytes, layer.parameters())) for layer in layers_of(self.model)]
        return self.weights - sum(layers) + 2 * max(layers, default=0)

    @property
    def linear_copies(self) -> int:
        """Bytes of the copies of linear layers that the engine decodes with."""
        frozen = self.job.adapter is not None and self.job.adapter.quantise is None
        casts = frozen and self.job.cache_dtype != self.job.weight_dtype
        dtype = self.job.copied_dtype or (self.job.cache_dtype if self.job.packs or casts else None)
        return 0 if dtype is None else numbers_in_copies(self.model) * dtype.itemsize

    @property
    def cache_per_token(self) -> int:
        """Bytes of key-value cache per token of a completion."""
        return cache_bytes_per_token(self.job.config, self.job.cache_dtype)

    @property
    def decoded(self) -> list["Decoded"]:
        """What is decoded at once in training, and in validation."""
        job = self.job
        return [
            self._fitting(job.prompts_per_step, job.group_size, job.sampling),
            self._fitting(job.validated_prompts, job.val_samples, job.val_sampling or job.sampling),
        ]

    @property
    def largest(self) -> "Decoded":
        """The one of `decoded` with the larger key-value cache."""
        return max(self.decoded, key=lambda one: one.rows * one.tokens)

    def _fitting(self, num_prompts: int, group_size: int, sampling: Sampling) -> "Decoded":
        """What is decoded at once: whole groups, unless one does not fit or rows are refilled."""
        job = self.job
        tokens = job.prompt_tokens + sampling.max_new_tokens
        if num_prompts * group_size == 0:
            return Decoded(0, 0, tokens, sampling)
        memory = sys.maxsize if job.max_cache is None else int(job.max_cache)
        together = 1 if job.refills else group_size
        rows = rows_at_once(job.config, job.cache_dtype, tokens, together, memory, job.max_rows)
        rows = min(num_prompts * group_size, max(1, rows))
        return Decoded(-(-rows // group_size), rows, tokens, sampling)

    @property
    def rows_at_once(self) -> int:
        """Completions that are decoded at once."""
        return self.largest.rows

    @property
    def cache(self) -> float:
        """The key-value cache, while all rows are going."""
        return self.cache_per_token * self.largest.rows * self.largest.tokens

    @cached_property
    def explored(self) -> Held:
        """Beside the cache, while the prompts are read or a token is drawn."""
        job = self.job
        # Where validation draws otherwise, the smaller cache may come with more logits.
        batches = [self.largest] if job.val_sampling in (None, job.sampling) else self.decoded
        return self._deep(
            lambda twin: [
                held
                for one in batches
                for held in (*twin.prefill(one.prompts, job.prompt_tokens), *twin.draw(one.rows, one.sampling))
            ]
        )

    @cached_property
    def pack(self) -> Rollouts:
        """The pack that holds most: full of tokens, of the lengths that are worst."""
        return max((self._largest_pack(fractions) for fractions in LENGTHS), key=size_of)

    def _largest_pack(self, fractions: Sequence[float]) -> Rollouts:
        job = self.job
        lengths = [max(1, round(fraction * job.sampling.max_new_tokens)) for fraction in fractions]
        num_prompts = max(1, job.prompts_per_step // job.num_minibatches)
        if job.max_tokens:
            # More would fill further packs.
            group = job.prompt_tokens + job.group_size * sum(lengths) // len(lengths)
            num_prompts = min(num_prompts, 2 + 2 * job.max_tokens // group)
        rows = [lengths[row % len(lengths)] for row in range(num_prompts * job.group_size)]
        rollouts = Rollouts(
            prompt_token_ids=torch.zeros(num_prompts * job.prompt_tokens, dtype=torch.int64),
            prompt_lengths=torch.full((num_prompts,), job.prompt_tokens),
            group=torch.arange(num_prompts).repeat_interleave(job.group_size),
            token_ids=torch.zeros(sum(rows), dtype=torch.int64),
            lengths=torch.tensor(rows),
        )
        return max(rollouts.packs(job.max_tokens, job.shares_prefix), key=size_of)

    @property
    def num_packs(self) -> int:
        """Packs of one update, if all are as full as `pack`."""
        job = self.job
        tokens = job.prompts_per_step * (job.prompt_tokens + job.group_size * job.sampling.max_new_tokens)
        return max(1, math.ceil(tokens / job.num_minibatches / size_of(self.pack)[0]))

    @property
    def packs_at_once(self) -> int:
        """Packs that are passed at once in an update."""
        return min(self.job.threads, self.num_packs)

    @property
    def all_gradients(self) -> int:
        """Bytes of the gradients, and of those that packs passed at once have each for itself."""
        at_once = self.packs_at_once
        return self.gradients * (1 if at_once == 1 else at_once + (self.num_packs > at_once))

    @cached_property
    def scored(self) -> Held:
        """A pass without gradients over the pack."""
        return self._deep(lambda twin: twin.score(self.pack))

    @cached_property
    def updated(self) -> Held:
        """A forward and a backward of the pack."""
        return self._deep(lambda twin: twin.update(self.pack, self.job.entropy_gradient))

    @property
    def rollouts(self) -> int:
        """Bytes of the completions of a step, and of the numbers of their tokens."""
        return self.job.rows * self.job.sampling.max_new_tokens * BYTES_PER_TOKEN[self.job.device]

    def _twin(self, num_layers: int) -> Twin:
        job = self.job
        config = job.config
        if num_layers != config.get_text_config(decoder=True).num_hidden_layers:
            config = of_depth(config, num_layers)
        return Twin(
            config,
            job.weight_dtype,
            job.attention,
            job.shares_prefix,
            job.recomputes,
            job.dropout,
            job.autocast,
            job.trust_remote_code,
            job.adapter,
            job.offloads,
            job.fused,
            job.device,
        )

    @cached_property
    def _twins(self) -> list[Twin]:
        depth = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return [self._twin(layers) for layers in (DEPTHS if layers_are_alike(self.model) else (depth,))]

    def _deep(self, run: Callable[[Twin], list[Held]]) -> Held:
        """What `run` holds in the model's full depth, by sections of which each grows evenly with the layers."""
        found = [run(twin) for twin in self._twins]
        if len(found) == 1:
            return most(*found[0])
        few, more = found
        further = self.model.config.get_text_config(decoder=True).num_hidden_layers - DEPTHS[1]
        return most(*(b + (b - a) * further for a, b in zip(few, more, strict=True)))


UNTOUCHED = {
    "threads": ("model", "optimizer", "explored", "pack", "scored", "updated", "_twins"),
    "spread": ("model", "optimizer", "explored", "pack", "scored", "updated", "_twins"),
    "max_cache": ("model", "optimizer", "pack", "scored", "updated", "_twins"),
    "max_rows": ("model", "optimizer", "pack", "scored", "updated", "_twins"),
    "validated_prompts": ("model", "optimizer", "pack", "scored", "updated", "_twins"),
    "max_tokens": ("model", "optimizer", "explored", "_twins"),
    "recomputes": ("model", "optimizer", "explored", "scored", "pack"),
    "offloads": ("model", "optimizer", "explored", "scored", "pack"),
}
"""The parts of an estimate that stay when a field of the job changes."""


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def size_of(pack: Rollouts) -> tuple[int, int]:
    """Tokens of the pack, prompts counted once, and its rows."""
    return pack.num_tokens + len(pack.prompt_token_ids), len(pack)


def optimizer_bytes(
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype, device: str
) -> tuple[float, float, float]:
    """Bytes of an optimizer per byte of its parameters, found by an update of small ones.

    Returns:
        The state; what it holds besides in an update, per byte of one parameter; the same, per byte of each other.
    """

    def run(count: int) -> tuple[float, float]:
        parameters = [torch.nn.Parameter(torch.ones(64, 96, dtype=dtype)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        stepping = optimizer(parameters)
        for group in stepping.param_groups:
            # What torch chooses by itself on a GPU.
            if device == "cuda" and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        stepping.step()
        state = sum(nbytes(value) for values in stepping.state.values() for value in tensors(values) if value.ndim)
        states = [value for values in stepping.state.values() for value in tensors(values)]
        live = LiveBytes([*parameters, *(p.grad for p in parameters if p.grad is not None), *states])
        with live:
            stepping.step()
        size = nbytes(parameters[0])
        return state / (count * size), live.peaks[0].total / size

    # A loop may keep one parameter's temporaries while it makes the next one's.
    (state, two), (_, four) = run(2), run(4)
    others = (four - two) / 2
    return state, two - others, others


def tensors(values: Any) -> list[Tensor]:
    """The tensors in an optimizer's state of one parameter."""
    return [value for value in values.values() if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Row:
    """One thing that takes memory, by phase."""

    name: str
    bytes: tuple[float, float, float]
    """In each of PHASES."""
    note: str = ""
    """Where the number comes from."""


@dataclass(frozen=True)
class MemoryTable:
    """Bytes by thing and phase."""

    rows: tuple[Row, ...]
    spread: Spread

    @classmethod
    def from_job(cls, job: Job) -> "MemoryTable":
        """The table of `job`."""
        return cls.from_estimate(Estimate(job))

    @classmethod
    def from_estimate(cls, estimate: Estimate) -> "MemoryTable":
        """The rows from the bytes of each thing."""
        e, job, shards = estimate, estimate.job, estimate.job.spread.shards
        state, stepping = e.optimizer
        weights, gradients, copies = e.weights / shards, e.all_gradients / shards, job.frozen_copies * e.copied / shards
        exchanged = gradients if job.spread.copies_gradients else 0
        # In a backward pass the gradients of gathered weights are whole as well.
        whole = e.gathered if job.adapter is None else min(e.gathered, e.gradients)
        gathered = (e.weights - weights if shards > 1 else 0, e.gathered, e.gathered + whole)
        # The update comes when the pack's activations are gone.
        passed = e.updated * e.packs_at_once
        updated = passed if passed.total > stepping / shards else Held(activations=stepping / shards)
        several = f"{e.packs_at_once} packs" if e.packs_at_once > 1 else "a pack"
        kept = "" if state else "keeps nothing"
        rows = (
            Row("process", (job.process,) * 3, "Python and libraries" if job.device == "cpu" else "CUDA context"),
            Row("weights", (weights,) * 3, e.described),
            Row(
                "gradients",
                (0, 0, gradients + exchanged),
                "and a copy to exchange" if exchanged else f"of {several}" if e.packs_at_once > 1 else "",
            ),
            Row("optimizer", (state * 1.0 / shards,) * 3, kept or f"{state / e.gradients:.2g} x the gradients"),
            Row("frozen copies", (copies,) * 3, f"{job.frozen_copies} of the policy"),
            Row("gathered weights", gathered, f"of {shards} shards"),
            Row("dequantised weight", (e.dequantised,) * 3, "of the layer that computes"),
            Row("copies for decoding", (e.linear_copies, 0, 0), "of the linear layers"),
            Row("key-value cache", (e.cache, 0, 0), f"{e.rows_at_once} rows x {e.largest.tokens} tokens"),
            Row(
                "activations",
                (e.explored.activations, e.scored.activations, updated.activations),
                f"{several} of {e.pack.num_tokens + len(e.pack.prompt_token_ids)} tokens in {len(e.pack)} rows",
            ),
            Row("logits", (e.explored.logits, e.scored.logits, updated.logits), "head, log-softmax, entropy"),
            Row("rollouts", (e.rollouts,) * 3, f"{job.rows} completions"),
        )
        return cls(tuple(row for row in rows if any(row.bytes)), job.spread)

    @property
    def sums(self) -> tuple[float, ...]:
        """The sum of each phase."""
        return tuple(sum(row.bytes[phase] for row in self.rows) for phase in range(len(PHASES)))

    @property
    def peak(self) -> float:
        """Most bytes held at once."""
        return max(self.sums)

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        return PHASES[self.sums.index(self.peak)]

    def __getitem__(self, name: str) -> tuple[float, float, float]:
        return next((row.bytes for row in self.rows if row.name == name), (0, 0, 0))

    def __str__(self) -> str:
        unit, size, digits = ("GiB", 2**30, 2) if self.peak >= 8 * 2**30 else ("MiB", 2**20, 1)
        where = f"each of {self.spread.world_size} devices" if self.spread.world_size > 1 else "the device"
        lines = [f"{f'memory of {where}, {unit}':<34}" + "".join(f"{phase:>11}" for phase in PHASES)]
        for row in self.rows:
            numbers = "".join(f"{value / size:>11.{digits}f}" if value else f"{'-':>11}" for value in row.bytes)
            lines.append(f"  {row.name:<32}{numbers}  {row.note}".rstrip())
        lines.append(f"  {'sum':<32}" + "".join(f"{value / size:>11.{digits}f}" for value in self.sums))
        return "\n".join(lines)


def millions(count: int) -> str:
    """1_234_567 -> 1.2 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def name_of(dtype: torch.dtype) -> str:
    """torch.float32 -> float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Remedy:
    """A key that lowers the memory of a run, and by how much."""

    key: str
    saves: float
    """Bytes."""

    def __str__(self) -> str:
        return f"{self.key} saves {amount(self.saves)}"


def remedies(estimate: Estimate, phase: str | None = None, devices: int = 1) -> list[Remedy]:
    """The keys that lower the sum of a phase, the one that saves most first. None changes the rollouts.

    Args:
        estimate: The estimate of the run.
        phase: One of PHASES. None takes the one with the largest sum, and counts by how much the peak falls.
        devices: Devices the weights could be sharded over.
    """
    return sorted(tried(estimate, phase, devices), key=lambda one: -one.saves)


def tried(
    estimate: Estimate, phase: str | None = None, devices: int = 1, says: Callable[[str], object] = str
) -> Iterator[Remedy]:
    """The same as they are found, those first that take little time. `says` gets each key before."""
    job, table = estimate.job, MemoryTable.from_estimate(estimate)
    pack = estimate.pack.num_tokens + len(estimate.pack.prompt_token_ids)
    half = max(1, estimate.rows_at_once // 2)
    prompts = min(job.validated_prompts, half)
    rounds = " (AdamW then rounds small updates away)" if job.adapter is None else ""
    computing: dict[str, dict[str, Any]] = {
        f"loop.max_tokens={pack // 2}": {"max_tokens": pack // 2},
        "model.policy.gradient_checkpointing=true": {"recomputes": True},
    }
    if job.threads > 1:
        computing["model.policy.threads=1"] = {"threads": 1}
    if job.device != "cpu":
        computing["model.policy.offload_activations=true"] = {"offloads": True}
    keeping: dict[str, dict[str, Any]] = {
        "trainer.precision=bf16-mixed": {"precision": "bf16-mixed"},
        f"model.policy.dtype=bfloat16{rounds}": {"dtype": torch.bfloat16},
    }
    if devices > 1 and job.spread.shards == 1:
        keeping["trainer.strategy=fsdp2"] = {"spread": Spread.sharded(devices)}
    exploring: dict[str, dict[str, Any]] = {
        f"model.engine.max_rows={half}": {"max_rows": half, "validated_prompts": prompts}
    }
    changes = {"exploring": exploring, "log-probs": computing, "updating": computing}[phase or table.phase] | keeping

    def held(table: MemoryTable) -> float:
        return table.peak if phase is None else table.sums[PHASES.index(phase)]

    def kept(key: str) -> int:
        """The parts of the estimate that need not be found again."""
        return min(len(UNTOUCHED.get(field, ())) for field in changes[key])

    worth_listing = 0.01 * (table.peak - job.process)
    for key in sorted(changes, key=kept, reverse=True):
        says(key)
        remedy = Remedy(key, held(table) - held(MemoryTable.from_estimate(estimate.changed(**changes[key]))))
        if remedy.saves > worth_listing:
            yield remedy


def amount(size: float) -> str:
    """1.5 * 2**30 -> 1.50 GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
