"""Every architecture is scored and decoded as plain forwards do, or refused in a sentence."""

from functools import cache

import model_table
import pytest
import transformers
from helpers.architectures import examine
from helpers.families import FAMILIES
from transformers import CONFIG_MAPPING

BFLOAT16 = ("llama", "gpt2", "gemma2", "granite", "mamba", "deepseek_v3")
"""Of each kind one: among them those that scale or cap their logits."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)


@cache
def page() -> dict[str, list[str]]:
    """The rows of docs/reference/models.md by family."""
    lines = model_table.TABLE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in rows[2:]}


def status(cell: str) -> str:
    """Yes or no; why not is another version's affair."""
    return cell.split(":")[0].split(",")[0]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_scored_and_decoded_as_a_plain_forward_or_refused(family: str) -> None:
    if family.split(" ")[0] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    finding = examine(family)
    assert not finding.errors, "\n".join(finding.errors)
    cells = [cell.strip() for cell in model_table.row(finding).strip("|").split("|")]
    assert family in page(), "run docs/figures/model_table.py"
    assert [status(cell) for cell in page()[family]] == [status(cell) for cell in cells[1:]], (
        "run docs/figures/model_table.py"
    )


def test_the_page_names_every_family_and_no_other() -> None:
    assert set(page()) == set(FAMILIES)
    assert len(FAMILIES) >= 50


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", BFLOAT16)
def test_bfloat16_weights_change_log_probs_by_rounding_alone(family: str) -> None:
    finding = examine(family, dtype="bfloat16")
    assert not finding.refused
    assert not finding.errors, "\n".join(finding.errors)
