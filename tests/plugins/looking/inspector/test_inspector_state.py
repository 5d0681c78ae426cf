"""What an inspector keeps from one moment to the next: which answers, which updates, which files, which loop."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers.fast import fit
from helpers.fitting import AfterOne, scalars
from helpers.inspecting import (
    check_sampler_logp,
    completions_of,
    group_of,
    groups_of,
    inspector,
    logits_of,
    plain_tokens,
    step_of,
    write_records,
)
from lightning.pytorch.callbacks import EMAWeightAveraging

from grpo_lightning import NativeEngine, Objective, RandomKey, Request, Validation
from grpo_lightning.engines.engine import Completions
from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.plugins.looking.inspector import read
from grpo_lightning.plugins.looking.inspector.inspector_page import RunData
from grpo_lightning.plugins.looking.inspector.record import describe, files_of

VALIDATES = {"limit_val_batches": 1}
FRESH = {**VALIDATES, "max_epochs": 1}


# Whose answers.


def test_answers_of_older_weights_are_not_taken(tmp_path: Path) -> None:
    for name, interval in (("whole", 4), ("third", 3)):
        trainer = {**FRESH, "max_epochs": 2, "val_check_interval": interval, "check_val_every_n_epoch": 1}
        fit(tmp_path / name, [inspector()], loop={"mu": 4}, trainer=trainer, samples=3)
    whole, third = (read(tmp_path / name) for name in ("whole", "third"))
    texts = [[one.text for one in completions_of(record, "validation")] for record in whole]
    assert texts[1] != texts[2]
    assert [[one.text for one in completions_of(record, "validation")] for record in third] == texts
    for record in [*whole, *third]:
        check_sampler_logp(record)


@pytest.mark.filterwarnings("ignore:.*WeightAveraging")
def test_answers_of_an_average_are_not_taken(tmp_path: Path) -> None:
    """Validation draws them with other weights of the same version."""
    average = EMAWeightAveraging(decay=0.9)
    fit(tmp_path, [inspector(), average], {"mu": 2}, FRESH | {"check_val_every_n_epoch": 1}, samples=3)
    check_sampler_logp(read(tmp_path)[-1])


class Counting(NativeEngine):
    """Notes each call: its random key and the prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[RandomKey, float]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey, *rest: Any) -> Completions:
        self.calls.append((key, sampling.temperature))
        return super().generate(requests, sampling, key, *rest)


@pytest.mark.parametrize("validate_first", [True, False])
def test_the_first_validation_answers_the_followed_prompts(tmp_path: Path, validate_first: bool) -> None:
    engine = Counting()
    trainer = {**FRESH, "check_val_every_n_epoch": 1}
    fit(tmp_path, [inspector(num_samples=2)], {"validate_first": validate_first}, trainer, engine=engine)
    records = read(tmp_path)
    assert [record.step for record in records] == [0, 1] and len(completions_of(records[0], "validation")) == 2 * 3
    evaluations = [call for call in engine.calls if call[0].step == 2**32 - 1]
    # Greedy and sampled, before the first step and after it: nothing twice.
    assert [temperature for _, temperature in evaluations] == [0.0, 1.0, 0.0, 1.0]


# At which temperature.


@pytest.mark.parametrize(
    ("sampling", "validation", "temperature", "is_known"),
    [
        (Sampling(max_new_tokens=12), ValidationSampling(temperature=0.5), 0.5, True),
        (Sampling(max_new_tokens=12, temperature=0.5), ValidationSampling(temperature=0.0), 1.0, False),
        (Sampling(max_new_tokens=12, temperature=0.5), ValidationSampling(top_k=3), 0.5, False),
    ],
)
def test_followed_tokens_are_measured_at_their_sampling_temperature(
    tmp_path: Path, sampling: Sampling, validation: ValidationSampling, temperature: float, is_known: bool
) -> None:
    module = fit(
        tmp_path,
        [inspector(num_samples=2)],
        trainer=FRESH | {"check_val_every_n_epoch": 1},
        sampling=sampling,
        validation=Validation(sampling=validation),
        objective=Objective(beta=0.1),
    )
    record = read(tmp_path)[-1]
    assert record.val_temperature == temperature and record.temperature == sampling.temperature
    for group in groups_of(record, "validation"):
        for one in group.completions:
            logp = (logits_of(module.policy.eval(), group, one) / temperature).log_softmax(-1)
            expected = logp.gather(-1, torch.tensor(one.tokens.ids.tolist())[:, None]).squeeze(-1)
            np.testing.assert_allclose(one.tokens.after_logp, expected, rtol=0, atol=2e-6)
            assert (one.tokens.sampler_logp is not None) == (is_known and not one.greedy)
            if one.tokens.sampler_logp is not None:
                np.testing.assert_allclose(one.tokens.sampler_logp, expected, rtol=0, atol=1e-5)


