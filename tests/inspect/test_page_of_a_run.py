"""The page of what a real run recorded."""

from pathlib import Path

import numpy as np
from helpers.chromium import browser, needs_chromium
from helpers.fitting import fit
from torch import Tensor

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.plugins.inspect.command import main
from grpo_lightning.plugins.inspect.inspector import Inspector
from grpo_lightning.plugins.inspect.record import read
from grpo_lightning.policy.snapshots import FrozenCopy


def run_of(folder: Path, surrogate: Surrogate) -> Path:
    """A run of two steps with two passes over two minibatches, recorded whole."""
    loop = {"mu": 2, "num_minibatches": 2}
    objective = Objective(surrogate, beta=0.05, entropy_bonus=0.01)
    callbacks = [Inspector(every_n_steps=1, num_groups=1000)]
    fit(folder, callbacks, loop, objective=objective, reference=FrozenCopy(), trainer={"max_epochs": 2})
    return folder


class SoftClip(Surrogate):
    """A surrogate of a user's."""

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        return SurrogateResult.unbounded(rollouts.advantage * (logp - old_logp).tanh())


def test_the_curve_of_any_surrogate_is_recorded(tmp_path: Path) -> None:
    for record in read(run_of(tmp_path, SoftClip()))[1:]:
        for one in (one for group in record.groups if group.kind == "train" for one in group.completions):
            tokens = one.tokens
            assert tokens.curve is not None and tokens.near is not None and tokens.old_logp is not None
            # Half-way from 0 to 1, and at the upper end of what surrounds the policies.
            for point, p in ((10, np.full(len(tokens), 10 / 19)), (39, tokens.near[:, 1])):
                value = tokens.advantage * np.tanh(np.log(p) - tokens.old_logp) - tokens.surrogate
                np.testing.assert_allclose(tokens.curve[:, point], value, rtol=2e-3, atol=1e-3)


@needs_chromium
def test_the_page_of_a_run_opens(tmp_path: Path) -> None:
    assert main([str(run_of(tmp_path / "run", SoftClip()))]) == 0
    with browser(tmp_path / "profile") as chromium:
        chromium.open(tmp_path / "run" / "inspect.html")
        chromium.click(".token")
        assert chromium.count("#card .landscape .objective") == 1
        assert chromium.count(".token") > 0 and chromium.texts(".multiples figcaption span")[0] == "reward"
        chromium.press(*"123456789j", "ArrowDown", "Enter", "f", "ArrowLeft", "ArrowLeft", "c", "Escape")
        assert chromium.complaints() == []
