"""Labels the steps of completions by where they lead: training data for a process model.

python tools/label_segments.py runs/.../predictions.jsonl --policy runs/tiny_policy --out labels.jsonl
    [--completions 8] [--pattern '\\n'] [--template '{question}'] [--max-new-tokens 256] [--temperature 1] [--seed 0]

The labels of Math-Shepherd (arXiv 2312.08935): the policy completes every step's prefix N times. A step is right
(hard) if any of these reaches the gold answer; its share (soft) is how many do. The last step is judged by the
completion as it is. The rows are those `grpo predict` writes: question, answer, completion. A row of the output has
`prompt`, `completions` (the steps), `labels` (hard) and `shares` (soft): TRL's form for PRMTrainer, and the shares.
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
from grpo_lightning.types import Completion, FinishReason, Prompt, Question, RandomKey, Request, Sample

ROWS_AT_ONCE = 64
MAX_STEPS = 1000
RIGHT_ABOVE = 0.5
"""An answer is right if the verifier gives more."""


@dataclass
class Solution:
    """A completion cut into steps."""

    prompt: Prompt
    text: str
    prefixes: list[list[int]]
    """Token ids of the completion up to the end of each step but the last."""
    steps: list[str]


def read(row: dict[str, Any], number: int, ends: Sequence[int], policy: Policy, template: str) -> Solution:
    """Cuts one row's completion between the tokens in which its steps end, so that prefixes go on as they were written.

    Args:
        row: With `question`, `answer` and `completion`.
        number: Of the row, which keys the draws.
        ends: Where the steps end, in characters.
        policy: For its tokenizer.
        template: The prompt, with `{question}` where the question goes.
    """
    question = Question(row["question"], row["answer"], row.get("source", f"row {number}"))
    prompt, text = template.replace("{question}", question.text), row["completion"]
    token_ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = sorted(set(last_tokens(policy.tokenizer, token_ids, text, ends[:-1])) - {len(token_ids) - 1})
    prefixes = [token_ids[: token + 1] for token in tokens[: MAX_STEPS - 1]]
    places = [len(decoded(policy, prefix)) for prefix in prefixes]
    steps = [text[start:end] for start, end in pairwise([0, *places, len(text)])]
    return Solution(Prompt(number, prompt, policy.tokenizer(prompt)["input_ids"], question), text, prefixes, steps)


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
    """For each step of each solution the share of `completions` from its end that reach the gold answer.

    The last step has none to come: it is 1 if the solution is right, else 0.
    """
    prefixes = [
        Prompt(
            solution.prompt.id * MAX_STEPS + step,
            solution.prompt.text + decoded(policy, prefix),
            solution.prompt.token_ids + prefix,
            solution.prompt.question,
        )
        for solution in solutions
        for step, prefix in enumerate(solution.prefixes)
    ]
    engine.sync(policy)
    requests = Request.from_prompts(prefixes, completions)
    drawn = iter(engine.generate(requests, sampling, RandomKey(seed, 0)) if requests else [])
    samples = [
        continued(solution.prompt, prefix, completion, policy)
        for solution in solutions
        for prefix in solution.prefixes
        for completion in islice(drawn, completions)
    ]
    samples += [Sample(solution.prompt, solution.text, [], FinishReason.STOP) for solution in solutions]
    right = [float(value > RIGHT_ABOVE) for value in verifier(samples).value]
    shares = iter(sum(own) / completions for own in groups(right[: len(right) - len(solutions)], completions))
    return [
        [*islice(shares, len(solution.prefixes)), outcome]
        for solution, outcome in zip(solutions, right[len(samples) - len(solutions) :], strict=True)
    ]


def groups(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    """Stretches of `size`."""
    return (values[start : start + size] for start in range(0, len(values), size))


def continued(prompt: Prompt, prefix: list[int], completion: Completion, policy: Policy) -> Sample:
    """The prefix and what the engine added to it, as one completion of the prompt."""
    token_ids = prefix + completion.token_ids
    written = token_ids[:-1] if completion.finish_reason is FinishReason.STOP else token_ids
    return Sample(prompt, decoded(policy, written), token_ids, completion.finish_reason)


def label_file(rows: Sequence[dict[str, Any]], policy: Policy, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The labelled rows; one whose steps cannot be found in time is left out."""
    engine, verifier, splitter = NativeEngine(), MathVerifier(), ByPattern(options.pattern)
    sampling = Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    try:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            cuts = splitter([row["completion"] for row in some])
            solutions = [
                read(row, number, cut.value, policy, options.template)
                for number, (row, cut) in enumerate(zip(some, cuts, strict=True), first)
                if cut.status == "ok" and row["completion"]
            ]
            labels = label_prefixes(solutions, policy, engine, verifier, sampling, options.completions, options.seed)
            for solution, shares in zip(solutions, labels, strict=True):
                yield {
                    "prompt": solution.prompt.text,
                    "completions": solution.steps,
                    "labels": [share > 0 for share in shares],
                    "shares": shares,
                }
    finally:
        for part in (engine, verifier, splitter):
            part.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Labels the steps of completions by where they lead.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("rows", type=Path, help="jsonl with question, answer and completion, as `grpo predict` writes")
    parser.add_argument("--policy", required=True, help="folder or hub id of the model that completes")
    parser.add_argument("--out", type=Path, required=True, help="jsonl to write")
    parser.add_argument("--completions", type=int, default=8, help="N, of each prefix")
    parser.add_argument("--pattern", default=r"\n", help="regular expression behind whose matches a step ends")
    parser.add_argument("--template", default="{question}", help="the prompt, as data.template of the run")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of a continuation")
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
