"""The units of quantities, their spellings and sizes."""

from fractions import Fraction

Unit = tuple[tuple[str, int], ...]
"""Base units and their powers, sorted: `m/s^2` is (("metre", 1), ("second", -2))."""

_SPELLINGS = """
metre: m meter metre; second: s sec second; minute: min minute; hour: h hr hour; day: d day; week: wk week;
month: month; year: yr year; decade: decade; century: century centuries; gram: g gram gramme; tonne: tonne;
litre: l L liter litre; newton: N newton; joule: J joule; watt: W watt; pascal: Pa pascal; hertz: Hz hertz;
volt: V volt; ampere: A amp ampere; ohm: ohm Omega; kelvin: K kelvin; mole: mol mole; molar: M molar; coulomb: C
coulomb; farad: F farad; tesla: T tesla; electronvolt: eV electronvolt; bar: bar; erg: erg; dyne: dyn dyne;
calorie: cal calorie; angstrom: angstrom; inch: in inch inches; foot: ft foot feet; yard: yd yard; mile: mi
mile; ounce: oz ounce; pound: lb pound; ton: ton; gallon: gal gallon; quart: qt quart; pint: pt pint; cup: cup;
acre: acre; hectare: ha hectare; dollar: dollar USD usd buck; cent: cent; euro: euro EUR; yen: yen JPY; yuan:
yuan RMB 元; rupee: rupee INR; ruble: ruble рублей рубля рубль; degree: degree deg; radian: rad radian; percent:
percent; mph: mph; unit: unit; point: point; bit: bit; byte: byte; decibel: dB; fahrenheit: fahrenheit; celsius:
celsius
"""
"""Each unit and its spellings; those of two letters and more also have a plural with an s."""
UNITS: dict[str, str] = {}
for _entry in _SPELLINGS.replace("\n", " ").split(";"):
    _name, *_words = _entry.replace(":", " ").split()
    UNITS |= {word + plural: _name for word in _words for plural in ("", "s") if len(word) > 1 or not plural}
_PREFIXES = {"k": "kilo", "c": "centi", "m": "milli", "M": "mega", "G": "giga", "n": "nano", "u": "micro", "d": "deci"}
_PREFIXED = {
    "metre": "m", "gram": "g", "litre": "l L", "second": "s", "newton": "N", "joule": "J", "watt": "W", "pascal": "Pa",
    "hertz": "Hz", "volt": "V", "ampere": "A", "ohm": "", "mole": "mol", "electronvolt": "eV", "calorie": "cal",
}  # fmt: skip
for _base, _short in _PREFIXED.items():
    for _sign, _long in _PREFIXES.items():
        _longs = [spelling for spelling, base in UNITS.items() if base == _base and len(spelling) > 3]
        UNITS |= {_sign + short: _long + _base for short in _short.split() if _sign + short not in UNITS}
        UNITS |= {_long + spelling: _long + _base for spelling in _longs}
UNITS["cc"] = "centilitre"

FACTORS: dict[str, tuple[str, Fraction | int]] = {
    "kilometre": ("metre", 1000), "centimetre": ("metre", Fraction(1, 100)), "millimetre": ("metre", Fraction(1, 1000)),
    "inch": ("metre", Fraction(254, 10**4)), "foot": ("metre", Fraction(3048, 10**4)), "percent": ("one", 100),
    "yard": ("metre", Fraction(9144, 10**4)), "mile": ("metre", Fraction(1609344, 1000)), "kilogram": ("gram", 1000),
    "milligram": ("gram", Fraction(1, 1000)), "tonne": ("gram", 10**6), "pound": ("gram", Fraction(45359237, 10**5)),
    "ounce": ("gram", Fraction(45359237, 16 * 10**5)), "millilitre": ("litre", Fraction(1, 1000)),
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
CURRENCIES |= {"USD": "dollar", "EUR": "euro", "GBP": "pound", "INR": "rupee", "Rs": "rupee"}

LOOSE = frozenset(["unit", "point"])
"""Units that fit every other."""
