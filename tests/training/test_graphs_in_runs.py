"""Whole runs that decode with captured steps, on a stand-in for CUDA graphs."""

import pytest
from helpers.command import Grpo
from helpers.fitting import fitted_scalars
from helpers.recorded_graph import RecordedGraphs

from grpo_lightning.engines.graphs import Graphs


def test_graphs_change_no_scalar_and_outlive_the_steps(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fitted_scalars(grpo, "plain")
    recorded, made, init = RecordedGraphs.install(monkeypatch), [], Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    graphs = fitted_scalars(grpo, "graphs", "--model.engine.graphs=true")
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
