"""The default engine: a decode loop over the policy's own weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.base import Finished, Progress, RolloutEngine
from grpo_lightning.engines.graphs import CAPTURES, Graphs, column_bucket, reason_against, rows_within
from grpo_lightning.engines.kept_rows import KeptRows, read
from grpo_lightning.engines.kv_memory import GIB, cache_bytes_per_token, free_bytes, row_bytes, rows_at_once
from grpo_lightning.engines.linear_copies import LinearCopies
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.prompt_part import Groups, is_worth
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.slab import SlabLayer, attention, mask, sharing_attention
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.maths import ragged
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError

ATTENTION = "grpo_slab"
SHARING_ATTENTION = "grpo_slab_sharing"
AttentionInterface.register(ATTENTION, attention)
AttentionInterface.register(SHARING_ATTENTION, sharing_attention)
AttentionMaskInterface.register(ATTENTION, mask)
AttentionMaskInterface.register(SHARING_ATTENTION, mask)


class NativeEngine(RolloutEngine):
    """Decodes with the policy's own weights, whole or sharded; its log-probs equal the policy's (1e-6 in float32).

    The default: nothing is merged, and nothing copied unless asked for. Equal prompts are read once, and finished rows
    are compacted away. A model that it cannot decode exactly is refused before the run.

    Args:
        max_rows: Completions decoded at once. Further ones are decoded in batches, longest prompts first.
        check_every: Positions decoded between two checks for finished rows.
        max_cache_gib: Memory for the key-value cache, which bounds the completions decoded at once. None takes what is
            free. It changes speed and memory, and rounding: in bfloat16 a token's probability depends on how many rows
            are decoded with it. Set it where a resumed run must be equal to the bit.
        packed: On a CPU, decode with copies of the linear layers in the layout that few rows read fastest. They are
            made when sampling begins and freed when it ends. Log-probs differ by rounding, 1e-5 in float32.
        dtype: Type of the copies of the linear layers. `bfloat16` has half the bytes of float32. It draws from another
            distribution than the policy, and its log-probs are of that one: see `model.objective.correction`. None
            computes in the policy's type.
        share_prompts: Read a prompt's keys and values once per group at each position, on a CPU where that is faster
            and the model has no sliding windows. False copies them to each row. On a CPU it also chooses between
            kernels of attention; log-probs differ by rounding, 1e-6 in float32.
        graphs: On a GPU, launch the kernels of one position together, as a CUDA graph. The graphs and the key-value
            cache then stay on the GPU between steps, and under autocast copies of the linear layers do. Nobody has run
            it on a GPU yet, so it is off. A model whose positions cannot be captured is decoded without graphs, which
            is logged once.
    """

    shares_weights = True

    hands_over = True

    def __init__(
        self,
        max_rows: int = 1024,
        check_every: int = 8,
        max_cache_gib: float | None = None,
        packed: bool = False,
        dtype: Literal["bfloat16"] | None = None,
        share_prompts: bool = True,
        graphs: bool = False,
    ) -> None:
        if max_rows < 1 or check_every < 1:
            raise UsageError(f"max_rows={max_rows}, check_every={check_every}: give 1 or more")
        if max_cache_gib is not None and max_cache_gib <= 0:
            raise UsageError(f"engine.max_cache_gib={max_cache_gib}: give more than 0, or null for what is free")
        self.max_rows = max_rows
        self.check_every = check_every
        self.max_cache_gib = max_cache_gib
        self.packed = packed
        self.dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self.graphs = graphs
        self._copies: LinearCopies | None = None
        self.attention = SHARING_ATTENTION if share_prompts else ATTENTION
        self._shares: bool | None = None if share_prompts else False
        """False where prompts' keys and values are not shared; None decides by what is faster."""
        self._keeps: bool | None = None
        """Whether the model can go on from kept rows; None as long as nobody has asked."""
        self._kept: KeptRows | None = None
        """The rows of conversations, inside `conversations`."""
        self._graphs: Graphs | None = None
        """The captured steps; None before the first, or where there are none."""
        self._uncaptured: Policy | None = None
        """The policy that cannot be captured."""

    def sync(self, policy: Policy) -> None:
        """As `RolloutEngine.sync`; copies the linear layers, if it decodes with copies."""
        if policy is not self.policy:
            self._keeps = None
        dtype = self._dtype_of_copies(policy)
        # Captured steps read the copies where they are.
        if not (self._graphs and self._copies and dtype and self._copies.refresh(policy, dtype)):
            self._copies = None  # Not two at a time.
            self._copies = self._copied(policy)
        super().sync(policy)

    def sleep(self) -> None:
        """Frees the copies of the linear layers, unless captured steps read them; without any, nothing."""
        if self._copies is not None and self._graphs is None:
            self._copies = self.version = None

    def close(self) -> None:
        """As `RolloutEngine.close`."""
        self._copies = self._graphs = self._uncaptured = None
        super().close()

    def _copied(self, policy: Policy) -> LinearCopies | None:
        """Copies of the linear layers as they are now; None if it decodes with the layers themselves."""
        dtype = self._dtype_of_copies(policy)
        return LinearCopies(policy, dtype) if dtype else None

    def _dtype_of_copies(self, policy: Policy) -> torch.dtype | None:
        """The type of the copies that it decodes with; None without any."""
        # Autocast's own copies would be made in every captured step.
        captures = self.graphs and self._uncaptured is not policy
        casts = captures and self.product_dtype(policy) != policy.model.dtype
        return self.product_dtype(policy) if self.packed or self.dtype or casts else None

    def _graphs_of(self, policy: Policy) -> Graphs | None:
        """The captured steps of the policy; None if it is decoded without."""
        if not self.graphs or self._uncaptured is policy:
            return None
        if self._graphs is None or self._graphs.policy is not policy:
            self._graphs = None
            _refuse_graphs_on(policy.device.type)
            reason = reason_against(policy) or self._fault_of_graphs(policy)
            if reason:
                self._uncaptured = policy
                self._copies = None
                self._copies = self._copied(policy)
                rank_zero_info(f"model.engine.graphs: {type(policy.model).__name__} decodes without graphs ({reason})")
                return None
            self._graphs = Graphs(policy, partial(self._rows_that_fit, policy))
        self._graphs.copies = self._copies
        return self._graphs

    def _fault_of_graphs(self, policy: Policy) -> str:
        """What is wrong with decoding in captured steps; empty if nothing is."""

        def decode(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            groups = groups_of(requests)
            with _slab_attention(policy, self.attention), self._copies.in_use() if self._copies else nullcontext():
                graphs = Graphs(policy, partial(self._rows_that_fit, policy))
                batch = _Batch(policy, _chosen(requests, groups), sampling, RandomKey(0, 0), None, graphs=graphs)
                return _in_order(groups, batch.run(self.check_every, lambda ended: None))

        return trial.fault(policy, decode, dtype=self._copies.dtype if self._copies else None)

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that it would decode wrongly or not at all, or that does not fit."""

        def decode(requests: Sequence[Request], sampling: Sampling, shares: bool = False) -> list[Completion]:
            groups = groups_of(requests)
            with _slab_attention(policy, self.attention), copies.in_use() if copies else nullcontext():
                batch = _Batch(policy, _chosen(requests, groups), sampling, RandomKey(0, 0), None, shares)
                return _in_order(groups, batch.run(self.check_every, lambda ended: None))

        if self.graphs and not torch.cuda.is_available():
            _refuse_graphs_on(policy.device.type)
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
        read again in every turn, and so is all with `graphs` or a model with sliding windows.
        """
        assert self.policy is not None, "call sync(policy) first"
        if self._keeps is None:
            self._keeps = not trial.fault(self.policy, partial(_in_two_turns, self.policy, self.attention))
        self._kept = KeptRows() if self._keeps and not self.graphs else None
        try:
            yield
        finally:
            self._kept = None

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        key: RandomKey,
        progress: Progress | None = None,
        finished: Finished | None = None,
    ) -> list[Completion]:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None, "call sync(policy) first"
        policy, stops = self.policy, StopStrings(self.policy, sampling.stop)
        if not self.has(policy) and self._copies:
            self.sync(policy)
        if self._kept:
            self._kept.begin(policy)
            self._kept.shrink(self._room_to_keep(policy, requests, sampling.max_new_tokens))
        graphs = self._graphs_of(policy)
        done: list[Sequence[int]] = []
        completions: list[Completion] = []
        with _decoding(policy, self.attention), self._copies.in_use() if self._copies else nullcontext():
            for groups in self._batches(policy, requests, sampling.max_new_tokens):
                batch = _Batch(policy, _chosen(requests, groups), sampling, key, stops, self._shares, graphs)
                batch.finished, batch.kept = _of_requests(groups, finished), self._kept
                completions += batch.run(self.check_every, progress or (lambda ended: None))
                done += groups
        if self._kept:
            self._kept.end()
        return _in_order(done, completions)

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
        if self._graphs is not None:
            tokens = column_bucket(tokens)
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
        return rows if self._graphs is None else rows_within(rows)

    def _memory(self, policy: Policy) -> int:
        """Bytes that keys and values may take, those that are held already included."""
        if self.max_cache_gib is not None:
            return int(self.max_cache_gib * GIB)
        held = self._kept.num_tokens * _token_bytes(policy) if self._kept else 0
        held += self._graphs.num_bytes if self._graphs else 0
        # Down to a power of 2: free memory differs between runs, and the rows at once decide about rounding.
        return int(2 ** (max(1, free_bytes(policy.device) + held).bit_length() - 1))

    def _room_to_keep(self, policy: Policy, requests: Sequence[Request], max_new_tokens: int) -> int:
        """Tokens whose keys and values may be kept beside those that are decoded."""
        tokens = max(len(request.token_ids) for request in requests) + max_new_tokens
        rows = min(len(requests), self._rows_that_fit(policy, tokens))
        decoded = rows * row_bytes(policy.config, trial.compute_dtype(policy), tokens)
        return (self._memory(policy) - decoded) // _token_bytes(policy)


