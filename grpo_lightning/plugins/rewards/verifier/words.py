"""The words that decide how a sentence is read: numbers, and what changes or takes back a value."""

from collections.abc import Collection, Sequence


def word_set(text: str) -> frozenset[str]:
    """Returns the set of the words of a text."""
    return frozenset(text.split())


def spellings(table: str) -> dict[str, str]:
    """Returns the name by each spelling of a table such as `le leq leqslant; ge geq`: a name, then its spellings."""
    entries = map(str.split, table.split(";"))
    return {spelling: name for name, *aliases in entries for spelling in aliases}


SMALL = str.split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = str.split("twenty thirty forty fifty sixty seventy eighty ninety")
BELOW_100 = {word: value for value, word in enumerate(SMALL)} | {word: 20 + 10 * i for i, word in enumerate(TENS)}
BELOW_100 |= {f"{ten}-{digit}": BELOW_100[ten] + BELOW_100[digit] for ten in TENS for digit in SMALL[1:10]}
LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES = {"hundred": 10**2, **LARGE, "dozen": 12}
_ORDINALS = str.split("half third quarter fifth sixth seventh eighth ninth tenth eleventh twelfth")
PARTS = {word: value for value, word in enumerate(_ORDINALS, 2)}
PARTS |= {"fourth": 4, "twentieth": 20, "hundredth": 100, "thousandth": 1000, "millionth": 10**6}
PARTS |= {f"{word}s": value for word, value in PARTS.items()} | {"halves": 2}
_QUANTITIES = word_set("once twice thrice double triple score gross lakh crore myriad percent")
_NUMBERS = _QUANTITIES.union(BELOW_100, SCALES, PARTS)

MONTHS = word_set("january february march april may june july august september october november december")

DENIALS = word_set(
    "not no never none nor neither nothing nobody cannot without except unless but or either if maybe perhaps possibly "
    "probably might could guess think suppose doubt unsure otherwise else alternatively wrong incorrect false instead "
    "another other anything until hardly barely dne too bound"
)
"""Words that take a claim back or add another one, wherever they stand."""
OPERATIONS = word_set("half twice halved doubled tripled squared cubed factorial times negative reciprocal inverse")
"""Words for something that is still to be done with a number; the question may have them."""
BOUNDS = word_set("over under above below less fewer least most almost nearly than between within beyond past")
"""Words that bound the number behind them."""
_ADVERBS = word_set(
    "approximately roughly only exactly simply finally clearly early daily weekly monthly yearly family"
)


def is_number_word(word: str) -> bool:
    """Tells whether a word is a number or a quantity: `twenty`, `tenths`, `double`."""
    low = word.casefold()
    return "illion" in low or not _NUMBERS.isdisjoint((low, low.removesuffix("s"), low.removesuffix("es")))


def changes(words: Sequence[str], question_words: Collection[str] = ()) -> bool:
    """Tells whether one of the words beside a number changes its value, and does not only repeat the question.

    The question, whose words are `question_words`, may ask for a half, or for quarters; it cannot allow `not`.
    """
    lows = [word.casefold().replace("’", "'").removesuffix("'s") for word in words]
    for previous, low in zip(["", *lows], lows, strict=False):
        stems = {low, low.removesuffix("s"), low.removesuffix("es")}
        if low.endswith(("n't", "ish")) or stems & DENIALS or (previous == "at" and low in ("most", "least")):
            return True
        is_adverb = low.endswith("ly") and low not in _ADVERBS
        if not stems & set(question_words) and (
            stems & OPERATIONS - {"times"} or (low == "times" and "as" not in lows) or is_adverb or is_number_word(low)
        ):
            return True
    return False


def take_back(words: Sequence[str], question_words: Collection[str] = ()) -> bool:
    """Tells whether the words that stand directly before a value deny, doubt or bound it: `it is not`, `at most`."""
    low = [word.casefold() for word in words[-3:]]
    is_part = low[-1:] == ["of"] and low[-2:-1] not in ([], ["total"], ["sum"], ["answer"], ["value"])
    return changes(low, question_words) or not BOUNDS.isdisjoint(low[-1:]) or low[-2:] == ["up", "to"] or is_part
