"""Labels the segments of completions by where they lead: training data for a process model.

python tools/label_segments.py runs/.../predictions.jsonl --policy runs/tiny_policy --out labels.jsonl
    [--completions 8] [--pattern '\\n'] [--template '{question}'] [--max-new-tokens 256] [--temperature 1] [--seed 0]

The labels of Math-Shepherd (arXiv 2312.08935): the policy completes every segment's prefix N times. A segment is right
(hard) if any of these reaches the gold answer; the soft label is the fraction that does. The last segment is judged by
the completion as it is. The rows are those `grpo predict` writes: question, answer, completion. A row of the output has
`prompt`, `completions` (the segments) and `labels` (hard), as TRL's PRMTrainer reads them, and `fractions` (soft).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.process.reward import last_tokens
from grpo_lightning.rewards.process.splitters import ByPattern
from grpo_lightning.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.types import Completion, FinishReason, Prompt, Question, Sample

ROWS_AT_ONCE = 64
MAX_SEGMENTS = 1000
RIGHT_ABOVE = 0.5
"""An answer is right if the verifier gives more."""


@dataclass
class Solution:
    """A completion cut into segments."""

    prompt: Prompt
    text: str
    prefixes: list[list[int]]
    """Token ids of the completion up to the end of each segment but the last."""
    segments: list[str]


def read(row: dict[str, Any], index: int, ends: Sequence[int], policy: Policy, template: str) -> Solution:
    """Cuts one row's completion at the last tokens of its segments, so that a prefix continues as it was written.

    Args:
        row: With `question`, `answer` and `completion`.
        index: The row's index, which keys the random numbers.
        ends: Where the segments end, in characters.
        policy: For its tokenizer.
        template: The prompt, with `{question}` where the question goes.
    """
    question = Question(row["question"], row["answer"], row.get("source", f"row {index}"))
    prompt, text = template.replace("{question}", question.text), row["completion"]
    token_ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = sorted(set(last_tokens(policy.tokenizer, token_ids, text, ends[:-1])) - {len(token_ids) - 1})
    prefixes = [token_ids[: token + 1] for token in tokens[: MAX_SEGMENTS - 1]]
    cuts = [len(decoded(policy, prefix)) for prefix in prefixes]
    segments = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return Solution(Prompt(index, prompt, policy.tokenizer(prompt)["input_ids"], question), text, prefixes, segments)


def decoded(policy: Policy, token_ids: Sequence[int]) -> str:
    """As the explorer decodes completions."""
    (text,) = policy.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
    return text


def label_prefixes(
    solutions: Sequence[Solution],
    policy: Policy,
    engine: RolloutEngine,
    verifier: Reward,
    sampling: Sampling,
    completions: int = 8,
    seed: int = 0,
) -> list[list[float]]:
    """For each segment of each solution the fraction of `completions` from its end that reach the gold answer.

    The last segment has no continuation: its label is 1 if the solution is right, else 0.
    """
    prefixes = [
        Prompt(
            solution.prompt.id * MAX_SEGMENTS + index,
            solution.prompt.text + decoded(policy, prefix),
            solution.prompt.token_ids + prefix,
            solution.prompt.question,
        )
        for solution in solutions
        for index, prefix in enumerate(solution.prefixes)
    ]
    engine.sync(policy)
    drawn = iter(engine.generate(prefixes, completions, sampling, seed) if prefixes else [])
    samples = [
        continued(solution.prompt, prefix, completion, policy)
        for solution in solutions
        for prefix in solution.prefixes
        for completion in islice(drawn, completions)
    ]
    samples += [Sample(solution.prompt, solution.text, [], FinishReason.STOP) for solution in solutions]
    right = [float(value > RIGHT_ABOVE) for value in verifier(samples).value]
    fractions = iter(sum(own) / completions for own in groups(right[: len(right) - len(solutions)], completions))
    return [
        [*islice(fractions, len(solution.prefixes)), outcome]
        for solution, outcome in zip(solutions, right[len(samples) - len(solutions) :], strict=True)
    ]


def groups(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    """Pieces of `size` values."""
    return (values[start : start + size] for start in range(0, len(values), size))


def continued(prompt: Prompt, prefix: list[int], completion: Completion, policy: Policy) -> Sample:
    """The prefix and what the engine added to it, as one completion of the prompt."""
    token_ids = prefix + completion.token_ids
    written = token_ids[:-1] if completion.finish_reason is FinishReason.STOP else token_ids
    return Sample(prompt, decoded(policy, written), token_ids, completion.finish_reason)


def label_file(rows: Sequence[dict[str, Any]], policy: Policy, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The labelled rows; one whose segments cannot be found in time is left out."""
    engine, verifier, splitter = NativeEngine(), MathVerifier(), ByPattern(options.pattern)
    sampling = Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    try:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            cuts = splitter([row["completion"] for row in some])
            solutions = [
                read(row, index, cut.value, policy, options.template)
                for index, (row, cut) in enumerate(zip(some, cuts, strict=True), first)
                if cut.status == "ok" and row["completion"]
            ]
            labels = label_prefixes(solutions, policy, engine, verifier, sampling, options.completions, options.seed)
            for solution, fractions in zip(solutions, labels, strict=True):
                yield {
                    "prompt": solution.prompt.text,
                    "completions": solution.segments,
                    "labels": [fraction > 0 for fraction in fractions],
                    "fractions": fractions,
                }
    finally:
        for part in (engine, verifier, splitter):
            part.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Labels the segments of completions by where they lead.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("rows", type=Path, help="jsonl with question, answer and completion, as `grpo predict` writes")
    parser.add_argument("--policy", required=True, help="folder or hub id of the model that completes")
    parser.add_argument("--out", type=Path, required=True, help="jsonl to write")
    parser.add_argument("--completions", type=int, default=8, help="N, per prefix")
    parser.add_argument("--pattern", default=r"\n", help="regular expression; a segment ends after each match")
    parser.add_argument("--template", default="{question}", help="the prompt, as `data.template` of the run")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest continuation, in tokens")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the continuations")
    parser.add_argument("--seed", type=int, default=0, help="of the continuations")
    options = parser.parse_args(arguments)
    if options.completions < 1:
        parser.error(f"--completions {options.completions}: give 1 or more")
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines() if line.strip()]
    policy = Policy(options.policy)
    policy.load()
    policy.model.eval()
    count = 0
    with options.out.open("w", encoding="utf-8") as out:
        for row in label_file(rows, policy, options):
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    print(f"{options.out}: {count} of {len(rows)} completions")


if __name__ == "__main__":
    main()
