"""How often the math verifier errs and how fast it is, beside math-verify called in this process.

python tools/bench_verifier.py                  # 10,000 pairs of each kind, some two minutes
python tools/bench_verifier.py --pairs 1000
GRPO_TEST_DATA=data python tools/bench_verifier.py --rates    # errors on labelled answers, instead of times

**Rates.** Each set of labelled answers under `$GRPO_TEST_DATA` gives one row: how many right answers are rejected, and
how many wrong ones are accepted. The sets of `natural_math/` are text that nobody wrote for a verifier: reference
solutions of MATH and of Minerva's questions, outputs of Qwen2.5-Math, the test suites of other graders. "Golds of other
rows" are 3,000 of these solutions, each with the gold answer of another one. The sets of `math_cases/` are attacks;
cases of `tests/plugins/rewards/verifier/prose.jsonl`, whose only fault is prose outside the answer, do not count.

**Times.** The pairs are made up, always the same ones: a gold answer and a completion of some 700 characters that ends
in an answer, wrong in every other one. Half are whole numbers after `####`, as in GSM8K; the rest is boxed: 20 %
fractions, 15 % decimals and percentages, 15 % formulas (radicals, polynomials, intervals, tuples, equations, matrices).

    groups of 8     eight completions of each question, as in training: four answers, each of them twice
    no repeats      every pair occurs once: nothing is gained from remembering

For the throughput the verifier gets batches of 256, after `prepare` as in a run. For the time per pair a new verifier
gets every pair alone. math-verify gets every pair alone, with its own settings: it parses the gold answer and the
completion, and verifies.
"""

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.types import FinishReason, Prompt, Question, Sample

Answers = tuple[str, list[str], list[str]]
"""A gold answer, right answers and wrong ones."""
SENTENCE = "First we look at what is given, then {} and {} make {}, as one sees from $x_{} = {}$ and the line before. "
BATCH = 256


PROSE = Path(__file__).parents[1] / "tests" / "plugins" / "rewards" / "verifier" / "prose.jsonl"
NUM_CROSSED = 3000


class Case(NamedTuple):
    """A completion, the gold answer of its question, and whether the completion's answer equals it."""

    gold: str
    completion: str
    question: str
    is_right: bool


# ----- rates


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def labelled_sets(folder: Path) -> dict[str, list[Case]]:
    """The labelled answers under a folder by the names of their sets; sets without answers are left out."""
    prose = {(row["gold"], row["completion"]) for row in rows_of(PROSE)}
    sets: dict[str, list[Case]] = {}

    def add(name: str, row: dict[str, Any]) -> None:
        completion = row.get("completion") or rf"\boxed{{{row['answer']}}}"
        if (row["gold"], completion) not in prose:
            case = Case(row["gold"], completion, row.get("question", ""), row["expected"])
            sets.setdefault(name, []).append(case)

    solutions = rows_of(folder / "natural_math" / "solutions.jsonl")
    for row in solutions:
        name = row["source"].split()[0]
        add("MATH, figures" if name == "MATH" and row.get("figure") else name, row)
    rng = random.Random(0)
    for row in rng.sample(solutions, min(NUM_CROSSED, len(solutions))):
        other_gold = rng.choice(solutions)["gold"]
        if other_gold != row["gold"]:
            add("golds of other rows", row | {"gold": other_gold, "expected": False})
    for row in rows_of(folder / "natural_math" / "suites.jsonl"):
        if row.get("verdict") in (None, "our fault"):  # the others are conventions, or faults of the suite
            add("suites", row)
    for row in rows_of(folder / "math_cases" / "attack.jsonl"):
        if not row["ambiguous"]:
            add("attack 1", row)
    kinds = {"W": "wrong W", "R": "phrasings R", "N": "natural N", "L": "late L"}
    for row in rows_of(folder / "math_cases" / "attack_2.jsonl"):
        if not row["ambiguous"]:
            add(f"attack 2, {kinds[row['category'][0]]}", row)
    return sets


