"""experiments/versus_trl without TRL: sizes, the lengths that both sides are made to have, and refusals."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fast import policy_of
from helpers.paths import ROOT
from helpers.tiny import requests_of

from grpo_lightning import Fast, FinishReason, Policy, RandomKey, Rollouts, Sampling
from grpo_lightning.plugins.fast import batch

GIB = 2**30
SIZES = {"prompt_tokens": 5, "new_tokens": 8, "prompts": 2, "group_size": 4}
SIZES |= {"warm_up": 1, "steps": 3, "max_tokens": 100, "trl_rows": 8}


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """Every module of the experiment, by name, as those of a script find each other; forgotten afterwards."""
    paths = [ROOT / "experiments" / folder for folder in ("versus_trl", "roofline")]
    names = [file.stem for path in paths for file in sorted(path.glob("*.py"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*map(str, paths), str(ROOT / "tools"), *sys.path])
        try:
            yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        finally:
            for name in names:
                sys.modules.pop(name, None)


def race_of(parts: SimpleNamespace, **changes: Any) -> Any:
    return parts.race.Race(**SIZES | changes)


def test_an_endless_model_is_the_same_model(parts: SimpleNamespace, policy_folder: Path, tmp_path: Path):
    parts.race.make_endless(policy_folder, tmp_path / "model")
    before, endless = Policy(str(policy_folder), compute=Fast()), Policy(str(tmp_path / "model"), compute=Fast())
    before.load()
    endless.load()
    assert all((a == b).all() for a, b in zip(before.parameters(), endless.parameters(), strict=True))
    assert before.stop_ids and min(before.stop_ids) < before.config.vocab_size
    assert min(endless.stop_ids) >= endless.config.vocab_size
    assert endless.tokenizer.encode("abc") == before.tokenizer.encode("abc")
    assert endless.tokenizer.pad_token_id < endless.config.vocab_size


def ended_with(parts: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Lets processes end with what is given, instead of running."""
    ended = {"returncode": 0, "peak": GIB, "exceeded": False, "tokens": [64, 64], "seconds": [1.0]} | changes

    def run(command: list[str], limit: float, environment: Any, log: Path) -> Any:
        log.write_text("why")
        (folder / f"{command[2]}.json").write_text(json.dumps(ended))
        return parts.memory_limit.Ended(ended["returncode"], ended["peak"], ended["exceeded"])

    monkeypatch.setattr(parts.memory_limit, "run", run)


def test_a_side_that_passed_other_tokens_is_refused(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended_with(parts, tmp_path, monkeypatch, tokens=[64, 63])
    outcome = parts.result_tables.Outcome()
    parts.compare.run_side("ours", tmp_path, race_of(parts, new_tokens=3), GIB, outcome, exact=False)
    with pytest.raises(parts.compare.Failure, match=r"grpo_lightning had \[64, 63\] tokens per step, not \[64, 64\]"):
        parts.compare.run_side("ours", tmp_path, race_of(parts, new_tokens=3), GIB, outcome, exact=True)


def test_a_side_that_fails_says_why(parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended_with(parts, tmp_path, monkeypatch, returncode=1)
    with pytest.raises(parts.compare.Failure, match=r"TRL failed at 5 \+ 3 tokens:\nwhy"):
        parts.compare.run_side(
            "trl", tmp_path, race_of(parts, new_tokens=3), GIB, parts.result_tables.Outcome(), exact=True
        )


def test_lengths_are_a_function_of_the_step(parts: SimpleNamespace) -> None:
    lengths = parts.forced_lengths.lognormal_lengths
    assert lengths(3, 16, 100) == lengths(3, 16, 100) != lengths(4, 16, 100)
    many = sorted(lengths(0, 4000, 100))
    # The median is a quarter of the longest; exp(N(0, 1)) exceeds 4 in 8.3 % of the draws.
    assert many[2000] == pytest.approx(25, abs=2)
    assert (many[0], many[-1]) == (1, 100)
    assert many.count(100) / 4000 == pytest.approx(0.083, abs=0.02)


def test_our_completions_end_at_their_lengths_and_say_what_the_policy_does(parts: SimpleNamespace) -> None:
    policy = policy_of()
    requests = requests_of([5, 9], 3)
    wanted = {0: [1, 4, 12, 7, 2, 9], 1: [3] * 6}
    with parts.forced_lengths.marking_policies():
        assert policy.stop_ids == {1}
        engine = parts.forced_lengths.forcing_engine(lambda step: wanted[step], check_every=4)
        engine.sync(policy)
        for step, lengths in wanted.items():
            found = engine.complete(requests, Sampling(max_new_tokens=12), RandomKey(0, step))
            assert [len(completion.token_ids) for completion in found] == lengths
            assert {completion.finish_reason for completion in found} == {FinishReason.STOP}
            tokens = [completion.token_ids for completion in found]
            assert all(row[-1] == 1 and 1 not in row[:-1] for row in tokens)
            groups = [index // 3 for index in range(6)]
            rollouts = Rollouts.from_lists([requests[0].token_ids, requests[3].token_ids], groups, tokens)
            logp = [value for completion in found for value in completion.logp]
            torch.testing.assert_close(policy(rollouts).logp, torch.tensor(logp), atol=1e-5, rtol=1e-4)
    # Nothing of it stays.
    assert policy.stop_ids == {3, 5}
    assert batch.draw.__module__ == "grpo_lightning.engines.sampling"
    assert batch.uniforms.__module__ == "grpo_lightning.engines.philox"
