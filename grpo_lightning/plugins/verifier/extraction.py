"""Extracts the final answer of a completion, found by its form, together with all that hedges it."""

import re

from grpo_lightning.plugins.verifier.rules import rewriting, rule

_BRACES = rule(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", r"«\boxed{»7«\,»«}»", "7", flags=re.DOTALL)
_UNBRACED = rule(r"\\(?:boxed|fbox)\s*(\d+|[A-Za-z])(?!\s*[{A-Za-z])", r"So «\boxed 7».", r"\boxed{7}")
_BOX_COMMAND = rule(r"\\(?:boxed|fbox)\s*(?=\{)", r"«\boxed»{7}", r"\boxed 7")
_LAYOUT = rule(r"[\s$*]|\\[()\[\],;]|\\q?quad", r"«$»7«$»« »«\quad»", "7")
_SENTENCE_END = rule(r"[.!?](?=[\s$)*\\\]]|\Z)|\n\s*\n|\n\s*[A-Z#*]", "It is 1.5«.» Yes«!»", "It is 7«\n\n»and", "1.5")
_CORRECTION = rule(
    r"\W*(?:no\b|but\b|wait|rather|or\s+rather|actually|i mean|then|so\b|hence|thus|therefore|which|is wrong"
    r"|\bnot?\b.*:)"
    r"|.*\b(?:correct|correction|instead|wrong)\b",
    "«, wait» 8",
    "«, or rather» 8",
    "«not the final one:» 8",
    "«, that is wrong»",
    "and 8",
    flags=re.IGNORECASE | re.DOTALL,
)
_ALTERNATIVE = rule(
    r"(?:[,;/|&]|or\b|and\b(?!\s*(?:so|thus|hence|we|this|that|it|the|then|is)\b)|\\text\s*\{\s*(?:or|and)\b|\\pm|~|"
    r"\+|-(?!-)|\\cdot|\\times|<|>|\\ne|\\le|\\ge|\\approx|maybe|perhaps|possibly|to\s+[$\d])",
    "7 «or» 8",
    "7 «and» 8",
    r"7 «\text{ or» } 8",
    r"7 «\pm» 2",
    "7 «to 8»",
    "7 and so it is",
    flags=re.IGNORECASE,
)
_FACTOR = rule(r"\\(?:pi|sqrt|[dt]?frac|binom|infty)(?![A-Za-z])|\d", r"«\sqrt»{«2»}", r"\pie")
_DENIAL = rule(
    r"(?:\b(?:not|isn't|aren't|never|cannot be|can't be|neither|wrong)|n't)\b\W*(?:\w+\W*){0,2}\Z",
    "it «isn't equal to»",
    "it is",
    "a note 7",
    flags=re.IGNORECASE,
)
_EITHER = rule(
    r"\b(?:either|maybe|perhaps|possibly|might be|could be)\b|\bor\s*(?:else\s*)?(?:the\s*)?\Z",
    "it is «either»",
    "7 «or the»",
    "7 or 8",
    flags=re.IGNORECASE,
)
_PREFIX = rule(r"(-|\+|<|>|\\neq?|\\leq?|\\geq?|\\pm|\\approx|~|\\[dt]?frac\{|\\sqrt\{)\Z", r"x «\le»", "«-»", "-x")

_ADVERB = r"(?:\s+(?:therefore|thus|then|hence|so|simply|just|exactly|indeed|clearly|equal to),?)?"
_PHRASE = rule(
    rf"\banswer\*{{0,2}}(?:\s+is\b{_ADVERB}\s*:?|\s*:)(?:[ \t*]*\n)*",
    "the «answer is therefore:» 7",
    "Final «answer**:» 7",
    "an answer of 7",
    flags=re.IGNORECASE,
)
_LABEL = rule(
    r"(?:the\s+)?(?:(?:final|correct)\s+)?answer(?:\s+is\s*:?|\s*:)\s*",
    "«The final answer is: »7",
    "answered",
    flags=re.IGNORECASE,
)
_DISPLAY = rule(r"\s*(?:\$\$([^$]+)\$\$|\\\[([^\]]+)\\\])[ \t]*(?=\n|\Z)", "«$$x = 3$$»", r"«\[7\]»", r"\[7\] apples")
_CLAUSE_END = rule(
    r"(?<![ap]\.m)(?<!\ssq)\.(?!\**\s+(?:[Oo]r|[Mm]aybe|[Pp]erhaps|[Pp]ossibly)\b)(?=\**(?:\s|\Z)|\$?\**\s*(?:\Z|\s[A-Z]))"
    r"|[,;]?\s\(?(?:"
    r"(?<!many )(?<!much )as(?! (?:many|much|long|old|tall|far|fast|big|large|heavy)\b)"
    r"|because|since|which|where|so that|giving|after|meaning|i\.e\.|namely)\b"
    r"|,\s*(?:so|as|for|I|we|and (?:we|so|thus|hence|that|this|it))\b|;\s*(?=[a-z]{2,} )"
    r"|\s\((?=(?:as|since|because|rounded|which|from|where|see|i\.e\.)\b)"
    r"|(?<=[\d*])!(?=\**\s+[A-Z])"
    r"|\s(?:—|--)\s|\sand we\b|\\\\(?=\s*\Z)",
    "7«.» Then",
    "7« since» it is odd",
    "7«, as» it is odd",
    "7«, so» the rest is 3",
    "7«; »then the rest is 3",
    "7« (»rounded down)",
    "7«!» Then",
    "7« — »the largest",
    r"7 «\\»",
    "3.5",
    "4 p.m. today",
    "5 sq. feet",
    "7. Or 8",
    "twice as many",
)
_AMENDED = rule(
    r"\b(?:unless|maybe|perhaps|possibly|(?:is|was) wrong)\b|\bor\b(?:\s+\w+){0,2}?\s*[$\\({]*-?\d[\w{}$)]*\s*\Z"
    r"|[^\d\s],\s*\$?\d+\s*\Z|\A[,;]?\s\(?after\b.*\band\s+\$?\d+\s*\Z",
    "7 «unless» it rains",
    "since x = 3 «or 4»",
    "since it is od«d, 8»",
    "« after lunch and 8»",
    "since it is odd",
    flags=re.IGNORECASE,
)
"""Words that make an explanation a part of the answer."""
_INLINE = rule(
    r"\$(?:(?!(?<![\\A-Za-z{])[a-z]{3})[^$])+[^$.]\$(?!\d)|\\\((?:(?!\\\)).)+\\\)",
    r"if «$x = 3$» and «\(y\)»",
    "$5 and $6",
)
_MAX_STATEMENT = 2100
_FACTORIAL = rewriting(r"\s+!(?!=)", "!", "5 ! -> 5!", "x != 3 -> x != 3")
_WITHOUT_TAGS = rewriting(r"</?\w+>", "", "<b>-</b> -> -")
_WITHOUT_NAME = rewriting(r"[$\\(\[{]|[A-Za-z]\s*=", " ", "not $x = 7 -> not    7")
_UNBOXED = rewriting(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r"\1", r"x = \boxed{7} -> x = 7")
_WITHOUT_CLOSING = rewriting(
    r"\A(?:[\s$*)\]}]|</?\w+>|\\[()\[\],;!]|\\q?quad)+", "", "$** or 8 -> or 8", r"\), or 8 -> , or 8"
)
_WITHOUT_MARKS = rewriting(r"[$*]", " ", "or $8$, -> or  8 ,")
_NEXT_CLAUSE = rule(r"[,;]\s*(?!or\b|maybe|perhaps|possibly)[A-Za-z]", "7«, t»he largest", "7, or 8")
_CONTENT = rule(r"[\w\\]", r"(«\»«p»«i»)", ".)")
_JOIN = rule(r"\W*(?:or|and)\W*", "« or »", "«; and »", "then")
_WITHOUT_OPEN_TEXT = rewriting(r",?\s*\\text\s*\{\s*,?\s*\Z", "", r"7, \text{ -> 7")
_WITHOUT_BOLD = rewriting(r"\*\*|__|\A\*|\*\Z", " ", "**7** apples ->  7  apples")
_WITHOUT_DELIMITERS = rewriting(r"(?<!\\)\\[()\[\]]", " ", r"\(7\), so ->  7 , so")
_EXCLAMATION = rewriting(r"(?<=\d)\s*!\Z", " !", "It is 7! -> It is 7 !")
_DOLLARS = rule(r"\$([^$]+)\$", "«$x = 3$»", "3")
_SPECIAL = rule(r"<\|[\w ]+\|>|</s>|<eos>", "7«<|im_end|>»«</s>»", "x < 3")


def extract_answer(text: str) -> str | None:
    r"""The answer as the completion wrote it; None if there is none.

    Reasoning does not count: only the text after the last `</think>` is read, and none while `<think>` is open.
    In that text the first form that occurs decides, and its last occurrence counts. The forms are, in order:
    `\boxed{}` or `\fbox{}` with balanced braces; `<answer></answer>`; the later of a `####` line and of
    "answer is" or "answer:".
    Words beside the answer in the same sentence belong to it. Boxes joined by a comma, "and" or "or" are one answer.
    A sign or a "not" before it and an "or" after it count too.
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


def _boxed(text: str) -> str | None:
    """The last box, with what its sentence adds to it."""
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
            _FACTORIAL(_without_boxes(text[start:end]).strip()) for _, start, end, *_ in _inner(boxes[first:])
        )
    )
    if not all(contents):
        return ""
    before = _LAYOUT.sub("", text[max(0, boxes[first][0] - 40) : boxes[first][0]])
    sign = _PREFIX.search(_WITHOUT_TAGS(before))
    if sign and first == last:
        contents[0] = f"{sign[1]} {contents[0]}"
    head = text[max(0, boxes[first][0] - 200) : boxes[first][0]]
    head = _SENTENCE_END.split(head)[-1]
    if _DENIAL.search(_WITHOUT_NAME(head).rstrip()):
        return f"not {contents[0]}"
    tail = text[boxes[last][2] : boxes[last][2] + 200]
    return "; ".join(contents) + _hedge(tail)


def _without_boxes(text: str) -> str:
    return _BOX_COMMAND.sub("", _UNBOXED(text))


def _hedge(tail: str) -> str:
    """The text after the answer that takes it back: an alternative or a change; else empty."""
    tail = _SENTENCE_END.split(tail, maxsplit=1)[0]
    beginning = _WITHOUT_CLOSING(tail)
    if tail[:1] in ("^", "!", "_") or _FACTOR.match(tail):
        return f" {tail}"
    if not _ALTERNATIVE.match(beginning):
        return ""
    what = _WITHOUT_MARKS(beginning).strip(" .,;")
    if _NEXT_CLAUSE.match(beginning) or not what:
        return ""
    return f" {what}" if _CONTENT.search(what) else ""


def _inner(boxes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    return [(start, content, end) for start, content, _, end in boxes]


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """The outermost boxes as indices: start of the box, start of its content, end of the box, end of its content."""
    boxes: list[tuple[int, int, int, int]] = [
        (match.start(), match.start(1), match.end(), match.end(1)) for match in _UNBRACED.finditer(text)
    ]
    opened: list[tuple[int, int]] = []
    start = min(position for position in (text.find(r"\boxed"), text.find(r"\fbox")) if position >= 0)
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
    """Whether two boxes with this text between them are one answer; not if the second corrects the first."""
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
    return f"{answer} or another" if earlier and _JOIN.fullmatch(gap) else answer


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
    """The statement up to the end of its sentence or to the beginning of an explanation."""
    statement = statement.lstrip()[:_MAX_STATEMENT].replace(r"\$", "$").strip()
    masked = _INLINE.sub(lambda match: "0" * len(match[0]), statement)  # a formula has no clauses
    end = _CLAUSE_END.search(masked)
    if end and _AMENDED.search(_SENTENCE_END.split(statement[end.start() :], maxsplit=1)[0]):
        end = None
    clause = statement[: end.start()] if end else statement
    clause = _WITHOUT_OPEN_TEXT(clause) if end else clause
    clause = _WITHOUT_BOLD(clause).strip()
    clause = _WITHOUT_DELIMITERS(clause).strip()
    clause = _EXCLAMATION(clause)  # the end of a sentence, and no factorial
    formula = _DOLLARS.fullmatch(clause)
    return formula[1].strip() if formula else clause
