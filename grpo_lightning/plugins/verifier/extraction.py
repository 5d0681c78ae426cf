"""Extracts the final answer of a completion, found by its form, together with all that hedges it."""

import re
from collections.abc import Iterator

from grpo_lightning.plugins.verifier.rules import rewriting, rule
from grpo_lightning.plugins.verifier.words import BOUNDS, FAULTS, JUDGEMENTS, NEGATIONS, changes, take_back

_BRACES = rule(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", r"«\boxed{»7«\,»«}»", "7", flags=re.DOTALL)
_UNBRACED = rule(r"\\(?:boxed|fbox)\s*(\d++(?:\.\d+)?|[A-Za-z])(?!\s*[{A-Za-z])", r"So «\boxed 7».", r"\boxed{7}")
_BOX = rewriting(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}|\\(?:boxed|fbox)\s*(?=\{)", r"\1", r"x = \boxed{7} -> x = 7")
_LAYOUT = rewriting(r"[\s$*]|\\[()\[\],;]|\\q?quad|</?\w+>", " ", r"$7$\quad or ->  7   or")
_SENTENCE_END = rule(
    r"[.!?](?=[\s$)*\\\]]|\Z)|\n\s*\n|\n\s*[A-Z#*<\\$]", "It is 1.5«.» Yes«!»", "It is 7«\n\n»and", "1.5"
)
_MATHS = rule(r"(?<!\\)\$\$?|\\[()\[\]]", "«$»x«$» and «\\(»y«\\)»", "x")
_RELATION = rule(
    r"(?<![<>!:])=|\\(?:approx|implies|\w*[Rr]ightarrow|iff|to|therefore|begin\{\w+\*?\}|end\{\w+\*?\}|\\|q?quad)"
    r"|&|\\text\s*\{[^{}]*\}\s*:?\Z",
    r"x «=» 3 «\implies» y«=»3",
    r"x \ne 3",
)
_PROSE = rule(r"(?<![\\A-Za-z{])[a-z]{3}", "5 «and» 6", r"\text{and}")
_WORDS = rule(r"[A-Za-z]+(?:['’-][A-Za-z]+)*", "«it» «isn't» 7", "7")
_CORRECTION = rule(
    r"\W*(?:no\b|but\b|wait|or\s+rather|rather|actually|i mean|then\b|so\b|hence|thus|therefore|not?\b.*:)"
    r"|.*\b(?:correct\w*|instead|wrong|mistake)\b",
    "«, wait» 8",
    "«, or rather» 8",
    "and 8",
    flags=re.IGNORECASE | re.DOTALL,
)
_NEXT = rule(
    r"\W*(?:or|otherwise|alternatively|else|maybe|perhaps|possibly|no|actually|instead)\b[^.]*\d|\W*and\s+\$?\d",
    "«Otherwise it is 8»",
    "Check: 3 + 5 = 8",
    flags=re.IGNORECASE,
)
_CLAUSE_END = rule(r"[.!?;](?=[\s$)*\\\]]|\Z)|\n|\s—\s|</\w+>", "It is 1.5«;» no« — »wait«.»", "1.5")
_PART = rule(r"[A-Za-z]+(?:['’]t)?|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", "«It» «isn't» «1,000.5»", "+")
_BECAUSE = rule(
    r"[,;]?\s\(?(?:(?<=, )as|because|since|which|where|so|given|giving|after|meaning|namely|i\.e\.|we"
    r"|and (?:we|so|thus|hence|this|that|it))\b|;\s*(?=[a-z]{2})|\s(?:—|--)\s",
    "7«, since» it is odd",
    flags=re.IGNORECASE,
)
"""What begins an explanation: from here on a number is no second answer."""
_OR = rule(
    r"\b(?:or|otherwise|maybe|perhaps|possibly|alternatively|else|unless|wrong)\b(?!\s+equal)|\band we also\b",
    "7, since it is 7 «or» 8",
    "7, since it is odd",
    flags=re.IGNORECASE,
)
_PHRASE = rule(
    r"\banswer\*{0,2}(?:\s+(?:is|equals)\b(?:\s+(?:therefore|thus|then|hence|so|simply|just|exactly|that),?)?\s*:?|\s*:)"
    r"(?:[ \t*]*\n)*",
    "the «answer is therefore:» 7",
    "Final «answer**:» 7",
    "an answer of 7",
    flags=re.IGNORECASE,
)
_LABEL = rewriting(
    r"\A(?:[Tt]he\s+)?(?:(?:[Ff]inal|[Cc]orrect)\s+)?[Aa]nswer(?:\s+is\s*:?|\s*:)\s*(.*?)\.?\Z",
    r"\1",
    "The final answer is: 7. -> 7",
)
_DISPLAY = rule(r"\s*(?:\$\$([^$]+)\$\$|\\\[([^\]]+)\\\])[ \t]*(?=\n|\Z)", "«$$x = 3$$»", r"«\[7\]»", r"\[7\] apples")
_INLINE = rule(
    r"\$(?:(?!(?<![\\A-Za-z{])[a-z]{3})[^$])+[^$.]\$(?!\d)|\\\((?:(?!\\\)).)+\\\)", r"if «$x = 3$»", "$5 and $6"
)
_STOP = rule(
    r"(?<![ap]\.m)(?<!\ssq)[.](?=[*$]*(?:\s|\Z))|(?<=[\d*])!(?=[*]*\s+[A-Z])|\\\\(?=\s*\Z)",
    "7«.» Then",
    "3.5",
    "4 p.m. today",
)
_MARKUP = rewriting(r"\*\*|__|\A\*|\*\Z|(?<!\\)\\[()\[\]]", " ", "**7** apples ->  7  apples")
_FACTORIAL = rewriting(r"\s+!(?!=)", "!", "5 ! -> 5!", "x != 3 -> x != 3")
_EXCLAMATION = rewriting(r"(?<=\d)\s*!\Z", " !", "It is 7! -> It is 7 !")
_BARE = rewriting(r"[\s$*{}.,]|\\[,;:! ]|\\(?:left|right|mathbf|displaystyle|underline)\b", "", "{ $. -> ")
_NUMBERS = rule(r"[\d:;=]", "for all «5» of", "none")
_TOUCHING_LEFT = rule(r"(?:\d|(?:[/^+~-]|(?<![a-z])[<>]|\\(?:ne|le|ge|pm)q?)\s?)?\Z", "«3»")
_TOUCHING_RIGHT = rule(r"\A(?:\\?[\^!_/%][\w{}]*|\.\w+|\\(?!q?quad|text)[a-z]+|\w*)", "«^2» x", "«.5»")
_SPECIAL = rewriting(r"<\|[\w ]+\|>|</s>|<eos>", "", "7<|im_end|></s> -> 7")
_MAX_STATEMENT = 2100
Box = tuple[int, int, int, int]
"""Indices: start of the box, start of its content, end of the box, end of its content."""


def extract_answer(text: str) -> str | None:
    r"""The answer as the completion wrote it; None if there is none.

    Reasoning does not count: only the text after the last `</think>` is read, and none while `<think>` is open.
    In that text the first form that occurs decides, and its last occurrence counts. The forms are, in order:
    `\boxed{}` or `\fbox{}` with balanced braces; `<answer></answer>`; the later of a `####` line and of
    "answer is" or "answer:".
    What stands beside it in its formula belongs to the answer, and so does the rest of a sentence that has a second
    number or takes the answer back.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    text = _SPECIAL(text) if "<" in text else text
    for find in (_boxed, _tagged, _stated):
        answer = find(text)
        if answer is not None:
            return _LABEL(answer.strip()) or None
    return None


def _boxed(text: str) -> str | None:
    """The last box and those that belong to it, with what its formula and its sentence add."""
    boxes = _boxes(text) if r"\boxed" in text or r"\fbox" in text else []
    if not boxes:
        return None
    first = last = len(boxes) - 1
    while first and _belongs(text, boxes[first - 1], boxes[first]):
        first -= 1
    contents = list(dict.fromkeys(_FACTORIAL(_BOX(text[start:end]).strip()) for _, start, _, end in boxes[first:]))
    if not all(contents):
        return ""
    start, answer, end = boxes[first][0], "; ".join(contents), boxes[last][2]
    before, after = text[max(0, start - 400) : start], text[end : end + 1000]
    left, right = _beside(before, after)
    is_correction = first and _CORRECTION.match(_LAYOUT(text[boxes[first - 1][2] : start]))
    head = _LAYOUT(_SENTENCE_END.split(before[: len(before) - len(left)])[-1])
    if take_back(_WORDS.findall(_NUMBERS.split(head)[-1])) and not is_correction:
        return f"not {answer}"
    answer = f"{left} {answer} {right}" if _BARE(left) or _BARE(right) else answer
    return answer + _taken_back(answer, *_split(after[len(right) :]))


def _beside(before: str, after: str) -> tuple[str, str]:
    """What stands left and right of a box in its formula, on its side of a relation."""
    start, opened = 0, ""
    for mark in _MATHS.finditer(before):
        opened = "" if opened else mark[0]
        start = mark.end()
    left, right = before[start:], after
    if opened:
        end = _MATHS.search(after)
        right = after[: end.start()] if end else after.partition("\n")[0]
    else:
        left = next(match[0] for match in _TOUCHING_LEFT.finditer(before))
        right = next(match[0] for match in _TOUCHING_RIGHT.finditer(after))
    if _PROSE.search(left) or _PROSE.search(right):
        return "", ""
    cuts = [match.end() for match in _RELATION.finditer(left)]
    return left[cuts[-1] if cuts else 0 :], right


def _taken_back(answer: str, sentence: str, rest: str) -> str:
    """The text after an answer that denies it or gives another one, in its sentence or later; else empty."""
    because = _BECAUSE.search(sentence)
    claimed, reason = (sentence[: because.start()], sentence[because.start() :]) if because else (sentence, "")
    plain = _LAYOUT(claimed).strip(" .,;")
    if changes(_WORDS.findall(plain)) or _NUMBERS.search(plain) or _OR.search(reason):
        return f" {plain} {reason}"
    rest = reason + rest if reason.lstrip()[:1] in (";", "—") else rest
    is_other = _NEXT.match(rest.lstrip(" .$\n*)\\]")) or _is_retracted(_values(answer), rest)
    return f" or {rest.strip()[:200]}" if is_other else ""


def _values(text: str) -> set[str]:
    return {_value(part) for part in _PART.findall(text) if part[0].isdigit()}


def _value(part: str) -> str:
    """A number in one spelling; a word in lower case."""
    part = part.casefold().replace(",", "").replace("’", "'")
    return part.rstrip("0").removesuffix(".") if "." in part else part


def _is_retracted(values: set[str], text: str) -> bool:
    """Whether a sentence of a text faults the answer with these values, or states one other value.

    A sentence that faults another number ("8, which is wrong", "not 8") confirms the answer.
    """
    for sentence in _CLAUSE_END.split(text):
        parts = [_value(part) for part in _PART.findall(sentence)]
        others = [part[0].isdigit() and part not in values for part in parts]
        faults = [index for index in range(len(parts)) if _is_fault(parts[index], parts[index + 1 :], values)]
        if any(not any(others[:index]) or not values.isdisjoint(parts[index:]) for index in faults):
            return True
        is_denied = any(word in NEGATIONS and other for word, other in zip(parts, others[1:], strict=False))
        is_hedged = "if" in parts or not BOUNDS.isdisjoint(parts)
        is_value = sum(others) == 1 and values and values.isdisjoint(parts)
        if is_value and not (faults or is_denied or is_hedged):
            return True
    return False


def _is_fault(word: str, behind: list[str], values: set[str]) -> bool:
    """Whether a word faults an answer: `wrong`, or a negation of a judgement or directly before its value."""
    is_negation = word in NEGATIONS or word.endswith("n't")
    return word in FAULTS or (is_negation and (not JUDGEMENTS.isdisjoint(behind) or not values.isdisjoint(behind[:1])))


def _boxes(text: str) -> list[Box]:
    """The outermost boxes."""
    boxes: list[Box] = [
        (match.start(), match.start(1), match.end(), match.end(1)) for match in _UNBRACED.finditer(text)
    ]
    opened: list[tuple[int, int]] = []
    start = min(position for position in (text.find(r"\boxed"), text.find(r"\fbox")) if position >= 0)
    for match in _BRACES.finditer(text, start):
        if match[0] == "}" and opened:
            box, content = opened.pop()
            if box >= 0:
                boxes.append((box, content, match.end(), match.start()))
        elif match[0][-1] == "{" and match[0] != r"\{":
            opened.append((match.start(), match.end()) if len(match[0]) > 1 else (-1, -1))
    return list(_outermost(sorted(boxes)))


def _outermost(boxes: list[Box]) -> Iterator[Box]:
    end = 0
    for box in boxes:
        if box[0] >= end:
            end = box[2]
            yield box


def _belongs(text: str, first: Box, second: Box) -> bool:
    """Whether two boxes are one answer: in a sentence without a correction, or on two lines that are worded alike."""
    gap = text[first[2] : second[0]]
    if len(gap) > 120:
        return False
    if not _SENTENCE_END.search(gap):
        return not _CORRECTION.match(_LAYOUT(gap).strip())
    lines = [_NUMBERS.sub("", text[text.rfind("\n", 0, box[0]) + 1 : box[0]]) for box in (first, second)]
    return gap.count("\n") == 1 and lines[0] == lines[1] != "" and bool(_WORDS.search(lines[0]))


def _tagged(text: str) -> str | None:
    before, closed, after = text.rpartition("</answer>")
    head, opened, answer = before.rpartition("<answer>")
    if not (opened and closed):
        return None
    _, earlier, gap = head.rpartition("</answer>")
    if earlier and not _SENTENCE_END.search(gap) and changes(_WORDS.findall(gap)):
        return f"{answer} or another"
    return answer + _taken_back(answer, *_split(after[:1000]))


def _split(text: str) -> tuple[str, str]:
    """The sentence that a text begins with, and the rest."""
    sentence, *_ = _SENTENCE_END.split(text, maxsplit=1)
    return sentence, text[len(sentence) :]


def _stated(text: str) -> str | None:
    hashes = text.rfind("####")
    phrases = list(_PHRASE.finditer(text, max(hashes, 0)))
    if not phrases and hashes < 0:
        return None
    start = phrases[-1].end() if phrases else hashes + 4
    if phrases:
        head = _SENTENCE_END.split(text[max(0, phrases[-1].start() - 200) : phrases[-1].start()])[-1]
        if take_back(_WORDS.findall(head)):
            return f"either {text[start:].partition(chr(10))[0]}"
        if display := _DISPLAY.match(text, start):
            return display[1] or display[2]
    line, _, rest = text[start:].partition("\n")
    if r"\boxed" in line or r"\fbox" in line:
        return ""
    statement = line.lstrip(" \t*_")[:_MAX_STATEMENT].replace(r"\$", "$").strip()
    masked = _INLINE.sub(lambda match: "0" * len(match[0]), statement)  # a formula has no sentences
    stop = _STOP.search(masked)
    end = stop.start() if stop else len(statement)
    because = _BECAUSE.search(masked, 1, end)
    reason = statement[because.start() : end] if because else ""
    clause = statement[:end] if _OR.search(reason) else statement[: because.start() if because else end]
    clause = _EXCLAMATION(_MARKUP(_MARKUP(clause).strip()).strip())
    formula = _DOLLARS.fullmatch(clause)
    answer = formula[1].strip() if formula else clause
    return answer + _taken_back(answer, "", statement[end:] + "\n" + rest[:1000])


_DOLLARS = rule(r"\$([^$]+)\$", "«$x = 3$»", "3")
