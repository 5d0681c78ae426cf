"""Conversations as text, in the chat template of a tokenizer."""

from functools import partial
from typing import Any

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError


def chat_text(
    tokenizer: Any,
    question: str,
    answer: str | None = None,
    system: str = "",
    answer_prefix: str = "",
    key: str = "chat=true",
    fix: str = "set chat=false",
) -> str:
    """A question, and perhaps its answer, in the tokenizer's chat template.

    Args:
        tokenizer: Of transformers.
        question: The user's turn.
        answer: The assistant's turn. None ends the text where that turn begins.
        system: The system turn; empty leaves it out.
        answer_prefix: The beginning of the assistant's turn, without an `answer`: the text ends with it.
        key: The setting that asked for a chat, with its value, for messages.
        fix: What to set instead, for messages.

    Raises:
        UsageError: The tokenizer has no chat template, or its template refuses or leaves out a turn.
    """
    if not tokenizer.chat_template:
        raise UsageError(f"{key}: the tokenizer {tokenizer.name_or_path} has no chat template; {fix}")
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": question})
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        text = str(render(turns, add_generation_prompt=answer is None))
    except Exception as error:  # A template is a program, and raises what it likes.
        if system:
            chat_text(tokenizer, question, answer, key=key, fix=fix)
            raise _no_system(system, first_line(error)) from error
        raise UsageError(f"{key}: the chat template of the model refuses this ({first_line(error)}); {fix}") from error
    if system.strip() not in text:
        raise _no_system(system, "it leaves it out")
    if not answer_prefix:
        return text
    if text != render(turns, add_generation_prompt=False):
        return text + answer_prefix
    return _continued(render, turns, text, answer_prefix)


def _continued(render: Any, turns: list[dict[str, str]], text: str, answer_prefix: str) -> str:
    """The assistant's turn where the template writes its beginning only together with it, such as a space."""
    turns = [*turns, {"role": "assistant", "content": answer_prefix}]
    try:
        continued, why = str(render(turns, continue_final_message=True)), "it changes it"
    except Exception as error:
        continued, why = "", first_line(error)
    if not (continued.startswith(text) and continued.endswith(answer_prefix)):
        raise UsageError(
            f"data.answer_prefix={answer_prefix!r}: the chat template of the model cannot begin an answer with it "
            f"({why}); write it without blanks at its ends, or set data.chat=false and write data.template"
        )
    return continued


def _no_system(system: str, why: str) -> UsageError:
    return UsageError(
        f"data.system={system!r}: the chat template of the model takes no system turn ({why}); leave data.system empty "
        "and write its text into data.template"
    )