def _refuse_graphs_on(kind: str) -> None:
    """Raises UsageError for a type of device that has no graphs."""
    if kind not in CAPTURES:
        raise UsageError(
            f"model.engine.graphs=True: the policy is on a device of type {kind}, which has no CUDA graphs. Leave it "
            "out, or train on a GPU (trainer.accelerator=gpu)"
        )


def _token_bytes(policy: Policy) -> int:
    """Bytes of the keys and values of one token."""
    return cache_bytes_per_token(policy.config, trial.compute_dtype(policy))


def _in_two_turns(policy: Policy, attention: str, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    """Completions of a first turn with part of each prompt, and of a second that goes on from its rows."""
    if any(layer.is_sliding for layer in _plain_layers(policy)):
        raise NotImplementedError("a window forgets")
    kept = KeptRows()
    first = [replace(request, token_ids=request.token_ids[:3]) for request in requests]
    with _slab_attention(policy, attention):
        for turn in (first, requests):
            kept.begin(policy)
            kept.shrink(2**31)
            groups = groups_of(turn)
            batch = _Batch(policy, _chosen(turn, groups), sampling, RandomKey(0, 0), None)
            batch.kept = kept
            completions = batch.run(sampling.max_new_tokens, lambda ended: None)
            kept.end()
    return _in_order(groups, completions)


def _cannot_decode(policy: Policy, reason: str) -> UsageError:
    """The error for a policy that this engine does not decode."""
    name = type(policy.model).__name__
    return UsageError(f"model.engine=NativeEngine cannot decode {name} ({reason}): use model.engine=TransformersEngine")


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
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    try:
        model.set_attn_implementation(name)
        if policy.text_config._attn_implementation != name:
            raise NotImplementedError("its attention cannot be exchanged")
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)


