import json
from pathlib import Path

import pytest

from grpo_lightning import HubPrompts, UsageError

ROWS = [
    {"question": "2+3?", "answer": "First 2, then 3.\n#### 5", "level": "easy"},
    {"question": "7*6?", "answer": "#### 40\n#### 42", "level": "hard"},
]
GOLDS = ["5", "42"]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder laid out like a dataset of the Hub, and a cache that goes away with the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", ROWS)
    write(tmp_path / "data" / "test.jsonl", [{"question": "a", "answer": ""}])
    return str(tmp_path / "data")


def test_hub(hub: str, capfd: pytest.CaptureFixture[str]):
    task = HubPrompts(hub, val="train[1:]", predict="test", answer_pattern=r"####\s*(.+)")
    questions = task.questions("train")
    assert [(q.text, q.answer) for q in questions] == [(r["question"], g) for r, g in zip(ROWS, GOLDS, strict=True)]
    assert questions[1].source == f"{hub}/train:2"
    assert questions[0].metadata == {"level": "easy", "solution": ROWS[0]["answer"]}
    assert [question.answer for question in task.questions("val")] == GOLDS[1:]
    assert [question.answer for question in task.questions("predict")] == [""]
    assert capfd.readouterr().err == ""


def test_hub_errors(hub: str, monkeypatch: pytest.MonkeyPatch):
    assert HubPrompts(hub).questions("test")[0].answer == ""
    with pytest.raises(UsageError, match=r"^data.task.val is not set: give the name of a split of"):
        HubPrompts(hub).questions("val")
    with pytest.raises(UsageError, match=r"train='dev'.* could not be loaded: Unknown split \"dev\""):
        HubPrompts(hub, train="dev").questions("train")
    with pytest.raises(UsageError, match=r"config='main'.*BuilderConfig 'main' not found"):
        HubPrompts(hub, config="main").questions("train")

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'no/such' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(UsageError, match=r"data.task.id='no/such'.*Couldn't reach .*download it first"):
        HubPrompts("no/such").questions("train")
