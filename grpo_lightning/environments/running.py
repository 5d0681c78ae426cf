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
        self._spoken: tuple[Any, Dialogue, ToolFormat | None] | None = None
        """A tokenizer, and what it makes of conversations."""

    def load(self, tokenizer: Any) -> None:
        """Starts the environment, and checks that the tokenizer can hold its conversations.

        Raises:
            UsageError: The environment cannot be made in another process, or the chat template refuses conversations.
        """
        self._dialogue(tokenizer)
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
        dialogue, calls = self._dialogue(policy.tokenizer)
        if calls is not None and calls.stop and calls.stop not in sampling.stop:
            sampling = replace(sampling, stop=[*sampling.stop, calls.stop])
        stops = StopStrings(policy, sampling.stop)
        everyone = [
            _Talk(index * group_size + sample, Request([], prompt.id, sample), prompt)
            for index, prompt in enumerate(prompts)
            for sample in range(group_size)
        ]
        self._instances.start({talk.key: seed_of(key, talk.request) for talk in everyone})
        try:
            self._begin(everyone, dialogue, calls)
            live = everyone
            while True:
                for talk in live:
                    self._check_room(talk, policy, sampling)
                self._end([talk for talk in live if talk.has_ended], progress)
                live = [talk for talk in live if not talk.has_ended]
                if not live:
                    break
                completions = engine.generate([talk.next_request() for talk in live], sampling, key)
                for talk, completion in zip(live, completions, strict=True):
                    talk.add(stops.cut(completion), policy.tokenizer)
                self._answer(live, dialogue, calls)
        finally:
            self._instances.end([talk.key for talk in everyone])
        return [talk.sample() for talk in everyone]

    def _dialogue(self, tokenizer: Any) -> tuple[Dialogue, ToolFormat | None]:
        if self._spoken is None or self._spoken[0] is not tokenizer:
            tools = list(self.environment.tools)
            variables = {} if self.chat else {"chat_template": PLAIN}
            calls = ToolFormat.for_tokenizer(tokenizer) if tools else None
            self._spoken = tokenizer, Dialogue(tokenizer, tools, variables), calls
        return self._spoken[1:]

    def _begin(self, everyone: Sequence["_Talk"], dialogue: Dialogue, calls: ToolFormat | None) -> None:
        """Resets every environment."""
        questions = [asdict(replace(talk.prompt.question, text=talk.prompt.text)) for talk in everyone]
        outcomes = self._instances.call(
            [Call(talk.key, "reset", [question]) for talk, question in zip(everyone, questions, strict=True)]
        )
        system = self.system
        if calls is not None and self.chat and not dialogue.shows_tools:
            system = "\n\n".join(filter(None, [system, calls.describe(self.environment.tools)]))
        first = [{"role": "system", "content": system}] if system else []
        for talk, outcome in zip(everyone, outcomes, strict=True):
            if talk.check(outcome):
                messages = [*first, *outcome.value]
                talk.begin(messages, dialogue.start(messages), dialogue.tokenizer)

    def _check_room(self, talk: "_Talk", policy: Policy, sampling: Sampling) -> None:
        """Cuts the conversation off where no other turn fits."""
        turns, length = len(talk.conversation.ends), len(talk.ids) + sampling.max_new_tokens
        context, most = policy.context_length, self.limits.max_tokens
        if talk.has_ended:
            return
        if not turns:
            if context is not None and length > context:
                error = f"with sampling.max_new_tokens={sampling.max_new_tokens} the first turn exceeds the context"
                talk.check(Outcome(Status.TOO_LONG, error=error))
        elif (
            turns >= self.limits.max_turns
            or (context is not None and length > context)
            or (most is not None and length - len(talk.prompt_ids) > most)
        ):
            talk.has_ended, talk.reason = True, FinishReason.LENGTH

    def _answer(self, live: Sequence["_Talk"], dialogue: Dialogue, calls: ToolFormat | None) -> None:
        """Lets the environments answer the turns that were just drawn; one that is cut off is no turn to answer."""
        answered = [talk for talk in live if not talk.has_ended]
        steps = []
        for talk in answered:
            message: Message = {"role": "assistant", "content": talk.text}
            found = []
            if calls is not None:
                found = calls.find(dialogue.turn(talk.drawn_ids)["content"], self.environment.tools)
                message["tool_calls"] = [call._asdict() for call in found]
            talk.conversation.num_calls += len(found)
            steps.append(Call(talk.key, "step", [message], self.limits.seconds * max(1, len(found))))
        for talk, outcome in zip(answered, self._instances.call(steps), strict=True):
            if not talk.check(outcome):
                continue
            turn, new = outcome.value, outcome.value["messages"]
            talk.conversation.rewards[-1] = turn["reward"]
            talk.conversation.num_failed_calls += turn["num_failed_calls"]
            talk.has_ended = turn["done"] or not new
            talk.hear(dialogue, new)

    def _end(self, ended: Sequence["_Talk"], progress: Progress | None) -> None:
        """Asks the environments that are left for the outcome, and ends them."""
        whole = [talk for talk in ended if talk.conversation.status == Status.OK]
        outcomes = self._instances.call([Call(talk.key, "end") for talk in whole])
        for talk, outcome in zip(whole, outcomes, strict=True):
            if talk.check(outcome):
                talk.conversation.outcome = outcome.value
        self._instances.end([talk.key for talk in ended])
        if progress and ended:
            progress(len(ended))


