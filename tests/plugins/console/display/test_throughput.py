"""Tokens per second and fractions of the wall clock, against counts by hand."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.fast import fit
from helpers.fitting import Minibatches, points, scalars
from helpers.tiny import rollouts_of

from grpo_lightning import MicroBatch, ScriptedEngine, Step
from grpo_lightning.maths.stopping import FixedPasses, Passes
from grpo_lightning.training.step_report import learned_tokens


def clock_of(folder: Path) -> dict[str, list[float]]:
    """What a run logged under time/ and perf/."""
    found = {name: values for name, values in points(folder, without=()).items() if name.startswith(("time/", "perf/"))}
    return {name: [value for _, value in values] for name, values in found.items()}


def test_the_tokens_of_passes_that_were_ended() -> None:
    micro_batches = [[MicroBatch(rollouts_of([2, 4]))], [MicroBatch(rollouts_of([3])), MicroBatch(rollouts_of([5]))]]
    passes = Passes(FixedPasses(), 2)
    # Three updates: the first minibatch twice, the second once.
    passes.updates.extend([None] * 3)  # type: ignore[list-item]
    step = Step(None, micro_batches, passes, started_at=0.0, prepared_at=0.0)  # type: ignore[arg-type]
    assert learned_tokens(step) == 2 * 6 + 8


def test_a_run_logs_them(tmp_path: Path) -> None:
    learned = Minibatches()
    fit(tmp_path, [learned], loop={"mu": 2, "num_minibatches": 2}, trainer={"limit_val_batches": 1.0})
    found = clock_of(tmp_path)
    fractions = {name: values for name, values in found.items() if name.startswith("time/fraction_")}
    assert len(fractions) == 6 and {len(values) for values in fractions.values()} == {3}
    for step in range(3):
        assert sum(values[step] for values in fractions.values()) == pytest.approx(1)
        assert all(values[step] > 0 for name, values in fractions.items() if name != "time/fraction_logp")
        drawn, updates = scalars(tmp_path)["rollout/tokens"][step], learned.seen[4 * step : 4 * step + 4]
        tokens = sum(micro_batch.rollouts.num_tokens for batch in updates for micro_batch in batch.micro_batches)
        for name, phase, count in (
            ("", "step", drawn),
            ("_explore", "explore", drawn),
            ("_optimise", "optimise", tokens),
        ):
            per_second = found[f"perf/tokens_per_second{name}"][step]
            assert per_second == pytest.approx(count / found[f"time/{phase}"][step], rel=1e-4)


def test_right_and_finished_needs_both(tmp_path: Path) -> None:
    # Of four: right and finished, right and cut off, wrong and finished, wrong and cut off.
    texts = ["1", "1" * 20, "a", "a" * 20]
    seen: list[dict[str, float]] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    engine = ScriptedEngine(lambda request, text: texts[request.sample])
    fit(tmp_path, [Watch()], engine=engine, trainer={"max_epochs": 2})
    assert seen[1]["rollout/right_and_finished"] == 0.25
    assert seen[1]["rollout/truncated"] == 0.5
