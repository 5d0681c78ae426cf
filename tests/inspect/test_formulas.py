"""The page's formulas are those of the objective: node runs formulas.js on records that the real objective made."""

import json
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chromium import NODE, needs_node
from helpers.contracts import VARIANTS, make, members
from helpers.inspecting import random_record
from helpers.page_formulas import ASSETS, ELSEWHERE, in_node

from grpo_lightning.maths.kl import K1, K2, K3, ImportanceWeighted, KLEstimator
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.surrogates import Surrogate

pytestmark = [needs_node, pytest.mark.whole]
SURROGATES: dict[str, Any] = {cls.__name__: lambda cls=cls: make(cls) for cls in members(Surrogate)} | VARIANTS
KLS: dict[str, Any] = {cls.__name__: lambda cls=cls: make(cls) for cls in members(KLEstimator)}
KLS |= {f"ImportanceWeighted {cls.__name__}": lambda cls=cls: ImportanceWeighted(cls()) for cls in (K1, K2, K3)}


def close(actual: float, expected: float) -> bool:
    return abs(float(actual) - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))


@pytest.mark.parametrize("given", [0.0, 0.5], ids=["all drawn", "some given"])
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogate_kl_and_terms_are_those_of_the_objective(surrogate: str, kl: str, given: float) -> None:
    objective = Objective(SURROGATES[surrogate](), KLS[kl](), beta=0.3, entropy_bonus=0.01)
    record, _ = random_record(objective, given=given)
    result = in_node(record)
    assert result["known"]
    for completion, tokens in zip(record.groups[0].completions, result["found"], strict=True):
        own = completion.tokens
        drawn = np.flatnonzero(own.given == 0) if own.given is not None else np.arange(len(own))
        terms = own.terms(objective.beta, objective.entropy_bonus)
        assert len(drawn) == len(tokens) > 0
        for t, token in zip(drawn, tokens, strict=True):
            assert close(token["surrogate"], own.surrogate[t])
            assert close(token["kl"], own.kl[t])
            assert close(token["term"], terms[t]) and close(token["card"], terms[t])
            assert token["agrees"]


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_terms_sum_to_the_objective(surrogate: str) -> None:
    objective = Objective(SURROGATES[surrogate](), beta=0.04, entropy_bonus=0.01)
    record, rollouts = random_record(objective, seed=3)
    tokens = [one.tokens for one in record.groups[0].completions]
    logp = torch.from_numpy(np.concatenate([one.update_logp for one in tokens]))
    entropy = torch.from_numpy(np.concatenate([one.entropy_update for one in tokens]))
    value, _ = objective(logp, entropy, rollouts)
    sums = sum(float(token["card"]) for completion in in_node(record)["found"] for token in completion)
    assert close(sums, float(value))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_curve_is_the_surrogate_with_this_token_elsewhere(surrogate: str) -> None:
    """Every token in turn goes to other probabilities while the others stay."""
    objective = Objective(SURROGATES[surrogate]())
    record, rollouts = random_record(objective, seed=1)
    logp = torch.from_numpy(np.concatenate([one.tokens.update_logp for one in record.groups[0].completions]))
    found = [token for completion in in_node(record)["found"] for token in completion]
    assert rollouts.old_logp is not None
    for index in range(rollouts.num_tokens):
        for elsewhere, actual in zip(ELSEWHERE, found[index]["moved"], strict=True):
            moved = logp.clone()
            moved[index] = elsewhere
            expected = objective.surrogate(moved, rollouts.old_logp, rollouts).value[index]
            assert close(actual, float(expected)), (index, elsewhere)


KINKED = [name for name in SURROGATES if name not in ("Reinforce", "SAPO") and "without bounds" not in name]


@pytest.mark.parametrize("surrogate", KINKED)
def test_a_corner_is_where_the_slope_changes(surrogate: str) -> None:
    objective = Objective(SURROGATES[surrogate]())
    record, _ = random_record(objective, seed=2)
    corners = [
        (number, index, corner)
        for number, completion in enumerate(in_node(record)["found"])
        for index, token in enumerate(completion)
        for corner in token["corners"]
    ]
    assert corners
    for number, index, corner in corners[:8]:
        near = [corner + step for step in (-2e-4, -1e-4, 1e-4, 2e-4)]
        a, b, c, d = in_node(record, near)["found"][number][index]["moved"]
        jumps, bends = abs(c - b) > 1e-3, abs((b - a) - (d - c)) > 1e-9 * max(1, abs(b))
        assert jumps or bends, corner


class Unheard(Surrogate):
    """A surrogate of a user's."""

    def __call__(self, logp, old_logp, rollouts):
        return Objective().surrogate(2 * logp, old_logp, rollouts)


@pytest.mark.parametrize("name", ["Unheard", "constructor"])
def test_a_class_that_the_page_does_not_know_has_no_curve(name: str) -> None:
    record, _ = random_record(Objective())
    record.objective["surrogate"] = {"class": name}
    rows = json.loads(json.dumps([json.loads(line) for line in record.lines()]))
    program = (ASSETS / "formulas.js").read_text() + f"\nconsole.log(isKnown({json.dumps(rows[0]['objective'])}));"
    assert NODE is not None
    assert subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True).stdout == "false\n"


def test_a_class_of_a_known_name_with_another_formula_is_noticed() -> None:
    record, _ = random_record(Objective(Unheard()))
    record.objective["surrogate"] = Objective().surrogate.__dict__ | {"class": "Clipped", "dual_clip": None}
    verdicts = [token["agrees"] for completion in in_node(record)["found"] for token in completion]
    assert not all(verdicts)
