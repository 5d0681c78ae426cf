"""Conversations of the policy with an environment: all of a step's advance together, one turn at a time."""

import json
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import torch

from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.sampler import Sampler, Samples, sampler_logp
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import text_of
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.data.conversations.dialogue import PLAIN, Dialogue
from grpo_lightning.plugins.data.conversations.environment import Environment, Remote
from grpo_lightning.plugins.data.conversations.instances import InstanceCall, Instances, Limits
from grpo_lightning.plugins.data.conversations.tool_calls import ToolFormat, Tools
from grpo_lightning.policy.policy import Policy
from grpo_lightning.sandbox.pool import LoadError, Outcome
from grpo_lightning.types import (
    Completion,
    Conversation,
    FinishReason,
    Message,
    Piece,
    Prompt,
    RandomKey,
    Request,
    Sample,
    Status,
    UsageError,
)

Turns = Generator[InstanceCall | Request, Any, None]
"""A conversation under way: yields what it waits for; is sent the value of a call, or a completion of the policy."""


class Conversations(Sampler):
    """Holds conversations between the policy, whose turns an engine samples, and instances of an environment.

    The random number of a sampled token depends on its position among the sampled tokens of its conversation, so
    batches, ranks and other conversations do not matter. Every conversation has a copy of the environment, in a
    separate process.

    Args:
        environment: The prototype, which is copied for every conversation.
        limits: Limits of a conversation; by default `Limits()`.
        system: Text of a message before the environment's messages; empty leaves it out.
        chat: Use the tokenizer's chat template. Without it the first message is the prompt as it is, and later messages
            stand between line breaks.
        variables: Further variables of the chat template.
    """

    def __init__(
        self,
        environment: Environment,
        limits: Limits | None = None,
        system: str = "",
        chat: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.environment = environment
        self.limits = limits = limits or Limits()
        self.system = system
        self.chat = chat
        self.variables = (variables or {}) if chat else {"chat_template": PLAIN}
        self._instances = Instances(Remote(environment), limits)
        self._tokenizer: Any = None
        self._form_by_tools: dict[str, MessageForm] = {}
        """How conversations are written, by their tools as JSON."""

    def load(self, tokenizer: Any) -> None:
        """Starts the environment, and checks that the tokenizer can hold its conversations."""
        if self._tokenizer is not tokenizer:
            self._tokenizer = tokenizer
            self._form_by_tools = {}
        self._form(self.environment.tools)
        try:
            self._instances.load()
        except LoadError as error:
            raise UsageError(
                f"data.environment={type(self.environment).__name__}: {error}. Its class must be in a module, and its "
                "attributes must be what pickle can write"
            ) from error

    def check_end(self, stop_ids: Collection[int]) -> None:
        """Raises UsageError where the policy's first turn would begin after a token that ends it."""
        dialogue = self._form(self.environment.tools).dialogue
        last_id = dialogue.start([Message(role="user", content="0")])[-1]
        if last_id in stop_ids:
            raise UsageError(
                f"data.environment: the policy's turns would begin after {self._tokenizer.decode([last_id])!r}, which "
                "ends them. Change the chat template in the model's folder: let it write the beginning of an answer"
            )

    def close(self) -> None:
        self._instances.close()

    def longest(self, sampling: Sampling) -> int:
        return self.limits.max_turns * sampling.max_new_tokens

    def draw(
        self,
        engine: RolloutEngine,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
    ) -> Samples:
        self.load(policy.tokenizer)

        # A turn ends with its call, where the form of calls has a stop string.
        call_format = self._form(self.environment.tools).call_format
        if call_format is not None and call_format.stop and call_format.stop not in sampling.stop:
            sampling = replace(sampling, stop=[*sampling.stop, call_format.stop])

        requests = Request.from_prompts(prompts, group_size)
        samples = [Sample(prompts[row // group_size], "", [], FinishReason.STOP) for row in range(len(requests))]
        self._instances.start({row: seed_of(key, request) for row, request in enumerate(requests)})
        try:
            turns_by_row = {
                row: self._turns(row, samples[row], request, policy, sampling) for row, request in enumerate(requests)
            }
            # What each conversation waits for: a call of its environment, or a turn of the policy.
            awaited = {row: next(turns) for row, turns in turns_by_row.items()}
            with engine.conversations():
                while awaited:
                    calls = {row: call for row, call in awaited.items() if isinstance(call, InstanceCall)}
                    turn_requests = {row: request for row, request in awaited.items() if isinstance(request, Request)}

                    # The policy's turns are sampled together, once no environment has a call to answer.
                    answers: Sequence[Outcome | Completion] = self._instances.call([*calls.values()])
                    if not calls:
                        answers = engine.complete([*turn_requests.values()], sampling, key)

                    for row, answer in zip([*(calls or turn_requests)], answers, strict=True):
                        turns = turns_by_row[row]
                        try:
                            if isinstance(answer, Completion):
                                awaited[row] = turns.send(answer)
                            elif answer.status == Status.OK:
                                awaited[row] = turns.send(answer.value)
                            else:
                                turns.throw(Failure(answer.status, answer.error or answer.status))
                        except StopIteration:
                            del awaited[row]

                    ended_rows = [row for row in calls or turn_requests if row not in awaited]
                    self._instances.end(ended_rows)
                    yield from ((row, samples[row]) for row in ended_rows)
        finally:
            self._instances.end(range(len(requests)))

    def rollouts(self, samples: Sequence[Sample], group_size: int, temperature: float) -> Rollouts:
        """As `Sampler.rollouts`: the pieces of conversations, without samples whose environment failed.

        A group's prompt is the tokens that all of its pieces begin with. What only some pieces begin with is context.
        """
        pieces = [
            (row, piece)
            for row, sample in enumerate(samples)
            if sample.conversation and not sample.failed
            for piece in sample.conversation.pieces
        ]
        pieces_by_group = groupby(pieces, key=lambda row_and_piece: row_and_piece[0] // group_size)
        prompts = {group: common_prompt([piece for _, piece in rows]) for group, rows in pieces_by_group}
        index_of_group = {group: index for index, group in enumerate(prompts)}
        starts = [len(prompts[row // group_size]) for row, _ in pieces]
        return Rollouts.from_lists(
            prompts=list(prompts.values()),
            group=[index_of_group[row // group_size] for row, _ in pieces],
            completions=[piece.token_ids[start:] for start, (_, piece) in zip(starts, pieces, strict=True)],
            is_sampled=[piece.sampled[start:] for start, (_, piece) in zip(starts, pieces, strict=True)],
            sample_index=torch.tensor([row for row, _ in pieces], dtype=torch.int64),
            truncated=torch.tensor([samples[row].truncated for row, _ in pieces], dtype=torch.bool),
            columns={"sampler_logp": sampler_logp([piece.logp for _, piece in pieces])},
            temperature=temperature,
        )

    def _turns(self, row: int, sample: Sample, request: Request, policy: Policy, sampling: Sampling) -> Turns:
        """Holds one conversation, and writes it into `sample`."""
        form = self._form(self.environment.tools_for(sample.prompt.question))
        dialogue = form.dialogue
        conversation = sample.conversation = Conversation()
        pieces = conversation.pieces
        try:
            # The environment's first messages are the prompt.
            question = replace(sample.prompt.question, text=sample.prompt.text)
            conversation.messages = [*form.system, *(yield InstanceCall(row, "reset", [asdict(question)]))]
            pieces.append(context_piece(contained(dialogue.start, conversation.messages)))
            ids = [*pieces[0].token_ids]
            sample.prompt = replace(sample.prompt, text=str(policy.tokenizer.decode(ids)), token_ids=ids)

            while self._has_room(sample, conversation, policy.context_length, sampling.max_new_tokens):
                # The policy's turn.
                ids = [*pieces[-1].token_ids]
                messages = conversation.messages
                completion: Completion = yield replace(request, token_ids=ids, position=len(sample.token_ids))
                add_turn(sample, conversation, completion, text_of(completion, policy.tokenizer))
                if sample.truncated:
                    break

                # The environment's turn.
                policy_message = dialogue.turn(completion.token_ids)
                turn = yield self._step(row, conversation, form, policy_message["content"])
                conversation.rewards[-1] = turn["reward"]
                conversation.num_failed_calls += turn["num_failed_calls"]
                conversation.messages = [*messages, policy_message, *turn["messages"]]
                if turn["done"] or not turn["messages"]:
                    break

                # Its tokens are context. Where the template rewrites history, a new piece begins.
                context_ids = contained(dialogue.follow, messages, completion.token_ids, turn["messages"])
                if context_ids is None:
                    pieces.append(context_piece(contained(dialogue.start, conversation.messages)))
                else:
                    pieces[-1].token_ids += context_ids
                    pieces[-1].sampled += [False] * len(context_ids)
            else:
                sample.finish_reason = FinishReason.LENGTH
            conversation.outcome = yield InstanceCall(row, "end")
        except Failure as failure:
            conversation.status, conversation.error = failure.args

        # Nothing is learned after the last sampled token of a piece.
        for piece in pieces:
            while piece.sampled and not piece.sampled[-1]:
                piece.token_ids.pop()
                piece.sampled.pop()
        conversation.pieces = [piece for piece in pieces if piece.sampled]

    def _has_room(
        self, sample: Sample, conversation: Conversation, context_length: int | None, max_new_tokens: int
    ) -> bool:
        """Returns True where another turn fits. Raises Failure where not even the first turn does."""
        length = len(conversation.pieces[-1].token_ids) + max_new_tokens
        num_turns = len(conversation.ends)
        fits = context_length is None or length <= context_length
        if not num_turns:
            if not fits:
                error = f"with sampling.max_new_tokens={max_new_tokens} the first turn exceeds the context"
                raise Failure(Status.TOO_LONG, error)
            return True
        max_tokens = self.limits.max_tokens
        is_within_limit = max_tokens is None or length <= len(sample.prompt.token_ids) + max_tokens
        return fits and num_turns < self.limits.max_turns and is_within_limit

    def _form(self, tools: Tools) -> "MessageForm":
        """Returns how conversations with these tools are written."""
        key = json.dumps(tools)
        if key not in self._form_by_tools:
            dialogue = Dialogue(self._tokenizer, tools, self.variables)
            call_format = ToolFormat.for_tokenizer(self._tokenizer) if tools else None

            # The system message describes the tools where the chat template does not.
            texts = [self.system]
            if call_format and self.chat and not dialogue.shows_tools:
                texts.append(call_format.describe(tools))
            system = [Message(role="system", content="\n\n".join(filter(None, texts)))] if any(texts) else []
            self._form_by_tools[key] = MessageForm(dialogue, tools, call_format, system)
        return self._form_by_tools[key]

    def _step(self, row: int, conversation: Conversation, form: "MessageForm", text: str) -> InstanceCall:
        """Returns the call that gives the environment the policy's last turn, with the calls of tools in `text`."""
        message = conversation.messages[-1]
        if form.call_format is None:
            return InstanceCall(row, "step", [message])
        calls = form.call_format.find(text, form.tools)
        conversation.num_calls += len(calls)
        message = message | {"tool_calls": [call._asdict() for call in calls]}
        return InstanceCall(row, "step", [message], self.limits.seconds * max(1, len(calls)))


class MessageForm(NamedTuple):
    """How conversations with the same tools are written."""

    dialogue: Dialogue
    """Writes messages as token ids."""
    tools: Tools
    """JSON schemas of the tools."""
    call_format: ToolFormat | None
    """Finds the calls of tools in a turn; None without tools."""
    system: list[Message]
    """The system message, or nothing."""


class Failure(Exception):
    """The environment has failed: status and error of the conversation."""


def context_piece(token_ids: Sequence[int]) -> Piece:
    """Returns a piece that begins with tokens which the policy did not sample."""
    return Piece([*token_ids], [False] * len(token_ids), [])


def add_turn(sample: Sample, conversation: Conversation, completion: Completion, text: str) -> None:
    """Adds a turn of the policy, whose text is `text`, to a sample and its conversation."""
    sample.token_ids += completion.token_ids
    sample.text = text
    sample.finish_reason = completion.finish_reason
    sample.stop_string = completion.stop_string
    piece = conversation.pieces[-1]
    piece.token_ids += completion.token_ids
    piece.sampled += [True] * len(completion.token_ids)
    piece.logp = None if piece.logp is None or completion.logp is None else piece.logp + completion.logp
    conversation.messages = [*conversation.messages, {"role": "assistant", "content": text}]
    conversation.ends.append(len(sample.token_ids) - 1)
    conversation.rewards.append(0.0)


def contained(write: Callable[..., Any], *messages: Any) -> Any:
    """Returns `write(*messages)`. Raises Failure where a template or a tokenizer fails with the messages."""
    try:
        return write(*messages)
    except Exception as error:
        raise Failure(Status.ERROR, f"{type(error).__name__}: {error}") from error


def seed_of(key: RandomKey, request: Request) -> int:
    """Returns the seed of the random numbers of the environment that answers a request's conversation."""
    text = f"{key.seed}:{key.step}:{request.prompt_id}:{request.sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def common_prompt(pieces: Sequence[Piece]) -> list[int]:
    """Returns the tokens that all pieces begin with, up to the first token that the policy sampled in any of them."""
    starts = [piece.token_ids[: piece.sampled.index(True)] for piece in pieces]
    prompt_ids = [ids[0] for ids in takewhile(lambda ids: len({*ids}) == 1, zip(*starts, strict=False))]
    if not prompt_ids:
        raise UsageError(
            "data.environment: conversations about one question begin with different tokens; let them begin with the "
            "same message, or with data.system"
        )
    return prompt_ids
