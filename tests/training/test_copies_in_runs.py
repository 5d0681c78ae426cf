"""Whole runs whose engine decodes with copies of the linear layers."""

import pytest
from helpers.command import Grpo
from helpers.fitting import fitted_scalars

from grpo_lightning.plugins.fast.native import NativeEngine


def test_packed_copies_change_no_scalar(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    made, copied = [], NativeEngine._copied
    plain = fitted_scalars(grpo, "plain")
    monkeypatch.setattr(NativeEngine, "_copied", lambda *args: made.append(args[1].version) or copied(*args))
    packed = fitted_scalars(grpo, "packed", "--model.engine.packed=true")
    # For the trial, then for each policy version: two updates per step. Validation has copies of its own.
    assert made == sorted(made) and set(made) == {0, 2, 4, 6}
    assert set(packed) == set(plain)
    for name in plain:
        if not name.startswith(("time/", "perf/")):
            assert packed[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name


def test_a_sampler_that_rounds_is_a_mismatch_that_a_correction_sees(grpo: Grpo) -> None:
    rounded = fitted_scalars(grpo, "rounded", "--model.engine.dtype=bfloat16")
    assert rounded["mismatch/kl"][0] > 1e-7
    assert 1e-5 < max(rounded["policy/logp_gap"].values()) < 0.5
    corrected = fitted_scalars(
        grpo, "corrected", "--model.engine.dtype=bfloat16", "--model.objective.correction=TruncatedRatio"
    )
    assert corrected["mismatch/kl"][0] == pytest.approx(rounded["mismatch/kl"][0], rel=1e-4)
    assert corrected["optim/grad_norm"][0] != rounded["optim/grad_norm"][0]


def test_another_type_of_copies_is_refused_by_name(grpo: Grpo) -> None:
    code, _, errors = grpo("fit", "--model.engine.dtype=int8")
    assert code != 0 and "bfloat16" in errors
