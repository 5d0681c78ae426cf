"""The default engine: it decodes with the policy's own weights."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.engine import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.plugins.compute.fast.threads import divided, in_threads
from grpo_lightning.plugins.engines.native.kept_rows import KeptRows
from grpo_lightning.plugins.engines.native.kv_memory import (
    GIB,
    cache_bytes_per_token,
    free_bytes,
    read_at_once,
    row_bytes,
)
from grpo_lightning.plugins.engines.native.linear_copies import LinearCopies, casts_weights
from grpo_lightning.plugins.engines.native.native_batch import Batch, groups_of, plain_layers
from grpo_lightning.plugins.engines.native.shared_prompts import is_worth
from grpo_lightning.plugins.engines.native.slab import attention, mask
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Completion, RandomKey, Request, UsageError

INSTEAD = "model.engine=PlainEngine"

ATTENTION = "grpo_slab"
AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)


class NativeEngine(RolloutEngine):
    """Decodes with the policy's own weights, whole or sharded; its log-probs equal the policy's (1e-6 in float32).

    The default: nothing is merged. Weights of another type than the products have, as under `bf16-mixed`, are copied in
    that type while completions are sampled: 2 bytes per weight, freed before the update. Otherwise nothing is copied
    unless asked for. Equal prompts are read once, and finished rows are compacted away. A model that it cannot decode
    exactly is refused before the run.

    Args:
        max_rows: Completions decoded at once. Further ones wait, those with the shortest prompts longest.
        check_every: Positions decoded between two checks for finished rows.
        max_cache_gib: Memory for the key-value cache, which bounds the completions decoded at once. It also bounds the
            prompts read at once: their activations take up to a quarter as much, beside it. None takes what is free. It
            changes speed and memory, and rounding: in bfloat16 a token's probability depends on how many rows are
            decoded with it. Set it where a resumed run must be equal to the bit.
        packed: On a CPU, decode with copies of the linear layers in the layout that few rows read fastest. They are
            made when sampling begins and freed when it ends. Log-probs differ by rounding, 1e-5 in float32.
        dtype: Type of the copies of the linear layers: `bfloat16` or `float16`, half the bytes of float32. It draws
            from another distribution than the policy, and its log-probs are of that one: see
            `model.objective.correction`. None computes in the policy's type.
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
        dtype: Literal["bfloat16", "float16"] | None = None,
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
        self._keeps: bool | None = None  # whether the model can go on from kept rows; None as long as nobody has asked
        self._kept: KeptRows | None = None
        self._shares: bool | None = None
        """Whether the model's attention can share prompts; None as long as nobody has asked."""

    @property
    def has_copies(self) -> bool:
        return super().has_copies or self._copies is not None

    def has(self, policy: Policy) -> bool:
        """As `RolloutEngine.has`; copies that another precision asks for are not of `policy` as it is here."""
        return super().has(policy) and self.copy_dtype(policy) == (self._copies and self._copies.dtype)

    def sync(self, policy: Policy) -> None:
        """As `RolloutEngine.sync`; copies the linear layers, if it decodes with copies."""
        if policy is not self.policy:
            self._keeps = self._shares = None
        if self._kept:
            self._kept = KeptRows()
        self._copies = None  # Not two at a time.
        if dtype := self.copy_dtype(policy):
            self._copies = LinearCopies(policy, dtype)
        super().sync(policy)

    def sleep(self) -> None:
        if self._copies is not None:
            self._copies = self.version = None

    def close(self) -> None:
        self._copies = None
        super().close()

    def copy_dtype(self, policy: Policy) -> torch.dtype | None:
        """The type of the copies that it decodes with here; None if it decodes with the layers themselves."""
        is_copied = self.packed or self.dtype or casts_weights(policy.model)
        return self.product_dtype(policy) if is_copied else None

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that it would decode wrongly or not at all, or that does not fit."""
        with policy.gathered():
            fault = trial.fault(policy, partial(_decoded, policy))
            if not fault and (dtype := self.copy_dtype(policy)):
                decoded = partial(_decoded, policy, copies=LinearCopies(policy, dtype))
                fault = trial.fault(policy, decoded, dtype=dtype)
        if fault:
            raise trial.refusal("NativeEngine", policy, fault, INSTEAD)
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
            self._keeps = not trial.fault(self.policy, partial(_in_two_turns, self.policy))
        self._kept = KeptRows() if self._keeps else None
        try:
            yield
        finally:
            self._kept = None

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        assert self.policy is not None, "call sync(policy) first"
        policy, stops = self.policy, StopStrings(self.policy, sampling.stop)
        if not (self.has(policy) and self.has_weights_of(policy)):
            self.sync(policy)
        batches = [*self._batches(policy, requests, sampling.max_new_tokens)]
        if self._kept:
            self._kept.begin(self._room_to_keep(policy, requests, sampling.max_new_tokens))
        read_tokens = read_at_once(policy.config, trial.compute_dtype(policy), self._memory(policy))
        threads, parts = self._num_threads(policy), list[list[Batch]]()
        for groups in batches:
            dealt = divided(groups, threads)
            most = max(1, read_tokens // len(dealt))
            shares = self._may_share(policy, requests, groups, sampling)
            parts.append(
                [Batch(policy, requests, own, sampling, key, stops, self._kept, most, shares) for own in dealt]
            )
        return self._draw(policy, parts)

    @torch.no_grad()
    def _draw(self, policy: Policy, batches: Sequence[list[Batch]]) -> Drawn:
        """Decodes one batch after the other, the parts of each in threads."""
        for going in batches:
            with ThreadPoolExecutor(len(going)) as pool:
                while going:
                    try:
                        with slab_attention(policy), self._copies.in_use() if self._copies else nullcontext():
                            ended = in_threads([partial(part.decode, self.check_every) for part in going], pool)
                    except NotImplementedError as error:
                        raise trial.refusal("NativeEngine", policy, first_line(error), INSTEAD) from error
                    yield from chain.from_iterable(ended)
                    going = [part for part in going if part.going]
        if self._kept:
            self._kept.end()

    def _may_share(
        self, policy: Policy, requests: Sequence[Request], groups: Sequence[Sequence[int]], sampling: Sampling
    ) -> bool:
        """True where the rows of these groups share their prompts: it is faster, and a trial finds the same."""
        width, copies = len(requests[groups[0][0]].token_ids), sum(map(len, groups)) - len(groups)
        copied = cache_bytes_per_token(policy.config, trial.compute_dtype(policy)) * width * copies
        if self._kept is not None or not is_worth(width, sampling.max_new_tokens, copied, policy.device):
            return False
        if self._shares is None:
            windows = any(layer.is_sliding for layer in plain_layers(policy))
            self._shares = not windows and not trial.fault(policy, partial(_decoded, policy, shares=True))
        return self._shares

    def _num_threads(self, policy: Policy) -> int:
        """Threads to decode in: one on a GPU, with other processes, and where rows are kept between turns."""
        alone = policy.device.type == "cpu" and not (dist.is_available() and dist.is_initialized())
        return self.threads if alone and self._kept is None else 1

    def _batches(
        self, policy: Policy, requests: Sequence[Request], max_new_tokens: int
    ) -> Iterator[list[Sequence[int]]]:
        """Decoded together: groups of indices of requests with one prompt, the longest prompts first.

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
        rows = min(self.max_rows, memory // row_bytes(config, dtype, tokens))
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
        token_bytes = cache_bytes_per_token(policy.config, trial.compute_dtype(policy))
        held = self._kept.num_tokens * token_bytes if self._kept else 0
        # Down to a power of 2: free memory differs between runs, and the rows at once decide about rounding.
        return int(2 ** (max(1, free_bytes(policy.device) + held).bit_length() - 1))

    def _room_to_keep(self, policy: Policy, requests: Sequence[Request], max_new_tokens: int) -> int:
        """Tokens whose keys and values may be kept beside those that are decoded."""
        tokens = max(len(request.token_ids) for request in requests) + max_new_tokens
        rows = min(len(requests), self._rows_that_fit(policy, tokens))
        config, dtype = policy.config, trial.compute_dtype(policy)
        decoded = rows * row_bytes(config, dtype, tokens)
        return (self._memory(policy) - decoded) // cache_bytes_per_token(config, dtype)


def _decoded(
    policy: Policy,
    requests: Sequence[Request],
    sampling: Sampling,
    copies: LinearCopies | None = None,
    kept: KeptRows | None = None,
    shares: bool = False,
) -> list[Completion]:
    """Completions that no token ends."""
    endless = StopStrings(policy, [])
    endless.ids = frozenset()
    with slab_attention(policy), copies.in_use() if copies else nullcontext():
        batch = Batch(policy, requests, groups_of(requests), sampling, RandomKey(0, 0), endless, kept, shares=shares)
        ended = dict(batch.decode(sampling.max_new_tokens))
    return [ended[index] for index in range(len(requests))]


def _in_two_turns(policy: Policy, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    """Completions of a first turn with part of each prompt, and of a second that goes on from its rows."""
    if any(layer.is_sliding for layer in plain_layers(policy)):
        raise NotImplementedError("a window forgets")
    kept = KeptRows()
    for turn in ([replace(request, token_ids=request.token_ids[:3]) for request in requests], requests):
        kept.begin(2**31)
        completions = _decoded(policy, turn, sampling, kept=kept)
        kept.end()
    return completions


@contextmanager
def slab_attention(policy: Policy) -> Iterator[None]:
    """Puts the model into eval mode with the slab's attention, and restores it afterwards."""
    model = policy.model
    implementation = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
        if policy.text_config._attn_implementation != ATTENTION:
            raise NotImplementedError("its attention cannot be exchanged")
        with policy.evaluating():
            yield
    finally:
        model.set_attn_implementation(implementation)
