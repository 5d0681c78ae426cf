"""Extracts the final answer of a completion, found by its form, together with all that hedges it."""

import re

from grpo_lightning.plugins.verifier.words import BOUNDS, FAULTS, JUDGEMENTS, NEGATIONS, PARTS, changes, take_back

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(\d++(?:\.\d+)?|[A-Za-z])(?!\s*[{A-Za-z]))|\\.|[{}]", re.DOTALL)
_INNER = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}|\\(?:boxed|fbox)\s*(?=\{)")
_LAYOUT = re.compile(
    r"[\s$*{}]|[.,](?!\d)|\\[()\[\],;:! ]|\\(?:q?quad|left|right|mathbf|displaystyle|underline)(?![a-z])|</?\w+>"
)
_SENTENCE_END = re.compile(r"(?<!i\.e)[.!?](?=[\s$)*\\\]]|\Z)|\n\s*\n|\n\s*[A-Z#*<\\$]")
_STATEMENT_END = re.compile(
    r"(?<![ap]\.m)(?<!\ssq)(?<!i\.e)[.](?=[*$]*(?:\s|\Z))(?!\$\s+[a-z])|(?<=[\d*])!(?=[*]*\s+[A-Z])|\\\\(?=\s*\Z)"
)
_MATHS = re.compile(r"(?<!\\)\$\$?|\\[()\[\]]")
_FORMULA = re.compile(r"\$(?:(?!(?<![\\A-Za-z{])[a-z]{3})[^$])+[^$.]\$(?!\d)|\\\((?:(?!\\\)).)+\\\)")
_RELATION = re.compile(
    r"(?<![<>!:])=|\\(?:approx|implies|\w*[Rr]ightarrow|iff|to|therefore|begin\{\w+\*?\}|end\{\w+\*?\}|\\|q?quad)"
    r"|&|\\text\s*\{[^{}]*\}\s*:?\Z"
)
_MARKUP = re.compile(r"\*\*|__|(?<!\\)\\[()\[\]]")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[a-z]{3}")
_CORRECTION = re.compile(
    r"\W*(?:no\b|but\b|wait|or\s+rather|rather|actually|i mean|then\b|so\b|hence|thus|therefore|not?\b.*:)"
    r"|.*\b(?:correct\w*|instead|wrong|mistake)\b",
    re.IGNORECASE | re.DOTALL,
)
_NEXT = re.compile(
    r"\W*(?:or|otherwise|alternatively|else|maybe|perhaps|possibly|no|actually|instead)\b[^.]*\d|\W*and\s+\$?\d",
    re.IGNORECASE,
)
_PART = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|[:;=]")
_BECAUSE = re.compile(
    r"[,;]?\s\(?(?:(?<=, )(?:as|who|with)|because|since|which|where|so|given|giving|after|meaning|namely|we"
    r"|and (?:we|so|thus|hence|this|that|it))\b|,?\s\(?i\.e\.|;\s*(?=[a-z]{2})|\s(?:—|--)\s",
    re.IGNORECASE,
)
"""What begins an explanation: from here on a number is no second answer."""
_OR = re.compile(
    r"\b(?:or|otherwise|maybe|perhaps|possibly|alternatively|else|unless|wrong)\b(?!\s+equal)|\band we also\b",
    re.IGNORECASE,
)
_SAME = re.compile(
    r"[\s$]*(?:\((?:(?:or|i\.e\.|that is|equivalently|=),?)?\s*(?P<near>about |approximately |roughly |≈|\\approx)?"
    r"\s*([^()\n]+)\)"
    r"|,?\s*(?:i\.e\.|that is|or equivalently|equivalently),?\s+(\$[^$\n]+\$|\S+))(?=[\s$.,;]|\Z)",
    re.IGNORECASE,
)
"""The same value in another form, behind a box: `(or 30%)`, `, i.e. $3.5$`."""
_PHRASE = re.compile(
    r"\banswer\*{0,2}(?:\s+(?:is|equals)\b(?:\s+(?:therefore|thus|then|hence|so|simply|just|exactly|that),?)?\s*:?|\s*:)"
    r"(?:[ \t*]*\n)*",
    re.IGNORECASE,
)
_TOUCHING_LEFT = re.compile(r"(?:\d|(?:[/^+~-]|(?<![a-z])[<>]|\\(?:ne|le|ge|pm)q?)\s?)?\Z")
_TOUCHING_RIGHT = re.compile(r"\A(?:\\?[\^!_/%][\w{}]*|\.\w+|\\(?!q?quad|text)[a-z]+|\w*)")
_SPECIAL = re.compile(r"<\|[\w ]+\|>|</s>|<eos>")
_MAX_STATEMENT, _MAX_AROUND = 2100, 1000
Box = tuple[int, int, int, str]  # start and end of a box, the start of its content, and its content


def extract_answer(text: str) -> str | None:
    r"""The answer as the completion wrote it; None if there is none.

    Reasoning does not count: only the text after the last `</think>` is read, and none while `<think>` is open.
    In that text the first form that occurs decides, and its last occurrence counts. The forms are, in order:
    `\boxed{}` or `\fbox{}` with balanced braces; `<answer></answer>`; the later of a `####` line and of
    "answer is" or "answer:".
    What stands beside it in its formula belongs to the answer, and so does the rest of a sentence that has a second
    number or takes the answer back.
    """
    text = _SPECIAL.sub("", text.rpartition("</think>")[2])
    if "<think>" in text:
        return None
    answers = (find(text) for find in (_boxed, _tagged, _stated))
    answer = next((answer for answer in answers if answer is not None), "")
    return answer.strip() or None


# ----- the three forms


def _boxed(text: str) -> str | None:
    """The last box and those that belong to it, with what its formula and its sentence add."""
    boxes = _boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and _belongs(text, boxes[first - 1], boxes[first]):
        first -= 1
    contents = dict.fromkeys(_INNER.sub(r"\1", content).replace(" !", "!").strip() for *_, content in boxes[first:])
    if not all(contents):
        return ""
    start, answer, end = boxes[first][0], "; ".join(contents), boxes[-1][1]
    before, after = text[max(0, start - _MAX_AROUND) : start], text[end : end + _MAX_AROUND]
    left, right = _beside(before, after)
    head = _words(_SENTENCE_END.split(before[: len(before) - len(left)])[-1])
    head = [word for word in head[:-1] if word not in PARTS or word == "half"] + head[-1:]  # `the third side is`
    is_correction = first and _CORRECTION.match(_LAYOUT.sub(" ", text[boxes[first - 1][1] : start]))
    is_unreal = "would" in head and (head[0] == "had" or " have been " in f" {' '.join(head)} ")
    is_fault = not FAULTS.isdisjoint(head)  # `a common mistake is`
    if is_unreal or is_fault or (take_back(_behind_value(head)) and not is_correction):
        return f"not {answer}"
    if any(_LAYOUT.sub("", side) for side in (left, right)):
        answer = f"{left} {answer} {right}"
    return _claimed(answer, after[len(right) :])


def _tagged(text: str) -> str | None:
    before, closed, after = text.rpartition("</answer>")
    head, opened, answer = before.rpartition("<answer>")
    if not (opened and closed):
        return None
    _, earlier, gap = head.rpartition("</answer>")
    if earlier and not _SENTENCE_END.search(gap) and changes(_words(gap)):
        return f"{answer} or another"
    return _claimed(answer, after[:_MAX_AROUND])


def _stated(text: str) -> str | None:
    """What follows `####` or "answer is", up to the end of its sentence or an explanation."""
    hashes = text.rfind("####")
    phrases = list(_PHRASE.finditer(text, max(hashes, 0)))
    if not phrases and hashes < 0:
        return None
    start = phrases[-1].end() if phrases else hashes + 4
    line, _, rest = text[start:].partition("\n")
    if phrases:
        if take_back(_words(_SENTENCE_END.split(text[max(0, phrases[-1].start() - 200) : phrases[-1].start()])[-1])):
            return f"either {line}"
        opening = line.strip()[:2]
        if opening in ("$$", r"\["):
            return text[start:].lstrip()[2:].partition("$$" if opening == "$$" else r"\]")[0]
    statement = line.lstrip(" \t*_")[:_MAX_STATEMENT].replace(r"\$", "$").strip()
    masked = _FORMULA.sub(lambda match: "0" * len(match[0]), statement)  # a formula has no sentences
    stop = _STATEMENT_END.search(masked)
    end = stop.start() if stop else len(statement)
    because = _BECAUSE.search(masked, 1, end)
    end = because.start() if because else end
    clause = _MARKUP.sub(" ", statement[:end].strip(" *_")).strip()
    if clause.endswith("!") and clause[:-1].rstrip()[-1:].isdigit():
        clause = f"{clause[:-1].rstrip()} !"  # no factorial
    if clause.startswith("$") and clause.endswith("$") and clause.count("$") == 2:
        clause = clause[1:-1].strip()
    return _claimed(clause, f"{statement[end:]}\n{rest[:_MAX_AROUND]}")


# ----- boxes


def _boxes(text: str) -> list[Box]:
    """The outermost boxes."""
    boxes: list[Box] = []
    opened: list[tuple[int, int]] = []
    start = min((position for name in (r"\boxed", r"\fbox") if (position := text.find(name)) >= 0), default=len(text))
    for match in _BRACE.finditer(text, start):
        if match[1]:
            boxes.append((match.start(), match.end(), match.start(1), match[1]))
        elif match[0] == "}" and opened:
            box, content = opened.pop()
            if box >= 0:
                boxes.append((box, match.end(), content, text[content : match.start()]))
        elif match[0][-1] == "{" and match[0] != r"\{":
            opened.append((match.start(), match.end()) if len(match[0]) > 1 else (-1, -1))
    outermost: list[Box] = []
    for found in sorted(boxes):
        if not outermost or found[0] >= outermost[-1][1]:
            outermost.append(found)
    return outermost


def _belongs(text: str, first: Box, second: Box) -> bool:
    """Whether two boxes are one answer: in a sentence without a correction, or on two lines that are worded alike."""
    gap = text[first[1] : second[0]]
    if len(gap) > 120:
        return False
    if not _SENTENCE_END.search(gap):
        return not _CORRECTION.match(_LAYOUT.sub(" ", gap).strip())
    lines = [
        [part for part in _words(text[text.rfind("\n", 0, box[0]) + 1 : box[0]]) if part.isalpha()]
        for box in (first, second)
    ]
    return gap.count("\n") == 1 and lines[0] == lines[1] != []


def _beside(before: str, after: str) -> tuple[str, str]:
    """What stands left and right of a box in its formula, on its side of a relation."""
    start, opened = 0, ""
    for mark in _MATHS.finditer(before):
        opened = "" if opened else mark[0]
        start = mark.end()
    if opened and "\n\n" not in before[start:]:
        end = _MATHS.search(after)
        left, right = before[start:], after[: end.start()] if end else after.partition("\n")[0]
    else:
        left = next(match[0] for match in _TOUCHING_LEFT.finditer(before))
        right = next(match[0] for match in _TOUCHING_RIGHT.finditer(after))
    cuts = [match.end() for match in _RELATION.finditer(left)]
    return left[cuts[-1] if cuts else 0 :], right


# ----- the rule for what stands around an answer


def _words(text: str) -> list[str]:
    """The words, numbers and signs `:;=` of a text: numbers in one spelling, words in lower case."""
    parts = [part.casefold().replace(",", "").replace("’", "'") for part in _PART.findall(text)]
    return [part.rstrip("0").removesuffix(".") if "." in part else part for part in parts]


def _behind_value(words: list[str]) -> list[str]:
    """The words behind the last number or sign."""
    ends = [index for index, word in enumerate(words) if not word[0].isalpha()]
    return words[ends[-1] + 1 if ends else 0 :]


def _claimed(answer: str, after: str) -> str:
    """An answer with what the text after it adds: its value in another form, a denial, another answer."""
    same = _SAME.match(after)
    form = (same[2] or same[3]).strip(" $.,;") if same else ""
    if same and any(c.isdigit() for c in form) and not _PROSE.search(form.removesuffix("percent")):
        answer = rf"{answer} \approx {form}" if same["near"] else f"{form} = {answer}"
        after = after[same.end() :]
    sentence, *_ = _SENTENCE_END.split(after, maxsplit=1)
    rest = after[len(sentence) :]
    because = _BECAUSE.search(sentence)
    said, reason = (sentence[: because.start()], sentence[because.start() :]) if because else (sentence, "")
    words, reasons = _words(said), _words(reason)
    is_fault = not FAULTS.isdisjoint(reasons) and not any(map(_is_number, reasons))  # `which is incorrect`
    is_asked = rest.startswith("?")
    if is_asked or changes(words) or any(not word[0].isalpha() for word in words) or _OR.search(reason) or is_fault:
        return f"{answer} {_LAYOUT.sub(' ', said).strip(' .,;')} {reason}{' or not' * is_asked}"
    rest = reason + rest if reason.lstrip()[:1] in (";", "—") else rest
    is_other = _NEXT.match(rest.lstrip(" .$\n*)\\]")) or _is_retracted({*filter(_is_number, _words(answer))}, rest)
    return f"{answer} or {rest.strip()[:200]}" if is_other else answer


def _is_number(word: str) -> bool:
    return word[0].isdigit()


def _is_retracted(values: set[str], text: str) -> bool:
    """Whether a sentence of a text faults the answer with these values, or states one other value.

    A sentence that faults another number ("8, which is wrong", "not 8") confirms the answer.
    """
    for sentence in _SENTENCE_END.split(text.replace(";", ". ")):
        words = {word for word in _words(sentence) if word[0].isalnum()}
        others = {word for word in words if _is_number(word) and word not in values}
        is_negative = not NEGATIONS.isdisjoint(words) or any(word.endswith("n't") for word in words)
        is_fault = not FAULTS.isdisjoint(words) or (is_negative and not JUDGEMENTS.isdisjoint(words))
        is_about_it = not others or not values.isdisjoint(words)
        is_hedged = "if" in words or not BOUNDS.isdisjoint(words)
        is_value = len(others) == 1 and values and values.isdisjoint(words)
        if (is_fault and is_about_it) or (is_value and not (is_fault or is_negative or is_hedged)):
            return True
    return False
