"""Conversations as text, in the chat template of a tokenizer."""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Message, UsageError, require

DAY = date(2024, 7, 26)
"""Today, for templates that write the date. A prompt follows from the configuration, and not from the clock: a run that
goes on tomorrow sees the same prompts. It is the day that Llama 3's template writes where it has no clock."""

ROLES = ("system", "user", "assistant", "tool")
LAYOUTS: Sequence[Sequence[str]] = ((), ROLES, ROLES[1:])
"""The roles whose `content` is a list of parts, in the order in which this is tried: vision models read such a list."""


def rendered(tokenizer: Any, messages: Sequence[Message], roles_of_parts: Sequence[str] = (), **options: Any) -> str:
    """The messages in the chat template, where it is always `DAY`; those of `roles_of_parts` as lists of one part."""
    turns = []
    for turn in messages:
        parts = [{"type": "text", "text": turn["content"]}]
        turns.append(turn | {"content": parts} if turn["role"] in roles_of_parts else turn)
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    if "strftime_now" in template:
        # A macro in place of the clock. What follows keeps a line break at its beginning.
        signs = {f"%{sign}": DAY.strftime(f"%{sign}") for sign in "aAbBcCdDeFgGhHIjmMnprRStTuUVwWxXyYzZ%"}
        replace = "".join(f" | replace('{sign}', '{text}')" for sign, text in ({"%-": "%"} | signs).items())
        template = f"{{% macro strftime_now(format) %}}{{{{ format{replace} }}}}{{% endmacro %}}{{{{ '' }}}}" + template
    return str(tokenizer.apply_chat_template(turns, tokenize=False, **options | {"chat_template": template}))


def hidden(text: str, messages: Sequence[Message]) -> str | None:
    """The first content that does not stand in a rendered text; a template may trim contents, and nothing else."""
    contents = [message["content"].strip() for message in messages]
    # A list that is written as Python or JSON has it.
    mark = "'type': 'text'"
    is_list = text.replace('"', "'").count(mark) > "".join(contents).replace('"', "'").count(mark)
    return next((content for content in contents if is_list or content not in text), None)


class Chat:
    """Writes questions in the chat template of a tokenizer, and proves that they stand in the text as they are.

    Raises UsageError where a template leaves out or changes the system turn or the question, refuses them, or writes
    something else each time.

    Args:
        tokenizer: With a chat template, which may read messages as text or as lists of parts.
        system: System turn; empty leaves it out.
        variables: Further ones of the template, such as `{"enable_thinking": False}`.
        key: The setting that asked for a chat, for messages.
        fix: What to set instead, for messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str = "",
        variables: Mapping[str, Any] | None = None,
        key: str = "chat=true",
        fix: str = "set chat=false",
    ) -> None:
        require(
            bool(tokenizer.chat_template), f"{key}: the tokenizer {tokenizer.name_or_path} has no chat template; {fix}"
        )
        self.tokenizer, self.variables = tokenizer, variables or {}
        self.refusal, self.fix = f"{key}: the chat template of the model", fix
        self.system = [Message(role="system", content=system)] if system else []
        probe = [Message(role="user", content="What is the question?")]
        fault = self._adapt(self.system + probe)
        if fault and system and not self._adapt(probe):
            raise UsageError(
                f"data.system={system!r}: the chat template of the model takes no system turn ({fault}); "
                "leave data.system empty and write its text into data.template"
            )
        require(not fault, f"{self.refusal} refuses this ({fault}); {fix}")

    def _adapt(self, messages: Sequence[Message]) -> str:
        """Finds the roles whose content is parts. Returns why messages cannot be written; empty if they can."""
        faults = []
        for self.roles_of_parts in LAYOUTS:
            try:
                text, *others = {self._rendered(messages) for _ in range(8)}
            except Exception as error:  # A template is a program, and raises what it likes.
                faults.append(first_line(error))
                continue
            if others:
                return "it writes something else each time"
            if hidden(text, messages) is None:
                return ""
            faults.append("it leaves it out")
        return faults[0]

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        options = {"add_generation_prompt": True, **self.variables, **options}
        return rendered(self.tokenizer, messages, self.roles_of_parts, **options)

    def text(self, messages: Sequence[Message], answer_prefix: str = "") -> str:
        """The text up to where the assistant's turn begins, or with its beginning, `answer_prefix`."""
        asked = [*self.system, *messages]
        try:
            text = self._rendered(asked)
        except Exception as error:
            raise UsageError(f"{self.refusal} refuses this ({first_line(error)}); {self.fix}") from error
        # Of earlier answers some templates leave out the thinking.
        lost = hidden(text, [message for message in asked if message["role"] != "assistant"])
        require(lost is None, f"{self.refusal} leaves out or changes {lost!r:.80}; {self.fix}")
        if not answer_prefix:
            return text
        before = self._rendered(asked, add_generation_prompt=False)
        key = f"data.answer_prefix={answer_prefix!r}: the chat template of the model"
        begun, fault = text + answer_prefix, "it changes it"
        if text == before:
            # The template has no mark for the beginning of an answer, and may write a space before one.
            turns = [*asked, Message(role="assistant", content=answer_prefix)]
            try:
                begun = self._rendered(turns, add_generation_prompt=False, continue_final_message=True)
            except Exception as error:
                begun, fault = "", first_line(error)
        if not (begun.startswith(text) and begun.endswith(answer_prefix)):
            raise UsageError(
                f"{key} cannot begin an answer with it ({fault}); write it without blanks at its "
                "ends, or set data.chat=false and write data.template"
            )
        header = begun.removeprefix(before)[: -len(answer_prefix)]
        begin, end = words(answer_prefix), words(header)
        is_twice = any(end[-size:] == begin[:size] for size in range(1, len(begin) + 1))
        require(not is_twice, f"{key} writes it too, and answers would begin with it twice; leave it out")
        return begun


def words(text: str) -> list[str]:
    """The words and tags of a text."""
    return re.findall(r"<[^<>]*>|\[[^][]*\]|[^\s<[]+|\S", text)


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text that goes on: with the special tokens before it, without those that may come after it."""
    ids, bare = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    ends = (start + len(bare) for start in range(len(ids)) if ids[start : start + len(bare)] == bare)
    return list(ids[: next(ends, None)] if bare else ids)
