"""A run that learns nothing says so, and options without an effect are refused."""

from pathlib import Path
from typing import Any

import pytest
from helpers.command import Grpo
from helpers.fitting import fit
from test_schedules import AfterOne

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.masks import Truncated
from grpo_lightning.maths.objective import Objective
from grpo_lightning.rewards.format import FormatReward
from grpo_lightning.training.callbacks.lines import StepLines
from grpo_lightning.training.callbacks.summary import RunSummary

RIGHT = [FormatReward(pattern=".*")]


@pytest.mark.parametrize(
    ("options", "remarks"),
    [
        ({"rewards": RIGHT, "objective": Objective(beta=0.1)}, ["all 4 groups had equal rewards: only KL or entropy"]),
        (
            {"objective": Objective(masks=[Truncated()]), "sampling": Sampling(max_new_tokens=1, stop=["no such"])},
            ["0 of 2 updates", "16 of 16 completions cut off", "no token had an advantage: nothing was learned"],
        ),
        ({"loop": {"mu": 2, "stop": AfterOne()}}, ["1 of 2 updates, AfterOne"]),
        ({}, []),
    ],
    ids=["equal with KL", "cut off", "stopped", "as it should be"],
)
def test_a_step_says_why_it_learns_nothing(
    options: dict[str, Any], remarks: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, [StepLines(), RunSummary()], trainer={"max_epochs": 1}, **{"loop": {"mu": 2}} | options)
    lines = [text for text in caplog.messages if text.startswith("step ")]
    (summary,) = [text for text in caplog.messages if text.startswith("done")]
    assert len(lines) == 1 and ("remarks" in summary) == ("learned" in "".join(remarks) or "KL" in "".join(remarks))
    for remark in remarks:
        assert all(remark in text for text in lines), lines
        assert " updates" in remark or remark in summary
    assert remarks or not any(" of 2 updates" in text or ": nothing" in text or "cut off" in text for text in lines)


IDLE = {
    "kl": (["--model.objective.kl=K2"], ["model.objective.kl=K2", "beta=0", "kl=K3"]),
    "M": (["--loop.steps_per_iteration=2"], ["loop.steps_per_iteration=2", "beta=0", "null"]),
    "stop": (["--loop.stop=AllSettled"], ["loop.stop=AllSettled", "loop.mu=1", "FixedPasses"]),
    "mode": (["--checkpoint.mode=min"], ["checkpoint.mode=min", "checkpoint.monitor"]),
}


@pytest.mark.parametrize(("options", "words"), IDLE.values(), ids=IDLE)
def test_an_option_without_effect_is_refused(options: list[str], words: list[str], grpo: Grpo) -> None:
    code, _, errors = grpo("fit", *options)
    assert code == 2 and "Traceback" not in errors
    assert all(word in errors.splitlines()[-1] for word in words), errors


def test_they_are_taken_where_they_have_one(grpo: Grpo) -> None:
    penalty = "--model.reward_kl={class_path: KLPenalty, init_args: {beta: 0.1}}"
    code, _, errors = grpo("fit", penalty, "--model.reference=FrozenCopy", "--loop.steps_per_iteration=2")
    assert code == 0, errors
