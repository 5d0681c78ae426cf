"""Writes sums of numbers of three digits with their worked solutions; runs/guessing_policy knows those of two digits.

python experiments/warm_start/make_data.py --out runs/longer_sums
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from make_tiny_policy import worked_solution

NUM_TRAIN, NUM_VAL, NUM_SHORT, NUM_SHORT_VAL = 4000, 256, 400, 128


def row(left: int, right: int) -> dict[str, object]:
    """A question; `digits` is that of its longer number."""
    solution = worked_solution(f"{left}+{right}", wrong=0.0, rng=random.Random(0))
    digits = len(str(max(left, right)))
    return {"question": f"{left}+{right}=", "answer": str(left + right), "digits": digits, "solution": solution}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--short", action="store_true", help="train on some sums of two digits too, and hold others out"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    rng = random.Random(0)
    pairs = dict.fromkeys((rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(NUM_TRAIN + NUM_VAL))
    val, train = [*pairs][:NUM_VAL], [*pairs][NUM_VAL:]
    files = {"train": train, "val": val}
    if options.short:
        draws = ((rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(NUM_SHORT + NUM_SHORT_VAL))
        short = [*dict.fromkeys(draws)]
        files = {"train": train + short[NUM_SHORT_VAL:], "val": val, "short": short[:NUM_SHORT_VAL]}
    for name, some in files.items():
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row(*pair)) + "\n" for pair in some))


if __name__ == "__main__":
    main()
