"""The final answer in a completion: found by its form, never guessed, and with all that hedges it."""

import re

from grpo_lightning.types import Sample

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"\\(?:boxed|fbox)\s*(\d+|[A-Za-z])(?!\s*[{A-Za-z])")
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_LAYOUT = re.compile(r"[\s$*]|\\[()\[\],;]|\\q?quad")
_SENTENCE_END = re.compile(r"[.!?](?=[\s$)*\\\]]|\Z)|\n\s*\n|\n\s*[A-Z#*]")
_CORRECTION = re.compile(
    r"\W*(?:no\b|but\b|wait|rather|or\s+rather|actually|i mean|then|so\b|hence|thus|therefore|which|is wrong"
    r"|\bnot?\b.*:)"
    r"|.*\b(?:correct|correction|instead|wrong)\b",
    re.IGNORECASE | re.DOTALL,
)
_ALTERNATIVE = re.compile(
    r"(?:[,;/|&]|or\b|and\b(?!\s*(?:so|thus|hence|we|this|that|it|the|then|is)\b)|\\text\s*\{\s*(?:or|and)\b|\\pm|~|"
    r"\+|-(?!-)|\\cdot|\\times|<|>|\\ne|\\le|\\ge|\\approx|maybe|perhaps|possibly|to\s+[$\d])",
    re.IGNORECASE,
)
_FACTOR = re.compile(r"\\(?:pi|sqrt|[dt]?frac|binom|infty)(?![A-Za-z])|\d")
_DENIAL = re.compile(
    r"(?:\b(?:not|isn't|aren't|never|cannot be|can't be|neither|wrong)|n't)\b\W*(?:\w+\W*){0,2}\Z", re.IGNORECASE
)
_EITHER = re.compile(
    r"\b(?:either|maybe|perhaps|possibly|might be|could be)\b|\bor\s*(?:else\s*)?(?:the\s*)?\Z", re.IGNORECASE
)
_PREFIX = re.compile(r"(-|\+|<|>|\\neq?|\\leq?|\\geq?|\\pm|\\approx|~|\\[dt]?frac\{|\\sqrt\{)\Z")

_ADVERB = r"(?:\s+(?:therefore|thus|then|hence|so|simply|just|exactly|indeed|clearly|equal to),?)?"
_PHRASE = re.compile(rf"\banswer\*{{0,2}}(?:\s+is\b{_ADVERB}\s*:?|\s*:)(?:[ \t*]*\n)*", re.IGNORECASE)
_LABEL = re.compile(r"(?:the\s+)?(?:(?:final|correct)\s+)?answer(?:\s+is\s*:?|\s*:)\s*", re.IGNORECASE)
_DISPLAY = re.compile(r"\s*(?:\$\$([^$]+)\$\$|\\\[([^\]]+)\\\])[ \t]*(?=\n|\Z)")
_CLAUSE_END = re.compile(
    r"(?<![ap]\.m)(?<!\ssq)\.(?!\**\s+(?:[Oo]r|[Mm]aybe|[Pp]erhaps|[Pp]ossibly)\b)(?=\**(?:\s|\Z)|\$?\**\s*(?:\Z|\s[A-Z]))"
    r"|[,;]?\s\(?(?:"
    r"(?<!many )(?<!much )as(?! (?:many|much|long|old|tall|far|fast|big|large|heavy)\b)"
    r"|because|since|which|where|so that|giving|after|meaning|i\.e\.|namely)\b"
    r"|,\s*(?:so|as|for|I|we|and (?:we|so|thus|hence|that|this|it))\b|;\s*(?=[a-z]{2,} )"
    r"|\s\((?=(?:as|since|because|rounded|which|from|where|see|i\.e\.)\b)"
    r"|(?<=[\d*])!(?=\**\s+[A-Z])"
    r"|\s(?:—|--)\s|\sand we\b|\\\\(?=\s*\Z)"
)
_AMENDED = re.compile(
    r"\b(?:unless|maybe|perhaps|possibly|(?:is|was) wrong)\b|\bor\b(?:\s+\w+){0,2}?\s*[$\\({]*-?\d[\w{}$)]*\s*\Z"
    r"|[^\d\s],\s*\$?\d+\s*\Z|\A[,;]?\s\(?after\b.*\band\s+\$?\d+\s*\Z",
    re.IGNORECASE,
)
"""What an explanation must not say: it would be part of the answer."""
_INLINE = re.compile(r"\$(?:(?!(?<![\\A-Za-z{])[a-z]{3})[^$])+[^$.]\$(?!\d)|\\\((?:(?!\\\)).)+\\\)")
_MAX_STATEMENT = 2100
_SPECIAL = re.compile(r"<\|[\w ]+\|>|</s>|<eos>")


