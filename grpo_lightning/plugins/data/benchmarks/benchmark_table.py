"""The table that `grpo evaluate`, `grpo validate` and `grpo test` print."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.maths.metrics import with_half_width
from grpo_lightning.plugins.looking.run_files.provenance import start_of
from grpo_lightning.training.evaluation import Evaluation, none_if_nan


class EvaluationTable(Callback):
    """Prints the validations of a model with their intervals, and writes them as JSON.

    Args:
        out: The file to write. None writes none.
    """

    def __init__(self, out: str | None = None) -> None:
        self.out = out

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the table, and writes the file."""
        evaluations: dict[str, Evaluation] = {
            name or ("test" if trainer.testing else "val"): evaluation
            for name, evaluation in pl_module.evaluations.items()
            if evaluation.was_asked
        }
        # Every rank gathers the values.
        numbers = {name: numbers_of(evaluation) for name, evaluation in evaluations.items()}
        if trainer.is_global_zero:
            print(table([row(name, evaluation) for name, evaluation in evaluations.items()]))
            if self.out is not None:
                made_by = {"model": pl_module.policy.path, "provenance": start_of(trainer, GRPOLoop.find(trainer).seed)}
                Path(self.out).write_text(json.dumps(made_by | numbers, indent=2) + "\n")

    on_test_end = on_validation_end


def numbers_of(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the means, their half widths and the number of questions, as in JSON. Every rank must call it."""
    measurements = evaluation.measurements()
    means = {name: none_if_nan(measurement.mean) for name, measurement in measurements.items()}
    half_widths = {name: none_if_nan(measurement.half_width) for name, measurement in measurements.items()}
    length = measurements["length"]
    return means | {
        "ci95": half_widths[f"avg@{evaluation.num_samples}"],
        "half_width": half_widths,
        "num_questions": length.num_questions,
        "questions": length.questions,
    }


def row(name: str, evaluation: Evaluation) -> dict[str, str]:
    """Returns the cells of a validation, by column."""
    k = evaluation.num_samples
    measurements = evaluation.measurements()
    length = measurements["length"]
    cells = {"validation": name, "questions": str(length.num_questions), "k": str(k)}
    texts = {name: with_half_width(score.mean, score.half_width, 3) for name, score in measurements.items()}
    cells |= {f"{title}@k": texts.get(f"{title}@{k}", "") for title in ("avg", "pass", "maj")}
    cells |= {title: texts[title] for title in ("greedy", "truncated", "failed")}
    # The reward of a grader alone is avg@k.
    cells["reward"] = texts["reward"] if len(evaluation.scorer.rewards) > 1 else ""
    return cells | {"tokens": with_half_width(length.mean, length.half_width, 1), "grader": evaluation.measure}


def table(rows: list[dict[str, str]]) -> str:
    """Returns rows with the same columns as aligned text, without empty columns; a line per column of a single row."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    if len(rows) == 1:
        return "\n".join(f"{title:<{max(map(len, titles))}}  {rows[0][title]}" for title in titles)
    lines = [{title: title for title in titles}, *rows]
    widths = {title: max(len(line[title]) for line in lines) for title in titles}
    return "\n".join("  ".join(line[title].ljust(widths[title]) for title in titles).rstrip() for line in lines)
