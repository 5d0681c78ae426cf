"""experiments/versus_trl without TRL: the lengths that both sides are made to have."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers.fast import policy_of
from helpers.paths import ROOT
from helpers.tiny import requests_of

from grpo_lightning import FinishReason, RandomKey, Rollouts, Sampling
from grpo_lightning.plugins.fast import batch


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
