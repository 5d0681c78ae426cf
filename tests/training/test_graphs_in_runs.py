"""Whole runs that decode with captured steps, on a stand-in for CUDA graphs."""

import pytest
from helpers.command import Grpo
from helpers.fitting import scalars
from helpers.recorded_graph import RecordedGraphs

from grpo_lightning.engines.graphs import Graphs

OPTIONS = (
    "--trainer.max_epochs=3",
    "--loop.num_minibatches=2",
    "--model.rewards=[RandomReward]",
    "--loop.group_size=8",
    "--model.sampling.max_new_tokens=12",
)


def run(grpo: Grpo, name: str, *options: str) -> dict[str, dict[int, float]]:
    code, _, errors = grpo("fit", f"--trainer.default_root_dir={name}", *OPTIONS, *options)
    assert code == 0, errors
    return scalars(name)


def test_graphs_change_no_scalar_and_outlive_the_steps(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(grpo, "plain")
    recorded, made, init = RecordedGraphs.install(monkeypatch), [], Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    graphs = run(grpo, "graphs", "--model.engine.graphs=true")
    assert set(graphs) == set(plain)
    for name in plain:
        if not name.startswith(("time/", "perf/")):
            assert graphs[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name
    # Those of the trial, and those of all steps.
    trial, whole = made
    assert len(trial._steps) == 1
    # None was captured twice, though there were six updates: a step of each bucket of rows, and those of the trial
    # and of buffers that validation enlarged.
    assert recorded.captured <= 2 * len(whole._steps) + 1
    assert recorded.replayed > 3 * 11


def test_a_run_on_a_cpu_is_refused_before_it_begins(grpo: Grpo) -> None:
    code, _, errors = grpo("fit", "--model.engine.graphs=true")
    assert code != 0
    assert "model.engine.graphs=True" in errors and "trainer.accelerator=gpu" in errors and "Traceback" not in errors
