"""The units of quantities, their spellings and sizes."""

from fractions import Fraction

Unit = tuple[tuple[str, int], ...]
"""Base units and their powers, sorted: `m/s^2` is (("metre", 1), ("second", -2))."""

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
CURRENCIES |= {"USD": "dollar", "EUR": "euro", "GBP": "pound", "INR": "rupee", "Rs": "rupee"}

LOOSE = frozenset(["unit", "point"])
"""Units that fit every other."""
