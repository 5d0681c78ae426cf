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
from grpo_lightning.plugins.data.images.pictures import thumbnail
from grpo_lightning.plugins.looking.inspector import record
from grpo_lightning.plugins.looking.inspector.record import NUM_ALTERNATIVES, CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.plugins.looking.inspector.token_texts import decode, pieces_of, vocabulary_of
from grpo_lightning.policy.micro_batcher import MicroBatcher
from grpo_lightning.policy.policy import Policy, TokenLogp
from grpo_lightning.rewards.results import Scores
from grpo_lightning.training.evaluation import none_if_nan
from grpo_lightning.types import Conversation, Prompt, Sample

POLICY = "assistant"
"""The role of the policy's turns."""
PROMPT = "prompt"
"""The role of what the prompts of a group do not have in common."""
HISTORY = "history"
"""The role of the turns that a branch begins with."""


@dataclass(slots=True)
class Row:
    """One row of some rollouts, a completion or a piece of it, and where its tokens are."""

    rollouts: Rollouts
    """The row alone."""
    tokens: slice
    """Its sampled tokens among those of all rows."""
    ids: list[int]
    """[T] sampled and context tokens."""
    sampled_positions: np.ndarray
    """[n] int64 indices of the sampled tokens in `ids`."""
    piece: int
    """Index among the rows of its sample: the piece of a conversation, 0 without an environment."""

    @classmethod
    def all_of(cls, rollouts: Rollouts) -> Iterator["Row"]:
        """Yields the rows, in their order."""
        end = 0
        earlier_samples: list[int] = []
        for index, (length, sample) in enumerate(
            zip(rollouts.lengths.tolist(), rollouts.sample_index.tolist(), strict=True)
        ):
            row = rollouts.select(torch.tensor([index]))
            start, end = end, end + length
            ids = torch.cat([row.token_ids, row.context.ids]) if row.context else row.token_ids
            ids_in_order = ids[row.sizes.order].tolist()
            yield cls(row, slice(start, end), ids_in_order, row.sizes.sampled.numpy(), earlier_samples.count(sample))
            earlier_samples.append(sample)

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """Returns the prompt of its group: what all conversations of the group begin with."""
        ids = self.rollouts.prompt_token_ids.tolist()
        if len(ids) == len(sample.prompt.token_ids):
            return sample.prompt
        return replace(sample.prompt, token_ids=ids, text=decode(tokenizer, ids))

    def record(self, tokenizer: PreTrainedTokenizerBase, **numbers: Tensor | None) -> TokenRecord:
        """Returns the tokens as they are recorded.

        Args:
            tokenizer: The policy's.
            numbers: [n] or [n, K] numbers of the sampled tokens, by the field of `TokenRecord`.
        """
        context = None
        if len(self.ids) > len(self.sampled_positions):
            context = np.ones(len(self.ids), bool)
            context[self.sampled_positions] = False
        arrays = {name: self._with_context(values) for name, values in numbers.items() if values is not None}
        columns = {
            name: self._with_context(values)
            for name, values in self.rollouts.columns.items()
            if name not in self.rollouts.NAMES
        }
        pieces = pieces_of(tokenizer, self.ids)
        return TokenRecord(np.array(self.ids, np.int32), pieces, context, **arrays, columns=columns)

    def _with_context(self, values: Tensor) -> np.ndarray:
        """[T] or [T, K] from [n] or [n, K]: NaN or 0 for context tokens."""
        empty = np.nan if values.is_floating_point() else 0
        array = values.numpy()
        filled = np.full((len(self.ids), *array.shape[1:]), empty, array.dtype)
        filled[self.sampled_positions] = array
        return filled


@dataclass(slots=True, frozen=True)
class Measure:
    """Measures completions with the policy's present weights.

    Call it in eval mode, without gradients, on every rank: ranks with sharded weights meet in every forward.
    """

    policy: Policy
    """π_θ."""
    max_tokens: int
    """Tokens in one forward at most; 0 sets no limit."""

    def __call__(self, rollouts: Rollouts) -> TokenLogp:
        """Returns log-probs, entropies and the likeliest tokens at each sampled token of `rollouts`, on the CPU."""
        micro_batcher, micro_batches = self._micro_batches(rollouts)
        # `trainer.precision: 64-true` changes the default type.
        numbers = torch.zeros(rollouts.num_tokens, 2 + NUM_ALTERNATIVES, dtype=torch.float32)
        ids = torch.zeros(rollouts.num_tokens, NUM_ALTERNATIVES, dtype=torch.int64)
        for tokens, scored in micro_batcher.over(
            rollouts, micro_batches, partial(self.policy, num_top=NUM_ALTERNATIVES)
        ):
            assert scored.top_ids is not None and scored.top_logp is not None
            numbers[tokens] = torch.column_stack([scored.logp, scored.entropy, scored.top_logp]).cpu()
            ids[tokens] = scored.top_ids.cpu()
        return TokenLogp(numbers[:, 0], numbers[:, 1], ids, numbers[:, 2:])

    def logp(self, rollouts: Rollouts, snapshot: Callable[[Policy, Rollouts], Tensor]) -> Tensor:
        """[N] float32 log-probs of a snapshot, on the CPU."""
        micro_batcher, micro_batches = self._micro_batches(rollouts)
        return micro_batcher.per_token(rollouts, micro_batches, partial(snapshot, self.policy))

    def _micro_batches(self, rollouts: Rollouts) -> tuple[MicroBatcher, list[Tensor]]:
        micro_batcher = MicroBatcher(self.policy, self.max_tokens, rollouts.temperature)
        return micro_batcher, micro_batcher.rows_of_micro_batches(rollouts) if len(rollouts) else []