class _Talk:
    """A conversation under way."""

    def __init__(self, key: int, request: Request, prompt: Prompt) -> None:
        self.key, self.request, self.prompt = key, request, prompt
        self.conversation = Conversation()
        self.has_ended = False
        self.prompt_ids: list[int] = prompt.token_ids
        self.prompt_text = prompt.text
        self.ids: list[int] = []
        """What the policy sees next."""
        self.drawn: list[bool] = []
        """[len(ids)] whether it drew them itself."""
        self.logp: list[float] | None = []
        """Of those that it drew."""
        self.token_ids: list[int] = []
        """All that it drew, in every piece."""
        self.drawn_ids: list[int] = []
        """Its last turn."""
        self.is_noted = True
        """Whether that is among the messages."""
        self.text, self.reason, self.stop_string = "", FinishReason.STOP, ""

    def check(self, outcome: Outcome) -> bool:
        """Whether the environment's call succeeded; if not, the conversation has failed."""
        if outcome.status != Status.OK:
            self.conversation.status, self.conversation.error = outcome.status, outcome.error or outcome.status
            self.has_ended = True
        return outcome.status == Status.OK

    def begin(self, messages: list[Message], ids: list[int], tokenizer: Any) -> None:
        """Notes the prompt, which is this conversation's own."""
        self.conversation.messages = messages
        self.prompt_ids, self.prompt_text = ids, str(tokenizer.decode(ids))
        self.ids, self.drawn = list(ids), [False] * len(ids)

    def next_request(self) -> Request:
        """The request for the next turn."""
        return replace(self.request, token_ids=list(self.ids), position=len(self.token_ids))

    def add(self, completion: Completion, tokenizer: Any) -> None:
        """Adds a turn of the policy."""
        self.drawn_ids, self.is_noted = completion.token_ids, False
        self.token_ids += completion.token_ids
        self.ids += completion.token_ids
        self.drawn += [True] * len(completion.token_ids)
        self.logp = None if self.logp is None or completion.logp is None else self.logp + completion.logp
        self.conversation.ends.append(len(self.token_ids) - 1)
        self.conversation.rewards.append(0.0)
        text = str(tokenizer.decode(completion.written, skip_special_tokens=True))
        self.text = text_up_to(text, completion.stop_string)
        self.reason, self.stop_string = completion.finish_reason, completion.stop_string
        self.has_ended = self.reason is FinishReason.LENGTH

    def hear(self, dialogue: Dialogue, new: list[Message]) -> None:
        """Adds what the environment answered; where history is rewritten, another piece begins."""
        before = self.conversation.messages
        self.conversation.messages = [*before, dict(dialogue.turn(self.drawn_ids)), *new]
        self.is_noted = True
        if self.has_ended:
            return
        given = dialogue.follow(before, self.drawn_ids, new)
        if given is None:
            self._end_piece()
            self.ids, self.drawn = dialogue.start(self.conversation.messages), []
            self.logp = []
        else:
            self.ids = self.ids + given
        self.drawn += [False] * (len(self.ids) - len(self.drawn))

    def _end_piece(self) -> None:
        if any(self.drawn):
            length = len(self.drawn) - self.drawn[::-1].index(True)
            self.conversation.pieces.append(Piece(self.ids[:length], self.drawn[:length], self.logp))

    def sample(self) -> Sample:
        """The conversation as rewards see it."""
        self._end_piece()
        if not self.is_noted:
            self.conversation.messages = [*self.conversation.messages, {"role": "assistant", "content": self.text}]
        prompt = replace(self.prompt, text=self.prompt_text, token_ids=self.prompt_ids)
        return Sample(prompt, self.text, self.token_ids, self.reason, self.stop_string, self.conversation)


def seed_of(key: RandomKey, request: Request) -> int:
    """The seed of an environment's own random numbers."""
    text = f"{key.seed}:{key.step}:{request.prompt_id}:{request.sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
