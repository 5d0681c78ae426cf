r"""Finds the answer that a completion commits to.

A policy commits to what stands in its last box. Words around the box win nothing for it, so they are not read: neither
what they explain nor what they deny. What touches the box in its formula belongs to the answer, as in `3\boxed{18}` and
`\boxed{18}\%`; the layout of the formula never does, as in `\boxed{18}\\ \end{align*}`.

1. Reasoning does not count: only the text after the last `</think>` is read, and none while `<think>` is open.
2. The last `\boxed{}` or `\fbox{}`, and the boxes that stand in one list with it: `$\boxed{2}$ and $\boxed{3}$`.
3. Without a box the last `<answer></answer>`.
4. Without both the later of a `####` line and of "answer is" or "answer:", up to the end of its clause.

There is no fallback to the last number: a policy would learn to end on one.
"""

import re

_SPECIAL = re.compile(r"<\|[\w ]+\|>|</s>|<eos>")

# Boxes, and which boxes are one list.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(\d++(?:\.\d+)?|[A-Za-z])(?!\s*[{A-Za-z]))|\\.|[{}]", re.DOTALL)
_INNER = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}|\\(?:boxed|fbox)\s*(?=\{)")
_LIST = re.compile(
    r"(?:.*\b(?:and|or|else|maybe|perhaps|possibly)\b)?"
    r"(?:[^\w=]|\\(?:q?quad|cup)\b|(?<![a-z])[a-z](?:_?\d)?(?![a-z])(?:\s*=)?)*\Z",
    re.IGNORECASE | re.DOTALL,
)
"""The text between two boxes of one list: a separator, and perhaps a name before the second box."""
_SENTENCE_END = re.compile(r"[.!?](?=[\s$)*\\\]]|\Z)|\n\s*\n|\n\s*[A-Z#*<\\$]")
_MAX_GAP = 120

# The text that touches a box: its side of a formula, without layout.
_MATHS = re.compile(r"(?<!\\)\$\$?|\\[()\[\]]")
_RELATION = (
    r"(?<![<>!:])=|(?<!\\left)(?<!\\right)[<>]|\\(?:(?:[lg]e|ne)q?q?|[lg]eqslant|[lg]t|approx|equiv|simeq|sim|in|to"
    r"|therefore|implies|iff|\w*[Rr]ightarrow)(?![A-Za-z])"
)
_LAYOUT = (
    r"&|\\\\(?![A-Za-z])|\\(?:begin|end|tag)\s*\{[^{}]*\}|\^\s*\{?\s*\\circ\}?|\\(?:q?quad|pmod)(?![A-Za-z])"
    r"|(?<=[A-Za-z]):|(?<=[A-Za-z]\}):"
)
_BOUNDARY = re.compile(rf"{_RELATION}|{_LAYOUT}")
"""Marks that end the side of a formula on which a box stands."""
_LABEL = re.compile(r"\\text\s*\{[^{}]*[a-z][^{}]*\}\s*:?\s*\Z")
"""Words in the formula before a box: `\text{the sum is } \boxed{8}`."""
_ADJACENT_LEFT = re.compile(r"(?:\d|[/^+~-]\s?|\\pm\s?)?\Z")
_ADJACENT_RIGHT = re.compile(r"\A(?:\\?[\^!_/%][\w{}]*|\.\w+|\\(?!q?quad|text)[a-z]+|\w*)")
"""The text that touches a box outside of a formula."""
_BLANK = re.compile(r"[\s$*{}]|[.,](?!\d)|\\[,;:! ]|\\(?:left|right|mathbf|displaystyle|underline)(?![a-z])")
_UNIT_MARKUP = re.compile(r"(?:\\(?:text|mathrm|operatorname|mbox)(?![a-z])|\\[,;:! ]|[{}~\s])+")
_UNIT = re.compile(r"/?\s*[A-Za-z][A-Za-z\s/^_.\d-]*")
_POWER = re.compile(r"\^\s*(-?\d+)")
_MAX_AROUND = 1000

# The answer after "answer is" and `####`.
_PHRASE = re.compile(
    r"\banswer\*{0,2}(?:\s+(?:is|equals)\b(?:\s+(?:therefore|thus|then|hence|so|simply|just|exactly|that),?)?\s*:?|\s*:)"
    r"(?:[ \t*]*\n)*",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\$(?:(?!(?<![\\A-Za-z{])[a-z]{3})[^$])+[^$.]\$(?!\d)|\\\((?:(?!\\\)).)+\\\)")
_CLAUSE_END = re.compile(
    r"(?<![ap]\.m)(?<!\ssq)(?<!i\.e)[.](?=[*$]*(?:\s|\Z))(?!\$\s+[a-z])|(?<=[\d*])!(?=[*]*\s+[A-Z])|\\\\(?=\s*\Z)"
    r"|(?<=.)[,;]?\s\(?(?:(?<=, )(?:as|who|with)|because|since|which|where|so|given|giving|after|meaning|namely|we"
    r"|and (?:we|so|thus|hence|this|that|it))\b|(?<=.),?\s\(?i\.e\.|(?<=.);\s*(?=[a-z]{2})|(?<=.)\s(?:—|--)\s",
    re.IGNORECASE,
)
"""The end of a sentence, or the beginning of an explanation."""
_MARKUP = re.compile(r"\*\*|__|(?<!\\)\\[()\[\]]")
_MAX_STATEMENT = 2100

Box = tuple[int, int, str]
"""The start and the end of a box, and its content."""


def extract_answer(text: str) -> str | None:
    """Returns the answer as the completion wrote it; None if there is none."""
    text = _SPECIAL.sub("", text.rpartition("</think>")[2])
    if "<think>" in text:
        return None
    answers = (find(text) for find in (_boxed, _tagged, _stated))
    answer = next((answer for answer in answers if answer is not None), "")
    return answer.strip() or None


# ----- the three forms


def _boxed(text: str) -> str | None:
    """Returns the contents of the last list of boxes, with what touches them."""
    boxes = _boxes(text)
    if not boxes:
        return None
    # The boxes that stand in one list with the last one.
    num_others = len(boxes) - 1
    while num_others and _is_list(text[boxes[num_others - 1][1] : boxes[num_others][0]]):
        num_others -= 1
    boxes = boxes[num_others:]
    contents = dict.fromkeys(_INNER.sub(r"\1", content).replace(" !", "!").strip() for *_, content in boxes)
    if not all(contents):
        return ""
    start, end = boxes[0][0], boxes[-1][1]
    separator = r"\text{ or }" if re.search(r"\bor\b", text[start:end]) else "; "
    left, right = _touching(text[max(0, start - _MAX_AROUND) : start], text[end : end + _MAX_AROUND])
    return f"{left} {separator.join(contents)} {right}"


def _tagged(text: str) -> str | None:
    """Returns the text in the last `<answer></answer>`."""
    text_before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = text_before.rpartition("<answer>")
    return answer if opened and closed else None


def _stated(text: str) -> str | None:
    """Returns the text behind the last `####` or "answer is", up to the end of its clause."""
    # The later of the two.
    hashes = text.rfind("####")
    phrases = list(_PHRASE.finditer(text, max(hashes, 0)))
    if not phrases and hashes < 0:
        return None
    statement = text[phrases[-1].end() if phrases else hashes + 4 :].lstrip(" \t*_")[:_MAX_STATEMENT]
    for opening, closing in (("$$", "$$"), (r"\[", r"\]")):
        if phrases and statement.startswith(opening):
            return statement[2:].partition(closing)[0]

    # The first clause of the line. A formula has no clauses.
    line = statement.partition("\n")[0].replace(r"\$", "$").strip()
    end = _CLAUSE_END.search(_FORMULA.sub(lambda match: "0" * len(match[0]), line))
    clause = _MARKUP.sub(" ", line[: end.start() if end else None].strip(" *_")).strip()
    if clause.endswith("!") and clause[:-1].rstrip()[-1:].isdigit():
        clause = f"{clause[:-1].rstrip()} !"  # no factorial
    is_formula = clause.startswith("$") and clause.endswith("$") and clause.count("$") == 2
    return clause[1:-1] if is_formula else clause


# ----- boxes


def _boxes(text: str) -> list[Box]:
    """Returns the outermost boxes."""
    boxes: list[Box] = []
    opened: list[tuple[int, int]] = []
    start = min((position for name in (r"\boxed", r"\fbox") if (position := text.find(name)) >= 0), default=len(text))
    for match in _BRACE.finditer(text, start):
        if match[1]:
            boxes.append((match.start(), match.end(), match[1]))
        elif match[0] == "}" and opened:
            box, content = opened.pop()
            if box >= 0:
                boxes.append((box, match.end(), text[content : match.start()]))
        elif match[0][-1] == "{" and match[0] != r"\{":
            opened.append((match.start(), match.end()) if len(match[0]) > 1 else (-1, -1))
    outermost: list[Box] = []
    for box_span in sorted(boxes):
        if not outermost or box_span[0] >= outermost[-1][1]:
            outermost.append(box_span)
    return outermost


def _is_list(gap: str) -> bool:
    """Tells whether two boxes with this text between them stand in one list."""
    return len(gap) <= _MAX_GAP and not _SENTENCE_END.search(gap) and _LIST.match(gap) is not None


def _touching(text_before: str, text_after: str) -> tuple[str, str]:
    """Returns the text left and right of a box in its formula, on its side of a relation; empty if only layout."""
    # In a formula, which is still open before the box, the side goes to the formula's ends; else it touches the box.
    start, opened = 0, ""
    for mark in _MATHS.finditer(text_before):
        opened = "" if opened else mark[0]
        start = mark.end()
    if opened and "\n\n" not in text_before[start:]:
        end = _MATHS.search(text_after)
        left = text_before[start:]
        right = text_after[: end.start()] if end else text_after.partition("\n")[0]
    else:
        left = next(match[0] for match in _ADJACENT_LEFT.finditer(text_before))
        right = next(match[0] for match in _ADJACENT_RIGHT.finditer(text_after))

    # Without layout. Letters behind a box are a unit: a factor would stand in the box.
    *_, left = _BOUNDARY.split(_LABEL.sub("", left))
    right = _BOUNDARY.split(right, maxsplit=1)[0]
    unit = _UNIT_MARKUP.sub(" ", right).strip(" .,$")
    if _UNIT.fullmatch(unit):
        right = _POWER.sub(r"^{\1}", rf"\text{{ {unit}}}")
    left, right = (side if _BLANK.sub("", side) else "" for side in (left, right))
    return left, right