def measured(scored: TokenLogp, tokens: slice, moment: str) -> dict[str, Tensor | None]:
    """Returns fields of a `TokenRecord` from a forward at the `moment` "before" or "after" the updates."""
    assert scored.top_ids is not None and scored.top_logp is not None
    return {
        f"entropy_{moment}": scored.entropy[tokens],
        f"top_{moment}_ids": scored.top_ids[tokens],
        f"top_{moment}_logp": scored.top_logp[tokens],
    }


def completion_record(
    sample: Sample, scores: Scores, index: int, row: Row | None, tokens: TokenRecord, greedy: bool = False
) -> CompletionRecord:
    """Returns the record of a completion.

    Args:
        sample: The completion.
        scores: The scores of all samples of its step or validation.
        index: Index of the sample in `scores`.
        row: The row in the rollouts; None if the environment failed before any token.
        tokens: The record of the row's tokens.
        greedy: True for a greedy answer.
    """
    conversation = sample.conversation
    piece = row.piece if row else 0
    sampled_positions = row.sampled_positions.tolist() if row else []

    # A segment ends at a token counted over all pieces; the record counts over the tokens of this piece.
    start = num_sampled_before(conversation, piece) if conversation else 0
    segments: dict[str, list[tuple[int, float | None]]] = {}
    for name, result in scores.results.items():
        if result.segments:
            ends = ((segment.end - start, none_if_nan(segment.value)) for segment in result.segments[index])
            inside = range(len(sampled_positions))
            segments[name] = [(sampled_positions[end], value) for end, value in ends if end in inside]

    described = scores.describe(index)
    answers = scores.main.answer
    return CompletionRecord(
        text=sample.text,
        finish_reason=str(sample.finish_reason),
        reward=none_if_nan(scores.total[index]),
        right=scores.is_right(index),
        scores={name: none_if_nan(value) for name, (value, _) in described.items()},
        statuses={name: str(status) for name, (_, status) in described.items()},
        answer=answers[index] if answers else None,
        segments=segments,
        tokens=tokens,
        greedy=greedy,
        grader=scores.correct or "",
        conversation=conversation_record(conversation, piece, tokens.sampled.tolist()) if conversation else None,
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
    """Returns the record of a group.

    Its mean and standard deviation leave out greedy answers, unless there are no others.
    """
    counted = [completion for completion in completions if not completion.greedy] or completions
    # The pieces of a conversation are one completion of their group.
    rewards = [
        completion.reward
        for completion in counted
        if completion.reward is not None and not (completion.conversation and completion.conversation.piece)
    ]
    mean, std = mean_and_std(rewards)
    tokens_of_all = [completion.tokens for completion in completions]
    tops = [top for tokens in tokens_of_all for top in (tokens.top_before_ids, tokens.top_after_ids)]
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
        vocabulary=vocabulary_of(tokenizer, [id for top in tops if top is not None for id in top.flatten().tolist()]),
        images=[thumbnail(image, prompt.question.source) for image in prompt.question.images],
    )


def conversation_record(conversation: Conversation, piece: int, sampled: Sequence[bool]) -> record.ConversationRecord:
    """Returns the record of one piece.

    Args:
        conversation: The whole conversation.
        piece: Index of the piece.
        sampled: [T] True for each recorded token that the policy sampled; the piece may have more tokens before them.
    """
    answers = answers_of(conversation)
    turns: list[record.TurnRecord] = []
    # The index of the next sampled token among all that the policy sampled, and of the turn that it belongs to.
    token = num_sampled_before(conversation, piece)
    for is_sampled, positions in groupby(range(len(sampled)), key=lambda t: sampled[t]):
        run = [*positions]
        if is_sampled:
            # Turns of the policy in a row are one run.
            for t in run:
                turn = sum(end < token for end in conversation.ends)
                if conversation.ends[turn] == token or t == run[-1]:
                    turns.append(record.TurnRecord(POLICY, t, conversation.rewards[turn]))
                token += 1
            continue
        role = HISTORY if piece else PROMPT
        if turns:
            last_turn = sum(end < token for end in conversation.ends) - 1
            role = ", ".join(dict.fromkeys(role for role, _ in answers[last_turn]))
        turns.append(record.TurnRecord(role, run[-1]))

    num_pieces = len(conversation.pieces)
    return record.ConversationRecord(
        piece,
        num_pieces,
        turns,
        answers[-1] if answers and piece >= num_pieces - 1 else [],
        conversation.outcome,
        conversation.num_calls,
        conversation.num_failed_calls,
        conversation.error,
    )


def num_sampled_before(conversation: Conversation, piece: int) -> int:
    """Returns how many tokens the policy sampled before a piece."""
    return sum(sum(earlier.sampled) for earlier in conversation.pieces[:piece])


def answers_of(conversation: Conversation) -> list[list[tuple[str, str]]]:
    """[turns] role and text of the messages that follow each turn of the policy."""
    # From the end: the messages before a turn of the policy follow the turn before it.
    answers: list[list[tuple[str, str]]] = [[]]
    for message in reversed(conversation.messages):
        if message["role"] == POLICY:
            answers.append([])
        else:
            name = message.get("name") if message["role"] == "tool" else None
            answers[-1].append((f"tool {name}" if name else message["role"], message["content"]))
    # The first messages may have turns of an assistant too, which are examples.
    return [messages[::-1] for messages in answers[: len(conversation.ends)]][::-1]


def mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Returns mean and population standard deviation.

    They are NaN and 0 without rewards; the deviation is 0 too where rewards differ by rounding alone.
    """
    if not rewards:
        return math.nan, 0.0
    differ = has_spread(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64), 1)
    return statistics.fmean(rewards), statistics.pstdev(rewards) if differ else 0.0
