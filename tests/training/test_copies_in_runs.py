"""Whole runs whose engine decodes with copies of the linear layers."""

import pytest
from helpers.command import Grpo
from helpers.fitting import scalars

from grpo_lightning.engines.native import NativeEngine

SMALL = ("--model.rewards=[RandomReward]", "--loop.group_size=8", "--model.sampling.max_new_tokens=12")


def run(grpo: Grpo, name: str, *options: str) -> dict[str, dict[int, float]]:
    code, _, errors = grpo(
        "fit",
        f"--trainer.default_root_dir={name}",
        "--trainer.max_epochs=3",
        "--loop.num_minibatches=2",
        *SMALL,
        *options,
    )
    assert code == 0, errors
    return scalars(name)


def test_packed_copies_change_no_scalar(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    made, copied = [], NativeEngine._copied
    plain = run(grpo, "plain")
    monkeypatch.setattr(NativeEngine, "_copied", lambda *args: made.append(args[1].version) or copied(*args))
    packed = run(grpo, "packed", "--model.engine.packed=true")
    # For the trial, then for each policy version: two updates per step. Validation has copies of its own.
    assert made == sorted(made) and set(made) == {0, 2, 4, 6}
    assert set(packed) == set(plain)
    for name in plain:
        if not name.startswith(("time/", "perf/")):
            assert packed[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name


def test_a_sampler_that_rounds_is_a_mismatch_that_a_correction_sees(grpo: Grpo) -> None:
    rounded = run(grpo, "rounded", "--model.engine.dtype=bfloat16")
    assert rounded["mismatch/kl"][0] > 1e-7
    assert 1e-5 < max(rounded["policy/logp_gap"].values()) < 0.5
    corrected = run(grpo, "corrected", "--model.engine.dtype=bfloat16", "--model.objective.correction=TruncatedRatio")
    assert corrected["mismatch/kl"][0] == pytest.approx(rounded["mismatch/kl"][0], rel=1e-4)
    assert corrected["optim/grad_norm"][0] != rounded["optim/grad_norm"][0]


def test_another_type_of_copies_is_refused_by_name(grpo: Grpo) -> None:
    code, _, errors = grpo("fit", "--model.engine.dtype=int8")
    assert code != 0 and "bfloat16" in errors
