"""Groups, completions and tokens as they are recorded, from samples, scores and rollouts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.choosing import mean_and_std
from grpo_lightning.plugins.inspect.pieces import decode, pieces_of, vocabulary_of
from grpo_lightning.plugins.inspect.record import CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.plugins.inspect.turns import ConversationRecord, first_drawn
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.rewards.results import Scores
from grpo_lightning.training.evaluation import none_if_nan
from grpo_lightning.types import Prompt, Sample


@dataclass(slots=True)
class Row:
    """One completion of some rollouts, and where its tokens are."""

    rollouts: Rollouts
    tokens: slice
    """Its drawn tokens among those of all completions."""
    ids: list[int]
    """[T] drawn and given tokens."""
    drawn: np.ndarray
    """[n] int64 indices of the drawn tokens in `ids`."""
    piece: int
    """Which of the completions of its sample it is: the piece of a conversation, 0 without one."""

    @classmethod
    def all_of(cls, rollouts: Rollouts) -> Iterator["Row"]:
        """Yields the completions, in their order."""
        end, seen = 0, list[int]()
        for index, (length, number) in enumerate(zip(rollouts.lengths.tolist(), rollouts.row.tolist(), strict=True)):
            one, start, end = rollouts.select(torch.tensor([index])), end, end + length
            ids = torch.cat([one.token_ids, one.context.ids]) if one.context else one.token_ids
            drawn = one.sizes.drawn.numpy()
            yield cls(one, slice(start, end), ids[one.sizes.order].tolist(), drawn, seen.count(number))
            seen.append(number)

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """The prompt of its group: what all of its conversations begin with."""
        ids = self.rollouts.prompt_token_ids.tolist()
        own = sample.prompt
        return own if len(ids) == len(own.token_ids) else replace(own, token_ids=ids, text=decode(tokenizer, ids))

    def record(self, tokenizer: PreTrainedTokenizerBase, **numbers: Tensor | None) -> TokenRecord:
        """The tokens as they are recorded.

        The `numbers` are [n] or [n, K] over the drawn tokens, by the field of `TokenRecord`.
        """
        ids, given = self.ids, None
        if len(ids) > len(self.drawn):
            given = np.ones(len(ids), np.int8)
            given[self.drawn] = 0
        own = {name: values for name, values in self.rollouts.columns.items() if name not in self.rollouts.NAMES}
        columns = {name: self._spread(values) for name, values in own.items()}
        arrays = {name: self._spread(values) for name, values in numbers.items() if values is not None}
        return TokenRecord(np.array(ids, np.int32), pieces_of(tokenizer, ids), given, **arrays, columns=columns)

    def _spread(self, values: Tensor) -> np.ndarray:
        """[T] or [T, K] from [n] or [n, K]: NaN or 0 for given tokens."""
        dtype = {torch.int64: np.int32, torch.int8: np.int8, torch.float16: np.float16}.get(values.dtype, np.float32)
        whole = np.full((len(self.ids), *values.shape[1:]), np.nan if values.is_floating_point() else 0, dtype)
        whole[self.drawn] = values.numpy()
        return whole


def measured(scored: TokenLogp, pick: slice, when: str) -> dict[str, Tensor | None]:
    """Fields of a `TokenRecord` that a pass `before` or `after` the updates gives, of the tokens `pick`."""
    assert scored.top_ids is not None and scored.top_logp is not None
    top = {f"top_{when}_ids": scored.top_ids[pick], f"top_{when}_logp": scored.top_logp[pick]}
    return {f"entropy_{when}": scored.entropy[pick], **top}


def completion_record(
    sample: Sample, scores: Scores, index: int, row: Row | None, tokens: TokenRecord, greedy: bool = False
) -> CompletionRecord:
    """The completion at an index of the scores; `row` is None where its environment failed before any token."""
    parts, main, talk = scores.describe(index), scores.main, sample.conversation
    piece, drawn = (row.piece, row.drawn.tolist()) if row else (0, [])
    first = first_drawn(talk, piece) if talk else 0
    segments: dict[str, list[tuple[int, float | None]]] = {}
    for name, result in scores.results.items():
        if result.segments:
            ends = ((segment.end - first, none_if_nan(segment.value)) for segment in result.segments[index])
            segments[name] = [(drawn[end], value) for end, value in ends if 0 <= end < len(drawn)]
    return CompletionRecord(
        text=sample.text,
        finish_reason=str(sample.finish_reason),
        reward=none_if_nan(scores.total[index]),
        right=None if math.isnan(main.value[index]) else main.value[index] > RIGHT_ABOVE,
        scores={name: none_if_nan(value) for name, (value, _) in parts.items()},
        statuses={name: str(status) for name, (_, status) in parts.items()},
        answer=main.answer[index] if main.answer else None,
        segments=segments,
        tokens=tokens,
        greedy=greedy,
        judge=scores.correct or "",
        conversation=ConversationRecord.from_piece(talk, piece, tokens.drawn.tolist()) if talk else None,
        notes=scores.notes(index),
    )


def group_record(
    kind: str,
    roles: list[str],
    prompt: Prompt,
    update: int | None,
    completions: list[CompletionRecord],
    tokenizer: PreTrainedTokenizerBase,
) -> GroupRecord:
    """A group; mean and standard deviation are of the completions that were not drawn greedily, if there are any."""
    drawn = [one for one in completions if not one.greedy] or completions
    # The pieces of a conversation are one completion of their group.
    rewards = [one.reward for one in drawn if not (one.conversation and one.conversation.piece)]
    known = [reward for reward in rewards if reward is not None]
    mean, std = mean_and_std(known)
    tops = [top for one in completions for top in (one.tokens.top_before_ids, one.tokens.top_after_ids)]
    return GroupRecord(
        kind=kind,
        roles=roles,
        prompt_id=prompt.id,
        question=prompt.question.text,
        gold=prompt.question.answer,
        source=prompt.question.source,
        prompt=prompt.text,
        num_prompt_tokens=len(prompt.token_ids),
        mean=none_if_nan(mean),
        std=std if known else None,
        update=update,
        completions=completions,
        vocabulary=vocabulary_of(tokenizer, [id for top in tops if top is not None for id in top.flatten().tolist()]),
    )
