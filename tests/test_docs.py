"""docs/metrics.md names what a run logs, all of it and nothing else."""

import re
from pathlib import Path

import pytest
from fitting import fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lightning.callbacks.completions import SampledCompletions
from grpo_lightning.objective import Objective

METRICS = Path(__file__).parents[1] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a run with a reference and validation logs."""
    folder = tmp_path_factory.mktemp("run")
    trainer = {"max_epochs": 2, "limit_val_batches": 1}
    fit(folder, callbacks=[SampledCompletions()], objective=Objective(beta=0.1), trainer=trainer)
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    texts = [name.removesuffix("/text_summary") for name in tags["tensors"]]
    return {*tags["scalars"], *tags["histograms"], *texts}


@pytest.fixture(scope="module")
def documented() -> dict[str, re.Pattern[str]]:
    """The names in the tables, and what each stands for: `<name>` for any word, `@k` for any number."""
    metrics = METRICS.read_text(encoding="utf-8").partition("## Statuses")[0]
    names = re.findall(r"^\| `([^`]+)` \|", metrics, re.MULTILINE)
    assert len(names) == len(set(names))
    return {name: re.compile(re.sub("<[a-z]+>", "[a-z_]+", name).replace("@k", r"@\d+")) for name in names}


def test_every_logged_name_is_documented(logged: set[str], documented: dict[str, re.Pattern[str]]):
    assert sorted(n for n in logged if not any(pattern.fullmatch(n) for pattern in documented.values())) == []


def test_every_documented_name_is_logged(logged: set[str], documented: dict[str, re.Pattern[str]]):
    assert sorted(name for name, pattern in documented.items() if not any(map(pattern.fullmatch, logged))) == []


def test_every_status_is_documented():
    statuses = set(
        re.findall(r"^\| `([a-z_]+)` \|", METRICS.read_text(encoding="utf-8").partition("## Statuses")[2], re.M)
    )
    from grpo_lightning.rewards import base, format, function, math_verifier, workers

    known = {workers.OK, workers.ERROR, workers.TIMEOUT, workers.MEMORY, workers.CRASH, format.NO_MATCH, "not_finite"}
    known |= {math_verifier.NO_ANSWER, math_verifier.UNPARSEABLE, math_verifier.TOO_LONG, math_verifier.GOLD_BAD}
    assert statuses == known | {base.OK, base.ERROR, function.NOT_A_NUMBER}
