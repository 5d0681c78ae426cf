"""What a run records: against what it logged, against its saved weights, and against the run without it."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import record_table
import torch
from helpers.command import Grpo
from helpers.contracts import SURROGATES, make, members
from helpers.fast import fit, policy_of
from helpers.fitting import Another, Digits, of_updates, scalars
from helpers.inspecting import (
    check_sampler_logp,
    completions_of,
    groups_of,
    inspector,
    logits_of,
    sums_of_terms,
    terms_of,
)
from helpers.paths import ROOT
from helpers.tiny import SPECIAL, STOP_IDS, rollouts_of

import grpo_lightning
from grpo_lightning import Inspector, KLEstimator, Objective, Policy, RatioMask, Rollouts, Sample
from grpo_lightning.maths.entropy import FixedEntropy
from grpo_lightning.maths.filters import Truncated
from grpo_lightning.maths.surrogates import Clipped
from grpo_lightning.maths.weightings import TokenWeighting
from grpo_lightning.plugins.looking.inspector import read
from grpo_lightning.plugins.looking.inspector.record import CompletionRecord, GroupRecord, StepRecord
from grpo_lightning.plugins.methods.token_weights.top_entropy import TopEntropy
from grpo_lightning.plugins.sources.stale.stale_source import StaleSource
from grpo_lightning.policy.snapshots import FrozenCopy, Proximal
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint

# The terms.

LEARNING: dict[str, Any] = {
    "loop": {"mu": 2, "num_minibatches": 2, "max_tokens": 60},
    "trainer": {"max_epochs": 2},
}


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    **{name: lambda make=make: Objective(make(), beta=0.05) for name, make in SURROGATES.items()},
    **{cls.__name__: lambda cls=cls: Objective(weighting=make(cls)) for cls in members(TokenWeighting)},
    **{cls.__name__: lambda cls=cls: Objective(kl=make(cls), beta=0.5) for cls in members(KLEstimator)},
    "Truncated": lambda: Objective(masks=[Truncated()], entropy=FixedEntropy(0.01)),
    "TopEntropy": lambda: Objective(masks=[TopEntropy(0.4)], entropy=FixedEntropy(0.01)),
}


class TakeTurns(L.Callback):
    """An objective a step. Stands before the loop."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.objective = [*OBJECTIVES.values()][trainer.current_epoch]()


def test_terms_of_every_part_sum_to_the_logged_objective(tmp_path: Path) -> None:
    steps = {"trainer": {"max_epochs": len(OBJECTIVES)}}
    records = check_terms_of(
        tmp_path, Objective(beta=0.05), 0.02, callbacks=[TakeTurns()], reference=Another(), **LEARNING | steps
    )
    by_name = {name: completions_of(record) for name, record in zip(OBJECTIVES, records, strict=True)}
    assert by_name["TargetProbability"][0].tokens.columns.keys() == {"logp_low", "logp_high"}
    for name in ("K1", "K2", "K3", "ImportanceWeighted"):
        tokens = by_name[name][0].tokens
        assert tokens.ref_logp is not None and np.abs(tokens.kl).max() > 1e-4
    for name in ("Truncated", "TopEntropy"):
        weights = [one.tokens.weight for one in by_name[name] if one.tokens.weight is not None]
        assert 0 < (np.concatenate(weights) == 0).mean() < 1


def test_terms_of_stale_rollouts_with_a_correction(tmp_path: Path) -> None:
    loop = LEARNING["loop"] | {"source": StaleSource(1)}
    objective = Objective(correction=RatioMask(0.97, 1.03), beta=0.05)
    records = check_terms_of(tmp_path, objective, loop=loop, old_policy=Proximal())
    tokens = [one.tokens for one in completions_of(records[1])]
    factors = np.concatenate([one.correction for one in tokens if one.correction is not None])
    assert 0 < (factors == 0).mean() < 1 and (factors[factors != 0] != 1).any()
    for one in tokens:
        if one.correction is not None:
            ratio = np.exp(one.old_logp - one.sampler_logp)
            expected = np.where((ratio < 0.97) | (ratio > 1.03), 0, ratio)
            np.testing.assert_allclose(one.correction, expected, rtol=1e-5)
            assert ((one.weight == 0) == (expected == 0)).all()


