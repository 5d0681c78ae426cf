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
from grpo_lightning.types import Completion, FinishReason, Prompt, UsageError


class TransformersEngine(RolloutEngine):
    """Decodes with `model.generate`: slower than `NativeEngine`, but right for every causal LM of transformers.

    Prompts are left-padded, or decoded with those of their own length where a model does not bear padding. Each is
    prefilled once per completion. Tokens are drawn as `NativeEngine` draws them.

    Args:
        max_rows: Completions decoded at once.
    """

    exact = True

    def __init__(self, max_rows: int = 1024) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows}: give 1 or more")
        self.max_rows = max_rows
        self.pads = True
        """Whether prompts of different lengths are decoded together; found out by `check`."""

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError for a policy that `generate` decodes wrongly or not at all, even without padding."""

        def decode(prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Completion]:
            return self._generate(policy, prompts, group_size, sampling, (0, 0), frozenset())

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
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        step: int = 0,
        progress: Progress | None = None,
    ) -> list[Completion]:
        assert self.policy is not None, "call sync(policy) first"
        key, stop_ids = (seed, step), self.policy.stop_ids
        return self._generate(self.policy, prompts, group_size, sampling, key, stop_ids, progress)

    def _generate(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: tuple[int, int],
        stop_ids: frozenset[int],
        progress: Progress | None = None,
    ) -> list[Completion]:
        groups: list[list[Completion]] = [[] for _ in prompts]
        for chosen in self._batches(prompts, group_size):
            done = _generate(policy, [prompts[index] for index in chosen], group_size, sampling, key, sorted(stop_ids))
            for place, index in enumerate(chosen):
                groups[index] = done[place * group_size : (place + 1) * group_size]
            if progress:
                progress(len(done))
        return [completion for group in groups for completion in group]

    def _batches(self, prompts: Sequence[Prompt], group_size: int) -> Iterator[list[int]]:
        """Indices of the prompts that are decoded together."""
        at_once = max(1, self.max_rows // group_size)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        kinds = [0] * len(prompts) if self.pads else lengths
        for kind in sorted(set(kinds), reverse=True):
            alike = [index for index in range(len(prompts)) if kinds[index] == kind]
            for first in range(0, len(alike), at_once):
                yield alike[first : first + at_once]


@torch.no_grad()
def _generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    key: tuple[int, int],
    stop_ids: list[int],
) -> list[Completion]:
    """Completions decoded together, their prompts left-padded."""
    model = policy.model
    width = max(len(prompt.token_ids) for prompt in prompts)
    pad = stop_ids[0] if stop_ids else 0
    ids = [[pad] * (width - len(p.token_ids)) + p.token_ids for p in prompts for _ in range(group_size)]
    mask = [[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts for _ in range(group_size)]
    drawing = _Drawing(prompts, group_size, sampling, key, width, policy.device)
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
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: tuple[int, int],
        width: int,
        device: torch.device,
    ) -> None:
        prompt = torch.tensor([prompt.id for prompt in prompts], device=device).repeat_interleave(group_size)
        sample = torch.arange(group_size, device=device).repeat(len(prompts))
        self.uniform = uniforms(*key, prompt, sample, 0, sampling.max_new_tokens)
        self.sampling = sampling
        self.width = width
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        token, logp = draw(scores, self.uniform[:, input_ids.shape[1] - self.width], self.sampling)
        self.logps.append(logp)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)  # type: ignore[return-value]
