"""Labels the segments of completions by the answers they lead to: training data for a process model.

python tools/label_segments.py runs/.../predictions.jsonl --policy runs/tiny_policy --out labels.jsonl
    [--num-completions 8] [--pattern '\\n'] [--template '{question}'] [--max-new-tokens 256] [--temperature 1]
    [--seed 0]

The labels of Math-Shepherd (arXiv 2312.08935): the policy completes the prefix up to the end of each segment N times. A
segment is right (hard label) if any of these completions reaches the gold answer; its fraction (soft label) is how many
of them do. The last segment is judged by the completion itself. The input is what `grpo predict` writes: question,
answer, completion. A row of the output has `prompt`, `completions` (the segments) and `labels` (hard), as TRL's
PRMTrainer reads them, and `fractions` (soft).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.plugins.process.reward import last_tokens
from grpo_lightning.plugins.process.splitters import ByPattern
from grpo_lightning.plugins.verifier.math_verifier import MathVerifier
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.base import Reward
from grpo_lightning.types import Completion, FinishReason, Prompt, Question, RandomKey, Request, Sample, Status

ROWS_AT_ONCE = 64
MAX_SEGMENTS = 1000
RIGHT_ABOVE = 0.5
"""An answer is right if its value is above this."""


@dataclass
class Solution:
    """A completion cut into segments."""

    prompt: Prompt
    text: str
    prefixes: list[list[int]]
    """Token ids of the completion up to the end of each segment but the last."""
    segments: list[str]


def read(row: dict[str, Any], index: int, ends: Sequence[int], policy: Policy, template: str) -> Solution:
    """The completion of one row, cut between tokens, so that every prefix consists of the tokens that were written.

    Args:
        row: Has `question`, `answer` and `completion`.
        index: Index of the row, which keys the draws.
        ends: Indices of the characters after each segment.
        policy: Gives its tokenizer.
        template: The prompt, with `{question}` in place of the question.
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
    """The text of a completion, decoded as by the explorer."""
    (text,) = policy.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
    return text


def label_prefixes(
    solutions: Sequence[Solution],
    policy: Policy,
    engine: RolloutEngine,
    verifier: Reward,
    sampling: Sampling,
    num_completions: int = 8,
    seed: int = 0,
) -> list[list[float]]:
    """For each segment of each solution the fraction of completions from its end that reach the gold answer.

    The last segment is not completed: its fraction is 1 if the solution is right, else 0.
    """
    prefixes = [
        Prompt(
            solution.prompt.id * MAX_SEGMENTS + segment,
            solution.prompt.text + decoded(policy, prefix),
            solution.prompt.token_ids + prefix,
            solution.prompt.question,
        )
        for solution in solutions
        for segment, prefix in enumerate(solution.prefixes)
    ]
    engine.sync(policy)
    requests = Request.from_prompts(prefixes, num_completions)
    drawn = iter(engine.complete(requests, sampling, RandomKey(seed, 0)) if requests else [])
    samples = [
        continued(solution.prompt, prefix, completion, policy)
        for solution in solutions
        for prefix in solution.prefixes
        for completion in islice(drawn, num_completions)
    ]
    samples += [Sample(solution.prompt, solution.text, [], FinishReason.STOP) for solution in solutions]
    right = [float(value > RIGHT_ABOVE) for value in verifier(samples).value]
    of_prefixes = groups(right[: len(right) - len(solutions)], num_completions)
    fractions = iter(sum(own) / num_completions for own in of_prefixes)
    return [
        [*islice(fractions, len(solution.prefixes)), outcome]
        for solution, outcome in zip(solutions, right[len(samples) - len(solutions) :], strict=True)
    ]


def groups(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    """Consecutive slices of `size` values."""
    return (values[start : start + size] for start in range(0, len(values), size))


def continued(prompt: Prompt, prefix: list[int], completion: Completion, policy: Policy) -> Sample:
    """The prefix and its continuation by the engine, as one completion of the prompt."""
    token_ids = prefix + completion.token_ids
    written = token_ids[:-1] if completion.finish_reason is FinishReason.STOP else token_ids
    return Sample(prompt, decoded(policy, written), token_ids, completion.finish_reason)


def label_file(rows: Sequence[dict[str, Any]], policy: Policy, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the labelled rows; a row that the splitter fails on is left out."""
    engine, verifier, splitter = NativeEngine(), MathVerifier(), ByPattern(options.pattern)
    sampling = Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    try:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            cuts = splitter([row["completion"] for row in some])
            solutions = [
                read(row, index, cut.value, policy, options.template)
                for index, (row, cut) in enumerate(zip(some, cuts, strict=True), first)
                if cut.status == Status.OK and row["completion"]
            ]
            labels = label_prefixes(
                solutions, policy, engine, verifier, sampling, options.num_completions, options.seed
            )
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
        description="Labels the segments of completions by the answers they lead to.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("rows", type=Path, help="jsonl with question, answer and completion, as `grpo predict` writes")
    parser.add_argument("--policy", required=True, help="folder or hub id of the model that completes")
    parser.add_argument("--out", type=Path, required=True, help="jsonl to write")
    parser.add_argument("--num-completions", type=int, default=8, help="N, completions per prefix")
    parser.add_argument("--pattern", default=r"\n", help="regular expression after whose matches a segment ends")
    parser.add_argument("--template", default="{question}", help="the prompt, as in data.template of the run")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the completions")
    parser.add_argument("--seed", type=int, default=0, help="of the completions")
    options = parser.parse_args(arguments)
    if options.num_completions < 1:
        parser.error(f"--num-completions {options.num_completions}: give 1 or more")
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
