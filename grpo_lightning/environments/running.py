"""Conversations of the policy with an environment: all of a step's advance together, one turn at a time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings, text_up_to
from grpo_lightning.environments.base import Environment, Message
from grpo_lightning.environments.dialogue import PLAIN, Dialogue
from grpo_lightning.environments.remote import Remote
from grpo_lightning.environments.tool_calls import ToolFormat
from grpo_lightning.policy.policy import Policy
from grpo_lightning.sandbox.instances import Call, Instances
from grpo_lightning.sandbox.pool import LoadError, Outcome
from grpo_lightning.types import (
    Completion,
    Conversation,
    FinishReason,
    Piece,
    Prompt,
    RandomKey,
    Request,
    Sample,
    Status,
    UsageError,
    at_least,
)


@dataclass
class Limits:
    """Limits of a conversation with an environment.

    A conversation that reaches one of the first two ends there, and its completion is truncated. The limit of a turn is
    `sampling.max_new_tokens`.

    Args:
        max_turns: Most turns of the policy.
        max_tokens: Most tokens after the prompt, drawn and given; None sets no limit but the model's context.
        seconds: Seconds that the environment may take per call of a tool, or per turn without calls.
        memory_limit_mb: Memory per conversation in MiB, in addition to what imports need (Linux only).
        max_answer_bytes: Most bytes that the environment may answer to a turn.
        num_workers: Environments that compute at once. Give more for those that wait for a server.
    """

    max_turns: int = 8
    max_tokens: int | None = None
    seconds: float = 10.0
    memory_limit_mb: int = 1024
    max_answer_bytes: int = 65536
    num_workers: int = 2

    def __post_init__(self) -> None:
        for limit in fields(self):
            least = 0.001 if limit.name == "seconds" else 1
            at_least(f"data.limits.{limit.name}", getattr(self, limit.name), least)


class Conversations:
    """Holds conversations between the policy, as an engine draws from it, and instances of an environment.

    A drawn token's random number depends on its position among the drawn tokens of its conversation, so batches, ranks
    and other conversations do not matter.

    Args:
        environment: What answers the policy. Every conversation has a copy of it, in a process of its own.
        limits: Of each conversation.
        system: System message before the environment's messages; empty leaves it out.
        chat: Whether messages stand in the tokenizer's chat template. Without it, the first is the prompt as it is, and
            later ones stand between line breaks.
    """

    def __init__(self, environment: Environment, limits: Limits | None = None, system: str = "", chat: bool = False):
        self.environment = environment
        self.limits = limits or Limits()
        self.system = system
        self.chat = chat
        self._instances = Instances(
            Remote(environment),
            self.limits.num_workers,
            self.limits.seconds,
            self.limits.memory_limit_mb,
            self.limits.max_answer_bytes,
        )
        self._dialogue: Dialogue | None = None
        self._format: ToolFormat | None = None

    def load(self, tokenizer: Any) -> None:
        """Starts the environment, and checks that the tokenizer can hold its conversations.

        Raises:
            UsageError: The environment cannot be made in another process, or the chat template refuses conversations.
        """
        if self._dialogue is None or self._dialogue.tokenizer is not tokenizer:
            tools = list(self.environment.tools)
            self._dialogue = Dialogue(tokenizer, tools, {} if self.chat else {"chat_template": PLAIN})
            self._format = ToolFormat.for_tokenizer(tokenizer) if tools else None
        try:
            self._instances.load()
        except LoadError as error:
            raise UsageError(
                f"data.environment={type(self.environment).__name__}: {error}. Its class must be in a module, and its "
                "attributes must be what pickle can write"
            ) from error

    def close(self) -> None:
        """Ends every process. May be called twice."""
        self._instances.close()

    def run(
        self,
        engine: RolloutEngine,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
        progress: Progress | None = None,
    ) -> list[Sample]:
        """`group_size` conversations about each prompt's question, group after group.

        Args:
            engine: Draws the turns; it is awake and synced.
            policy: Its tokenizer and context length are used.
            prompts: The questions; their texts are in the prompt template.
            group_size: Conversations per prompt.
            sampling: The distribution of a turn, and what ends it.
            key: Seed of the run and exploration step.
            progress: Called with the number of conversations that have just ended.
        """
        self.load(policy.tokenizer)
        if self._format is not None and self._format.stop and self._format.stop not in sampling.stop:
            sampling = replace(sampling, stop=[*sampling.stop, self._format.stop])
        stops = StopStrings(policy, sampling.stop)
        requests = Request.from_prompts(prompts, group_size)
        everyone = [_Live(key, one, prompts[key // group_size]) for key, one in enumerate(requests)]
        self._instances.start({one.key: seed_of(key, one.request) for one in everyone})
        try:
            self._begin(everyone)
            live = everyone
            while live := self._going_on(live, policy, sampling, progress):
                completions = engine.generate([one.next_request() for one in live], sampling, key)
                for one, completion in zip(live, completions, strict=True):
                    one.add(stops.cut(completion), policy.tokenizer)
                self._answer([one for one in live if not one.has_ended])
        finally:
            self._instances.end([one.key for one in everyone])
        return [one.whole() for one in everyone]

    def _begin(self, everyone: Sequence["_Live"]) -> None:
        """Resets every environment."""
        assert self._dialogue is not None
        system = self.system
        if self._format is not None and self.chat and not self._dialogue.shows_tools:
            system = "\n\n".join(filter(None, [system, self._format.describe(self.environment.tools)]))
        first = [{"role": "system", "content": system}] if system else []
        questions = [replace(one.sample.prompt.question, text=one.sample.prompt.text) for one in everyone]
        calls = [Call(one.key, "reset", [asdict(question)]) for one, question in zip(everyone, questions, strict=True)]
        for one, outcome in zip(everyone, self._instances.call(calls), strict=True):
            if one.succeeded(outcome):
                one.talk.messages = [*first, *outcome.value]
                one.begin_piece(self._dialogue)
                ids = one.talk.pieces[-1].token_ids
                text = str(self._dialogue.tokenizer.decode(ids))
                one.sample.prompt = replace(one.sample.prompt, text=text, token_ids=[*ids])

    def _going_on(
        self, live: Sequence["_Live"], policy: Policy, sampling: Sampling, progress: Progress | None
    ) -> list["_Live"]:
        """Those that have another turn. The others are asked for the outcome, if nothing failed, and ended."""
        for one in live:
            if not one.has_ended:
                one.ends_without_room(self.limits, policy.context_length, sampling.max_new_tokens)
        ended = [one for one in live if one.has_ended]
        whole = [one for one in ended if one.talk.status == Status.OK]
        outcomes = self._instances.call([Call(one.key, "end") for one in whole])
        for one, outcome in zip(whole, outcomes, strict=True):
            if one.succeeded(outcome):
                one.talk.outcome = outcome.value
        self._instances.end([one.key for one in ended])
        if progress and ended:
            progress(len(ended))
        return [one for one in live if not one.has_ended]

    def _answer(self, live: Sequence["_Live"]) -> None:
        """Lets the environments answer the turns that were just drawn."""
        assert self._dialogue is not None
        steps = []
        for one in live:
            message: Message = {"role": "assistant", "content": one.sample.text}
            found = []
            if self._format is not None:
                written = self._dialogue.turn(one.drawn_ids)["content"]
                found = self._format.find(written, self.environment.tools)
                message["tool_calls"] = [call._asdict() for call in found]
            one.talk.num_calls += len(found)
            steps.append(Call(one.key, "step", [message], self.limits.seconds * max(1, len(found))))
        for one, outcome in zip(live, self._instances.call(steps), strict=True):
            if one.succeeded(outcome):
                one.hear(outcome.value, self._dialogue)


class _Live:
    """A conversation under way: the sample that it becomes, and the request that draws its turns."""

    def __init__(self, key: int, request: Request, prompt: Prompt) -> None:
        self.key = key
        self.request = request
        self.talk = Conversation()
        self.sample = Sample(prompt, "", [], FinishReason.STOP, conversation=self.talk)
        self.has_ended = False
        self.has_answer = True
        """Whether the environment has answered the last turn."""

    @property
    def drawn_ids(self) -> list[int]:
        """The last turn."""
        return self.sample.token_ids[self.sample.first :]

    def succeeded(self, outcome: Outcome) -> bool:
        """Whether the environment's call succeeded; if not, the conversation has failed."""
        if outcome.status != Status.OK:
            self.talk.status, self.talk.error = outcome.status, outcome.error or outcome.status
            self.has_ended = True
        return outcome.status == Status.OK

    def ends_without_room(self, limits: Limits, context: int | None, max_new_tokens: int) -> None:
        """Cuts the conversation off where no other turn fits. Where not even the first does, it has failed."""
        turns, length = len(self.talk.ends), len(self.talk.pieces[-1].token_ids) + max_new_tokens
        most = None if limits.max_tokens is None else len(self.sample.prompt.token_ids) + limits.max_tokens
        fits = context is None or length <= context
        if not turns and not fits:
            error = f"with sampling.max_new_tokens={max_new_tokens} the first turn exceeds the context"
            self.succeeded(Outcome(Status.TOO_LONG, error=error))
        elif turns and not (fits and turns < limits.max_turns and (most is None or length <= most)):
            self.has_ended, self.sample.finish_reason = True, FinishReason.LENGTH

    def begin_piece(self, dialogue: Dialogue) -> None:
        """Begins a piece with the messages so far."""
        ids = dialogue.start(self.talk.messages)
        self.talk.pieces.append(Piece(ids, [False] * len(ids), []))

    def next_request(self) -> Request:
        """The request for the next turn."""
        ids = list(self.talk.pieces[-1].token_ids)
        return replace(self.request, token_ids=ids, position=len(self.sample.token_ids))

    def add(self, completion: Completion, tokenizer: Any) -> None:
        """Adds a turn of the policy."""
        sample, piece = self.sample, self.talk.pieces[-1]
        sample.token_ids += completion.token_ids
        piece.token_ids += completion.token_ids
        piece.drawn += [True] * len(completion.token_ids)
        piece.logp = None if piece.logp is None or completion.logp is None else piece.logp + completion.logp
        self.talk.ends.append(len(sample.token_ids) - 1)
        self.talk.rewards.append(0.0)
        text = str(tokenizer.decode(completion.written, skip_special_tokens=True))
        sample.text = text_up_to(text, completion.stop_string)
        sample.finish_reason, sample.stop_string = completion.finish_reason, completion.stop_string
        self.has_ended, self.has_answer = sample.truncated, False

    def hear(self, turn: dict[str, Any], dialogue: Dialogue) -> None:
        """Adds what the environment answered; where history is rewritten, another piece begins."""
        before, new = self.talk.messages, turn["messages"]
        self.talk.messages = [*before, dialogue.turn(self.drawn_ids), *new]
        self.talk.rewards[-1] = turn["reward"]
        self.talk.num_failed_calls += turn["num_failed_calls"]
        self.has_ended, self.has_answer = turn["done"] or not new, True
        if self.has_ended:
            return
        given, piece = dialogue.follow(before, self.drawn_ids, new), self.talk.pieces[-1]
        if given is None:
            self.begin_piece(dialogue)
        else:
            piece.token_ids += given
            piece.drawn += [False] * len(given)

    def whole(self) -> Sample:
        """The conversation as rewards see it. Its pieces end with a drawn token."""
        for piece in self.talk.pieces:
            length = max((at + 1 for at, own in enumerate(piece.drawn) if own), default=0)
            del piece.token_ids[length:], piece.drawn[length:]
        self.talk.pieces = [piece for piece in self.talk.pieces if piece.drawn]
        if not self.has_answer:
            self.talk.messages = [*self.talk.messages, {"role": "assistant", "content": self.sample.text}]
        return self.sample


def seed_of(key: RandomKey, request: Request) -> int:
    """The seed of an environment's own random numbers."""
    text = f"{key.seed}:{key.step}:{request.prompt_id}:{request.sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
