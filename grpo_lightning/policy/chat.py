"""Conversations as text, in the chat template of a tokenizer."""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Message, UsageError, require

DAY = date(2024, 7, 26)
"""The date of today for templates that write it. Prompts depend on the configuration and not on the clock, so that a
run that goes on tomorrow sees the same prompts. Llama 3's template writes this day where it has no clock."""

ROLES = ("system", "user", "assistant", "tool")
LAYOUTS: Sequence[Sequence[str]] = ((), ROLES, ROLES[1:])
"""Sets of roles whose `content` is a list of parts, as vision models read it, in the order of the trials."""


def rendered(tokenizer: Any, messages: Sequence[Message], roles_of_parts: Sequence[str] = (), **options: Any) -> str:
    """Returns the messages in the chat template, on the day `DAY`.

    Args:
        tokenizer: The tokenizer with the template.
        messages: The turns, with text as content, or a list of parts where they show images.
        roles_of_parts: Roles whose content is written as a list of one part.
        options: Further arguments of `apply_chat_template`.
    """
    turns = []
    for turn in messages:
        content = turn["content"]
        if isinstance(content, str) and turn["role"] in roles_of_parts:
            turn = turn | {"content": [{"type": "text", "text": content}]}
        turns.append(turn)
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    if "strftime_now" in template:
        # A macro takes the place of the clock. The text behind it keeps a line break at its beginning.
        signs = {f"%{sign}": DAY.strftime(f"%{sign}") for sign in "aAbBcCdDeFgGhHIjmMnprRStTuUVwWxXyYzZ%"}
        replace = "".join(f" | replace('{sign}', '{text}')" for sign, text in ({"%-": "%"} | signs).items())
        template = f"{{% macro strftime_now(format) %}}{{{{ format{replace} }}}}{{% endmacro %}}{{{{ '' }}}}" + template
    return str(tokenizer.apply_chat_template(turns, tokenize=False, **options | {"chat_template": template}))


def hidden(text: str, messages: Sequence[Message]) -> str | None:
    """Returns the first content that is missing in a rendered text; a template may trim contents, and nothing else."""
    contents = [text.strip() for message in messages for text in texts_of(message["content"])]
    # A template that expects text writes a list of parts as Python or JSON would.
    mark = "'type': 'text'"
    is_list = text.replace('"', "'").count(mark) > "".join(contents).replace('"', "'").count(mark)
    return next((content for content in contents if is_list or content not in text), None)


def texts_of(content: Any) -> list[str]:
    """Returns the texts of a message's content: the text itself, or that of each part that has one."""
    return [content] if isinstance(content, str) else [item["text"] for item in content if "text" in item]


class Chat:
    """Writes questions in the chat template of a tokenizer, and proves that they stand in the text as they are.

    Raises UsageError where a template leaves out or changes the system turn or the question, refuses them, or writes
    something else each time.

    Args:
        tokenizer: With a chat template, which may read messages as text or as lists of parts.
        system: System turn; empty leaves it out.
        variables: Further variables of the template, such as `{"enable_thinking": False}`.
        key: The setting that turns the chat template on, for messages.
        advice: The advice at the end of messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str = "",
        variables: Mapping[str, Any] | None = None,
        key: str = "chat=true",
        advice: str = "set chat=false",
    ) -> None:
        if not tokenizer.chat_template:
            raise UsageError(f"{key}: the tokenizer {tokenizer.name_or_path} has no chat template; {advice}")
        self.tokenizer = tokenizer
        self.variables = variables or {}
        self.refusal = f"{key}: the chat template of the model"
        self.advice = advice
        self.system = [Message(role="system", content=system)] if system else []

        # Does the template write a question, with the system turn?
        probe = [Message(role="user", content="What is the question?")]
        fault = self._adapt(self.system + probe)
        if fault and system and not self._adapt(probe):
            raise UsageError(
                f"data.system={system!r}: the chat template of the model takes no system turn ({fault}); "
                "leave data.system empty and write its text into data.template"
            )
        require(not fault, f"{self.refusal} refuses this ({fault}); {advice}")

    def _adapt(self, messages: Sequence[Message]) -> str:
        """Finds the roles whose content is a list of parts.

        Returns:
            The reason why the template cannot write the messages; empty if it can.
        """
        faults = []
        for self.roles_of_parts in LAYOUTS:
            try:
                text, *other_texts = {self._rendered(messages) for _ in range(8)}
            except Exception as error:  # A template is a program, and raises exceptions of any class.
                faults.append(first_line(error))
                continue
            if other_texts:
                return "it writes something else each time"
            if hidden(text, messages) is None:
                return ""
            faults.append("it leaves it out")
        return faults[0]

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        options = {"add_generation_prompt": True, **self.variables, **options}
        return rendered(self.tokenizer, messages, self.roles_of_parts, **options)

    def text(self, messages: Sequence[Message], answer_prefix: str = "") -> str:
        """Returns the text up to the beginning of the assistant's turn, which may begin with `answer_prefix`."""
        turns = [*self.system, *messages]
        try:
            text = self._rendered(turns)
        except Exception as error:
            raise UsageError(f"{self.refusal} refuses this ({first_line(error)}); {self.advice}") from error
        # Some templates leave out the thinking in earlier answers.
        missing_content = hidden(text, [message for message in turns if message["role"] != "assistant"])
        if missing_content is not None:
            raise UsageError(f"{self.refusal} leaves out or changes {missing_content!r:.80}; {self.advice}")
        if not answer_prefix:
            return text

        # The prefix follows the mark for the beginning of an answer. Without such a mark the template writes the
        # prefix as an answer that is not closed: it may put a space before an answer.
        text_of_turns = self._rendered(turns, add_generation_prompt=False)
        prefixed_text = text + answer_prefix
        fault = "it changes it"
        if text == text_of_turns:
            turns.append(Message(role="assistant", content=answer_prefix))
            try:
                prefixed_text = self._rendered(turns, add_generation_prompt=False, continue_final_message=True)
            except Exception as error:
                prefixed_text = ""
                fault = first_line(error)
        key = f"data.answer_prefix={answer_prefix!r}: the chat template of the model"
        if not (prefixed_text.startswith(text) and prefixed_text.endswith(answer_prefix)):
            raise UsageError(
                f"{key} cannot begin an answer with it ({fault}); write it without blanks at its "
                "ends, or set data.chat=false and write data.template"
            )

        # Does the template's mark end as the prefix begins?
        mark_words = words(prefixed_text.removeprefix(text_of_turns)[: -len(answer_prefix)])
        prefix_words = words(answer_prefix)
        is_twice = any(mark_words[-size:] == prefix_words[:size] for size in range(1, len(prefix_words) + 1))
        require(not is_twice, f"{key} writes it too, and answers would begin with it twice; leave it out")
        return prefixed_text


def words(text: str) -> list[str]:
    """Returns the words and tags of a text."""
    return re.findall(r"<[^<>]*>|\[[^][]*\]|[^\s<[]+|\S", text)


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text that goes on: with special tokens in front, but none at its end."""
    ids = tokenizer.encode(text)
    bare_ids = tokenizer.encode(text, add_special_tokens=False)
    length = len(bare_ids)
    ends = (start + length for start in range(len(ids)) if ids[start : start + length] == bare_ids)
    return list(ids[: next(ends, None)] if bare_ids else ids)