def groups_of(requests: Sequence[Request]) -> list[Sequence[int]]:
    """Indices of the requests with equal `token_ids`, group by group, the longest prompts first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.token_ids), []).append(index)
    return [groups[prompt] for prompt in sorted(groups, key=len, reverse=True)]


def _chosen(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[list[Request]]:
    """The requests whose indices `groups` holds."""
    return [[requests[index] for index in group] for group in groups]


def _in_order(groups: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[Completion]:
    """Completions of groups of indices, sorted by index."""
    indices = chain.from_iterable(groups)
    return [completion for _, completion in sorted(zip(indices, completions, strict=True), key=itemgetter(0))]


def _of_requests(groups: Sequence[Sequence[int]], finished: Finished | None) -> Finished | None:
    """`finished`, called with indices into a batch of `groups` instead of indices of requests."""
    indices = [*chain.from_iterable(groups)]
    return None if finished is None else lambda row, completion: finished(indices[row], completion)


class _Batch:
    """Completions that are decoded together. Its tensors are indexed by completion, whether it has ended or not.

    Args:
        policy: What to decode with, in eval mode and with the slab's attention.
        groups: Requests with equal `token_ids` are one group.
        sampling: The distribution to draw from.
        key: Seed of the run and exploration step.
        stops: What ends a completion; None lets nothing end it.
        shares: Whether a group's rows share their prompt's keys and values; None decides by what is faster.
        graphs: Captured steps to decode with.
    """

    finished: Finished | None = None
    """Called with each completion that has ended, and its index in the batch."""
    kept: KeptRows | None = None
    """The rows of conversations, to go on from and to keep these; None keeps nothing."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[Sequence[Request]],
        sampling: Sampling,
        key: RandomKey,
        stops: StopStrings | None,
        shares: bool | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.policy = policy
        self.groups = groups
        self.sampling = sampling
        self.key = key
        self.stops = stops
        self.shares = shares
        self.graphs = graphs
        device = policy.device
        prompts = [group[0].token_ids for group in groups]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        flat = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        self.input_ids, self.input_lengths = ragged.pad(flat, lengths), lengths
        keys = [(index, r.prompt_id, r.sample, r.position) for index, group in enumerate(groups) for r in group]
        self.prompt, self.prompt_id, self.sample, self.position = torch.tensor(keys, device=device).unbind(1)
        self.prompt_length = lengths[self.prompt]
        self.stop_ids = torch.tensor(sorted(stops.ids if stops else ()), dtype=torch.int64, device=device)
        shape = (len(keys), sampling.max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape, dtype=torch.float32, device=device)
        self.drawn: list[list[int]] = [[] for _ in keys]
        """What was searched for stop strings of each completion so far."""

    def run(self, check_every: int, progress: Progress) -> list[Completion]:
        """Decodes until every completion has ended."""
        running = self.prefill()
        uniform = torch.empty(0)
        for index in range(self.sampling.max_new_tokens):
            if index % check_every == 0:
                if self.stops and self.stops.strings and index:
                    self._search(running, index - check_every, index)
                if self.kept and index:
                    self._keep(running, running.ended.nonzero().squeeze(1))
                rows, over = running.rows, running.ended
                if ended := running.drop_ended():
                    progress(ended)
                    self._hand_over(rows, over)
                if not len(running):
                    break
                uniform = self._uniforms(running.rows, index, check_every)
            token, logp = draw(running.logits, uniform[:, index % check_every], self.sampling)
            self.tokens[running.rows, index], self.logp[running.rows, index] = token, logp
            running.ended |= torch.isin(token, self.stop_ids)
            if index + 1 < self.sampling.max_new_tokens:
                running.decode(token, self.prompt_length[running.rows] + index)
        else:
            if self.kept:
                self._keep(running, torch.arange(len(running), device=running.rows.device))
        progress(len(running))
        completions = self._completions()
        if self.finished:
            for row in running.rows.tolist():
                self.finished(row, completions[row])
        return completions

    def prefill(self) -> "_Running":
        """Reads every prompt once, and copies its keys and values to its completions.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.
        """
        width = self.input_ids.shape[1]
        known = [self.kept.find(group) for group in self.groups] if self.kept else []
        if any(known):
            layers, last = read(self.policy, [group[0].token_ids for group in self.groups], known)
            cache = Cache(layers=list(layers))
        else:
            layers = [SlabLayer(width) for _ in _plain_layers(self.policy)]
            cache = Cache(layers=list(layers))
            hidden = self.policy.hidden(self.input_ids, past_key_values=cache, use_cache=True)
            last = hidden[torch.arange(len(hidden), device=hidden.device), self.input_lengths - 1]
        logits = self.policy.logits(last).index_select(0, self.prompt)
        if self.graphs is not None:
            self.graphs.start(layers, self.prompt, self.prompt_length, self.sampling.max_new_tokens)
            return _Running(self.policy, Cache(layers=[]), [], logits, None, None, self.graphs)
        if self._shares(layers):
            padded = bool((self.input_lengths < width).any())
            column = torch.arange(width, device=last.device)
            padding = column >= self.input_lengths[:, None, None] if padded else None
            groups = Groups.of(self.prompt, len(last), padding)
            for layer in layers:
                layer.share(groups, self.sampling.max_new_tokens)
            return _Running(self.policy, cache, layers, logits, None, groups)
        for layer in layers:
            layer.expand(self.prompt, width + self.sampling.max_new_tokens)
        return _Running(self.policy, cache, layers, logits, self._mask())

    def _keep(self, running: "_Running", rows: Tensor) -> None:
        """Keeps the keys and values of [r] `rows` of the cache for the next turn."""
        assert self.kept is not None
        completions, width = running.rows[rows], self.input_ids.shape[1]
        requests = [*chain.from_iterable(self.groups)]
        drawn = self.tokens[completions, : running.layers[0].get_seq_length() - width].tolist()
        self.kept.save([requests[index] for index in completions.tolist()], drawn, running.layers, rows, width)

    def _shares(self, layers: list[SlabLayer]) -> bool:
        """Whether rows see their prompt's keys and values where they are, and none is copied."""
        if any(layer.is_sliding for layer in _plain_layers(self.policy)):
            return False
        return (
            all(is_worth(layer.key_slab, len(self.prompt)) for layer in layers) if self.shares is None else self.shares
        )

    def _mask(self) -> Tensor | None:
        """[B, width + max_new_tokens] bool, False on the padding between prompt and completion; None without any."""
        width = self.input_ids.shape[1]
        if bool((self.prompt_length == width).all()):
            return None
        column = torch.arange(width + self.sampling.max_new_tokens, device=self.prompt_length.device)
        mask = (column < self.prompt_length[:, None]) | (column >= width)
        windows = any(layer.is_sliding for layer in _plain_layers(self.policy))
        # With four dimensions it goes to the attention as it is, and only `slab.mask` knows windows.
        return mask if windows else mask[:, None, None]

    def _uniforms(self, rows: Tensor, first: int, count: int) -> Tensor:
        """[r, count] random numbers of the completions `rows`, for their drawn tokens from index `first` on."""
        return uniforms(self.key, self.prompt_id[rows], self.sample[rows], self.position[rows] + first, count)

    def _search(self, running: "_Running", first: int, end: int) -> None:
        """Marks the rows as ended whose tokens from index `first` on complete a stop string."""
        assert self.stops is not None
        rows, found = running.rows, []
        # The one wait for the device, unless a row has ended.
        for row, *new in torch.cat([rows[:, None], self.tokens[rows, first:end]], 1).tolist():
            self.drawn[row] += new
            found.append(self.stops.first_end(self.drawn[row], first) is not None)
        if any(found):
            running.ended |= torch.tensor(found, device=rows.device)

    def _hand_over(self, rows: Tensor, over: Tensor) -> None:
        """Calls `finished` with those of [r] `rows` that are `over`."""
        if self.finished:
            for row, completion in zip(rows[over].tolist(), self._completions(rows[over]), strict=True):
                self.finished(row, completion)

    def _completions(self, rows: Tensor | slice = slice(None)) -> list[Completion]:
        """What was drawn of some rows, each completion up to its first stop token or string."""
        drawn, logps = self.tokens[rows], self.logp[rows]
        stops = torch.isin(drawn, self.stop_ids)
        # A row that never stopped has all its tokens; the others end with their first stop token.
        stopped = stops.any(1)
        lengths = torch.where(stopped, stops.int().argmax(1) + 1, self.sampling.max_new_tokens).tolist()
        completions = [
            Completion(tokens[:length], logp[:length], FinishReason.STOP if stop else FinishReason.LENGTH)
            for tokens, logp, length, stop in zip(
                drawn.tolist(), logps.tolist(), lengths, stopped.tolist(), strict=True
            )
        ]
        return [self.stops.cut(completion) for completion in completions] if self.stops else completions


