"""The final answer in a completion: found by its form, never guessed from a last number."""

import re

from grpo_lightning.types import Sample

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_SPACE = r"(?:[\s$]|\\[()\[\]]|\\quad|\\,)*"
_BETWEEN_BOXES = re.compile(rf"{_SPACE}(?:,|;|(?:,\s*)?(?:\\text\s*\{{\s*)?(?:and|or)\b\s*\}}?){_SPACE}")
_ADVERB = r"(?:\s+(?:therefore|thus|then|hence|so|simply|just|exactly|indeed|clearly|equal to),?)?"
_PHRASE = re.compile(rf"\banswer\*{{0,2}}(?:\s+is\b{_ADVERB}\s*:?|\s*:)(?:[ \t*]*\n)?", re.IGNORECASE)
_LABEL = re.compile(r"(?:the\s+)?(?:(?:final|correct)\s+)?answer(?:\s+is\s*:?|\s*:)\s*", re.IGNORECASE)
_DISPLAY = re.compile(r"\s*(?:\$\$([^$]+)\$\$|\\\[([^\]]+)\\\])")
_FORMULA = re.compile(r"\**\s*(?:\$\$?((?:\\\$|[^$])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])")
_MORE = re.compile(r"\**\s*(?:,|;|/|-|\bor\b|\band\b|\bto\b)\s*(?:or\b|and\b)?\s*\**[$\\\d(]")
_CLAUSE_END = re.compile(r"\.(?:\s|\**$)|,?\s\(?(?:as|because|since|which)\b")


def extract_answer(text: str) -> str | None:
    r"""The answer as the completion wrote it, or None.

    Reasoning does not count: only what follows the last `</think>`, and nothing while `<think>` is open.
    There the first of these that occurs decides, and of several the last one: `\boxed{}` or `\fbox{}` with
    balanced braces (boxes joined by a comma, "and" or "or" are one answer), `<answer></answer>`, and then
    whichever comes later of a `####` line and "answer is" or "answer:".
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    for find in (_boxed, _tagged, _stated):
        answer = find(text)
        if answer is not None:
            answer = answer.strip()
            return answer[label.end() :].rstrip(".") if (label := _LABEL.match(answer)) else answer or None
    return None


def whole_turn(sample: Sample) -> str:
    """The completion, with the `<think>` in front that its prompt may have ended with."""
    return "<think>" + sample.text if sample.prompt.text.rstrip().endswith("<think>") else sample.text


def _boxed(text: str) -> str | None:
    start = text.find(r"\boxed"), text.find(r"\fbox")
    if start == (-1, -1):
        return None
    boxes: list[tuple[int, int, int]] = []  # where a box starts, where its content does, where that ends
    opened: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text, min(place for place in start if place >= 0)):
        if match[0] == "}":
            if opened:
                box, content = opened.pop()
                if box >= 0:
                    boxes.append((box, content, match.start()))
        elif match[0] == "{":
            opened.append((-1, -1))
        elif match[0][-1] == "{" and len(match[0]) > 2:
            opened.append((match.start(), match.end()))
    if not boxes:
        return None
    boxes.sort()
    first = last = len(boxes) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, boxes[first - 1][2] + 1, boxes[first][0]):
        first -= 1
    return ", ".join(dict.fromkeys(text[content:end].strip() for _, content, end in boxes[first : last + 1]))


def _tagged(text: str) -> str | None:
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer if opened and closed else None


def _stated(text: str) -> str | None:
    hashes = text.rfind("####")
    phrases = list(_PHRASE.finditer(text, max(hashes, 0)))
    if phrases:
        display = _DISPLAY.match(text, phrases[-1].end())
        if display:
            return display[1] or display[2]
        return _first_of(text[phrases[-1].end() :].partition("\n")[0]).strip().strip("*")
    return text[hashes + 4 :].partition("\n")[0] if hashes >= 0 else None


def _first_of(statement: str) -> str:
    """The formula a statement starts with, unless there are more, or its first clause."""
    formula = _FORMULA.match(statement)
    if formula and not _MORE.match(statement, formula.end()):
        return next(group for group in formula.groups() if group is not None)
    return _CLAUSE_END.split(statement, maxsplit=1)[0]
