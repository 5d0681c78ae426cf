"""The tokens of a conversation: what the policy drew is kept, what the environment wrote is added."""

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

MARK = "\U000f0000"  # a private character around special tokens that others than template and policy wrote


class Dialogue:
    """Finds the ids that follow a turn of the policy, as the difference between two renderings of the chat template.

    Drawn ids are never replaced, and after every turn all ids decode to what the template renders for the whole
    conversation. A template may rewrite earlier turns: Qwen3's drops their thinking. Then no ids do both, and `follow`
    returns None.

    A special token counts as one where the template or the policy wrote it. In other messages it is plain text, so
    that no answer of a tool can end a turn. A role that the template refuses or leaves out, `system` or `tool`, becomes
    `user`. Messages of the user in a row become one where the template wants turns to alternate.

    `PLAIN` is the template of a tokenizer that has none. Tools are JSON schemas. `variables` are further ones of the
    template, such as `{"enable_thinking": False}`. Raises UsageError where it refuses even one message of the user.
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
        self._joins, self._refused = False, frozenset[str]()
        question = [Message(role="user", content="0")]
        # Vision models read lists of parts.
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
        shown = self._rendered(question)
        self._joins = not self._takes("user", "user")
        uses = {"system": ("system", "user"), "tool": ("user", "assistant", "tool")}
        self._refused = frozenset(role for role, roles in uses.items() if not self._takes(*roles))
        self.shows_tools = bool(tools) and shown != Dialogue(tokenizer, (), variables)._rendered(question)
        """True if the template shows the tools. If not, the system message should: `ToolFormat.describe`."""

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to the policy's next turn, its header included."""
        return self._encode(self._rendered(messages), begins="chat_template" in self._template)

    def follow(
        self, messages: Sequence[Message], sampled_ids: Sequence[int], new_messages: Sequence[Message]
    ) -> list[int] | None:
        """The given ids after a turn: its end, unless the policy drew it, new messages, the header of the next turn.

        `messages` come before the turn; `sampled_ids` are all of it, with its stop token if the policy drew one. None
        where kept ids cannot spell what the template now renders. A new completion then begins with
        `start([*messages, turn(sampled_ids), *new_messages])`.
        """
        drawn = self._decode(sampled_ids)
        before = self._rendered(messages) + drawn
        whole = self._rendered([*messages, self.turn(sampled_ids), *new_messages])
        if not whole.startswith(before):
            return None
        given = self._encode(whole[len(before) :])
        # Not so where a character was cut in two, and its first half takes part of what follows with it.
        joined = self._decode([*sampled_ids, *given]) == drawn + self._decode(given)
        return given if joined else None

    def turn(self, sampled_ids: Sequence[int]) -> Message:
        """The message that the policy drew: its text, calls of tools included, without the stop token."""
        written = sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in self._special_ids else sampled_ids
        return Message(role="assistant", content=self._decode(written))

    def _rendered(self, messages: Sequence[Message]) -> str:
        """The text up to the policy's next turn, with marks."""
        turns: list[Message] = []
        for message in messages:
            turn = message | {"role": "user"} if message["role"] in self._refused else dict(message)
            if turn["role"] != "assistant":
                turn["content"] = re.sub(self._special, rf"{MARK}\g<0>{MARK}", turn["content"])
            if self._joins and turns and turns[-1]["role"] == turn["role"] == "user":
                turns[-1]["content"] += f"\n\n{turn['content']}"
            else:
                turns.append(turn)
        options = {"add_generation_prompt": True} | self._template
        try:
            return rendered(self.tokenizer, turns, self._roles_of_parts, **options)
        except Exception as error:  # A template is a program, and raises what it likes.
            roles = ", ".join(message["role"] for message in messages)
            raise UsageError(
                f"the chat template of the model refuses messages of {roles} ({first_line(error)}): change them, or "
                "chat_template.jinja in the model's folder"
            ) from error

    def _takes(self, *roles: str) -> bool:
        """True if the template renders messages of all these roles."""
        messages = [Message(role=role, content=f"{role}{index}") for index, role in enumerate(roles)]
        try:
            return hidden(self._rendered(messages), messages) is None
        except UsageError:
            return False

    def _encode(self, text: str, begins: bool = False) -> list[int]:
        """The ids of a text, in which marked special tokens are plain text; one that `begins` has those before it."""
        first, *pieces = re.split(f"{MARK}({self._special}){MARK}", text)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        ids: list[int] = prompt_ids(self.tokenizer, first) if begins else encode(first)
        for index, piece in enumerate(pieces):
            ids += encode(piece, split_special_tokens=index % 2 == 0)
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        """The text of ids in the middle of others: at the beginning some tokenizers leave out a space."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        before, whole = (self.tokenizer.decode(part, **options) for part in (self._middle, [*self._middle, *ids]))
        return str(whole[len(before) :])
