"""The fallback engine: `generate` of transformers, for any architecture that has it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError


class TransformersEngine(RolloutEngine):
    """Decodes with `model.generate`: slower than `NativeEngine`, but right for every causal LM of transformers.

    Prompts are left-padded, or decoded with those of their own length where a model does not bear padding. Each is
    prefilled once per completion. Tokens are drawn as `NativeEngine` draws them.

    Args:
        max_rows: Completions decoded at once.
    """

    shares_weights = True

    def __init__(self, max_rows: int = 1024) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows}: give 1 or more")
        self.max_rows = max_rows
        self.pads = True
        """Whether prompts of different lengths are decoded together; found out by `check`."""

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that `generate` decodes wrongly or not at all, even without padding."""

        def decode(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            return self._generate(policy, requests, sampling, RandomKey(0, 0), frozenset())

        fault = ""
        with policy.gathered():
            for self.pads in (True, False):
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
    ) -> list[Completion]:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None, "call sync(policy) first"
        return self._generate(self.policy, requests, sampling, key, self.policy.stop_ids, progress)

    def _generate(
        self,
        policy: Policy,
        requests: Sequence[Request],
        sampling: Sampling,
        key: RandomKey,
        stop_ids: frozenset[int],
        progress: Progress | None = None,
    ) -> list[Completion]:
        found: dict[int, Completion] = {}
        for chosen in self._batches(requests):
            done = _generate(policy, [requests[index] for index in chosen], sampling, key, sorted(stop_ids))
            found.update(zip(chosen, done, strict=True))
            if progress:
                progress(len(done))
        return [found[index] for index in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of the requests that are decoded together."""
        lengths = [len(request.token_ids) for request in requests]
        kinds = [0] * len(requests) if self.pads else lengths
        for kind in sorted(set(kinds), reverse=True):
            alike = [index for index in range(len(requests)) if kinds[index] == kind]
            for first in range(0, len(alike), self.max_rows):
                yield alike[first : first + self.max_rows]


@torch.no_grad()
def _generate(
    policy: Policy, requests: Sequence[Request], sampling: Sampling, key: RandomKey, stop_ids: list[int]
) -> list[Completion]:
    """Completions decoded together, their prompts left-padded."""
    model = policy.model
    prompts = [request.token_ids for request in requests]
    width = max(map(len, prompts))
    pad = stop_ids[0] if stop_ids else 0
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    drawing = _Drawing(requests, sampling, key, width, policy.device)
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids or None,
        pad_token_id=pad,
    )
    was_training, own_config = model.training, model.generation_config
    model.eval()
    # `generate` fills what `config` leaves open from the model's own settings: penalties, forbidden tokens,
    # least lengths. They would change the distribution behind the noted log-probs.
    model.generation_config = config
    try:
        sequences = model.generate(  # type: ignore[operator]
            torch.tensor(ids, device=policy.device),
            attention_mask=torch.tensor(mask, device=policy.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([drawing]),
        )
    finally:
        model.train(was_training)
        model.generation_config = own_config
    logps = torch.stack(drawing.logps, dim=1).tolist()
    completions = []
    for tokens, logp in zip(sequences[:, width:].tolist(), logps, strict=True):
        length = next((at + 1 for at, token in enumerate(tokens) if token in stop_ids), len(tokens))
        reason = FinishReason.STOP if tokens[length - 1] in stop_ids else FinishReason.LENGTH
        completions.append(Completion(tokens[:length], logp[:length], reason))
    return completions


class _Drawing(LogitsProcessor):
    """Draws the token itself and leaves `generate` no choice but to take it."""

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
