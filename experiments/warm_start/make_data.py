"""Writes differences with their worked solutions, train.jsonl and val.jsonl: the tiny policy knows sums alone.

python experiments/warm_start/make_data.py --out runs/differences
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from make_tiny_policy import worked_solution

NUM_TRAIN, NUM_VAL = 4000, 256


def row(left: int, right: int) -> dict[str, object]:
    """A question; `digits` is that of its longer number."""
    solution = worked_solution(f"{left}-{right}", wrong=0.0, rng=random.Random(0))
    digits = len(str(max(left, right)))
    return {"question": f"{left}-{right}=", "answer": str(left - right), "digits": digits, "solution": solution}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True)
    pairs = [(left, right) for left in range(100) for right in range(100)]
    random.Random(0).shuffle(pairs)
    long = [pair for pair in pairs if max(pair) > 9]
    short = [pair for pair in pairs if max(pair) <= 9]
    train = [*long[NUM_VAL:NUM_TRAIN], *short]
    for name, some in (("train", train), ("val", long[:NUM_VAL])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row(*pair)) + "\n" for pair in some))


if __name__ == "__main__":
    main()
