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
from grpo_lightning.plugins.data.conversations.instances import Call, Instances, Limits
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

Talk = Generator[Call | Request, Any, None]
"""A conversation under way: it yields what it waits for, and is sent what a call returns or the policy draws."""


class Conversations(Sampler):
    """Holds conversations between the policy, as an engine draws from it, and instances of an environment.

    A drawn token's random number depends on its position among the drawn tokens of its conversation, so batches, ranks
    and other conversations do not matter.

    Every conversation has a copy of the environment, in a process of its own. `system` is a message before those of the
    environment; empty leaves it out. Without `chat`, the tokenizer's chat template is not used: the first message is
    the prompt as it is, and later ones stand between line breaks. `variables` are further ones of the template.
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
        self._forms: dict[str, Form] = {}  # by the tools as JSON

    def load(self, tokenizer: Any) -> None:
        """Starts the environment, and checks that the tokenizer can hold its conversations."""
        if self._tokenizer is not tokenizer:
            self._tokenizer, self._forms = tokenizer, {}
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
        last = dialogue.start([Message(role="user", content="0")])[-1]
        if last in stop_ids:
            raise UsageError(
                f"data.environment: the policy's turns would begin after {self._tokenizer.decode([last])!r}, which "
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
        calls_form = self._form(self.environment.tools).calls
        if calls_form is not None and calls_form.stop and calls_form.stop not in sampling.stop:
            sampling = replace(sampling, stop=[*sampling.stop, calls_form.stop])
        requests = Request.from_prompts(prompts, group_size)
        samples = [Sample(prompts[row // group_size], "", [], FinishReason.STOP) for row in range(len(requests))]
        self._instances.start({row: seed_of(key, request) for row, request in enumerate(requests)})
        try:
            talks = {row: self._talk(row, samples[row], one, policy, sampling) for row, one in enumerate(requests)}
            asked = {row: next(talk) for row, talk in talks.items()}
            with engine.conversations():
                while asked:
                    calls = {row: one for row, one in asked.items() if isinstance(one, Call)}
                    turns = {row: one for row, one in asked.items() if isinstance(one, Request)}
                    answers: Sequence[Outcome | Completion] = self._instances.call([*calls.values()])
                    if not calls:  # all of them have come to the policy's turn
                        answers = engine.complete([*turns.values()], sampling, key)
                    for row, answer in zip([*(calls or turns)], answers, strict=True):
                        try:
                            if isinstance(answer, Completion):
                                asked[row] = talks[row].send(answer)
                            elif answer.status == Status.OK:
                                asked[row] = talks[row].send(answer.value)
                            else:
                                talks[row].throw(Failure(answer.status, answer.error or answer.status))
                        except StopIteration:
                            del asked[row]
                    ended = [row for row in calls or turns if row not in asked]
                    self._instances.end(ended)
                    yield from ((row, samples[row]) for row in ended)
        finally:
            self._instances.end(range(len(requests)))

    def rollouts(self, samples: Sequence[Sample], group_size: int, temperature: float) -> Rollouts:
        """As `Sampler.rollouts`: the pieces of conversations, without those whose environment failed.

        A group's prompt is what all of its pieces begin with; what only some begin with is given in these.
        """
        pieces = [
            (row, piece)
            for row, sample in enumerate(samples)
            if sample.conversation and not sample.failed
            for piece in sample.conversation.pieces
        ]
        by_group = groupby(pieces, key=lambda one: one[0] // group_size)
        prompts = {group: common_prompt([piece for _, piece in own]) for group, own in by_group}
        index = {group: number for number, group in enumerate(prompts)}
        starts = [len(prompts[row // group_size]) for row, _ in pieces]
        return Rollouts.from_lists(
            prompts=list(prompts.values()),
            group=[index[row // group_size] for row, _ in pieces],
            completions=[piece.token_ids[start:] for start, (_, piece) in zip(starts, pieces, strict=True)],
            is_sampled=[piece.drawn[start:] for start, (_, piece) in zip(starts, pieces, strict=True)],
            row=torch.tensor([row for row, _ in pieces], dtype=torch.int64),
            truncated=torch.tensor([samples[row].truncated for row, _ in pieces], dtype=torch.bool),
            columns={"sampler_logp": sampler_logp([piece.logp for _, piece in pieces])},
            temperature=temperature,
        )

    def _talk(self, row: int, sample: Sample, request: Request, policy: Policy, sampling: Sampling) -> Talk:
        """One conversation, which becomes `sample`."""
        form, talk = self._form(self.environment.tools_for(sample.prompt.question)), Conversation()
        dialogue = form.dialogue
        sample.conversation = talk
        try:
            question = replace(sample.prompt.question, text=sample.prompt.text)
            talk.messages = [*form.system, *(yield Call(row, "reset", [asdict(question)]))]
            talk.pieces.append(given_piece(contained(dialogue.start, talk.messages)))
            ids = [*talk.pieces[0].token_ids]
            sample.prompt = replace(sample.prompt, text=str(policy.tokenizer.decode(ids)), token_ids=ids)
            while self._has_room(sample, talk, policy.context_length, sampling.max_new_tokens):
                ids, before = [*talk.pieces[-1].token_ids], talk.messages
                drawn: Completion = yield replace(request, token_ids=ids, position=len(sample.token_ids))
                add_turn(sample, talk, drawn, text_of(drawn, policy.tokenizer))
                if sample.truncated:
                    break
                written = dialogue.turn(drawn.token_ids)
                turn = yield self._step(row, talk, form, written["content"])
                talk.rewards[-1] = turn["reward"]
                talk.num_failed_calls += turn["num_failed_calls"]
                talk.messages = [*before, written, *turn["messages"]]
                if turn["done"] or not turn["messages"]:
                    break
                given = contained(dialogue.follow, before, drawn.token_ids, turn["messages"])
                if given is None:  # the template rewrites history
                    talk.pieces.append(given_piece(contained(dialogue.start, talk.messages)))
                else:
                    talk.pieces[-1].token_ids += given
                    talk.pieces[-1].drawn += [False] * len(given)
            else:
                sample.finish_reason = FinishReason.LENGTH
            talk.outcome = yield Call(row, "end")
        except Failure as failure:
            talk.status, talk.error = failure.args
        for piece in talk.pieces:
            while piece.drawn and not piece.drawn[-1]:  # Nothing is learned after the last drawn token.
                piece.token_ids.pop()
                piece.drawn.pop()
        talk.pieces = [piece for piece in talk.pieces if piece.drawn]

    def _has_room(self, sample: Sample, talk: Conversation, context: int | None, max_new_tokens: int) -> bool:
        """True where another turn fits; Failure where not even the first does."""
        length = len(talk.pieces[-1].token_ids) + max_new_tokens
        fits = context is None or length <= context
        if not fits and not talk.ends:
            error = f"with sampling.max_new_tokens={max_new_tokens} the first turn exceeds the context"
            raise Failure(Status.TOO_LONG, error)
        most = None if self.limits.max_tokens is None else len(sample.prompt.token_ids) + self.limits.max_tokens
        return not talk.ends or (fits and len(talk.ends) < self.limits.max_turns and (most is None or length <= most))

    def _form(self, tools: Tools) -> "Form":
        """How conversations with these tools are written."""
        key = json.dumps(tools)
        if key not in self._forms:
            dialogue = Dialogue(self._tokenizer, tools, self.variables)
            calls = ToolFormat.for_tokenizer(self._tokenizer) if tools else None
            described = calls is not None and self.chat and not dialogue.shows_tools
            texts = [self.system, calls.describe(tools) if calls and described else ""]
            system = [Message(role="system", content="\n\n".join(filter(None, texts)))] if any(texts) else []
            self._forms[key] = Form(dialogue, tools, calls, system)
        return self._forms[key]

    def _step(self, row: int, talk: Conversation, form: "Form", written: str) -> Call:
        """The call that gives the environment the last turn, with the calls of tools in what was written."""
        if form.calls is None:
            return Call(row, "step", [talk.messages[-1]])
        found = form.calls.find(written, form.tools)
        talk.num_calls += len(found)
        message = talk.messages[-1] | {"tool_calls": [call._asdict() for call in found]}
        return Call(row, "step", [message], self.limits.seconds * max(1, len(found)))


class Form(NamedTuple):
    """How conversations with the same tools are written."""

    dialogue: Dialogue
    tools: Tools
    calls: ToolFormat | None  # None without tools
    system: list[Message]  # one message, or none


class Failure(Exception):
    """The environment has failed: status and error of the conversation."""


def given_piece(token_ids: Sequence[int]) -> Piece:
    """A piece that begins with tokens which the policy did not draw."""
    return Piece([*token_ids], [False] * len(token_ids), [])


def add_turn(sample: Sample, talk: Conversation, drawn: Completion, text: str) -> None:
    """Adds a turn of the policy, whose text is `text`, to a sample and its conversation."""
    sample.token_ids += drawn.token_ids
    sample.text, sample.finish_reason, sample.stop_string = text, drawn.finish_reason, drawn.stop_string
    piece = talk.pieces[-1]
    piece.token_ids += drawn.token_ids
    piece.drawn += [True] * len(drawn.token_ids)
    piece.logp = None if piece.logp is None or drawn.logp is None else piece.logp + drawn.logp
    talk.messages = [*talk.messages, {"role": "assistant", "content": text}]
    talk.ends.append(len(sample.token_ids) - 1)
    talk.rewards.append(0.0)


def contained(write: Callable[..., Any], *messages: Any) -> Any:
    """The result of `write` on an environment's messages; Failure where a template or a tokenizer fails with them."""
    try:
        return write(*messages)
    except Exception as error:
        raise Failure(Status.ERROR, f"{type(error).__name__}: {error}") from error


def seed_of(key: RandomKey, request: Request) -> int:
    """The seed of an environment's own random numbers."""
    text = f"{key.seed}:{key.step}:{request.prompt_id}:{request.sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def common_prompt(pieces: Sequence[Piece]) -> list[int]:
    """The tokens that all pieces begin with, before any of them was drawn."""
    starts = [piece.token_ids[: piece.drawn.index(True)] for piece in pieces]
    found = [ids[0] for ids in takewhile(lambda ids: len({*ids}) == 1, zip(*starts, strict=False))]
    if not found:
        raise UsageError(
            "data.environment: conversations about one question begin with different tokens; let them begin with the "
            "same message, or with data.system"
        )
    return found