def check_terms_of(
    folder: Path, objective: Objective, rate: float = 0.5, callbacks: Sequence[L.Callback] = (), **options: Any
) -> list[StepRecord]:
    """The records of a run. Each update's terms sum to the objective that was logged for it."""
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=rate)  # noqa: E731
    fit(folder, [inspector(), *callbacks], objective=objective, optimizer=optimizer, **LEARNING | options)
    records, seen = read(folder), 0
    objectives = of_updates(folder, "policy/objective")
    for record in records:
        logged = objectives[record.step - 1]
        for update, total in sums_of_terms(record).items():
            assert total == pytest.approx(logged[update], rel=1e-6, abs=1e-6), (record.step, update)
            seen += abs(logged[update]) > 1e-3
    # Most objectives are not 0, where a sum over nothing would pass.
    assert seen >= len(records)
    return records


def test_push_is_the_derivative_of_the_objective(tmp_path: Path) -> None:
    """Of a sequence surrogate, where a token's log-prob changes the terms of all."""
    objective = Objective(SURROGATES["GMPO"](), beta=0.1)
    fit(tmp_path, [inspector()], objective=objective, **LEARNING)
    one = max(completions_of(read(tmp_path)[-1]), key=lambda one: np.abs(one.tokens.push).max())
    tokens, step = one.tokens, 1e-3
    n = len(tokens)
    rollouts = rollouts_of([n])
    rollouts = rollouts.with_columns(dict.fromkeys(rollouts.columns))
    for name in ("advantage", "weight", "old_logp", "ref_logp"):
        setattr(rollouts, name, torch.tensor(getattr(tokens, name)))

    def total(change: torch.Tensor) -> float:
        logp = torch.tensor(tokens.update_logp) + change
        return float((rollouts.weight.double() * objective.terms(logp, torch.zeros(n), rollouts).total.double()).sum())

    for index in range(n):
        change = torch.zeros(n)
        change[index] = step
        slope = (total(change) - total(-change)) / (2 * step)
        assert tokens.push[index] == pytest.approx(slope, abs=2e-5)


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that clips often, and has a reference."""
    folder = tmp_path_factory.mktemp("clipped")
    fit(folder, [inspector()], objective=Objective(Clipped(0.05, 0.05), beta=0.1), **LEARNING)
    return folder


def test_clipped_tokens_are_those_that_the_run_counted(clipped: Path) -> None:
    for record in read(clipped):
        names = ("policy/clip_low", "policy/clip_high", "policy/entropy")
        logged = {name: of_updates(clipped, name)[record.step - 1] for name in names}
        for update in {group.update for group in groups_of(record)}:
            ours = [one.tokens for group in groups_of(record) if group.update == update for one in group.completions]
            learned = [tokens for tokens in ours if tokens.update_logp is not None]
            clip = np.concatenate([tokens.clip for tokens in learned])
            assert (clip == -1).mean() == pytest.approx(logged["policy/clip_low"][update])
            assert (clip == 1).mean() == pytest.approx(logged["policy/clip_high"][update])
            entropy = np.concatenate([tokens.entropy_update for tokens in learned])
            assert entropy.mean() == pytest.approx(logged["policy/entropy"][update], rel=1e-5)


# The passes.


def test_after_is_a_fresh_forward_with_the_saved_weights(tmp_path: Path) -> None:
    policy = policy_of(scale=0.1)
    trainer = {"max_epochs": 2, "enable_checkpointing": True, "limit_val_batches": 1}
    loop = {"mu": 2, "num_minibatches": 2}
    fit(tmp_path, [inspector(), StepCheckpoint(keep=-1)], loop, trainer, policy=policy, objective=Objective(beta=0.1))
    before: dict[str, torch.Tensor] = dict(policy_of(scale=0.1).state_dict())
    for record in read(tmp_path)[1:]:
        fresh = policy_of(scale=0.1)
        saved = torch.load(tmp_path / "checkpoints" / f"step-{record.step}.ckpt", weights_only=True)["state_dict"]
        after = {name.removeprefix("policy."): value for name, value in saved.items() if name.startswith("policy.")}
        for group in record.groups:
            for one in group.completions:
                check(fresh, after, group, one, "after")
                if group.kind == "train":
                    check(fresh, before, group, one, "before")
                if group.kind == "train" and record.step == 1:
                    assert np.allclose(one.tokens.ref_logp, one.tokens.old_logp, rtol=0, atol=2e-6)
        before = after


@torch.no_grad()
def check(
    policy: Policy, weights: dict[str, torch.Tensor], group: GroupRecord, one: CompletionRecord, when: str
) -> None:
    """The numbers of one completion against a forward over it alone."""
    policy.load_state_dict(weights)
    prompt = policy.tokenizer.encode(group.prompt)
    scored = policy(Rollouts.from_lists([prompt], [0], [one.tokens.ids.tolist()]))
    every = logits_of(policy, group, one).log_softmax(-1)
    top_ids, top_logp = getattr(one.tokens, f"top_{when}_ids"), getattr(one.tokens, f"top_{when}_logp")
    np.testing.assert_allclose(getattr(one.tokens, f"entropy_{when}"), scored.entropy, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(top_logp, every.topk(5).values, rtol=0, atol=2e-6)
    np.testing.assert_allclose(top_logp, every.gather(-1, torch.tensor(top_ids, dtype=torch.int64)), rtol=0, atol=2e-6)
    if when == "after":
        np.testing.assert_allclose(one.tokens.after_logp, scored.logp, rtol=0, atol=1e-6)
    for id in {*top_ids.flatten().tolist()}:
        assert group.vocabulary[id] == policy.tokenizer.decode([id])


# Nothing else changes.


class Moody(Digits):
    """Draws from the global generators, and fails now and then."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        result = super().score(samples)
        result.value = [v + float(torch.rand(())) + np.random.rand() for v in result.value]
        result.value[0] = math.nan
        result.status[0] = "moody"
        return result

    def learn(self, *args: Any) -> dict[str, float]:
        return {"draw": float(torch.rand(()))}


