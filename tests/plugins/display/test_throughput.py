"""Tokens per second, fractions of the wall clock and model FLOPs utilisation, against counts by hand."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fast import fit, policy_of
from helpers.fitting import Minibatches, scalars
from helpers.tiny import rollouts_of
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lightning import Observer, Pack, ScriptedEngine, Step
from grpo_lightning.maths.stopping import FixedPasses, Passes
from grpo_lightning.plugins.display.utilisation import Cost, Utilisation, operations_of, peak_operations
from grpo_lightning.training.step_report import learned_tokens

BF16, FP32 = torch.bfloat16, torch.float32


def clock_of(folder: Path) -> dict[str, list[float]]:
    """What a run logged under time/ and perf/."""
    events = EventAccumulator(str(folder)).Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith(("time/", "perf/"))]
    return {name: [event.value for event in events.Scalars(name)] for name in names}


def test_the_cost_of_a_pack_counts_every_weight_and_every_pair_of_tokens() -> None:
    policy = policy_of("llama")
    cost = Cost.from_model(policy.model)
    assert cost is not None
    hidden, inner, layers, heads, key_heads, vocabulary = 32, 48, 2, 4, 2, 64
    size = hidden // heads
    attention = 2 * hidden * heads * size + 2 * hidden * key_heads * size
    trunk = layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    assert cost.token == 6 * trunk
    assert cost.drawn == 6 * vocabulary * hidden
    assert cost.pair == 12 * layers * heads * size
    # Two prompts of 3 and 5 tokens; completions of 2 and 4 of the first, 1 of the second.
    pack = rollouts_of([2, 4, 1], prompt_lengths=[3, 5], group=[0, 0, 1])
    drawn = 7 * cost.drawn
    completions = 2 * 5 + 4 * 7 + 1 * 6
    shared = cost.token * (3 + 5 + 7) + drawn + cost.pair * (9 + 25 + completions)
    assert cost.of(pack, shares_prefix=True) == shared
    repeated = cost.token * (3 + 3 + 5 + 7) + drawn + cost.pair * (9 + 9 + 25 + completions)
    assert cost.of(pack, shares_prefix=False) == repeated


def test_a_head_that_is_the_embedding_counts_once_and_experts_are_not_counted() -> None:
    tied = Cost.from_model(policy_of("llama", tie_word_embeddings=True).model)
    assert tied == Cost.from_model(policy_of("llama").model)
    policy = policy_of("llama")
    policy.config.num_experts = 8
    assert Cost.from_model(policy.model) is None


def test_the_work_of_passes_that_were_ended() -> None:
    policy = policy_of("llama")
    cost = Cost.from_model(policy.model)
    assert cost is not None
    packs = [[Pack(rollouts_of([2, 4]))], [Pack(rollouts_of([3])), Pack(rollouts_of([5]))]]
    # Three updates: the first minibatch twice, the second once.
    each = [sum(cost.of(pack.rollouts, policy.compute.shares_prefix) for pack in minibatch) for minibatch in packs]
    assert operations_of(packs, 3, policy) == 2 * each[0] + each[1]
    passes = Passes(FixedPasses(), 2)
    passes.updates.extend([None] * 3)  # type: ignore[list-item]
    step = Step(None, packs, passes, started=0.0, prepared=0.0)  # type: ignore[arg-type]
    assert learned_tokens(step) == 2 * 6 + 8


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", BF16, False, 989e12),
        ("NVIDIA A100-SXM4-80GB", FP32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", FP32, False, 19.5e12),
        ("NVIDIA A10G", BF16, False, 70e12),
        ("NVIDIA GeForce RTX 4090", torch.float16, False, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, False, 0.0),
        ("Some other device", BF16, False, 0.0),
    ],
)
def test_peaks_are_found_by_the_devices_name(name: str, dtype: torch.dtype, tf32: bool, peak: float) -> None:
    assert peak_operations(name, dtype, tf32) == peak


def test_a_run_logs_them(tmp_path: Path) -> None:
    learned = Minibatches()
    fit(tmp_path, [learned], loop={"mu": 2, "num_minibatches": 2}, trainer={"limit_val_batches": 1.0})
    found = clock_of(tmp_path)
    fractions = {name: values for name, values in found.items() if name.startswith("time/fraction_")}
    assert len(fractions) == 6 and {len(values) for values in fractions.values()} == {3}
    for step in range(3):
        assert sum(values[step] for values in fractions.values()) == pytest.approx(1)
        drawn, updates = scalars(tmp_path)["rollout/tokens"][step], learned.seen[4 * step : 4 * step + 4]
        tokens = sum(pack.rollouts.num_tokens for batch in updates for pack in batch.packs)
        for name, phase, count in (
            ("", "step", drawn),
            ("_explore", "explore", drawn),
            ("_optimise", "optimise", tokens),
        ):
            per_second = found[f"perf/tokens_per_second{name}"][step]
            assert per_second == pytest.approx(count / found[f"time/{phase}"][step], rel=1e-4)
    assert "perf/mfu" not in found


def test_utilisation_is_logged_where_the_peak_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lightning.plugins.display.utilisation.peak_of", lambda device, dtype: 1e12)
    fit(tmp_path, [Utilisation()], trainer={"max_epochs": 1})
    assert 0 < clock_of(tmp_path)["perf/mfu"][0] < 1


class Idles(Callback, Observer):
    """Moves the clock on: 1 second per update, 10 per validation, 100 where the loop tells its observers.

    Args:
        now: The time.
    """

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def prepared(self, step: Step) -> None:
        self.now[0] += 100

    def updated(self, step: Step) -> None:
        self.now[0] += 100

    def on_train_batch_start(self, *args: Any) -> None:
        self.now[0] += 1

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.now[0] += 0 if trainer.sanity_checking else 10


@pytest.mark.parametrize(
    ("interval", "times"), [(1.0, 1), (2, 2), (3, 1)], ids=["at the end", "in the middle and at the end", "in it alone"]
)
def test_a_validation_is_timed_as_one_wherever_it_stands(
    interval: float, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    for module in ("grpo.loop", "training.step_report"):
        monkeypatch.setattr(f"grpo_lightning.{module}.perf_counter", lambda: now[0])
    # The first of two steps: the end of the last is validated in any case.
    trainer = {"max_epochs": 2, "limit_val_batches": 1, "val_check_interval": interval}
    fit(tmp_path, [Idles(now)], loop={"mu": 2, "num_minibatches": 2}, trainer=trainer)
    found = {name: values[0] for name, values in clock_of(tmp_path).items()}
    wall = 4 + 10 * times + 200
    assert found["time/optimise"] == 4 and found["time/step"] == 4
    assert found["time/fraction_optimise"] * wall == pytest.approx(4)
    assert found["time/fraction_validate"] * wall == pytest.approx(10 * times)
    # Sampling and rewards are timed by clocks of their own.
    rest = sum(found[f"time/fraction_{name}"] for name in ("explore", "reward"))
    assert (found["time/fraction_other"] + rest) * wall == pytest.approx(200)


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