class _Running:
    """The completions of a batch that have not ended: a row of the cache each.

    Args:
        policy: What to decode with.
        cache: Keys and values of all rows.
        layers: Those of `cache`.
        logits: [B, V] float32 of the next tokens.
        mask: As `_Batch` makes it.
        groups: Which rows share a prompt's keys and values; None where each has a copy.
        graphs: Captured steps, which have the cache and the mask; None without.
    """

    def __init__(
        self,
        policy: Policy,
        cache: Cache,
        layers: list[SlabLayer],
        logits: Tensor,
        mask: Tensor | None,
        groups: Groups | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.policy = policy
        self.cache = cache
        self.layers = layers
        self.logits = logits
        self.mask = mask
        self.groups = groups
        self.graphs = graphs
        self.rows = torch.arange(len(logits), device=logits.device)
        """[r] int64, the completion that each row is of."""
        self.ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        """[r] bool, whether a row has drawn a stop token."""

    def __len__(self) -> int:
        """Rows of the cache."""
        return len(self.rows)

    def drop_ended(self) -> int:
        """Compacts everything to the rows that go on, and returns how many have ended."""
        # The one wait for the device: how many rows go on.
        going = (~self.ended).nonzero().squeeze(1)
        ended = len(self) - len(going)
        if ended:
            self.rows, self.logits, self.ended = self.rows[going], self.logits[going], self.ended[going]
        if ended and len(going):
            self.mask = None if self.mask is None else self.mask[going]
            for layer in self.layers:
                layer.keep(going)
            if self.graphs is not None:
                self.graphs.keep(going)
            if self.groups is not None:
                prompts, self.groups = self.groups.keep(going)
                for layer in self.layers:
                    layer.regroup(prompts, self.groups)
        return ended

    def decode(self, token: Tensor, position: Tensor) -> None:
        """Finds the logits that follow [r] `token` at [r] `position` in its sequence."""
        if self.graphs is not None:
            self.logits = self.graphs.decode(token, position)
            return
        length = self.layers[0].length + 1
        hidden = self.policy.hidden(
            token[:, None],
            past_key_values=self.cache,
            position_ids=position[:, None],
            attention_mask=None if self.mask is None else self.mask[..., :length],
            use_cache=True,
        )
        self.logits = self.policy.logits(hidden[:, 0])


def _plain_layers(policy: Policy) -> list[DynamicLayer]:
    """The layers of the model's own cache. Raises NotImplementedError if they hold more than keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