@pytest.mark.filterwarnings("ignore:the sampler's and the policy's log-probs")  # dropout
def test_nothing_else_of_the_run_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    warnings = {}
    for name, callbacks in (("with", [inspector()]), ("without", []), ("off", [inspector(every_n_steps=0)])):
        caplog.clear()
        # The rewards draw in the validation before the first step too, where no step has set the states yet.
        L.seed_everything(0, verbose=False)
        policy = policy_of("gpt2", resid_pdrop=0.3)
        found[name] = fit(
            tmp_path / name,
            callbacks,
            loop={"mu": 2, "num_minibatches": 2, "max_tokens": 60},
            trainer={"max_epochs": 2, "limit_val_batches": 1, "check_val_every_n_epoch": 2},
            policy=policy,
            rewards=[Moody()],
            objective=Objective(beta=0.1),
            reference=FrozenCopy(),
        )
        warnings[name] = [message for message in caplog.messages if "moody" in message]
    expected = scalars(tmp_path / "without")
    logged = scalars(tmp_path / "with")
    extra = {"update/agreement", "update/delta_logp_right", "update/delta_logp_wrong"}
    assert logged.keys() & extra
    assert {name: repr(values) for name, values in logged.items() if name not in extra} == {
        name: repr(values) for name, values in expected.items()
    }
    assert warnings["with"] == warnings["without"] and warnings["with"]
    for name in ("with", "off"):
        for key, value in found["without"].state_dict().items():
            assert torch.equal(found[name].state_dict()[key], value), key
    assert len(read(tmp_path / "with")) == 3 and not (tmp_path / "off" / "inspect").exists()
    assert scalars(tmp_path / "off").keys() == expected.keys()


# Which steps, and which prompts.


def test_every_nth_and_the_last_step(tmp_path: Path) -> None:
    fit(tmp_path, [Inspector(every_n_steps=2)], trainer={"max_epochs": 5})
    assert [record.step for record in read(tmp_path)] == [2, 4, 5]
    assert sorted(scalars(tmp_path)["update/agreement"]) == [1, 3, 4]


