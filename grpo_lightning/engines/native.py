"""The default engine: a decode loop over the policy's own weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from grpo_lightning import ragged
from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.slab import SlabLayer, attention
from grpo_lightning.policy import Policy
from grpo_lightning.types import Completion, FinishReason, Prompt, UsageError

ATTENTION = "grpo_slab"
AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class NativeEngine(RolloutEngine):
    """Decodes with the policy's own weights: nothing to sync, and its log-probs equal the policy's (1e-6 in fp32).

    Each prompt is prefilled once and its keys and values are expanded to the group; finished rows are compacted away.

    Args:
        max_rows: Completions decoded at once; more prompts are done batch by batch, those of like length together.
        check_every: Decoding steps between two looks at which rows have ended.
    """

    exact = True

    def __init__(self, max_rows: int = 1024, check_every: int = 8) -> None:
        if max_rows < 1 or check_every < 1:
            raise UsageError(f"max_rows={max_rows}, check_every={check_every}: give 1 or more")
        self.max_rows = max_rows
        self.check_every = check_every

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
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        at_once = max(1, self.max_rows // group_size)
        groups: list[list[Completion]] = [[] for _ in prompts]
        with _decoding(self.policy):
            for first in range(0, len(order), at_once):
                chosen = order[first : first + at_once]
                batch = _Batch(self.policy, [prompts[index] for index in chosen], group_size, sampling, (seed, step))
                completions = batch.run(self.check_every, progress or (lambda ended: None))
                for place, index in enumerate(chosen):
                    groups[index] = completions[place * group_size : (place + 1) * group_size]
        return [completion for group in groups for completion in group]


@contextmanager
def _decoding(policy: Policy) -> Iterator[None]:
    """The model in eval mode with the slab's attention; afterwards as it was."""
    model = policy.model
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    except NotImplementedError as error:
        raise UsageError(
            f"engine=NativeEngine cannot decode {type(model).__name__} ({error}): use engine=TransformersEngine"
        ) from error
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)


class _Batch:
    """The completions decoded together: `rows` are those still running, everything else is indexed by completion."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: tuple[int, int],
    ) -> None:
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
        self.sample = torch.arange(group_size, device=device).repeat(len(prompts))
        self.stop_ids = torch.tensor(sorted(policy.stop_ids), dtype=torch.int64, device=device)
        shape = (len(self.sample), sampling.max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape, dtype=torch.float32, device=device)

    def _prefill(self) -> tuple[Cache, list[SlabLayer], Tensor]:
        """Every prompt once -> a cache expanded to the groups, its layers, and the logits [B, V] of the first tokens.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.
        """
        width = self.input_ids.shape[1]
        plain = DynamicCache(config=self.policy.model.config)
        if any(not isinstance(layer, DynamicLayer) for layer in plain.layers):
            raise NotImplementedError("a cache that is not keys and values alone")
        layers = [SlabLayer(width) for _ in plain.layers]
        cache = Cache(layers=list(layers))
        hidden = self.policy.hidden(self.input_ids, past_key_values=cache, use_cache=True)
        last = hidden[torch.arange(len(hidden), device=hidden.device), self.input_lengths - 1]
        for layer in layers:
            layer.expand(self.group_size, width + self.sampling.max_new_tokens)
        return cache, layers, self.policy.logits(last).repeat_interleave(self.group_size, 0)

    def _mask(self) -> Tensor | None:
        """[B, 1, 1, width + max_new_tokens] bool, False on the padding between prompt and completion."""
        width = self.input_ids.shape[1]
        if bool((self.prompt_length == width).all()):
            return None
        column = torch.arange(width + self.sampling.max_new_tokens, device=self.prompt_length.device)
        return ((column < self.prompt_length[:, None]) | (column >= width))[:, None, None]

    def run(self, check_every: int, progress: Progress) -> list[Completion]:
        """Decodes until every row has ended."""
        cache, layers, logits = self._prefill()
        mask, width = self._mask(), self.input_ids.shape[1]
        rows = torch.arange(len(self.sample), device=logits.device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=logits.device)
        uniform = torch.empty(0)
        for position in range(self.sampling.max_new_tokens):
            if position % check_every == 0:
                if bool(ended.any()):
                    progress(int(ended.sum()))
                    going = (~ended).nonzero().squeeze(1)
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
