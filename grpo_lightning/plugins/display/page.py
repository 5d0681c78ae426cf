"""Sampled completions as a page of Markdown, for the loggers that show text."""

import html
import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.types import Sample

BEFORE = r"(<answer>|boxed\{|####|answer is:?)\s*"
"""What stands before a final answer."""

VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
VISIBLE |= {code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""The picture that Unicode has for a control character; the code of one that turns the text round."""


def as_page(exploration: Exploration, rows: Sequence[int], folder: str | Path) -> str:
    """Each prompt once, with a table of its completions; text of the model is escaped, its answer is bold."""
    samples, scores = exploration.samples, exploration.scores
    answers = scores.main.answer or [None] * len(samples)
    header = ["reward", "ended", *scores.results, "completion"]
    parts = [f"What the updates did to each token: `grpo inspect {shlex.quote(str(folder))}`"]
    for _, group in groupby(rows, key=lambda row: samples[row].prompt.id):
        own = [*group]
        prompt, gold = escape(samples[own[0]].prompt.text), escape(samples[own[0]].answer)
        lines = [[*map(solid, facts_of(exploration, row)), whole(samples[row], answers[row])] for row in own]
        table = [[*map(solid, header)], ["---"] * len(header), *lines]
        parts += [f"**prompt**\n\n> {prompt}", f"**gold** {gold}"]
        parts += ["\n".join(f"| {' | '.join(line)} |" for line in table)]
    return "\n\n".join(parts).encode(errors="replace").decode()  # a reward may find half a character


def as_table(exploration: Exploration, rows: Sequence[int]) -> list[list[str]]:
    """A header and one line per completion, unescaped."""
    table = [["prompt", "gold", "completion", "ended", "reward", *exploration.scores.results]]
    for row in rows:
        sample, (reward, ended, *scores) = exploration.samples[row], facts_of(exploration, row)
        table.append([sample.prompt.text, sample.answer, sample.text, ended, reward, *scores])
    return table


def facts_of(exploration: Exploration, row: int) -> list[str]:
    """The total reward of a completion, how it ended, and the value and status of each reward."""
    scores = [f"{value:.2f} {status}" for value, status in exploration.scores.describe(row).values()]
    return [f"{exploration.scores.total[row]:.2f}", str(exploration.samples[row].finish_reason), *scores]


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
    start, end = span_of(text, answer) or (0, 0)
    bold = f"<strong>{escape(text[start:end])}</strong>" if end else ""
    return f"{escape(text[:start])}{bold}{escape(text[end:])}"


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
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    text = text.translate(VISIBLE)
    text = re.sub(r"[\\`*_\[\]|~#!+-]", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))
    return re.sub(r"  +|(?m:^) ", lambda match: "&nbsp;" * len(match[0]), text).replace("\n", "<br>")
