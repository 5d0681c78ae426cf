"""The units and nouns that may follow a number. Nothing else may."""

from collections.abc import Collection, Sequence
from fractions import Fraction

from grpo_lightning.plugins.verifier.rules import rule


def word_set(text: str) -> frozenset[str]:
    """The set of the words of a text."""
    return frozenset(text.split())


Unit = tuple[tuple[str, int], ...]
"""Base units and their powers, sorted: `m/s^2` is (("metre", 1), ("second", -2))."""

SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip

_SPELLINGS = """
metre m meter meters metre metres
second s sec secs second seconds
minute min mins minute minutes
hour h hr hrs hour hours
day d day days
week wk week weeks
month month months
year yr yrs year years
decade decade decades
century century centuries
gram g gram grams gramme grammes
tonne tonne tonnes
litre l L liter liters litre litres
newton N newton newtons
joule J joule joules
watt W watt watts
pascal Pa pascal pascals
hertz Hz hertz
volt V volt volts
ampere A amp amps ampere amperes
ohm ohm ohms Omega
kelvin K kelvin kelvins
mole mol mole moles
molar M molar
coulomb C coulomb coulombs
farad F farad farads
tesla T tesla teslas
electronvolt eV electronvolt electronvolts
bar bar bars
erg erg ergs
dyne dyn dyne dynes
calorie cal calorie calories
angstrom angstrom angstroms
inch in inch inches
foot ft foot feet
yard yd yard yards
mile mi mile miles
ounce oz ounce ounces
pound lb lbs pound pounds
ton ton tons
gallon gal gallon gallons
quart qt quart quarts
pint pt pint pints
cup cup cups
acre acre acres
hectare ha hectare hectares
dollar dollar dollars USD usd buck bucks
cent cent cents
euro euro euros EUR
yen yen JPY
yuan yuan RMB 元
rupee rupee rupees INR
ruble ruble rubles рублей рубля рубль
degree degree degrees deg
radian rad radian radians
percent percent
mph mph
unit unit units
point point points
bit bit bits
byte byte bytes
decibel dB
fahrenheit fahrenheit
celsius celsius
"""
UNITS = {spelling: line.split()[0] for line in _SPELLINGS.strip().splitlines() for spelling in line.split()[1:]}
_PREFIXES = {"k": "kilo", "c": "centi", "m": "milli", "M": "mega", "G": "giga", "n": "nano", "u": "micro", "d": "deci"}
_PREFIXED = {
    "metre": "m", "gram": "g", "litre": "l L", "second": "s", "newton": "N", "joule": "J", "watt": "W", "pascal": "Pa",
    "hertz": "Hz", "volt": "V", "ampere": "A", "ohm": "", "mole": "mol", "electronvolt": "eV", "calorie": "cal",
}  # fmt: skip
for _base, _short in _PREFIXED.items():
    for _sign, _long in _PREFIXES.items():
        _longs = [spelling for spelling, base in UNITS.items() if base == _base and len(spelling) > 2]
        UNITS |= {_sign + short: _long + _base for short in _short.split() if _sign + short not in UNITS}
        UNITS |= {_long + spelling: _long + _base for spelling in _longs}
UNITS["cc"] = "centilitre"

FACTORS: dict[str, tuple[str, Fraction | int]] = {
    "kilometre": ("metre", 1000), "centimetre": ("metre", Fraction(1, 100)), "millimetre": ("metre", Fraction(1, 1000)),
    "inch": ("metre", Fraction(254, 10**4)), "foot": ("metre", Fraction(3048, 10**4)), "percent": ("one", 100),
    "yard": ("metre", Fraction(9144, 10**4)), "mile": ("metre", Fraction(1609344, 1000)),
    "kilogram": ("gram", 1000), "milligram": ("gram", Fraction(1, 1000)), "tonne": ("gram", 10**6),
    "pound": ("gram", Fraction(45359237, 10**5)), "ounce": ("gram", Fraction(45359237, 16 * 10**5)),
    "millilitre": ("litre", Fraction(1, 1000)), "centilitre": ("litre", Fraction(1, 100)),
    "minute": ("second", 60), "hour": ("second", 3600), "day": ("second", 86400), "week": ("second", 604800),
    "cent": ("dollar", Fraction(1, 100)),
}  # fmt: skip
"""Base unit and size in it of each unit, for `convert_units`."""


def conversion(unit: Unit, into: Unit) -> Fraction | None:
    """The size of one `unit` in units of `into`; None if they measure different quantities."""
    factor = Fraction(1)
    found: list[dict[str, int]] = []
    for names, sign in ((unit, 1), (into, -1)):
        bases: dict[str, int] = {}
        for name, power in names:
            base, size = FACTORS.get(name, (name, 1))
            factor *= Fraction(size) ** (sign * power)
            bases[base] = bases.get(base, 0) + power
        found.append(bases)
    return factor if found[0] == found[1] else None


CURRENCIES = {"¢": "cent", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}

