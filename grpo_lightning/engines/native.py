"""The default engine: a decode loop over the policy's own weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.kv_memory import GIB, cache_bytes_per_token, free_bytes, row_bytes, rows_at_once
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.slab import SlabLayer, attention, mask
from grpo_lightning.maths import ragged
from grpo_lightning.policy.policy import Policy, first_line
from grpo_lightning.types import Completion, FinishReason, Prompt, UsageError

ATTENTION = "grpo_slab"
AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)


class NativeEngine(RolloutEngine):
    """Decodes with the policy's own weights: nothing to sync, and its log-probs equal the policy's (1e-6 in fp32).

    Each prompt is prefilled once and its keys and values are expanded to the group; finished rows are compacted away.
    What it cannot decode exactly it refuses before the run begins.

    Args:
        max_rows: Completions decoded at once; more prompts are done batch by batch, those of like length together.
        check_every: Decoding steps between two looks at which rows have ended.
        max_cache_gib: Memory for the key-value cache, which bounds the completions decoded at once. None takes what is
            free. It changes speed and memory alone, but for rounding: in bfloat16 a token's probability depends on how
            many rows are decoded with it, so give a number where a resumed run must not differ by a bit.
    """

    exact = True

    def __init__(self, max_rows: int = 1024, check_every: int = 8, max_cache_gib: float | None = None) -> None:
        if max_rows < 1 or check_every < 1:
            raise UsageError(f"max_rows={max_rows}, check_every={check_every}: give 1 or more")
        if max_cache_gib is not None and max_cache_gib <= 0:
            raise UsageError(f"engine.max_cache_gib={max_cache_gib}: give more than 0, or null for what is free")
        self.max_rows = max_rows
        self.check_every = check_every
        self.max_cache_gib = max_cache_gib

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that this engine would decode wrongly or not at all."""

        def decode(prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Completion]:
            with _slab_attention(policy):
                batch = _Batch(policy, prompts, range(group_size), sampling, (0, 0), frozenset())
                return batch.run(self.check_every, lambda ended: None)

        with policy.gathered():
            fault = trial.fault(policy, decode)
        if fault:
            raise _cannot_decode(policy, fault)
        # The shortest prompt there can be; what others need is known when they come.
        self._rows_that_fit(policy, 1, 1 + sampling.max_new_tokens)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        step: int = 0,
        progress: Progress | None = None,
    ) -> list[Completion]:
        assert self.policy is not None, "call sync(policy) first"
        policy, stop_ids = self.policy, self.policy.stop_ids
        rows: list[list[Completion]] = [[] for _ in prompts]
        with _decoding(policy):
            for chosen, samples in self._batches(prompts, group_size, sampling):
                some = [prompts[index] for index in chosen]
                batch = _Batch(policy, some, samples, sampling, (seed, step), stop_ids)
                completions = batch.run(self.check_every, progress or (lambda ended: None))
                for place, index in enumerate(chosen):
                    rows[index] += completions[place * len(samples) : (place + 1) * len(samples)]
        return [completion for group in rows for completion in group]

    def _batches(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling
    ) -> Iterator[tuple[list[int], range]]:
        """What is decoded together: indices of prompts, and the samples of each. Prompts of like length come together.

        A group is cut only where it does not fit as a whole.
        """
        assert self.policy is not None
        lengths = [len(prompt.token_ids) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda index: lengths[index], reverse=True)
        first = 0
        while first < len(order):
            # The longest come first, so the first of a batch is its width.
            rows = self._rows_that_fit(self.policy, group_size, lengths[order[first]] + sampling.max_new_tokens)
            chosen = order[first : first + max(1, rows // group_size)]
            for sample in range(0, group_size, min(rows, group_size)):
                yield chosen, range(sample, min(sample + rows, group_size))
            first += len(chosen)

    def _rows_that_fit(self, policy: Policy, group_size: int, tokens: int) -> int:
        """Rows of so many tokens to decode at once, at least 1."""
        config, dtype = policy.config, trial.compute_dtype(policy)
        free = None if self.max_cache_gib is not None else free_bytes(policy.device)
        memory = int(self.max_cache_gib * GIB) if free is None else free  # type: ignore[operator]
        if free is not None:
            # A coarse grid: what is free differs a little in every run, and rounding depends on the number of rows.
            memory = 2 ** (max(1, memory).bit_length() - 1)
        rows = rows_at_once(config, dtype, tokens, group_size, memory, self.max_rows)
        if rows < 1:
            key = f"model.engine.max_cache_gib={self.max_cache_gib}" if free is None else f"memory of {policy.device}"
            raise UsageError(
                f"{key}: one completion of {tokens} tokens with its prompt takes "
                f"{row_bytes(config, dtype, tokens) / GIB:.3g} GiB ({cache_bytes_per_token(config, dtype)} bytes per "
                f"token) and {memory / GIB:.3g} GiB may be used; "
                f"{'raise model.engine.max_cache_gib, or ' if free is None else ''}lower sampling.max_new_tokens or "
                "the length of prompts"
            )
        return rows


def _cannot_decode(policy: Policy, reason: str) -> UsageError:
    name = type(policy.model).__name__
    return UsageError(f"model.engine=NativeEngine cannot decode {name} ({reason}): use model.engine=TransformersEngine")


@contextmanager
def _decoding(policy: Policy) -> Iterator[None]:
    """`_slab_attention`, which says what to do about a model that it cannot be used with."""
    try:
        with _slab_attention(policy):
            yield
    except NotImplementedError as error:
        raise _cannot_decode(policy, first_line(error)) from error


@contextmanager
def _slab_attention(policy: Policy) -> Iterator[None]:
    """The model in eval mode with the slab's attention; afterwards as it was."""
    model = policy.model
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    try:
        model.set_attn_implementation(ATTENTION)
        if policy.text_config._attn_implementation != ATTENTION:
            raise NotImplementedError("its attention cannot be exchanged")
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)


class _Batch:
    """The completions decoded together: `rows` are those still running, everything else is indexed by completion."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        samples: range,
        sampling: Sampling,
        key: tuple[int, int],
        stop_ids: frozenset[int],
    ) -> None:
        group_size = len(samples)
        self.policy = policy
        self.group_size = group_size
        self.sampling = sampling
        self.key = key
        device = policy.device
        lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
        flat = torch.tensor([token for prompt in prompts for token in prompt.token_ids], device=device)
        self.input_ids, self.input_lengths = ragged.pad(flat, lengths), lengths
        self.prompt_length = lengths.repeat_interleave(group_size)
        self.prompt_id = torch.tensor([prompt.id for prompt in prompts], device=device).repeat_interleave(group_size)
        self.sample = torch.arange(samples.start, samples.stop, device=device).repeat(len(prompts))
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        shape = (len(self.sample), sampling.max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape, dtype=torch.float32, device=device)

    def _prefill(self) -> tuple[Cache, list[SlabLayer], Tensor]:
        """Every prompt once -> a cache expanded to the groups, its layers, and the logits [B, V] of the first tokens.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.
        """
        width = self.input_ids.shape[1]
        layers = [SlabLayer(width) for _ in _plain_layers(self.policy)]
        cache = Cache(layers=list(layers))
        hidden = self.policy.hidden(self.input_ids, past_key_values=cache, use_cache=True)
        last = hidden[torch.arange(len(hidden), device=hidden.device), self.input_lengths - 1]
        for layer in layers:
            layer.expand(self.group_size, width + self.sampling.max_new_tokens)
        return cache, layers, self.policy.logits(last).repeat_interleave(self.group_size, 0)

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

    def run(self, check_every: int, progress: Progress) -> list[Completion]:
        """Decodes until every row has ended."""
        cache, layers, logits = self._prefill()
        mask, width = self._mask(), self.input_ids.shape[1]
        rows = torch.arange(len(self.sample), device=logits.device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=logits.device)
        uniform = torch.empty(0)
        for position in range(self.sampling.max_new_tokens):
            if position % check_every == 0:
                # The one wait for the device: how many rows go on.
                going = (~ended).nonzero().squeeze(1)
                if len(going) < len(ended):
                    progress(len(ended) - len(going))
                    rows, logits, ended = rows[going], logits[going], ended[going]
                    if len(rows) == 0:
                        break
                    mask = None if mask is None else mask[going]
                    for layer in layers:
                        layer.keep(going)
                uniform = uniforms(*self.key, self.prompt_id[rows], self.sample[rows], position, check_every)
            token, logp = draw(logits, uniform[:, position % check_every], self.sampling)
            self.tokens[rows, position], self.logp[rows, position] = token, logp
            ended |= torch.isin(token, self.stop_ids)
            if position + 1 < self.sampling.max_new_tokens:
                hidden = self.policy.hidden(
                    token[:, None],
                    past_key_values=cache,
                    position_ids=(self.prompt_length[rows] + position)[:, None],
                    attention_mask=None if mask is None else mask[..., : width + position + 1],
                    use_cache=True,
                )
                logits = self.policy.logits(hidden[:, 0])
        progress(len(rows))
        return self._completions()

    def _completions(self) -> list[Completion]:
        stops = torch.isin(self.tokens, self.stop_ids)
        # A row that never stopped has all its tokens; the others end with their first stop token.
        stopped = stops.any(1)
        lengths = torch.where(stopped, stops.int().argmax(1) + 1, self.sampling.max_new_tokens).tolist()
        return [
            Completion(tokens[:length], logp[:length], FinishReason.STOP if stop else FinishReason.LENGTH)
            for tokens, logp, length, stop in zip(
                self.tokens.tolist(), self.logp.tolist(), lengths, stopped.tolist(), strict=True
            )
        ]


def _plain_layers(policy: Policy) -> list[DynamicLayer]:
    """The layers of the model's own cache, which must hold nothing but keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
