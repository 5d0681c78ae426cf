r"""The choices of a multiple-choice question: `(A) 3 (B) 4`, `\textbf{(A)}\ 3 \qquad \textbf{(B)}\ 4`, `A. 3`."""

from functools import lru_cache

from grpo_lightning.plugins.verifier.rules import rewriting, rule

_MARKERS = [
    rule(
        r"\\(?:text|mathrm|math)(?:bf|rm)?\s*\{\s*\(?([A-J])\)?[.:]?\s*\)?\s*\}",
        r"«\textbf{(A)}» 3 «\text{B.}» 4",
        r"\text{(K)}",
    ),
    rule(r"\(([A-J])\)", "«(A)» 3 «(B)» 4", "f(x)"),
    rule(r"(?<![\w$\\({])([A-J])[.):](?=\s)", "«A.» 3 «B)» 4", "A.M."),
]
_LAYOUT = rule(r"(?:\\q?quad|\\hspace\{[^{}]*\}|\\[ ,;]|[~\s,;$]|\\\\)+", r"«\quad »3«,\\ »", "3")
_WITHOUT_END = rewriting(r"(?:\\q?quad|\\[ ,;]|[~\s,;.$]|\\\\)+\Z", "", r"3, \qquad -> 3")


@lru_cache(maxsize=1 << 10)
def choices_in(question: str) -> dict[str, str]:
    """The text of each choice by its letter; empty if the letters do not run from A on."""
    for marker in _MARKERS:
        found = list(marker.finditer(question))
        starts = [index for index, match in enumerate(found) if match[1] == "A"]
        for start in starts[::-1]:
            run = found[start:]
            if len(run) < 2 or [match[1] for match in run] != list("ABCDEFGHIJ"[: len(run)]):
                continue
            ends = [match.start() for match in run[1:]] + [_end(question, run[-1].end())]
            texts = [question[match.end() : end] for match, end in zip(run, ends, strict=True)]
            return {match[1]: _bare(text) for match, text in zip(run, texts, strict=True)}
    return {}


def _end(question: str, start: int) -> int:
    """The index at which the last choice ends: with its paragraph."""
    end = question.find("\n\n", start)
    return end if end >= 0 else len(question)


def _bare(text: str) -> str:
    while (bare := _strip(text)) != text:
        text = bare
    return text


def _strip(text: str) -> str:
    text = text.strip()
    if match := _LAYOUT.match(text):
        text = text[match.end() :]
    return _WITHOUT_END(text)
