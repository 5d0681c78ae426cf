"""The table that `grpo evaluate` prints."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from grpo_lightning.training.evaluation import Evaluation, none_if_nan


class EvaluationTable(Callback):
    """Prints the validations of a model as a table, and writes them as JSON.

    Args:
        out: The file to write. None writes none.
    """

    def __init__(self, out: str | None = None) -> None:
        self.out = out

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the table, and writes the file."""
        values_by_metric = pl_module.validated()
        if not trainer.is_global_zero:
            return
        metrics_by_name = {
            name: {
                key.removeprefix(f"{name}/"): value
                for key, value in values_by_metric.items()
                if key.startswith(f"{name}/")
            }
            for name in pl_module.named
        }
        print(table([row(name, pl_module.evaluations[name], metrics) for name, metrics in metrics_by_name.items()]))
        if self.out is not None:
            numbers = {
                name: {key: none_if_nan(value) for key, value in metrics.items()}
                for name, metrics in metrics_by_name.items()
            }
            Path(self.out).write_text(json.dumps({"model": pl_module.policy.path, **numbers}, indent=2) + "\n")


def row(name: str, evaluation: Evaluation, metrics: dict[str, float]) -> dict[str, str]:
    """Returns the cells of a benchmark, by column."""
    k = evaluation.num_samples
    cells = {"benchmark": name, "k": str(k)}
    cells["avg@k"] = f"{metrics[f'avg@{k}']:.3f} ± {metrics['ci95']:.3f}"
    key_by_title = {"pass@k": f"pass@{k}", "maj@k": f"maj@{k}"}
    key_by_title |= {key: key for key in ("greedy", "truncated", "failed")}
    cells |= {title: f"{metrics[key]:.3f}" if key in metrics else "" for title, key in key_by_title.items()}
    return cells | {"tokens": f"{metrics['length']:.1f}", "grader": evaluation.measure}


def table(rows: list[dict[str, str]]) -> str:
    """Returns rows with the same columns as aligned text, without empty columns."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [{title: title for title in titles}, *rows]
    widths = {title: max(len(line[title]) for line in lines) for title in titles}
    return "\n".join("  ".join(line[title].ljust(widths[title]) for title in titles).rstrip() for line in lines)
