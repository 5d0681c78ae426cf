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
from grpo_lightning.engines.engine import Completions, RolloutEngine
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
"""The setting to use with a model that this engine cannot decode."""
ATTENTION = "grpo_slab"
"""Name under which transformers knows the attention and the masks of `slab.py`."""

AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)


class NativeEngine(RolloutEngine):
    """Decodes with the policy's own weights, whole or sharded; its log-probs equal the policy's (1e-6 in float32).

    It is the default. Adapters are not merged. If weights and products differ in type, as under `bf16-mixed`, the
    weights are copied into the type of the products while completions are sampled: 2 bytes per weight, freed before the
    update. Otherwise only `packed` and `dtype` make copies. Equal prompts are read once, and rows that have ended are
    removed. A model that the engine cannot decode exactly is refused before the run.

    Args:
        max_rows: Completions decoded at once. Further completions wait; the shortest prompts come last.
        check_every: Positions decoded between two checks for finished rows.
        max_cache_gib: Memory for the key-value cache, which bounds the completions decoded at once. It also bounds the
            prompts read at once: their activations take up to a quarter as much, beside the cache. None takes a part
            of the free memory. It changes speed, memory and rounding: in bfloat16 a token's probability depends on how
            many rows are decoded with it. Set it if a resumed run must be equal to the bit.
        packed: On a CPU, decode with copies of the linear layers in the layout that few rows read fastest. Copies are
            made when sampling begins and freed when it ends. Log-probs differ by rounding, 1e-5 in float32.
        dtype: Type of the copies of the linear layers: `bfloat16` or `float16`, half the bytes of float32. Then the
            engine samples from another distribution than the policy, and records its log-probs: see
            `model.objective.correction`. None computes in the policy's type.
        threads: Number of threads to decode in on a CPU, each with an equal part of the completions and of the cores.
            More than 1 is faster for small models, whose products are too small to be divided among cores. Log-probs
            differ by rounding.
    """

    shares_weights = True
    reads_images = True

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
        self._kept_rows: KeptRows | None = None
        self._can_keep: bool | None = None
        """True if the model can continue kept rows; None before the trial."""
        self._can_share: bool | None = None
        """True if the model's attention can share prompts; None before the trial."""

    @property
    def has_copies(self) -> bool:
        return super().has_copies or self._copies is not None

    def has(self, policy: Policy) -> bool:
        """As `RolloutEngine.has`. Copies of another type than this precision needs do not count."""
        return super().has(policy) and self.copy_dtype(policy) == (self._copies and self._copies.dtype)

    def sync(self, policy: Policy) -> None:
        """As `RolloutEngine.sync`. Copies the linear layers if the engine decodes with copies."""
        if policy is not self.policy:
            self._can_keep = self._can_share = None
        if self._kept_rows:
            self._kept_rows = KeptRows()
        # The old copies are freed before new ones are made.
        self._copies = None
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
        """Returns the type of the copies to decode with; None to decode with the layers themselves."""
        is_copied = self.packed or self.dtype or casts_weights(policy.model)
        return self.product_dtype(policy) if is_copied else None

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that the engine would decode wrongly or not at all, or that does not fit."""
        with policy.gathered():
            fault = trial.fault(policy, partial(_decoded, policy))
            if not fault and (dtype := self.copy_dtype(policy)):
                decoded = partial(_decoded, policy, copies=LinearCopies(policy, dtype))
                fault = trial.fault(policy, decoded, dtype=dtype)
        if fault:
            raise trial.refusal("NativeEngine", policy, fault, INSTEAD)
        # The shortest possible prompt; `generate` refuses prompts that are too long for the memory.
        self._rows_that_fit(policy, 1 + sampling.max_new_tokens)

    @contextmanager
    def conversations(self) -> Iterator[None]:
        """As `RolloutEngine.conversations`. Keeps keys and values, so that a turn reads only new tokens.

        The rows of the last call are kept, in the cache memory that decoding does not need. Rows that do not fit are
        read again in every turn. A model with sliding windows keeps none.
        """
        assert self.policy is not None, "call sync(policy) first"
        if self._can_keep is None:
            self._can_keep = not trial.fault(self.policy, partial(_in_two_turns, self.policy))
        self._kept_rows = KeptRows() if self._can_keep else None
        try:
            yield
        finally:
            self._kept_rows = None

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        assert self.policy is not None, "call sync(policy) first"
        policy = self.policy
        stops = StopStrings(policy, sampling.stop)
        if not (self.has(policy) and self.has_weights_of(policy)):
            self.sync(policy)
        # All requests are divided before the first is decoded: a prompt that does not fit is refused here.
        groups_of_batches = [*self._batches(policy, requests, sampling.max_new_tokens)]
        if self._kept_rows:
            self._kept_rows.begin(self._room_to_keep(policy, requests, sampling.max_new_tokens))
        read_tokens = read_at_once(policy.config, trial.compute_dtype(policy), self._memory(policy))
        num_threads = self._num_threads(policy)
        batches_of_threads = []
        for groups in groups_of_batches:
            groups_of_threads = divided(groups, num_threads)
            batch = partial(
                Batch,
                policy,
                requests,
                sampling=sampling,
                key=key,
                stops=stops,
                kept_rows=self._kept_rows,
                read_tokens=max(1, read_tokens // len(groups_of_threads)),
                shares_prompts=self._may_share(policy, requests, groups, sampling),
            )
            batches_of_threads.append([*map(batch, groups_of_threads)])
        return self._decode(policy, batches_of_threads)

    @torch.no_grad()
    def _decode(self, policy: Policy, batches_of_threads: Sequence[list[Batch]]) -> Completions:
        """Decodes list after list: the batches of a list at the same time, in a thread each."""
        for batches in batches_of_threads:
            with ThreadPoolExecutor(len(batches)) as pool:
                while batches:
                    # Between two completions the model is as it was: attention and copies are set anew each time.
                    try:
                        with slab_attention(policy), self._copies.in_use() if self._copies else nullcontext():
                            results = in_threads([partial(batch.decode, self.check_every) for batch in batches], pool)
                    except NotImplementedError as error:
                        raise trial.refusal("NativeEngine", policy, first_line(error), INSTEAD) from error
                    yield from chain.from_iterable(results)
                    batches = [batch for batch in batches if batch.request_of_row]
        if self._kept_rows:
            self._kept_rows.end()

    def _may_share(
        self, policy: Policy, requests: Sequence[Request], groups: Sequence[Sequence[int]], sampling: Sampling
    ) -> bool:
        """Returns whether the rows of these groups share their prompts: if it is faster, and a trial finds the same."""
        width = len(requests[groups[0][0]].token_ids)
        num_copies = sum(map(len, groups)) - len(groups)
        copied_bytes = cache_bytes_per_token(policy.config, trial.compute_dtype(policy)) * width * num_copies
        is_faster = is_worth(width, sampling.max_new_tokens, copied_bytes, policy.device)
        if self._kept_rows is not None or not is_faster:
            return False
        if self._can_share is None:
            has_windows = any(layer.is_sliding for layer in plain_layers(policy))
            fault = has_windows or trial.fault(policy, partial(_decoded, policy, shares_prompts=True))
            self._can_share = not fault
        return self._can_share

    def _num_threads(self, policy: Policy) -> int:
        """Returns the number of threads: one on a GPU, with other processes, and while rows are kept."""
        has_ranks = dist.is_available() and dist.is_initialized()
        may_divide = policy.device.type == "cpu" and not has_ranks and self._kept_rows is None
        return self.threads if may_divide else 1

    def _batches(
        self, policy: Policy, requests: Sequence[Request], max_new_tokens: int
    ) -> Iterator[list[Sequence[int]]]:
        """Yields the groups of each batch, the longest prompts first. A group has the indices of equal prompts.

        A group that does not fit as a whole is divided.
        """
        batch: list[Sequence[int]] = []
        room = 0
        for group in groups_of(requests):
            if len(group) > room:
                if batch:
                    yield batch
                # The longest prompts come first, so the first prompt of a batch is its width.
                max_rows = self._rows_that_fit(policy, len(requests[group[0]].token_ids) + max_new_tokens)
                *full_batches, group = [group[start : start + max_rows] for start in range(0, len(group), max_rows)]
                yield from ([rows] for rows in full_batches)
                batch = []
                room = max_rows
            batch.append(group)
            room -= len(group)
        if batch:
            yield batch

    def _rows_that_fit(self, policy: Policy, tokens: int) -> int:
        """Returns how many rows of `tokens` tokens to decode at once; raises UsageError if there is no room for one."""
        dtype = trial.compute_dtype(policy)
        memory = self._memory(policy)
        bytes_per_row = row_bytes(policy.config, dtype, tokens)
        if memory < bytes_per_row:
            has_limit = self.max_cache_gib is not None
            key = f"model.engine.max_cache_gib={self.max_cache_gib}" if has_limit else f"memory of {policy.device}"
            raise UsageError(
                f"{key}: one completion of {tokens} tokens with its prompt takes {bytes_per_row / GIB:.3g} GiB "
                f"({cache_bytes_per_token(policy.config, dtype)} bytes per token) "
                f"and {memory / GIB:.3g} GiB may be used; "
                f"{'raise model.engine.max_cache_gib, or ' if has_limit else ''}"
                "lower sampling.max_new_tokens or the length of prompts"
            )
        return min(self.max_rows, memory // bytes_per_row)

    def _memory(self, policy: Policy) -> int:
        """Returns the bytes that keys and values may take, including the rows that are kept already."""
        if self.max_cache_gib is not None:
            return int(self.max_cache_gib * GIB)
        token_bytes = cache_bytes_per_token(policy.config, trial.compute_dtype(policy))
        kept_bytes = self._kept_rows.num_tokens * token_bytes if self._kept_rows else 0
        # Down to a power of 2: free memory differs between runs, and the rows at once decide about rounding.
        return int(2 ** (max(1, free_bytes(policy.device) + kept_bytes).bit_length() - 1))

    def _room_to_keep(self, policy: Policy, requests: Sequence[Request], max_new_tokens: int) -> int:
        """Returns the number of tokens whose keys and values may be kept beside the rows that are decoded."""
        dtype = trial.compute_dtype(policy)
        tokens = max(len(request.token_ids) for request in requests) + max_new_tokens
        rows = min(len(requests), self._rows_that_fit(policy, tokens))
        decoded_bytes = rows * row_bytes(policy.config, dtype, tokens)
        return (self._memory(policy) - decoded_bytes) // cache_bytes_per_token(policy.config, dtype)


def _decoded(
    policy: Policy,
    requests: Sequence[Request],
    sampling: Sampling,
    copies: LinearCopies | None = None,
    kept_rows: KeptRows | None = None,
    shares_prompts: bool = False,
) -> list[Completion]:
    """Decodes completions that no stop token ends."""
    stops = StopStrings(policy, [])
    stops.ids = frozenset()
    groups = groups_of(requests)
    with slab_attention(policy), copies.in_use() if copies else nullcontext():
        batch = Batch(
            policy, requests, groups, sampling, RandomKey(0, 0), stops, kept_rows, shares_prompts=shares_prompts
        )
        completions = dict(batch.decode(sampling.max_new_tokens))
    return [completions[index] for index in range(len(requests))]


def _in_two_turns(policy: Policy, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    """Decodes a first turn after the beginning of each prompt, and a second that continues its rows."""
    if any(layer.is_sliding for layer in plain_layers(policy)):
        raise NotImplementedError("a window forgets")
    kept_rows = KeptRows()
    for turn in ([replace(request, token_ids=request.token_ids[:3]) for request in requests], requests):
        kept_rows.begin(2**31)
        completions = _decoded(policy, turn, sampling, kept_rows=kept_rows)
        kept_rows.end()
    return completions


@contextmanager
def slab_attention(policy: Policy) -> Iterator[None]:
    """A context in which the model is in eval mode with the slab's attention."""
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
