"""Conversations as text, in the chat template of a tokenizer."""

from functools import partial
from typing import Any

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError, require


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

    Without an answer the text ends where the assistant's turn begins, or with its beginning, `answer_prefix`. Messages
    name `key`, the setting that asked for a chat, and `fix`, what to set instead.
    """
    no_system = f"data.system={system!r}: the chat template of the model takes no system turn"
    instead = "leave data.system empty and write its text into data.template"
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
            raise UsageError(f"{no_system} ({first_line(error)}); {instead}") from error
        raise UsageError(f"{key}: the chat template of the model refuses this ({first_line(error)}); {fix}") from error
    require(system.strip() in text, f"{no_system} (it leaves it out); {instead}")
    if not answer_prefix:
        return text
    if text != render(turns, add_generation_prompt=False):
        return text + answer_prefix
    # The template has no mark for the beginning of an answer, and may write a space before one.
    turns.append({"role": "assistant", "content": answer_prefix})
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
