"""Groups, completions and tokens as they are recorded, from samples, scores and rollouts."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_lightning.maths.advantages import has_spread
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.looking.inspector import record
from grpo_lightning.plugins.looking.inspector.record import NUM_ALTERNATIVES, CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.plugins.looking.inspector.token_texts import decode, pieces_of, vocabulary_of
from grpo_lightning.policy.packer import Packer
from grpo_lightning.policy.policy import Policy, TokenLogp
from grpo_lightning.rewards.results import Scores
from grpo_lightning.training.evaluation import none_if_nan
from grpo_lightning.types import Conversation, Prompt, Sample

POLICY, PROMPT, HISTORY = "assistant", "prompt", "history"
"""Who wrote the tokens of a turn, where it was not the environment."""


@dataclass(slots=True)
class Row:
    """One completion of some rollouts, and where its tokens are."""

    rollouts: Rollouts
    tokens: slice  # its drawn tokens among those of all completions
    ids: list[int]  # [T] drawn and given tokens
    drawn: np.ndarray  # [n] int64 indices of the drawn tokens in `ids`
    piece: int  # which of the completions of its sample it is: the piece of a conversation, 0 without one

    @classmethod
    def all_of(cls, rollouts: Rollouts) -> Iterator["Row"]:
        """Yields the completions, in their order."""
        end, seen = 0, list[int]()
        for index, (length, number) in enumerate(zip(rollouts.lengths.tolist(), rollouts.row.tolist(), strict=True)):
            one, start, end = rollouts.select(torch.tensor([index])), end, end + length
            ids = torch.cat([one.token_ids, one.context.ids]) if one.context else one.token_ids
            drawn = one.sizes.sampled.numpy()
            yield cls(one, slice(start, end), ids[one.sizes.order].tolist(), drawn, seen.count(number))
            seen.append(number)

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """The prompt of its group: what all of its conversations begin with."""
        ids = self.rollouts.prompt_token_ids.tolist()
        own = sample.prompt
        return own if len(ids) == len(own.token_ids) else replace(own, token_ids=ids, text=decode(tokenizer, ids))

    def record(self, tokenizer: PreTrainedTokenizerBase, **numbers: Tensor | None) -> TokenRecord:
        """The tokens as they are recorded; the `numbers` of the drawn ones are given by the field of `TokenRecord`."""
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
        numbers, empty = values.numpy(), np.nan if values.is_floating_point() else 0
        whole = np.full((len(self.ids), *numbers.shape[1:]), empty, numbers.dtype)
        whole[self.drawn] = numbers
        return whole


@dataclass(slots=True, frozen=True)
class Measure:
    """Measures completions with the policy as it is. Call it in eval mode, without gradients, on every rank."""

    policy: Policy
    max_tokens: int

    def __call__(self, rollouts: Rollouts) -> TokenLogp:
        """Log-probs, entropies and the likeliest tokens at each drawn token, on the CPU, in the order of `rollouts`."""
        packer, micro_batches = self._packs(rollouts)
        # `trainer.precision: 64-true` changes the default type.
        numbers = torch.zeros(rollouts.num_tokens, 2 + NUM_ALTERNATIVES, dtype=torch.float32)
        ids = torch.zeros(rollouts.num_tokens, NUM_ALTERNATIVES, dtype=torch.int64)
        for tokens, scored in packer.over(rollouts, micro_batches, partial(self.policy, num_top=NUM_ALTERNATIVES)):
            assert scored.top_ids is not None and scored.top_logp is not None
            numbers[tokens] = torch.column_stack([scored.logp, scored.entropy, scored.top_logp]).cpu()
            ids[tokens] = scored.top_ids.cpu()
        return TokenLogp(numbers[:, 0], numbers[:, 1], ids, numbers[:, 2:])

    def logp(self, rollouts: Rollouts, of: Callable[[Policy, Rollouts], Tensor]) -> Tensor:
        """[N] float32 log-probs of a snapshot, on the CPU."""
        packer, micro_batches = self._packs(rollouts)
        return packer.per_token(rollouts, micro_batches, partial(of, self.policy))

    def _packs(self, rollouts: Rollouts) -> tuple[Packer, list[Tensor]]:
        packer = Packer(self.policy, self.max_tokens, rollouts.temperature)
        return packer, packer.rows_of_micro_batches(rollouts) if len(rollouts) else []


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
        right=scores.is_right(index),
        scores={name: none_if_nan(value) for name, (value, _) in parts.items()},
        statuses={name: str(status) for name, (_, status) in parts.items()},
        answer=main.answer[index] if main.answer else None,
        segments=segments,
        tokens=tokens,
        greedy=greedy,
        grader=scores.correct or "",
        conversation=conversation_record(talk, piece, tokens.drawn.tolist()) if talk else None,
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


def conversation_record(talk: Conversation, piece: int, drawn: Sequence[bool]) -> record.ConversationRecord:
    """The record of one piece.

    `drawn` [T] tells of each recorded token whether the policy drew it; the piece may have more before them.
    """
    answers = answers_of(talk)
    at, turns = first_drawn(talk, piece), list[record.TurnRecord]()
    for own, run in groupby(range(len(drawn)), key=lambda t: drawn[t]):
        indices = [*run]
        if own:
            # Turns of the policy in a row are one run.
            for t in indices:
                number = sum(end < at for end in talk.ends)
                if talk.ends[number] == at or t == indices[-1]:
                    turns.append(record.TurnRecord(POLICY, t, talk.rewards[number]))
                at += 1
            continue
        role = HISTORY if piece else PROMPT
        if turns:
            role = ", ".join(dict.fromkeys(role for role, _ in answers[sum(end < at for end in talk.ends) - 1]))
        turns.append(record.TurnRecord(role, indices[-1]))
    closing = answers[-1] if answers and piece >= len(talk.pieces) - 1 else []
    calls = talk.num_calls, talk.num_failed_calls
    return record.ConversationRecord(piece, len(talk.pieces), turns, closing, talk.outcome, *calls, talk.error)


def first_drawn(talk: Conversation, piece: int) -> int:
    """Index of a piece's first drawn token among all that the policy drew."""
    return sum(sum(before.drawn) for before in talk.pieces[:piece])


def answers_of(talk: Conversation) -> list[list[tuple[str, str]]]:
    """[turns] role and text of the messages that follow each turn of the policy."""
    found: list[list[tuple[str, str]]] = [[]]
    for message in reversed(talk.messages):
        if message["role"] == POLICY:
            found.append([])
        else:
            name = message.get("name") if message["role"] == "tool" else None
            found[-1].append((f"tool {name}" if name else message["role"], message["content"]))
    # The first messages may have turns of an assistant too, which are examples.
    return [answers[::-1] for answers in found[: len(talk.ends)]][::-1]


def mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; NaN and 0 without any, and 0 where rewards differ by rounding alone."""
    if not rewards:
        return math.nan, 0.0
    differ = has_spread(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64), 1)
    return statistics.fmean(rewards), statistics.pstdev(rewards) if differ else 0.0