def extract_answer(text: str) -> str | None:
    r"""The answer as the completion wrote it, or None.

    Reasoning does not count: only what follows the last `</think>`, and nothing while `<think>` is open.
    There the first of these that occurs decides, and of several the last one: `\boxed{}` or `\fbox{}` with
    balanced braces, `<answer></answer>`, and then whichever comes later of a `####` line and "answer is" or
    "answer:". What stands beside it in the same sentence belongs to it: boxes joined by a comma, "and" or "or"
    are one answer, and so are a sign or a "not" before it and an "or" behind it.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    if "<|" in text or "<" in text:
        text = _SPECIAL.sub("", text)
    for find in (_boxed, _tagged, _stated):
        answer = find(text)
        if answer is not None:
            answer = answer.strip()
            label = _LABEL.match(answer)
            return answer[label.end() :].rstrip(".") if label else answer or None
    return None


def whole_turn(sample: Sample) -> str:
    """The completion, with the `<think>` in front that its prompt may have ended with."""
    return "<think>" + sample.text if sample.prompt.text.rstrip().endswith("<think>") else sample.text


def _boxed(text: str) -> str | None:
    """The last box and what its sentence adds to it."""
    if r"\boxed" not in text and r"\fbox" not in text:
        return None
    boxes = _boxes(text)
    if not boxes:
        return None
    first = last = len(boxes) - 1
    while first and _belongs(text[boxes[first - 1][2] : boxes[first][0]]):
        first -= 1
    contents = list(
        dict.fromkeys(
            re.sub(r"\s+!(?!=)", "!", _without_boxes(text[start:end]).strip())
            for _, start, end, *_ in _inner(boxes[first:])
        )
    )
    if not all(contents):
        return ""
    before = _LAYOUT.sub("", text[max(0, boxes[first][0] - 40) : boxes[first][0]])
    sign = _PREFIX.search(re.sub(r"</?\w+>", "", before))
    if sign and first == last:
        contents[0] = f"{sign[1]} {contents[0]}"
    head = text[max(0, boxes[first][0] - 200) : boxes[first][0]]
    head = _SENTENCE_END.split(head)[-1]
    if _DENIAL.search(re.sub(r"[$\\(\[{]|[A-Za-z]\s*=", " ", head).rstrip()):
        return f"not {contents[0]}"
    tail = text[boxes[last][2] : boxes[last][2] + 200]
    return "; ".join(contents) + _hedge(tail)


def _without_boxes(text: str) -> str:
    return _BOX_COMMAND.sub("", re.sub(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r"\1", text))


def _hedge(tail: str) -> str:
    """What the sentence says against the answer behind it: an alternative, a change."""
    tail = _SENTENCE_END.split(tail, maxsplit=1)[0]
    beginning = re.sub(r"\A(?:[\s$*)\]}]|</?\w+>|\\[()\[\],;!]|\\q?quad)+", "", tail)
    if tail[:1] in ("^", "!", "_") or _FACTOR.match(tail):
        return f" {tail}"
    if not _ALTERNATIVE.match(beginning):
        return ""
    what = re.sub(r"[$*]", " ", beginning).strip(" .,;")
    if re.match(r"[,;]\s*(?!or\b|maybe|perhaps|possibly)[A-Za-z]", beginning) or not what:
        return ""
    return f" {what}" if re.search(r"[\w\\]", what) else ""


def _inner(boxes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    return [(start, content, end) for start, content, _, end in boxes]


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Outermost boxes: where each starts, where its content does, where the box ends and where its content does."""
    boxes: list[tuple[int, int, int, int]] = [
        (match.start(), match.start(1), match.end(), match.end(1)) for match in _UNBRACED.finditer(text)
    ]
    opened: list[tuple[int, int]] = []
    start = min(place for place in (text.find(r"\boxed"), text.find(r"\fbox")) if place >= 0)
    for match in _BRACES.finditer(text, start):
        if match[0] == "}":
            if opened:
                box, content = opened.pop()
                if box >= 0:
                    boxes.append((box, content, match.end(), match.start()))
        elif match[0] == "{":
            opened.append((-1, -1))
        elif match[0][-1] == "{" and len(match[0]) > 2:
            opened.append((match.start(), match.end()))
    boxes.sort()
    outer: list[tuple[int, int, int, int]] = []
    for found in boxes:
        if not outer or found[0] >= outer[-1][2]:
            outer.append(found)
    return outer


