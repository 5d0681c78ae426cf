"""Sampled completions as a page of Markdown, for the loggers that show text."""

import html
import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from grpo_lightning.training.explorer import Exploration
from grpo_lightning.types import Sample

BEFORE = r"(<answer>|boxed\{|####|answer is:?)\s*"
"""What stands before a final answer."""


def as_page(exploration: Exploration, rows: Sequence[int], folder: str | Path) -> str:
    """Each prompt once, with a table of its completions; text of the model is escaped, its answer is bold.

    Args:
        exploration: The completions and their scores.
        rows: Those that are shown, group after group.
        folder: The run's.
    """
    groups = groupby(rows, key=lambda row: exploration.samples[row].prompt.id)
    parts = [_group(exploration, list(group)) for _, group in groups]
    hint = f"What the updates did to each token: `grpo inspect {shlex.quote(str(folder))}`"
    return "\n\n".join([hint, *parts]).encode(errors="replace").decode()  # a reward may find half a character


def _group(exploration: Exploration, rows: Sequence[int]) -> str:
    first, scores = exploration.samples[rows[0]], exploration.scores
    answers = scores.main.answer or [None] * len(exploration.samples)
    header = ["reward", "ended", *scores.results, "completion"]
    lines = [[solid(name) for name in header], ["---"] * len(header)]
    for row in rows:
        sample = exploration.samples[row]
        each = [f"{value:.2f} {status}" for value, status in scores.describe(row).values()]
        facts = [f"{scores.total[row]:.2f}", str(sample.finish_reason), *each]
        lines.append([*map(solid, facts), whole(sample, answers[row])])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**prompt**\n\n> {escape(first.prompt.text)}\n\n**gold** {escape(first.answer)}\n\n{table}"


def whole(sample: Sample, answer: str | None) -> str:
    """A completion; of a conversation every message from the first turn on, with its writer and the turn's reward."""
    talk = sample.conversation
    turns = [i for i, one in enumerate(talk.messages) if one["role"] == "assistant"] if talk else []
    turns = turns[-len(talk.ends) :] if talk and talk.ends else []  # The first messages may have examples of turns.
    if not talk or not turns or talk.messages[turns[0] :] == talk.messages[-1:]:
        return completion(sample.text, answer)
    lines = []
    for index, message in enumerate(talk.messages[turns[0] :], start=turns[0]):
        text, name = escape(message["content"]), message["role"]
        if index in turns:
            number = turns.index(index)
            name = f"turn {number + 1}" + (f", {talk.rewards[number]:+.2f}" if any(talk.rewards) else "")
            text = completion(message["content"], answer) if index == turns[-1] else text
        elif name == "tool":
            name = f"tool {message.get('name', '')}".strip()
        lines.append(f"<em>{escape(name)}</em> {text}")
    return "<br>".join(lines)


def completion(text: str, answer: str | None) -> str:
    """The text, with the answer that a reward has found in it in bold."""
    found = span_of(text, answer)
    if found is None:
        return escape(text)
    start, end = found
    return f"{escape(text[:start])}<strong>{escape(text[start:end])}</strong>{escape(text[end:])}"


def span_of(text: str, answer: str | None) -> tuple[int, int] | None:
    """Where the answer stands: behind a tag, a box or the like, else the last time that it stands alone."""
    if not answer:
        return None
    exact = re.escape(answer)
    for pattern in (f"{BEFORE}(?P<answer>{exact})", rf"(?<![\w.])(?P<answer>{exact})(?!\w|\.\d)"):
        if matches := list(re.finditer(pattern, text, re.IGNORECASE)):
            return matches[-1].span("answer")
    return None


def solid(text: str) -> str:
    """The text, escaped, so that no column of a table breaks it into lines of one letter."""
    return escape(text).replace(" ", "&nbsp;").replace("-", "&#8209;")


def escape(text: str) -> str:
    """The text, so that Markdown shows it unchanged, also in a table: lines, spaces and control characters are kept."""
    text = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", visible, text.replace("\r\n", "\n").replace("\t", "    ")
    )
    text = re.sub(r"[\\`*_\[\]|~#!+-]", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))
    return re.sub(r"  +|(?m:^) ", lambda match: "&nbsp;" * len(match[0]), text).replace("\n", "<br>")


def visible(character: re.Match[str]) -> str:
    """The picture that Unicode has for a control character; the code of one that turns the text round."""
    code = ord(character[0])
    if code > 0x7F:
        return f"<U+{code:04X}>"
    return chr(0x2421 if code == 0x7F else 0x2400 + code)
