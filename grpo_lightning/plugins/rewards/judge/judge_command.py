"""`grpo judge`: measures how well a judge agrees with the verifier."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError, require


def labelled(path: Path, label: str) -> list[tuple[Sample, bool]]:
    """Reads a file that `grpo predict` wrote. Returns its samples, each with True if the verifier finds it right.

    Args:
        path: The file, with a JSON object per line.
        label: The reward whose score is the verdict, for rows without a `label`.
    """
    labelled_samples = []
    # `splitlines` would also split at other line breaks, which may stand inside a text.
    for index, row in enumerate(map(json.loads, path.read_text(encoding="utf-8").strip().split("\n"))):
        value = row.get("label", row.get("scores", {}).get(label))
        if value is not None:
            question = Question(row["question"], row.get("answer", ""), f"{path}:{index + 1}", row.get("metadata", {}))
            # A judge reads texts alone, so any token ids do.
            prompt = Prompt(index, question.text, [0], question)
            labelled_samples.append((Sample(prompt, row["completion"], [0], FinishReason.STOP), value > 0.5))
    require(
        bool(labelled_samples),
        f"--against {path}: no row has a `label`, or a score by {label}; --label names another reward",
    )
    return labelled_samples


def main(args: Sequence[str] | None = None) -> int:
    """Prints a table of how often judge and verifier agree. Returns the exit code."""
    about = "Measures how well a judge agrees with the verifier on completions that both have seen."
    parser = argparse.ArgumentParser("grpo judge", description=about)
    add = parser.add_argument
    add("config", type=Path, help="a YAML file of the arguments of JudgeReward: url, model, rubric and others")
    add("--against", type=Path, required=True, metavar="FILE", help="completions with verdicts: a file of grpo predict")
    add("--label", default="math_verifier", help="the reward whose score is the verdict, where rows have no `label`")
    options = parser.parse_args(args)

    # --help need not wait for torch.
    import torch
    from torchmetrics.functional.classification import binary_cohen_kappa

    from grpo_lightning.plugins.rewards.judge.judge_reward import JudgeReward

    reward = JudgeReward(**yaml.safe_load(options.config.read_text(encoding="utf-8")))
    pairs = labelled(options.against, options.label)
    reward.read_questions([sample.prompt.question for sample, _ in pairs])
    values = reward([sample for sample, _ in pairs]).value
    # Completions that the judge failed to score have NaN, which differs from itself.
    counts = Counter((right, value > 0.5) for (_, right), value in zip(pairs, values, strict=True) if value == value)
    if not counts:
        raise UsageError(f"grpo judge: reward {reward.tally.describe()}")
    verified, judged = torch.tensor([*counts.elements()]).unbind(dim=1)
    agreement = (verified == judged).float().mean()
    kappa = binary_cohen_kappa(judged, verified)
    print(f"""| verifier | judge: right | judge: wrong |
|---|---|---|
| right | {counts[True, True]} | {counts[True, False]} |
| wrong | {counts[False, True]} | {counts[False, False]} |

agreement {agreement:.3f}, Cohen's kappa {kappa:.3f}, {len(values) - counts.total()} of {len(values)} not judged
A judge's score above 0.5, of 0 to 1, counts as right.""")
    return 0