def _belongs(gap: str) -> bool:
    """Whether two boxes with this between them are one answer: on one line, unless the second corrects the first."""
    if len(gap) > 120 or _SENTENCE_END.search(gap):
        return False
    plain = _LAYOUT.sub(" ", gap).strip()
    return not _CORRECTION.match(plain)


def _tagged(text: str) -> str | None:
    before, closed, _ = text.rpartition("</answer>")
    head, opened, answer = before.rpartition("<answer>")
    if not (opened and closed):
        return None
    _, earlier, gap = head.rpartition("</answer>")
    return f"{answer} or another" if earlier and re.fullmatch(r"\W*(?:or|and)\W*", gap) else answer


def _stated(text: str) -> str | None:
    hashes = text.rfind("####")
    phrases = list(_PHRASE.finditer(text, max(hashes, 0)))
    if not phrases:
        return _clause(text[hashes + 4 :].partition("\n")[0]) if hashes >= 0 else None
    phrase = phrases[-1]
    head = _SENTENCE_END.split(text[max(0, phrase.start() - 200) : phrase.start()])[-1]
    if _EITHER.search(head.rstrip()):
        return f"either {text[phrase.end() :].partition(chr(10))[0]}"
    display = _DISPLAY.match(text, phrase.end())
    if display:
        return display[1] or display[2]
    return _clause(text[phrase.end() :].partition("\n")[0])


def _clause(statement: str) -> str:
    """What a statement says before its sentence ends or an explanation begins."""
    statement = statement.lstrip()[:_MAX_STATEMENT].replace(r"\$", "$").strip()
    masked = _INLINE.sub(lambda match: "0" * len(match[0]), statement)  # a formula has no clauses
    end = _CLAUSE_END.search(masked)
    if end and _AMENDED.search(_SENTENCE_END.split(statement[end.start() :], maxsplit=1)[0]):
        end = None
    clause = statement[: end.start()] if end else statement
    clause = re.sub(r",?\s*\\text\s*\{\s*,?\s*\Z", "", clause) if end else clause
    clause = re.sub(r"\*\*|__|\A\*|\*\Z", " ", clause).strip()
    clause = re.sub(r"(?<!\\)\\[()\[\]]", " ", clause).strip()
    clause = re.sub(r"(?<=\d)\s*!\Z", " !", clause)  # the end of a sentence, and no factorial
    formula = re.fullmatch(r"\$([^$]+)\$", clause)
    return formula[1].strip() if formula else clause