# Which updates were made.


class Bad(L.Callback):
    """Makes the gradient of one update not finite."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            parameter = next(p for p in pl_module.policy.parameters() if p.requires_grad)
            self.handle = parameter.register_hook(lambda grad: grad * torch.nan)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.handle.remove()


MADE_ONE: dict[str, tuple[dict[str, Any], list[L.Callback]]] = {
    "refused": ({"stop": AfterOne()}, []),
    "not finite": ({}, [Bad(at=1)]),
}


@pytest.mark.parametrize("name", MADE_ONE)
def test_metrics_count_only_updates_that_were_made(name: str, tmp_path: Path) -> None:
    options, callbacks = MADE_ONE[name]
    fit(tmp_path, [inspector(), *callbacks], {"num_minibatches": 2} | options, {"max_epochs": 1})
    (record,) = read(tmp_path)
    logged = {key: values[record.step - 1] for key, values in scalars(tmp_path).items() if key.startswith("update/")}
    # Both were looked at; the second changed nothing.
    assert {group.update for group in record.groups} == {0, 1}
    made = [one for group in record.groups if group.update == 0 for one in group.completions]
    learned = [(one.tokens, one.right) for one in made if one.tokens.update_logp is not None]
    change = np.concatenate([tokens.after_logp - tokens.old_logp for tokens, _ in learned])
    push = np.concatenate([tokens.weight * tokens.advantage for tokens, _ in learned])
    is_right = np.concatenate([np.full(len(tokens), right) for tokens, right in learned])
    agreeing = np.abs(push)[change * push > 0]
    assert logged["update/agreement"] == pytest.approx(agreeing.sum() / np.abs(push).sum(), rel=1e-4)
    for name, changes in (("right", change[is_right]), ("wrong", change[~is_right])):
        key = f"update/delta_logp_{name}"
        assert (key in logged) == bool(changes.size)
        if changes.size:
            assert logged[key] == pytest.approx(changes.mean(), rel=1e-3, abs=1e-6)


# Which files.


def test_a_fresh_run_removes_the_records_of_another(tmp_path: Path) -> None:
    write_records(tmp_path, [step_of([group_of([plain_tokens(["old"])])], step=step) for step in (0, 1, 7)])
    # It does not validate, so it has no record of step 0 itself.
    fit(tmp_path, [inspector()], trainer={"max_epochs": 2})
    assert [file.name for file in files_of(tmp_path)] == ["step-000001.jsonl", "step-000002.jsonl"]
    assert all(group.kind == "train" for record in read(tmp_path) for group in record.groups)
    assert len(RunData.read(tmp_path).steps) == 2


# What is described.


class Part:
    """Settings with anything in them."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


def test_an_object_that_points_back_is_described_once() -> None:
    part, child, shared = Part(low=0.8), Part(high=1.2), Part(c=3)
    part.child, child.parent, part.twice = child, part, [shared, shared]
    assert describe(part) == {
        "class": "Part",
        "low": 0.8,
        "child": {"class": "Part", "high": 1.2, "parent": {"class": "Part"}},
        "twice": [{"class": "Part", "c": 3}, {"class": "Part", "c": 3}],
    }
    table: dict[Any, Any] = {"a": float("inf"), 2: [Part(x=1)]}
    table["itself"] = table
    assert describe(table) == {"a": None, "2": [{"class": "Part", "x": 1}], "itself": {"class": "dict"}}
