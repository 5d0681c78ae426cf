"""The tokens of a conversation: ids that the policy sampled are kept, and the environment's messages are added."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from grpo_lightning.policy.chat import LAYOUTS, hidden, prompt_ids, rendered
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Message, UsageError

PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + (eos_token or '') }}"
    "{% else %}{{ m.content if loop.first else '\n' + m.content + '\n' }}{% endif %}{% endfor %}"
)
"""Stands in for a missing chat template: the first message as it is, later ones between line breaks, and the end token
after each of the policy's turns. So a single question is the same prompt as with `data.chat=false`."""

MARK = "\U000f0000"
"""A private character around special tokens in messages that neither the template nor the policy wrote."""


class Dialogue:
    """Finds the ids that follow a turn of the policy, as the difference between two renderings of the chat template.

    Sampled ids are never replaced, and after every turn all ids decode to what the template renders for the whole
    conversation. A template may rewrite earlier turns: the template of Qwen3 drops their thinking. Then no ids do both,
    and `follow` returns None.

    A special token counts as special where the template or the policy wrote it. In other messages it is plain text, so
    that no answer of a tool can end a turn. A role that the template refuses or leaves out, `system` or `tool`, becomes
    `user`. Messages of the user in a row are joined where the template wants turns to alternate.

    Args:
        tokenizer: Its chat template writes the messages; `PLAIN` does where the tokenizer has no template.
        tools: JSON schemas of the tools.
        variables: Further variables of the template, such as `{"enable_thinking": False}`.

    Raises:
        UsageError: The template refuses even a single message of the user.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), variables: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._template = {"tools": [*tools] or None, **(variables or {})}
        if not tokenizer.chat_template:
            self._template["chat_template"] = PLAIN
        special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = special.keys()
        self._special = "|".join(map(re.escape, sorted(special.values(), key=len, reverse=True))) or "(?!)"
        self._middle = tokenizer.encode("a", add_special_tokens=False)
        self._joins_users = False
        self._refused_roles = frozenset[str]()
        question = [Message(role="user", content="0")]

        # The first layout in which the template shows a message of the user: vision models read lists of parts.
        for self._roles_of_parts in LAYOUTS:
            if self._takes("user"):
                break
        else:
            self._roles_of_parts = ()
            self._rendered(question)
            raise UsageError(
                "the chat template of the model leaves out the messages of the user: change chat_template.jinja in "
                "the model's folder"
            )
        rendered_question = self._rendered(question)

        # What the template refuses is found by trial.
        self._joins_users = not self._takes("user", "user")
        trials = {"system": ("system", "user"), "tool": ("user", "assistant", "tool")}
        self._refused_roles = frozenset(role for role, roles in trials.items() if not self._takes(*roles))
        self.shows_tools = bool(tools) and rendered_question != Dialogue(tokenizer, (), variables)._rendered(question)
        """True if the template shows the tools. If not, the system message should: `ToolFormat.describe`."""

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a conversation up to the policy's next turn, the turn's header included."""
        return self._encode(self._rendered(messages), begins="chat_template" in self._template)

    def follow(
        self, messages: Sequence[Message], sampled_ids: Sequence[int], new_messages: Sequence[Message]
    ) -> list[int] | None:
        """Returns the context ids after a turn of the policy, up to the header of its next turn.

        They begin with the end of the turn, unless the policy sampled it.

        Args:
            messages: The messages before the turn.
            sampled_ids: All ids of the turn, with its stop token if the policy sampled one.
            new_messages: The messages after the turn.

        Returns:
            None where the sampled ids cannot spell what the template now renders. A new piece then begins with
            `start([*messages, turn(sampled_ids), *new_messages])`.
        """
        sampled_text = self._decode(sampled_ids)
        text_before = self._rendered(messages) + sampled_text
        text = self._rendered([*messages, self.turn(sampled_ids), *new_messages])
        if not text.startswith(text_before):
            return None
        context_ids = self._encode(text[len(text_before) :])
        # Where the turn ends inside a character, its first half may swallow text that follows.
        is_joined = self._decode([*sampled_ids, *context_ids]) == sampled_text + self._decode(context_ids)
        return context_ids if is_joined else None

    def turn(self, sampled_ids: Sequence[int]) -> Message:
        """Returns the policy's message: its text, calls of tools included, without the stop token."""
        written_ids = sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in self._special_ids else sampled_ids
        return Message(role="assistant", content=self._decode(written_ids))

    def _rendered(self, messages: Sequence[Message]) -> str:
        """Returns the text up to the policy's next turn, with marks."""
        turns: list[Message] = []
        for message in messages:
            turn = message | {"role": "user"} if message["role"] in self._refused_roles else dict(message)
            if turn["role"] != "assistant":
                turn["content"] = re.sub(self._special, rf"{MARK}\g<0>{MARK}", turn["content"])
            if self._joins_users and turns and turns[-1]["role"] == turn["role"] == "user":
                turns[-1]["content"] += f"\n\n{turn['content']}"
            else:
                turns.append(turn)
        options = {"add_generation_prompt": True} | self._template
        try:
            return rendered(self.tokenizer, turns, self._roles_of_parts, **options)
        except Exception as error:  # a template is a program, and may raise any exception
            roles = ", ".join(message["role"] for message in messages)
            raise UsageError(
                f"the chat template of the model refuses messages of {roles} ({first_line(error)}): change them, or "
                "chat_template.jinja in the model's folder"
            ) from error

    def _takes(self, *roles: str) -> bool:
        """Returns True if the template renders messages of all these roles."""
        messages = [Message(role=role, content=f"{role}{index}") for index, role in enumerate(roles)]
        try:
            return hidden(self._rendered(messages), messages) is None
        except UsageError:
            return False

    def _encode(self, text: str, begins: bool = False) -> list[int]:
        """Returns the ids of a text, in which marked special tokens are plain text.

        Args:
            text: The text, with marks.
            begins: The text begins a prompt: special tokens that the tokenizer puts before a prompt belong to it.
        """
        first_text, *texts = re.split(f"{MARK}({self._special}){MARK}", text)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        ids: list[int] = prompt_ids(self.tokenizer, first_text) if begins else encode(first_text)
        # Marked tokens and the texts between them alternate.
        for index, span in enumerate(texts):
            ids += encode(span, split_special_tokens=index % 2 == 0)
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids in the middle of a text: at its beginning some tokenizers leave out a space."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text_before = decode(self._middle)
        return str(decode([*self._middle, *ids])[len(text_before) :])