def mistakes(verifier: MathVerifier, cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """The right answers that a verifier rejects, and the wrong ones that it accepts."""
    prompts = (Prompt(0, case.question, [1], Question(case.question, case.gold)) for case in cases)
    samples = [
        Sample(prompt, case.completion, [1], FinishReason.STOP) for prompt, case in zip(prompts, cases, strict=True)
    ]
    return _split_mistakes(cases, [value == 1 for value in verifier(samples).value])


def mistakes_of_math_verify(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """The right answers that math-verify rejects, and the wrong ones that it accepts."""
    from math_verify import parse, verify

    verdicts = [verify(parse(rf"\boxed{{{case.gold}}}"), parse(case.completion)) for case in cases]
    return _split_mistakes(cases, verdicts)


def _split_mistakes(cases: Sequence[Case], verdicts: Sequence[bool]) -> tuple[list[Case], list[Case]]:
    mistaken = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict != case.is_right]
    return [case for case in mistaken if case.is_right], [case for case in mistaken if not case.is_right]


def print_rates(folder: Path) -> None:
    """Prints the table of rates."""
    verifier = MathVerifier()
    print("| set | right | rejected | by math-verify | wrong | accepted | by math-verify |")
    print("|---|---|---|---|---|---|---|")
    for name, cases in labelled_sets(folder).items():
        rejected, accepted = mistakes(verifier, cases)
        peer_rejected, peer_accepted = mistakes_of_math_verify(cases)
        num_right = sum(case.is_right for case in cases)
        right = f"{num_right} | {len(rejected)} | {len(peer_rejected)}"
        wrong = f"{len(cases) - num_right} | {len(accepted)} | {len(peer_accepted)}"
        print(f"| {name} | {right} | {wrong} |", flush=True)
    verifier.close()


# ----- times


def numbers(rng: random.Random) -> Answers:
    """As in GSM8K."""
    n = rng.randrange(2, 10 ** rng.choice((2, 3, 4, 6)))
    return str(n), [str(n), f"{n:,}", f"${n}", f"{n}.00"], [str(n + 1), str(10 * n), f"{n + 7:,}", f"${2 * n + 1}"]


def fractions(rng: random.Random) -> Answers:
    a, b = rng.randrange(1, 400), rng.randrange(401, 1000)
    right = [rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}", rf"\dfrac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{3 * a}}}{{{3 * b}}}"]
    return (
        right[0],
        right,
        [rf"\frac{{{b}}}{{{a}}}", f"{a}/{b + 1}", rf"\frac{{{a + 1}}}{{{b}}}", rf"-\frac{{{a}}}{{{b}}}"],
    )


def decimals(rng: random.Random) -> Answers:
    n = rng.randrange(101, 99999)
    right = [f"{n / 1000}", rf"\frac{{{n}}}{{1000}}", f"{n / 1000:.5f}", rf"{n / 10:.1f}\%"]
    return right[0], right, [f"{n / 100}", f"{(n + 1) / 1000}", rf"{n / 1000 + 1:.3f}\%", rf"\frac{{{n}}}{{100}}"]


def formulas(rng: random.Random) -> Answers:
    a, b, c = rng.randrange(2, 60), rng.randrange(61, 120), rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    kind = rng.randrange(6)
    if kind == 0:
        right = [
            rf"{a}\sqrt{{{c}}}",
            rf"\sqrt{{{a * a * c}}}",
            rf"\frac{{{a * c}}}{{\sqrt{{{c}}}}}",
            rf"\sqrt{c}\cdot{a}",
        ]
        wrong = [rf"{b}\sqrt{{{c}}}", rf"\sqrt{{{a * c}}}", str(a), rf"{a}+\sqrt{{{c}}}"]
    elif kind == 1:
        right = [f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})", f"x^2+{a * b}+{a + b}x", f"(x+{b})(x+{a})"]
        wrong = [f"x^2+{a + b}x", f"(x-{a})(x-{b})", f"x^2+{a + b + 1}x+{a * b}", f"(x+{a})^2"]
    elif kind == 2:
        right = [f"[{a},{b})", rf"{a}\le x<{b}", rf"x\in[{a},{b})", rf"\left[{a}, {b}\right)"]
        wrong = [f"({a},{b})", rf"{a}<x<{b}", rf"[{a},\infty)", f"[{a},{b}]"]
    elif kind == 3:
        right = [f"({a},-{b})", rf"\left({a}, -{b}\right)", f"(x,y)=({a},-{b})", rf"({a},\frac{{-{2 * b}}}{{2}})"]
        wrong = [f"(-{b},{a})", f"({a},{b})", f"({a + 1},-{b})", str(a)]
    elif kind == 4:
        right = [f"y={a}x+{b}", f"{a}x+{b}", f"{a}x-y+{b}=0", f"y-{b}={a}x"]
        wrong = [f"y={b}x+{a}", f"y={a}x-{b}", f"{a}x+y={b}", f"{a}x"]
    else:
        right = [
            rf"\frac{{{a}\pi}}{{{b}}}",
            rf"\frac{{{a}}}{{{b}}}\pi",
            rf"{a}\pi/{b}",
            rf"\frac{{{2 * a}\pi}}{{{2 * b}}}",
        ]
        wrong = [rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{b}\pi}}{{{a}}}", rf"{a}\pi", rf"\frac{{{a + 1}\pi}}{{{b}}}"]
    return right[0], right, wrong


