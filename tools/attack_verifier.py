"""Looks for answers that the math verifier judges wrongly, and prints them, the shortest first.

python tools/attack_verifier.py --minutes 10
python tools/attack_verifier.py --pairs 20000 --seed 7

The pairs come from `tests/plugins/rewards/verifier/fuzz.py`: gold answers of every kind with equal rewritings, wrong
mutations, hedges and restatements. Their verdicts are known. Exit code: 0 if no wrong answer was accepted and at most
1 % of the right ones were rejected, 1 if not.
"""

import argparse
import importlib.util
import itertools
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.plugins.rewards.verifier.math_verifier import EQUAL, Verdict, decide
from grpo_lightning.plugins.rewards.verifier.value_comparison import compare

FUZZ = Path(__file__).parents[1] / "tests" / "plugins" / "rewards" / "verifier" / "fuzz.py"


def load_fuzz() -> ModuleType:
    """The fuzzer, which is a helper of the tests and no part of the package."""
    spec = importlib.util.spec_from_file_location("verifier_fuzz", FUZZ)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def outcome(pair: Any) -> str:
    """The verifier's judgement, made in this process."""
    answer = extract_answer(pair.completion)
    if not answer:
        return "no_answer"
    verdict = decide(pair.gold, answer, pair.question)
    return verdict.outcome if isinstance(verdict, Verdict) else compare(*verdict)


def main(argv: list[str] | None = None) -> int:
    """Runs the attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--pairs", type=int, default=0, help="how many, instead of how long")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs (default: 0)")
    parser.add_argument("--show", type=int, default=20, help="how many to print of each kind of mistake (default: 20)")
    options = parser.parse_args(argv)
    end = time.monotonic() + 60 * options.minutes
    counts: Counter[bool] = Counter()
    mistakes: dict[str, list[str]] = {"accepted though wrong": [], "rejected though right": [], "over 1 s of CPU": []}
    for number, pair in enumerate(load_fuzz().pairs(options.seed)):
        if number >= options.pairs if options.pairs else time.monotonic() > end:
            break
        start = time.process_time()
        actual = outcome(pair)
        seconds = time.process_time() - start
        counts[pair.right] += 1
        row = f"{pair.gold!r} <- {pair.completion!r}: {actual} ({pair.kind})" + f" [{pair.question}]" * bool(
            pair.question
        )
        if (actual == EQUAL) != pair.right:
            mistakes["rejected though right" if pair.right else "accepted though wrong"].append(row)
        if seconds > 1:
            mistakes["over 1 s of CPU"].append(f"{seconds:.1f} s: {row}")
    for name, rows in mistakes.items():
        print(f"{name}: {len(rows)}")
        for row in itertools.islice(sorted(set(rows), key=len), options.show):
            print(f"  {row}")
    print(f"{counts[True]} right pairs, {counts[False]} wrong pairs")
    failed = mistakes["accepted though wrong"] or mistakes["over 1 s of CPU"]
    return int(bool(failed) or len(mistakes["rejected though right"]) > 0.01 * counts[True])


if __name__ == "__main__":
    sys.exit(main())
