"""The units of quantities, their spellings and sizes."""

from fractions import Fraction

from grpo_lightning.plugins.rewards.verifier.words import spellings, word_set

Unit = tuple[tuple[str, int], ...]
"""Units and their powers, sorted: `m/s^2` is `(("metre", 1), ("second", -2))`."""

_TABLE = """
metre: m meter metre; inch 0.0254 metre: in inch inches; foot 0.3048 metre: ft foot feet; yard 0.9144 metre: yd yard;
mile 1609.344 metre: mi mile; angstrom 1/10000000000 metre: angstrom; second: s sec second; minute 60 second: min
minute; hour 3600 second: h hr hour; day 86400 second: d day; week 604800 second: wk week; month: month; year 12
month: yr year; decade 120 month: decade; century 1200 month: century centuries; gram: g gram gramme; tonne 1000000
gram: tonne; ounce 28.349523125 gram: oz ounce; pound 453.59237 gram: lb pound; ton: ton; litre: l L liter litre;
gallon: gal gallon; quart 1/4 gallon: qt quart; pint 1/8 gallon: pt pint; cup 1/16 gallon: cup; acre: acre; hectare:
hectare; newton: N newton; joule: J joule; watt: W watt; pascal: Pa pascal; hertz: Hz hertz; volt: V volt; ampere: A
amp ampere; ohm: ohm Omega; kelvin: K kelvin; mole: mol mole; molar: M molar; coulomb: C coulomb; farad: F farad;
tesla: T tesla; electronvolt: eV electronvolt; bar: bar; erg: erg; dyne: dyn dyne; calorie: cal calorie; dollar:
dollar USD usd buck; cent 0.01 dollar: cent; euro: euro EUR; yen: yen JPY; yuan: yuan RMB 元; rupee: rupee INR; ruble:
ruble рублей рубля рубль; radian: rad radian; degree: degree deg; percent 100 one: percent; unit: unit; point: point;
bit: bit; byte: byte; decibel: dB; fahrenheit: fahrenheit; celsius: celsius
"""
"""Each unit with its size, unless it is a base, and its spellings. From two letters on they have a plural with s."""
UNITS: dict[str, str] = {}
"""The unit of each spelling."""
_SIZES: dict[str, tuple[str, Fraction]] = {}
"""The base of each unit that is none, and its size in this base."""
_PREFIXES = "k kilo 3; c centi -2; m milli -3; M mega 6; G giga 9; n nano -9; u micro -6; p pico -12; d deci -1"
_PREFIXED = word_set(
    "metre gram litre second newton joule watt pascal hertz volt ampere ohm mole electronvolt calorie byte"
)
for _entry in _TABLE.replace("\n", " ").split(";"):
    (_name, *_size), _words = map(str.split, _entry.split(":"))
    UNITS |= {word + plural: _name for word in _words for plural in ("", "s") if len(word) > 1 or not plural}
    if _size:
        _SIZES[_name] = _size[1], Fraction(_size[0])
for _sign, _long, _power in map(str.split, _PREFIXES.split(";")):
    for _word, _name in list(UNITS.items()):
        _spelling = (_long if len(_word) > 3 else _sign) + _word
        if _name in _PREFIXED and _spelling not in UNITS and _word not in ("sec", "amp"):
            UNITS[_spelling] = _long + _name
            _SIZES[_long + _name] = _name, Fraction(10) ** int(_power)
UNITS |= spellings("millilitre cc; micrometre micron microns")

_RATES = spellings("mile/hour mph; kilometre/hour kph kmh; mile/gallon mpg")
UNITS |= {name: name for name in _RATES}
CURRENCIES = spellings("cent ¢; dollar $ USD; euro € EUR; pound £ GBP; yen ¥; rupee ₹ INR Rs")
TIMES = frozenset(name for name, (base, _) in _SIZES.items() if base in ("second", "month"))
LOOSE = frozenset(["unit", "point"])
"""Units that fit every other."""
TEMPERATURES = spellings("celsius celsius coulomb; fahrenheit fahrenheit farad")
"""The unit that degrees of a unit are: `^\\circ C` are no coulombs."""


def product_of(name: str) -> Unit:
    """Returns a unit as a product of others: `mph` is a mile per hour."""
    above, _, below = _RATES.get(name, name).partition("/")
    return ((above, 1), (below, -1)) if below else ((above, 1),)


def conversion(unit: Unit, target: Unit) -> Fraction | None:
    """Returns the size of one `unit` in units of `target`; None if they measure different quantities."""
    factor = Fraction(1)
    powers: dict[str, int] = {}
    for names, sign in ((unit, 1), (target, -1)):
        for name, power in names:
            base, size = _SIZES.get(name, (name, Fraction(1)))
            factor *= size ** (sign * power)
            powers[base] = powers.get(base, 0) + sign * power
    return None if any(powers.values()) else factor
