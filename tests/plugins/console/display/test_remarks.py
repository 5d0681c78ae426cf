"""A run that learns nothing says so, and options without an effect are refused."""

from pathlib import Path
from typing import Any

import pytest
from helpers.fast import fit
from helpers.fitting import AfterOne

from grpo_lightning import FormatReward, Objective, RunSummary, Sampling, StepLines, Truncated

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
