"""Sampled completions as a table, and as Markdown for the loggers that show text."""

import html
import re
from collections.abc import Sequence

from grpo_lightning.grpo.explore import Exploration

VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
VISIBLE |= {code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Unicode's picture of each control character, and the code of each character that turns the text round."""


def as_table(exploration: Exploration, rows: Sequence[int]) -> list[list[str]]:
    """Returns a header and a line per completion, unescaped."""
    scores = exploration.scores
    table = [["prompt", "gold", "completion", "ended", "reward", *scores.results]]
    for row in rows:
        sample, total = exploration.samples[row], f"{scores.total[row]:.2f}"
        rewards = [f"{value:.2f} {status}" for value, status in scores.describe(row).values()]
        table.append([sample.prompt.text, sample.answer, sample.text, str(sample.finish_reason), total, *rewards])
    return table


def as_page(table: Sequence[Sequence[str]]) -> str:
    """Returns a table of Markdown, which shows every cell unchanged."""
    header, *lines = ([escape(cell) for cell in line] for line in table)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


def escape(text: str) -> str:
    """Returns the text so that Markdown shows it unchanged, in a table too, with lines, spaces, control characters."""
    text = text.replace("\r\n", "\n").replace("\t", "    ").translate(VISIBLE)
    text = re.sub(r"[\\`*_\[\]|~#!+-]", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))
    text = re.sub(r"  +|(?m:^) ", lambda match: "&nbsp;" * len(match[0]), text).replace("\n", "<br>")
    return text.encode(errors="replace").decode()  # a reward may find half a character