def completion(answer: str, hashes: bool, rng: random.Random) -> str:
    """Some sentences, then the answer."""
    sentences = "".join(SENTENCE.format(*(rng.randrange(100) for _ in range(5))) for _ in range(6))
    return f"{sentences}\n#### {answer}" if hashes else rf"{sentences}So the answer is $\boxed{{{answer}}}$."


def samples(count: int, repeats: bool) -> Iterator[Sample]:
    """The pairs, eight per question with `repeats`."""
    rng = random.Random(0)
    seen: set[tuple[str, str]] = set()
    made = 0
    while made < count:
        kind = rng.choices((numbers, fractions, decimals, formulas), (50, 20, 15, 15))[0]
        gold, right, wrong = kind(rng)
        if repeats:
            answers = 2 * [*rng.sample(right, 2), *rng.sample(wrong, 2)]
        else:
            answers = [rng.choice(right if made % 2 else wrong)]
        for answer in answers:
            if repeats or (gold, answer) not in seen:
                seen.add((gold, answer))
                made += 1
                prompt = Prompt(0, "q", [1], Question("q", gold))
                yield Sample(prompt, completion(answer, kind is numbers, rng), [1], FinishReason.STOP)


def timed(batches: Sequence[Sequence[Sample]]) -> tuple[list[float], list[float]]:
    """Seconds of each batch with a new verifier, and the values."""
    verifier = MathVerifier()
    verifier.read_questions([sample.prompt.question for batch in batches for sample in batch])
    seconds, values = [], []
    for batch in batches:
        start = time.perf_counter()
        values += verifier(batch).value
        seconds.append(time.perf_counter() - start)
    verifier.close()
    return seconds, values


def by_math_verify(pairs: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Seconds of each pair, and the values."""
    from math_verify import parse, verify

    seconds, values = [], []
    for sample in pairs:
        start = time.perf_counter()
        values.append(float(verify(parse(rf"\boxed{{{sample.answer}}}"), parse(sample.text))))
        seconds.append(time.perf_counter() - start)
    return seconds, values


def quantile(seconds: Sequence[float], fraction: float) -> float:
    """The quantile in milliseconds."""
    return 1000 * sorted(seconds)[min(len(seconds) - 1, int(fraction * len(seconds)))]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000, help="how many (default: 10,000)")
    parser.add_argument("--rates", action="store_true", help="measure errors on labelled answers, instead of times")
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if options.rates:
        print_rates(Path(os.environ["GRPO_TEST_DATA"]))
        return
    by_math_verify(list(samples(20, False)))  # its first calls build its regular expressions
    print("| pairs | by | pairs/s | times math-verify | p50 ms | p99 ms | max ms | right |")
    print("|---|---|---|---|---|---|---|---|")
    for name, repeats in (("groups of 8", True), ("no repeats", False)):
        pairs = list(samples(options.pairs, repeats))[: options.pairs]
        reference, reference_values = by_math_verify(pairs)
        batches, values = timed([pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)])
        single, _ = timed([[pair] for pair in pairs])
        rows = (("math-verify", reference, reference, reference_values), ("MathVerifier", batches, single, values))
        for by, whole, one, right in rows:
            speed = f"{len(pairs) / sum(whole):.0f} | {sum(reference) / sum(whole):.1f}"
            times = " | ".join(f"{quantile(one, fraction):.2f}" for fraction in (0.5, 0.99, 1))
            print(f"| {name} | {by} | {speed} | {times} | {sum(right) / len(right):.3f} |", flush=True)


if __name__ == "__main__":
    main()
