"""The values of each question in the validations of a run, from its validations.jsonl."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VALIDATIONS = "validations.jsonl"
"""The file in a run's folder: a line per validation set and validation."""


@dataclass(frozen=True)
class ValuesByQuestion:
    """The values of one metric for each question, over the validations of a run."""

    grader: str
    """The grader's name."""
    questions: str
    """The hash of the questions, in their order; runs with the same hash answered the same questions."""
    by_step: Mapping[int, list[float]]
    """The values of the questions by step, which is -1 before training; NaN where no answer could be graded."""


def read_validations(folder: Path | str) -> dict[str, ValuesByQuestion]:
    """Reads the values of each question by the name of their scalar, such as `val/avg@8`; {} without a file.

    Of several lines of a step, as in a resumed run, the last counts; so do the last grader and the last questions.
    """
    path = Path(folder, VALIDATIONS)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    values_by_name: dict[str, ValuesByQuestion] = {}
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # half a line, since the program was killed
            for name, values in _scalars(json.loads(line)).items():
                earlier = values_by_name.get(name)
                is_alike = earlier and (earlier.grader, earlier.questions) == (values.grader, values.questions)
                by_step = {**(earlier.by_step if earlier and is_alike else {}), **values.by_step}
                values_by_name[name] = ValuesByQuestion(values.grader, values.questions, by_step)
    return values_by_name


def _scalars(row: Mapping[str, Any]) -> dict[str, ValuesByQuestion]:
    prefix = "/".join(filter(None, ["val", row["name"]]))
    return {
        f"{prefix}/{metric}": ValuesByQuestion(
            row["grader"],
            row["questions"],
            {row["step"]: [math.nan if value is None else float(value) for value in values]},
        )
        for metric, values in row["values"].items()
    }
