"""The page of what a real run recorded: its formulas give the recorded numbers, and it opens."""

from pathlib import Path

import numpy as np
import pytest
from helpers.chromium import browser, needs_chromium, needs_node
from helpers.contracts import make, members
from helpers.fitting import fit
from helpers.page_formulas import in_node

from grpo_lightning.inspect.command import main
from grpo_lightning.inspect.inspector import Inspector
from grpo_lightning.inspect.record import read
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.surrogates import Surrogate
from grpo_lightning.policy.snapshots import FrozenCopy


def run_of(folder: Path, surrogate: Surrogate) -> Path:
    """A run of two steps with two passes over two minibatches, recorded whole."""
    loop = {"mu": 2, "num_minibatches": 2}
    objective = Objective(surrogate, beta=0.05, entropy_bonus=0.01)
    callbacks = [Inspector(every_n_steps=1, num_groups=1000)]
    fit(folder, callbacks, loop, objective=objective, reference=FrozenCopy(), trainer={"max_epochs": 2})
    return folder


@needs_node
@pytest.mark.parametrize("cls", members(Surrogate), ids=lambda cls: cls.__name__)
def test_the_formulas_give_what_a_run_recorded(cls: type[Surrogate], tmp_path: Path) -> None:
    for record in read(run_of(tmp_path, make(cls)))[1:]:
        result = in_node(record)
        completions = [one for group in record.groups if group.kind == "train" for one in group.completions]
        assert result["known"] and len(completions) == len(result["found"]) > 0
        for completion, tokens in zip(completions, result["found"], strict=True):
            own = completion.tokens
            assert own.surrogate is not None and own.kl is not None
            for name, expected in (("surrogate", own.surrogate), ("kl", own.kl), ("card", own.terms(0.05, 0.01))):
                actual = [token[name] for token in tokens]
                np.testing.assert_allclose(np.array(actual, float), expected, rtol=1e-6, atol=1e-6, err_msg=name)


@needs_chromium
def test_the_page_of_a_run_opens(tmp_path: Path) -> None:
    assert main([str(run_of(tmp_path / "run", make(members(Surrogate)[0])))]) == 0
    with browser(tmp_path / "profile") as chromium:
        chromium.open(tmp_path / "run" / "inspect.html")
        assert chromium.count(".token") > 0 and chromium.texts(".multiples figcaption span")[0] == "reward"
        chromium.press(*"123456789j", "ArrowDown", "Enter", "f", "ArrowLeft", "ArrowLeft", "c", "Escape")
        assert chromium.complaints() == []
