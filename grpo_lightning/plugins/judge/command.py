"""`grpo judge`: how well a judge agrees with the verifier."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError


def kappa(counts: Counter[tuple[bool, bool]]) -> float:
    """Cohen's kappa of pairs of verdicts: the agreement beyond chance, as a fraction of what is possible beyond it."""
    total = counts.total()
    agreed = (counts[True, True] + counts[False, False]) / total
    rights = [sum(count for pair, count in counts.items() if pair[side]) / total for side in (0, 1)]
    chance = math.prod(rights) + math.prod(1 - right for right in rights)
    return math.nan if chance == 1 else (agreed - chance) / (1 - chance)


def table(counts: Counter[tuple[bool, bool]], num_failed: int) -> str:
    """The verdicts of verifier and judge, counted, with their agreement."""
    agreed = (counts[True, True] + counts[False, False]) / counts.total()
    return f"""| verifier | judge: right | judge: wrong |
|---|---|---|
| right | {counts[True, True]} | {counts[True, False]} |
| wrong | {counts[False, True]} | {counts[False, False]} |

agreement {agreed:.3f}, Cohen's kappa {kappa(counts):.3f}, {num_failed} of {counts.total() + num_failed} not judged"""


def labelled(path: Path, label: str) -> list[tuple[Sample, bool]]:
    """The completions of a file, as `grpo predict` writes it, with the verifier's verdicts."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    found = []
    for index, row in enumerate(rows):
        value = row.get("label", row.get("scores", {}).get(label))
        if value is not None:
            question = Question(row["question"], row.get("answer", ""), f"{path}:{index + 1}", row.get("metadata", {}))
            prompt = Prompt(index, question.text, [0], question)
            found.append((Sample(prompt, row["completion"], [0], FinishReason.STOP), value > 0.5))
    if not found:
        raise UsageError(f"--against {path}: no row has a `label`, or a score by {label}; --label names another reward")
    return found


def main(args: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        "grpo judge",
        description="Measures how well a judge agrees with the verifier on completions that both have seen.",
    )
    add = parser.add_argument
    add("config", type=Path, help="a YAML file of the arguments of JudgeReward: url, model, rubric and others")
    add("--against", type=Path, required=True, metavar="FILE", help="completions with verdicts: a file of grpo predict")
    add("--label", default="math_verifier", help="the reward whose score is the verdict, where rows have no `label`")
    add("--threshold", type=float, default=0.5, help="the judge says right above this value, from 0 to 1")
    given = parser.parse_args(args)
    from grpo_lightning.plugins.judge.reward import JudgeReward  # imports torch, which --help need not wait for

    reward = JudgeReward(**yaml.safe_load(given.config.read_text(encoding="utf-8")))
    if reward.group:
        raise UsageError("grpo judge: a verdict is of one completion; leave out `group`")
    pairs = labelled(given.against, given.label)
    reward.read_questions([sample.prompt.question for sample, _ in pairs])
    result = reward([sample for sample, _ in pairs])
    both = [(right, value) for (_, right), value in zip(pairs, result.value, strict=True) if not math.isnan(value)]
    if not both:
        raise UsageError(f"grpo judge: reward {reward.tally.describe()}")
    print(table(Counter((right, value > given.threshold) for right, value in both), len(pairs) - len(both)))
    return 0
