"""The default engine: it decodes with the policy's own weights."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Literal

import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.base import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.plugins.fast.batch import Batch, groups_of, plain_layers
from grpo_lightning.plugins.fast.kept_rows import KeptRows
from grpo_lightning.plugins.fast.kv_memory import (
    GIB,
    cache_bytes_per_token,
    free_bytes,
    read_at_once,
    row_bytes,
    rows_at_once,
)
from grpo_lightning.plugins.fast.linear_copies import LinearCopies, linear_layers
from grpo_lightning.plugins.fast.slab import attention, mask, sharing_attention
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.policy.threads import divided, in_threads
from grpo_lightning.types import Completion, RandomKey, Request, UsageError

ATTENTION = "grpo_slab"
SHARING_ATTENTION = "grpo_slab_sharing"
AttentionInterface.register(ATTENTION, attention)
AttentionInterface.register(SHARING_ATTENTION, sharing_attention)
AttentionMaskInterface.register(ATTENTION, mask)
AttentionMaskInterface.register(SHARING_ATTENTION, mask)


class NativeEngine(RolloutEngine):
    """Decodes with the policy's own weights, whole or sharded; its log-probs equal the policy's (1e-6 in float32).

    The default: nothing is merged, and nothing copied unless asked for, but for frozen weights of another type than the
    products have (LoRA with float32 weights under `bf16-mixed`). Equal prompts are read once, and finished rows are
    compacted away. A model that it cannot decode exactly is refused before the run.

    Args:
        max_rows: Completions decoded at once. Further ones wait, those with the shortest prompts longest.
        check_every: Positions decoded between two checks for finished rows.
        max_cache_gib: Memory for the key-value cache, which bounds the completions decoded at once. It also bounds the
            prompts read at once: their activations take up to a quarter as much, beside it. None takes what is free. It
            changes speed and memory, and rounding: in bfloat16 a token's probability depends on how many rows are
            decoded with it. Set it where a resumed run must be equal to the bit.
        packed: On a CPU, decode with copies of the linear layers in the layout that few rows read fastest. They are
            made when sampling begins and freed when it ends. Log-probs differ by rounding, 1e-5 in float32.
        dtype: Type of the copies of the linear layers. `bfloat16` has half the bytes of float32. It draws from another
            distribution than the policy, and its log-probs are of that one: see `model.objective.correction`. None
            computes in the policy's type.
        share_prompts: Read a prompt's keys and values once per group at each position, on a CPU where that is faster
            and the model has no sliding windows. False copies them to each row. On a CPU it also chooses between
            kernels of attention; log-probs differ by rounding, 1e-6 in float32.
        threads: On a CPU, decode in so many threads, each with a part of the completions and of the cores. It is faster
            for small models, whose products are too small to be divided among cores. 1 decodes all together. Log-probs
            differ by rounding.
    """

    shares_weights = True

    def __init__(
        self,
        max_rows: int = 1024,
        check_every: int = 8,
        max_cache_gib: float | None = None,
        packed: bool = False,
        dtype: Literal["bfloat16"] | None = None,
        share_prompts: bool = True,
        threads: int = 1,
    ) -> None:
        if max_rows < 1 or check_every < 1 or threads < 1:
            raise UsageError(f"max_rows={max_rows}, check_every={check_every}, threads={threads}: give 1 or more")
        if max_cache_gib is not None and max_cache_gib <= 0:
            raise UsageError(f"engine.max_cache_gib={max_cache_gib}: give more than 0, or null for what is free")
        self.max_rows = max_rows
        self.check_every = check_every
        self.max_cache_gib = max_cache_gib
        self.threads = threads
        self.packed = packed
        self.dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._copies: LinearCopies | None = None
        self.attention = SHARING_ATTENTION if share_prompts else ATTENTION
        self._shares: bool | None = None if share_prompts else False
        """False where prompts' keys and values are not shared; None decides by what is faster."""
        self._keeps: bool | None = None
        """Whether the model can go on from kept rows; None as long as nobody has asked."""
        self._kept: KeptRows | None = None
        """The rows of conversations, inside `conversations`."""

    def sync(self, policy: Policy) -> None:
        """As `RolloutEngine.sync`; copies the linear layers, if it decodes with copies."""
        if policy is not self.policy:
            self._keeps = None
        self._copies = None  # Not two at a time.
        self._copies = self._copied(policy)
        super().sync(policy)

    def sleep(self) -> None:
        """Frees the copies of the linear layers; without any, nothing."""
        if self._copies is not None:
            self._copies = self.version = None

    def close(self) -> None:
        """As `RolloutEngine.close`."""
        self._copies = None
        super().close()

    def _copied(self, policy: Policy) -> LinearCopies | None:
        """Copies of the linear layers as they are now; None if it decodes with the layers themselves."""
        dtype = self.product_dtype(policy)
        # Autocast keeps no copies of frozen weights: it would make them at every position.
        casts = dtype != policy.model.dtype and not all(
            layer.weight.requires_grad for layer in linear_layers(policy.model)
        )
        return LinearCopies(policy, dtype) if self.packed or self.dtype or casts else None

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that it would decode wrongly or not at all, or that does not fit."""

        def decode(requests: Sequence[Request], sampling: Sampling, shares: bool = False) -> list[Completion]:
            with _slab_attention(policy, self.attention), copies.in_use() if copies else nullcontext():
                batch = Batch(policy, requests, groups_of(requests), sampling, RandomKey(0, 0), None, shares)
                return _whole(batch)

        copies = None
        with policy.gathered():
            fault = trial.fault(policy, decode)
            if not fault and self.attention == SHARING_ATTENTION:
                self._shares = False if trial.fault(policy, partial(decode, shares=True)) else None
            if not fault and (copies := self._copied(policy)):
                fault = trial.fault(policy, decode, dtype=copies.dtype)
        if fault:
            raise _cannot_decode(policy, fault)
        # The shortest prompt there can be; what others need is known when they come.
        self._rows_that_fit(policy, 1 + sampling.max_new_tokens)

    @contextmanager
    def conversations(self) -> Iterator[None]:
        """As `RolloutEngine.conversations`: keeps keys and values, so that a turn's prefill reads only what is new.

        They are those of the last call, and take the memory for the cache that decoding leaves. What finds no room is
        read again in every turn, and so is all of a model with sliding windows.
        """
        assert self.policy is not None, "call sync(policy) first"
        if self._keeps is None:
            self._keeps = not trial.fault(self.policy, partial(_in_two_turns, self.policy, self.attention))
        self._kept = KeptRows() if self._keeps else None
        try:
            yield
        finally:
            self._kept = None

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None, "call sync(policy) first"
        stops = StopStrings(self.policy, sampling.stop)
        if not self.has(self.policy) and self._copies:
            self.sync(self.policy)
        # What does not fit is refused here.
        batches = [*self._batches(self.policy, requests, sampling.max_new_tokens)]
        return self._draw(self.policy, requests, batches, sampling, key, stops)

    @torch.no_grad()
    def _draw(
        self,
        policy: Policy,
        requests: Sequence[Request],
        batches: Sequence[Sequence[Sequence[int]]],
        sampling: Sampling,
        key: RandomKey,
        stops: StopStrings,
    ) -> Drawn:
        """As `generate`, of `batches` of groups of indices."""
        if self._kept:
            self._kept.begin(policy)
            self._kept.shrink(self._room_to_keep(policy, requests, sampling.max_new_tokens))
        read_tokens = read_at_once(policy.config, trial.compute_dtype(policy), self._memory(policy))
        for groups in batches:
            parts = divided(groups, self._num_threads(policy))
            read = max(1, read_tokens // len(parts))
            going = [
                Batch(policy, requests, part, sampling, key, stops, self._shares, self._kept, read) for part in parts
            ]
            with ThreadPoolExecutor(len(parts)) as pool:
                while going:
                    with _decoding(policy, self.attention), self._copies.in_use() if self._copies else nullcontext():
                        ended = in_threads([partial(batch.decode, self.check_every) for batch in going], pool)
                    for some in ended:
                        yield from some
                    going = [batch for batch in going if not batch.has_ended]
        if self._kept:
            self._kept.end()

    def _num_threads(self, policy: Policy) -> int:
        """Threads to decode in: one on a GPU, with other processes, and where rows are kept between turns."""
        alone = policy.device.type == "cpu" and not (dist.is_available() and dist.is_initialized())
        return self.threads if alone and self._kept is None else 1

    def _batches(
        self, policy: Policy, requests: Sequence[Request], max_new_tokens: int
    ) -> Iterator[list[Sequence[int]]]:
        """What is decoded together: groups of indices of requests with one prompt, the longest prompts first.

        A group is cut only where it does not fit as a whole.
        """
        batch: list[Sequence[int]] = []
        room = 0
        for group in groups_of(requests):
            if len(group) > room:
                if batch:
                    yield batch
                # The longest come first, so the first of a batch is its width.
                fits = self._rows_that_fit(policy, len(requests[group[0]].token_ids) + max_new_tokens)
                *whole, group = [group[first : first + fits] for first in range(0, len(group), fits)]
                yield from ([part] for part in whole)
                batch, room = [], fits
            batch.append(group)
            room -= len(group)
        if batch:
            yield batch

    def _rows_that_fit(self, policy: Policy, tokens: int) -> int:
        """Rows of `tokens` tokens each to decode at once, at least 1."""
        config, dtype = policy.config, trial.compute_dtype(policy)
        memory = self._memory(policy)
        rows = rows_at_once(config, dtype, tokens, 1, memory, self.max_rows)
        if rows < 1:
            given = self.max_cache_gib is not None
            key = f"model.engine.max_cache_gib={self.max_cache_gib}" if given else f"memory of {policy.device}"
            raise UsageError(
                f"{key}: one completion of {tokens} tokens with its prompt takes "
                f"{row_bytes(config, dtype, tokens) / GIB:.3g} GiB ({cache_bytes_per_token(config, dtype)} bytes per "
                f"token) and {memory / GIB:.3g} GiB may be used; "
                f"{'raise model.engine.max_cache_gib, or ' if given else ''}lower sampling.max_new_tokens or "
                "the length of prompts"
            )
        return rows

    def _memory(self, policy: Policy) -> int:
        """Bytes that keys and values may take, those that are held already included."""
        if self.max_cache_gib is not None:
            return int(self.max_cache_gib * GIB)
        held = self._kept.num_tokens * _token_bytes(policy) if self._kept else 0
        # Down to a power of 2: free memory differs between runs, and the rows at once decide about rounding.
        return int(2 ** (max(1, free_bytes(policy.device) + held).bit_length() - 1))

    def _room_to_keep(self, policy: Policy, requests: Sequence[Request], max_new_tokens: int) -> int:
        """Tokens whose keys and values may be kept beside those that are decoded."""
        tokens = max(len(request.token_ids) for request in requests) + max_new_tokens
        rows = min(len(requests), self._rows_that_fit(policy, tokens))
        decoded = rows * row_bytes(policy.config, trial.compute_dtype(policy), tokens)
        return (self._memory(policy) - decoded) // _token_bytes(policy)


def _token_bytes(policy: Policy) -> int:
    """Bytes of the keys and values of one token."""
    return cache_bytes_per_token(policy.config, trial.compute_dtype(policy))


def _in_two_turns(policy: Policy, attention: str, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    """Completions of a first turn with part of each prompt, and of a second that goes on from its rows."""
    if any(layer.is_sliding for layer in plain_layers(policy)):
        raise NotImplementedError("a window forgets")
    kept = KeptRows()
    first = [replace(request, token_ids=request.token_ids[:3]) for request in requests]
    with _slab_attention(policy, attention):
        for turn in (first, requests):
            kept.begin(policy)
            kept.shrink(2**31)
            batch = Batch(policy, turn, groups_of(turn), sampling, RandomKey(0, 0), None, kept=kept)
            completions = _whole(batch)
            kept.end()
    return completions


def _whole(batch: Batch) -> list[Completion]:
    """The completions of a batch, in the order of its requests."""
    ended = []
    while not batch.has_ended:
        ended += batch.decode(batch.sampling.max_new_tokens)
    return [completion for _, completion in sorted(ended, key=itemgetter(0))]


def _cannot_decode(policy: Policy, reason: str) -> UsageError:
    """The error for a policy that this engine does not decode."""
    return trial.refusal("NativeEngine", policy, reason, "model.engine=PlainEngine")


@contextmanager
def _decoding(policy: Policy, attention: str = ATTENTION) -> Iterator[None]:
    """As `_slab_attention`; a model that it cannot be used with gives a UsageError with the fix."""
    try:
        with _slab_attention(policy, attention):
            yield
    except NotImplementedError as error:
        raise _cannot_decode(policy, first_line(error)) from error


@contextmanager
def _slab_attention(policy: Policy, name: str) -> Iterator[None]:
    """Puts the model into eval mode with the slab's attention `name`, and restores it afterwards."""
    model = policy.model
    implementation = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        if policy.text_config._attn_implementation != name:
            raise NotImplementedError("its attention cannot be exchanged")
        with policy.evaluating():
            yield
    finally:
        model.set_attn_implementation(implementation)
