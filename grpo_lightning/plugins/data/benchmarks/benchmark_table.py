"""What `grpo evaluate` found."""

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
        """Prints, and writes."""
        found = pl_module.validated()
        if not trainer.is_global_zero:
            return
        by_name = {
            name: {key.removeprefix(f"{name}/"): value for key, value in found.items() if key.startswith(f"{name}/")}
            for name in pl_module.named
        }
        print(table([row(name, pl_module.evaluations[name], values) for name, values in by_name.items()]))
        if self.out is not None:
            numbers = {
                name: {key: none_if_nan(value) for key, value in values.items()} for name, values in by_name.items()
            }
            Path(self.out).write_text(json.dumps({"model": pl_module.policy.path, **numbers}, indent=2) + "\n")


def row(name: str, evaluation: Evaluation, values: dict[str, float]) -> dict[str, str]:
    """The cells of a benchmark, by column."""
    k = evaluation.num_samples
    cells = {"benchmark": name, "k": str(k)}
    cells["avg@k"] = f"{values[f'avg@{k}']:.3f} ± {values['ci95']:.3f}"
    shares = {"pass@k": f"pass@{k}", "maj@k": f"maj@{k}"} | {key: key for key in ("greedy", "truncated", "failed")}
    cells |= {title: f"{values[key]:.3f}" if key in values else "" for title, key in shares.items()}
    return cells | {"tokens": f"{values['length']:.1f}", "grader": evaluation.measure}


def table(rows: list[dict[str, str]]) -> str:
    """Rows with the same columns as aligned text; columns without any cell are left out."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [{title: title for title in titles}, *rows]
    width = {title: max(len(line[title]) for line in lines) for title in titles}
    return "\n".join("  ".join(line[title].ljust(width[title]) for title in titles).rstrip() for line in lines)
