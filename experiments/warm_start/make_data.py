"""Writes sums with their worked solutions: train.jsonl and val.jsonl of several numbers of terms.

python experiments/warm_start/make_data.py --out runs/sums_of_terms
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

HELD_OUT = 256


def solution(numbers: Sequence[int]) -> str:
    """The written method that the tiny policy knows for two numbers, column by column."""
    columns, digits, carry = [], "", 0
    for place in (1, 10):
        column = [number // place % 10 for number in numbers]
        value = sum(column) + carry
        columns.append(f"{'+'.join(map(str, column))}{f'+{carry}' if carry else ''}={value}")
        digits, carry = f"{value % 10}{digits}", value // 10
    return f"<think>{' '.join(columns)}</think><answer>{int(f'{carry}{digits}')}</answer>"


def rows(terms: Sequence[int], count: int, seed: int) -> list[dict[str, object]]:
    """As many questions of each number of terms, all different, in turn."""
    rng, seen, found = random.Random(seed), set[str](), list[dict[str, object]]()
    while len(found) < count:
        numbers = [rng.randrange(100) for _ in range(terms[len(found) % len(terms)])]
        question = "+".join(map(str, numbers)) + "="
        if question not in seen:
            seen.add(question)
            row = {"question": question, "answer": str(sum(numbers)), "terms": len(numbers)}
            found.append(row | {"solution": solution(numbers)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--terms", type=int, nargs="+", default=[3], help="numbers of terms to train on")
    parser.add_argument("--val_terms", type=int, nargs="+", default=[3], help="numbers of terms to validate on")
    parser.add_argument("--num_train", type=int, default=4000)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    val = rows(options.val_terms, HELD_OUT, seed=1)
    held_out = {row["question"] for row in val}
    train = [row for row in rows(options.terms, options.num_train, seed=0) if row["question"] not in held_out]
    for name, some in (("train", train), ("val", val)):
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


if __name__ == "__main__":
    main()
