"""The fallback engine: `generate` of transformers, for architectures that the native engine cannot decode."""

import inspect
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.base import Finished, Progress, RolloutEngine
from grpo_lightning.engines.kv_memory import READ_TOKENS
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError

CHECK_EVERY = 8
"""Positions between two searches for stop strings."""


class TransformersEngine(RolloutEngine):
    """Decodes with `model.generate` of transformers: slower than `NativeEngine`, but it decodes any causal LM.

    Prompts are left-padded, or decoded with those of their own length where a model does not bear padding. Equal
    prompts are read once, where the model's cache allows it. Tokens are drawn as `NativeEngine` draws them.

    Args:
        max_rows: Completions decoded at once; fewer where their prompts have more than 16,384 tokens together.
    """

    shares_weights = True

    hands_over = True

    def __init__(self, max_rows: int = 1024) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows}: give 1 or more")
        self.max_rows = max_rows
        self.pads = True
        """Whether prompts of different lengths are decoded together; `check` tries it."""
        self.shares_prefill = True
        """Whether equal prompts are read once; `check` tries it."""

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that `generate` decodes wrongly or not at all, even without padding."""

        def decode(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            return self._generate(policy, requests, sampling, RandomKey(0, 0), None)

        fault = ""
        with policy.gathered():
            for self.pads, self.shares_prefill in product((True, False), repeat=2):
                fault = trial.fault(policy, decode)
                if not fault:
                    return
        name = type(policy.model).__name__
        raise UsageError(f"model.engine=TransformersEngine cannot decode {name} ({fault}): use another model")

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
        stops = StopStrings(self.policy, sampling.stop)
        return self._generate(self.policy, requests, sampling, key, stops, progress, finished)

    def _generate(
        self,
        policy: Policy,
        requests: Sequence[Request],
        sampling: Sampling,
        key: RandomKey,
        stops: StopStrings | None,
        progress: Progress | None = None,
        finished: Finished | None = None,
    ) -> list[Completion]:
        found: dict[int, Completion] = {}
        for chosen in self._batches(requests):
            some = [requests[index] for index in chosen]
            done = _generate(policy, some, sampling, key, stops, self.shares_prefill)
            found.update(zip(chosen, done, strict=True))
            if progress:
                progress(len(done))
            if finished:
                for index in chosen:
                    finished(index, found[index])
        return [found[index] for index in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of the requests that are decoded together."""
        lengths = [len(request.token_ids) for request in requests]
        kinds = [0] * len(requests) if self.pads else lengths
        for kind in sorted(set(kinds), reverse=True):
            batch: list[int] = []
            prompts: set[object] = set()
            width = 0
            for index in (index for index in range(len(requests)) if kinds[index] == kind):
                prompt = tuple(requests[index].token_ids) if self.shares_prefill else index
                width = max(width, lengths[index])
                read = width * (len(prompts) + (prompt not in prompts))
                if batch and (len(batch) == self.max_rows or read > READ_TOKENS):
                    yield batch
                    batch, prompts, width = [], set(), lengths[index]
                batch.append(index)
                prompts.add(prompt)
            yield batch


@torch.no_grad()
def _generate(
    policy: Policy,
    requests: Sequence[Request],
    sampling: Sampling,
    key: RandomKey,
    stops: StopStrings | None,
    shares_prefill: bool,
) -> list[Completion]:
    """Completions decoded together, their prompts left-padded; `stops` is what ends them, None nothing."""
    model = policy.model
    stop_ids = sorted(stops.ids) if stops else []
    prompts = [request.token_ids for request in requests]
    width = max(map(len, prompts))
    pad = stop_ids[0] if stop_ids else 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=policy.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=policy.device)
    drawing = _Drawing(requests, sampling, key, width, policy.device)
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids or None,
        pad_token_id=pad,
    )
    was_training, own_config = model.training, model.generation_config
    model.eval()
    # `generate` takes what `config` leaves open from the model's own settings: penalties, forbidden tokens, minimum
    # lengths. They would change the distribution behind the recorded log-probs.
    model.generation_config = config
    try:
        sequences = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            past_key_values=_prefilled(policy, prompts, ids, mask) if shares_prefill else None,
            generation_config=config,
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([_Searching(stops, width)] if stops and stops.strings else []),
        )
    finally:
        model.train(was_training)
        model.generation_config = own_config
    logps = torch.stack(drawing.logps, dim=1).tolist()
    completions = []
    for tokens, logp in zip(sequences[:, width:].tolist(), logps, strict=True):
        length = next((at + 1 for at, token in enumerate(tokens) if token in stop_ids), len(tokens))
        reason = FinishReason.STOP if tokens[length - 1] in stop_ids else FinishReason.LENGTH
        completion = Completion(tokens[:length], logp[:length], reason)
        completions.append(stops.cut(completion) if stops else completion)
    return completions


def _prefilled(policy: Policy, prompts: Sequence[Sequence[int]], ids: Tensor, mask: Tensor) -> Cache | None:
    """Keys and values of all but the last token of each prompt, equal prompts read once; None where all differ.

    Args:
        policy: What to read with.
        prompts: [B] token ids of each.
        ids: [B, T] the same, left-padded.
        mask: [B, T] 1 at tokens, 0 at padding.
    """
    first: dict[tuple[int, ...], int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(tuple(prompt), row)
    if len(first) == len(prompts) or ids.shape[1] == 1:
        return None
    rows = torch.tensor([*first.values()], device=ids.device)
    ids, mask = ids[rows, :-1], mask[rows, :-1]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(policy.trunk.forward).parameters
    positions = {"position_ids": position_ids} if takes_positions else {}
    cache = policy.trunk(input_ids=ids, attention_mask=mask, use_cache=True, **positions).past_key_values
    index = {prompt: number for number, prompt in enumerate(first)}
    cache.reorder_cache(torch.tensor([index[tuple(prompt)] for prompt in prompts], device=ids.device))
    return cache


class _Drawing(LogitsProcessor):
    """Draws the token itself, and leaves `generate` only this token to choose."""

    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, key: RandomKey, width: int, device: torch.device
    ) -> None:
        keys = torch.tensor([(r.prompt_id, r.sample, r.position) for r in requests], device=device)
        prompt, sample, position = keys.unbind(1)
        self.uniform = uniforms(key, prompt, sample, position, sampling.max_new_tokens)
        self.sampling = sampling
        self.width = width
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        token, logp = draw(scores, self.uniform[:, input_ids.shape[1] - self.width], self.sampling)
        self.logps.append(logp)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)  # type: ignore[return-value]


class _Searching(StoppingCriteria):
    """Ends rows whose text has a stop string. It looks now and then; what is drawn meanwhile is cut off later."""

    def __init__(self, stops: StopStrings, width: int) -> None:
        self.stops = stops
        self.width = width
        self.drawn: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        found = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        length = input_ids.shape[1] - self.width
        if length % CHECK_EVERY == 0:
            self.drawn = self.drawn or [[] for _ in input_ids]
            for row, new in enumerate(input_ids[:, -CHECK_EVERY:].tolist()):
                self.drawn[row] += new
                found[row] = self.stops.first_end(self.drawn[row], length - CHECK_EVERY) is not None
        return found  # type: ignore[return-value]
