"""Groups and completions as they are recorded, from samples and scores."""

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.plugins.inspect.choosing import mean_and_std
from grpo_lightning.plugins.inspect.pieces import vocabulary_of
from grpo_lightning.plugins.inspect.record import CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.plugins.inspect.turns import ConversationRecord, first_drawn
from grpo_lightning.rewards.results import Scores
from grpo_lightning.training.records import none_if_nan
from grpo_lightning.types import Prompt, Sample

TRAIN, VALIDATION = "train", "validation"


def completion_record(
    sample: Sample,
    scores: Scores,
    row: int,
    tokens: TokenRecord,
    drawn: Sequence[int],
    greedy: bool = False,
    piece: int = 0,
) -> CompletionRecord:
    """A completion.

    Args:
        sample: The completion.
        scores: Those of all completions.
        row: Its index in `scores`.
        tokens: Its tokens.
        drawn: [n] the index of each drawn token in `tokens`.
        greedy: Whether it was drawn greedily.
        piece: Which piece of its conversation it is, where there is one.
    """
    parts, main, talk = scores.describe(row), scores.main, sample.conversation
    first = first_drawn(talk, piece) if talk else 0
    segments = {name: result.segments[row] for name, result in scores.results.items() if result.segments}
    return CompletionRecord(
        text=sample.text,
        finish_reason=str(sample.finish_reason),
        reward=none_if_nan(scores.total[row]),
        right=None if math.isnan(main.value[row]) else main.value[row] > RIGHT_ABOVE,
        scores={name: none_if_nan(value) for name, (value, _) in parts.items()},
        statuses={name: str(status) for name, (_, status) in parts.items()},
        answer=main.answer[row] if main.answer else None,
        segments={
            name: [
                (drawn[segment.end - first], none_if_nan(segment.value))
                for segment in found
                if 0 <= segment.end - first < len(drawn)
            ]
            for name, found in segments.items()
        },
        tokens=tokens,
        greedy=greedy,
        judge=scores.correct or "",
        conversation=ConversationRecord.from_piece(talk, piece, tokens.drawn.tolist()) if talk else None,
    )


def group_record(
    kind: str,
    roles: list[str],
    prompt: Prompt,
    update: int | None,
    completions: list[CompletionRecord],
    tokenizer: PreTrainedTokenizerBase,
) -> GroupRecord:
    """A group; mean and standard deviation are those of the completions that were not drawn greedily, if there are any.

    Args:
        kind: `train` or `validation`.
        roles: Why it is recorded.
        prompt: Its prompt.
        update: The last update that saw it.
        completions: All of the group.
        tokenizer: That of the policy.
    """
    drawn = [one for one in completions if not one.greedy] or completions
    # The pieces of a conversation are one completion of their group.
    drawn = [one for one in drawn if one.conversation is None or not one.conversation.piece]
    rewards = [one.reward for one in drawn if one.reward is not None]
    mean, std = mean_and_std(rewards)
    ids: set[int] = set()
    for tokens in (one.tokens for one in completions):
        for top in (tokens.top_before_ids, tokens.top_after_ids):
            ids |= set() if top is None else {*top.flatten().tolist()}
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
        std=std if rewards else None,
        update=update,
        completions=completions,
        vocabulary=vocabulary_of(tokenizer, ids),
    )