class Watch(L.Callback):
    """The answers of each validation to the first prompts."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.kept = pl_module.evaluation.answers_by_id
        for id in (0, 1):
            self.kept.setdefault(id, [])

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.texts.append([answer.sample.text for id in (0, 1) for answer in self.kept[id]])


def test_followed_prompts_have_the_answers_of_validation(tmp_path: Path) -> None:
    watch = Watch()
    for name, callbacks, interval in (("validated", [watch], 1), ("rarely", [], 3)):
        trainer = {"limit_val_batches": 1, "check_val_every_n_epoch": interval}
        callbacks += [inspector(num_samples=3)]
        fit(tmp_path / name, callbacks, trainer=trainer, objective=Objective(beta=0.1), samples=3)
    validated, rare = read(tmp_path / "validated"), read(tmp_path / "rarely")
    assert [record.step for record in validated] == [record.step for record in rare] == [0, 1, 2, 3]
    for number, (record, other) in enumerate(zip(validated, rare, strict=True)):
        groups = groups_of(record, "validation")
        found = [(group.prompt_id, group.roles, group.update) for group in groups]
        assert found == [(id, ["followed"], None) for id in (0, 1)]
        assert [one.greedy for one in groups[0].completions] == [True, False, False, False]
        assert groups[0].source == "echo:0" and groups[0].gold == "3"
        answers = completions_of(record, "validation")
        texts = [one.text for one in answers]
        # The first validation comes before the first step.
        assert texts == watch.texts[number]
        # The step without validation decodes them itself, and finds the same.
        assert texts == [one.text for one in completions_of(other, "validation")]
        for one in answers:
            tokens = one.tokens
            assert tokens.ref_logp is not None and tokens.after_logp is not None
            assert (tokens.sampler_logp is None) == one.greedy
            assert one.scores == {"digits": one.reward} and one.right == ((one.reward or 0) > 0.5)
            assert tokens.advantage is None and tokens.weight is None and tokens.old_logp is None
        check_sampler_logp(record)
    # The reference is the policy before the first step.
    for one in completions_of(validated[0], "validation"):
        assert np.allclose(one.tokens.ref_logp, one.tokens.after_logp, rtol=0, atol=1e-5)


def test_what_records_nothing(tmp_path: Path, grpo: Grpo) -> None:
    fit(tmp_path / "trial", [inspector()], trainer={"fast_dev_run": True, "logger": False})
    assert not (tmp_path / "trial").exists()
    grpo.ok("validate")
    assert not (tmp_path / "run" / "inspect").exists()


def test_it_is_on_by_default(tmp_path: Path, grpo: Grpo) -> None:
    grpo.ok("fit", "--trainer.max_epochs=2")
    assert [record.step for record in grpo_lightning.plugins.looking.inspector.read(tmp_path / "run")] == [0, 2]
    assert "time/inspect" in scalars(tmp_path / "run", without=())


# What an update may be.


def test_a_group_without_advantage_is_recorded_with_terms_of_zero(tmp_path: Path) -> None:
    some_equal = Digits(change=lambda sample, share: 0.0 if sample.prompt.id % 2 else share)
    fit(tmp_path, [inspector()], rewards=[some_equal], trainer={"max_epochs": 1}, loop={"mu": 2})
    (record,) = read(tmp_path)
    equal, other = ([g for g in groups_of(record) if g.prompt_id % 2 == odd] for odd in (1, 0))
    assert len(equal) == len(other) == 2
    assert all(group.update == 1 and group.std for group in other)
    for group in equal:
        assert group.update is None and group.mean == group.std == 0
        for one in group.completions:
            tokens = one.tokens
            assert tokens.update_logp is None and (tokens.weight > 0).all()
            assert (terms_of(tokens) == 0).all() and not tokens.push.any()
            assert tokens.after_logp is not None
            assert np.allclose(tokens.old_logp, tokens.sampler_logp, rtol=0, atol=1e-5)


# Resuming, and broken files.


def test_a_file_says_what_it_was_given(clipped: Path) -> None:
    for record in read(clipped):
        np.testing.assert_equal(asdict(StepRecord.from_lines(record.lines())), asdict(record))
        assert record.objective["surrogate"] == {"class": "Clipped", "low": 0.95, "high": 1.05, "dual_clip": None}
        assert record.rewards == ["digits"] and record.correct == "digits" and record.temperature == 1.0
        for one in completions_of(record):
            pairs = zip(one.tokens.ids.tolist(), one.tokens.pieces, strict=True)
            assert "".join(piece for id, piece in pairs if id >= len(SPECIAL)) == one.text
            assert (one.finish_reason == "stop") == (one.tokens.ids[-1] in STOP_IDS)


def test_the_tables_of_the_documentation_are_the_docstrings() -> None:
    assert record_table.written(page := record_table.PAGE.read_text("utf-8")) == page


def test_the_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fit("runs/quickstart", [inspector(num_groups=2)], trainer={"max_epochs": 2, "limit_val_batches": 1})
    capsys.readouterr()
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "reference" / "records.md").read_text("utf-8"), re.DOTALL | re.M
    )
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * 4 and lines[0].startswith("1 ['mixed'")
