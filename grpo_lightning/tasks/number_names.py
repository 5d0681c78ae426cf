"""Whole numbers in English words."""

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**6, "million"), (10**3, "thousand"), (100, "hundred"))


def in_words(number: int) -> str:
    """A number in words: 123 is `one hundred twenty-three`.

    Args:
        number: 0 to 999,999,999.
    """
    assert 0 <= number < 10**9
    for size, name in SCALES:
        if number >= size:
            count, rest = divmod(number, size)
            return f"{in_words(count)} {name}" + (f" {in_words(rest)}" if rest else "")
    if number < len(SMALL):
        return SMALL[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")
