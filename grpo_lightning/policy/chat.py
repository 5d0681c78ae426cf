"""Conversations as text, in the chat template of a tokenizer."""

from typing import Any

from jinja2.exceptions import TemplateError

from grpo_lightning.types import UsageError


def chat_text(
    tokenizer: Any,
    question: str,
    answer: str | None = None,
    system: str = "",
    key: str = "chat=true",
    fix: str = "set chat=false",
) -> str:
    """A question, and perhaps its answer, in the tokenizer's chat template.

    Args:
        tokenizer: Of transformers.
        question: The user's turn.
        answer: The assistant's turn. None ends the text where that turn begins.
        system: The system turn; empty leaves it out.
        key: The setting that asked for a chat, with its value, for messages.
        fix: What to set instead, for messages.

    Raises:
        UsageError: The tokenizer has no chat template, or its template refuses these turns.
    """
    if not tokenizer.chat_template:
        raise UsageError(f"{key}: the tokenizer {tokenizer.name_or_path} has no chat template; {fix}")
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": question})
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer is None))
    except TemplateError as error:
        raise UsageError(f"{key}: the chat template of the model refuses this ({error}); {fix}") from error
