r"""`grpo-verify`: grades answers from the command line as `MathVerifier` does in training, and says why.

    grpo-verify '\frac{1}{2}' 0.5                       one pair
    grpo-verify --question 'Expand $(x+1)^2$.' ...      with the question, whose form and units count
    grpo-verify --completion 18 'So #### 18'            the whole completion; - reads it from stdin
    grpo-verify --jsonl predictions.jsonl --out graded.jsonl

A row of the jsonl has its gold answer under `gold`, and a `completion` or a bare `answer`; its question under
`question` or `prompt`. Without `gold`, `answer` is the gold answer, as `grpo predict` writes it. Exit code: 0 if all
answers are right, 1 if not, 2 for wrong arguments.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.plugins.rewards.verifier.math_verifier import EQUAL, MathVerifier
from grpo_lightning.sandbox.pool import LoadError
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError, require

BATCH = 256


def grade(verifier: MathVerifier, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Yields the grade of each sample in words. `ms` is the mean over the samples of this call."""
    start = time.perf_counter()
    answers, verdicts = verifier.grade(samples)
    result = verifier.report(samples, answers, verdicts)
    milliseconds = round(1000 * (time.perf_counter() - start) / max(1, len(samples)), 3)
    for answer, verdict, status in zip(answers, verdicts, result.status, strict=True):
        grade_row = {"right": verdict.outcome == EQUAL, "status": status, "extracted": answer}
        yield grade_row | {"stage": verdict.stage, "why": verdict.reason, "ms": milliseconds}


def sample_of(gold: str, completion: str, prompt: str = "", source: str = "", question: str = "") -> Sample:
    """Returns the sample, as the verifier gets it in training."""
    problem = Question(question or prompt, gold, source)
    return Sample(Prompt(0, prompt, [0], problem), completion, [0], FinishReason.STOP)


def read_row(line: str, source: str) -> tuple[dict[str, Any], Sample]:
    """Returns the row of one line of the file, and its sample."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{source}: no JSON: {error}") from None
    require(isinstance(row, dict), f"{source}: a {type(row).__name__}; each line must be an object")
    gold = row.get("gold", row.get("answer"))
    completion = row.get("completion")
    if completion is None and "gold" in row and "answer" in row:
        completion = rf"\boxed{{{row['answer']}}}"
    if gold is None or completion is None:
        raise UsageError(f"{source}: has {sorted(row)}; give `gold` with `completion` or `answer`, or both of these")
    return row, sample_of(str(gold), str(completion), str(row.get("prompt", "")), source, str(row.get("question", "")))


def grade_file(verifier: MathVerifier, path: Path, out: Path | None) -> bool:
    """Grades every row; returns whether all are right.

    It prints the wrong rows and a summary, and writes the rows with their grades to `out`.
    """
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may have other line breaks inside
    rows = [read_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    require(bool(rows), f"{path}: no rows")
    samples = [sample for _, sample in rows]
    verifier.read_questions([sample.prompt.question for sample in samples])
    batches = (samples[start : start + BATCH] for start in range(0, len(samples), BATCH))
    grades = [grade_row for batch in batches for grade_row in grade(verifier, batch)]
    graded = [row | grade_row for (row, _), grade_row in zip(rows, grades, strict=True)]
    for sample, grade_row in zip(samples, grades, strict=True):
        if not grade_row["right"]:
            print(
                f"{sample.prompt.question.source}: gold {sample.answer!r}: wrong (status {grade_row['status']}), "
                f"extracted {grade_row['extracted']!r}, decided by {grade_row['stage']}: {grade_row['why']}"
            )
    if out:
        texts = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in graded)
        out.write_text("".join(texts), encoding="utf-8", errors="backslashreplace")
    num_right = sum(grade_row["right"] for grade_row in grades)
    print(f"{num_right} of {len(rows)} right ({num_right / len(rows):.1%})")
    for key in ("status", "stage"):
        counts = Counter(grade_row[key] for grade_row in grades).most_common()
        print(f"{key}: " + ", ".join(f"{name} {count}" for name, count in counts))
    if expected := [row for row in graded if "expected" in row]:
        num_expected = sum(bool(row["expected"]) == row["right"] for row in expected)
        print(f"as `expected`: {num_expected} of {len(expected)}")
    return num_right == len(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="grpo-verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gold", nargs="?", help="the gold answer, bare")
    parser.add_argument("answer", nargs="?", help=r"the answer, as inside \boxed{}")
    parser.add_argument("--question", default="", help="the question of the pair")
    parser.add_argument("--completion", action="store_true", help="`answer` is a whole completion")
    parser.add_argument("--jsonl", type=Path, help="a file with one row per line, instead of one pair")
    parser.add_argument("--out", type=Path, help="file to write the rows with their grades to")
    parser.add_argument("--timeout", type=float, default=1.0, help="CPU seconds per comparison (default: 1.0)")
    options = parser.parse_args(argv)
    if (options.jsonl is None) == (options.answer is None) or (options.jsonl and options.gold):
        parser.error("give GOLD and ANSWER, or --jsonl FILE")
    if options.out and not options.jsonl:
        parser.error("--out goes with --jsonl")
    try:
        verifier = MathVerifier(timeout=options.timeout)
    except UsageError as error:
        parser.error(str(error))
    try:
        if options.jsonl:
            return 0 if grade_file(verifier, options.jsonl, options.out) else 1
        text = sys.stdin.read() if options.completion and options.answer == "-" else options.answer
        verifier.read_questions([])  # so that the time below is a comparison's, without the start of a worker
        completion = text if options.completion else rf"\boxed{{{text}}}"
        (grade_row,) = grade(verifier, [sample_of(options.gold, completion, question=options.question)])
        if grade_row["stage"] == "worker":
            grade_row |= verifier.explain(options.gold, grade_row["extracted"], options.question)
        width = max(map(len, grade_row))
        for key, value in grade_row.items():
            print(f"{key:{width}}  {value}")
        return 0 if grade_row["right"] else 1
    except (UsageError, OSError, UnicodeDecodeError, LoadError) as error:
        print(f"grpo-verify: {error}", file=sys.stderr)
        return 2
    finally:
        verifier.close()


if __name__ == "__main__":
    sys.exit(main())
