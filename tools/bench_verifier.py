"""How fast the math verifier is, beside math-verify called in this process, on the same pairs and in the same run.

python tools/bench_verifier.py                  # 10,000 pairs of each kind, some two minutes
python tools/bench_verifier.py --pairs 1000

The pairs are made up, always the same ones: a gold answer and a completion of some 700 characters that ends in an
answer, wrong in every other one. Half are whole numbers after `####`, as in GSM8K; the rest is boxed: 20 % fractions,
15 % decimals and percentages, 15 % formulas (radicals, polynomials, intervals, tuples, equations, matrices).

    groups of 8     eight completions of each question, as in training: four answers, each of them twice
    no repeats      every pair occurs once: nothing is gained from remembering

For the throughput the verifier gets batches of 256, after `prepare` as in a run. For the time per pair a new verifier
gets every pair alone. math-verify gets every pair alone, with its own settings: it parses the gold answer and the
completion, and verifies.
"""

import argparse
import logging
import random
import time
from collections.abc import Iterator, Sequence

from math_verify import parse, verify

from grpo_lightning.plugins.verifier.math_verifier import MathVerifier
from grpo_lightning.types import FinishReason, Prompt, Question, Sample

Answers = tuple[str, list[str], list[str]]
"""A gold answer, right answers and wrong ones."""
SENTENCE = "First we look at what is given, then {} and {} make {}, as one sees from $x_{} = {}$ and the line before. "
BATCH = 256


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
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
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