_NOT_NOUNS = word_set(
    "times plus minus less versus is was has does as this thus perhaps its his us yes across always besides "
    "unless alas plus towards afterwards backwards sometimes else's gross sevens ones twos threes fours fives "
    "sixes eights nines tens hundreds thousands millions billions trillions dozens scores lakhs crores myriads "
    "halves quarters thirds fourths guesses maybes"
)
_NUMBER_WORD = rule(
    r"(?:zero|once|one|twice|thrice|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty"
    r"|seventy|eighty|ninety|hundred|thousand|\w+illion|dozen|half|third|quarter|double|triple)s?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w+illion)ths?"
    r"|(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet)ieths?",
    "«twenty»",
    "«tenths»",
    "«seventeen»",
    "apple",
)
_COUNTED = rule(r"([a-z]{3,}|\d+)-([a-z]{3,})", "«three-digit»", "«12-hour»", "3-4")


def is_number_word(word: str) -> bool:
    """Whether a word is a number or a quantity: `twenty`, `tenths`, `double`."""
    return bool(_NUMBER_WORD.fullmatch(word.casefold()))


HEDGES = word_set(
    "or and not no nor neither either maybe possibly probably perhaps about approximately roughly almost "
    "nearly least most than more fewer less greater below above under over between through to mod modulo "
    "remainder point base wrong if else otherwise unless except but instead rather until squared cubed "
    "factorial factored choose tripled doubled halved negative positive times divided multiplied added "
    "subtracted log sin cos tan sqrt root power raised"
)
_NOUNS = word_set(
    "text people children men women fish sheep feet geese mice teeth money time water rice milk money cash "
    "change profit student book apple ball card coin way solution value number digit term side edge point "
    "integer factor root square pair triangle person child man woman game"
)
_ADJECTIVES = word_set(
    "more fewer extra lattice intersection consecutive equal real complex distinct different whole integer "
    "integral prime square cubic total possible positive unique red blue green black white yellow small large "
    "big new old full single additional extra any ordered valid such nautical metric fluid US"
)
_LEADING = word_set("of per each every")
_LINKS = word_set("of per a an each every in from for at on")
_ARTICLES = word_set("the a an his her its their our each one every")
_ENDS = word_set(
    "left remaining remain total altogether old long tall wide deep high away each apart together today "
    "combined more? daily weekly yearly annually only exactly"
)
_PLURAL = rule(r"[A-Za-z]{3,}s|[A-Za-z]+-[A-Za-z]{3,}s", "«apples»", "«T-shirts»", "fish")


def is_noun(word: str, known: Collection[str]) -> bool:
    """Whether a word can be counted: a unit, a plural, a common noun, or a word of the question."""
    low = word.casefold()
    if low in HEDGES or low in _NOT_NOUNS or _NUMBER_WORD.fullmatch(low):
        return False
    is_known = low in known or low.removesuffix("s") in known or f"{low}s" in known
    is_foreign = not word.isascii() and word.isalpha()
    return word in UNITS or low in UNITS or low in _NOUNS or is_known or is_foreign or bool(_PLURAL.fullmatch(word))


def counts_things(words: Sequence[str], known: Collection[str] = ()) -> bool:
    """Whether a phrase begins with a plural noun that is no unit: `5 apples`, not `18 profit` or `5 left`."""
    end = _noun_phrase(words, 0, known)
    return end > 0 and bool(_PLURAL.fullmatch(words[end - 1])) and words[end - 1].casefold() not in UNITS


def is_phrase(words: Sequence[str], known: Collection[str] = ()) -> bool:
    """Whether the words after a number only name what is counted: `real solutions`, `pounds of sugar`, `cups a day`."""
    index = _noun_phrase(words, 0, known)
    if index == 0 and (not words or words[0].casefold() not in _LEADING):
        return False
    while index < len(words):
        word = words[index].casefold()
        if word in _ENDS:
            index += 1
        elif words[index : index + 2] == ["in", "total"] or words[index : index + 2] == ["in", "all"]:
            index += 2
        elif word in _LINKS:
            after = _noun_phrase(words, index + 1, known, known_only=True)
            if after == index + 1:
                return word in ("each", "every") and after == len(words)
            index = after
        else:
            return False
    return True


def _is_compound(low: str) -> bool:
    """Whether a word is a compound such as `three-digit` or `well-known`, and no number as `twenty-five`."""
    parts = _COUNTED.fullmatch(low)
    return parts is not None and not is_number_word(parts[2]) and (parts[2] != "ish" or not is_number_word(parts[1]))


def _noun_phrase(words: Sequence[str], start: int, known: Collection[str], known_only: bool = False) -> int:
    """The index at which the noun phrase at `start` ends; `start` if there is none."""
    index = start
    while index < len(words) and words[index].casefold() in _ARTICLES and known_only:
        index += 1
    last = start
    while index < len(words) and index - start < 6:
        word, low = words[index], words[index].casefold()
        if is_noun(word, known) or (known_only and word.isalpha() and low not in HEDGES | _LINKS):
            last = index = index + 1
            if index < len(words) and words[index].casefold() in HEDGES - {"and"}:
                break
        elif low in _ADJECTIVES or (_is_compound(low) and index + 1 < len(words)):
            index += 1
        else:
            break
        if known_only and last == index and (index >= len(words) or words[index].casefold() in _LINKS | _ENDS):
            break
    return last
