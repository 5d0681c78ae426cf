"""A run on questions with images through the command line, and what is made of it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_lightning import cli
from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.looking.inspector.record import StepRecord

ENGINE = """
from grpo_lightning import NativeEngine

class TextEngine(NativeEngine):
    reads_images = False
"""
SMALL = ["--config=run.yaml", "--trainer.enable_progress_bar=false", "--data.val_limit=4", "--loop.prompts_per_step=4"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with one step of training behind it."""
    folder = tmp_path_factory.mktemp("images") / "squares"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["grpo"])
        assert answer(["init", str(folder), "--example", "images"]) == 0
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        cli.run(["fit", *SMALL, "--trainer.max_epochs=1"])
    return folder


@pytest.fixture(autouse=True)
def _in_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)


def test_the_inspector_shows_the_picture_once_per_group() -> None:
    for file in Path("runs/images/inspect").glob("step-*.jsonl"):
        text = file.read_text(encoding="utf-8")
        record = StepRecord.from_lines(text.splitlines())
        assert record.groups
        assert text.count("data:image/") == len(record.groups)
        assert all(group.images[0].startswith("data:image/png;base64,") for group in record.groups)
    assert answer(["inspect", "runs/images"]) == 0


def test_no_picture_is_in_the_other_files() -> None:
    files = [path for path in Path("runs/images").rglob("*") if path.suffix in (".jsonl", ".yaml", ".csv")]
    assert [path for path in files if path.parent.name != "inspect" and "data:image" in path.read_text()] == []


def test_an_export_sees_as_the_policy_does() -> None:
    assert answer(["export", "runs/images", "--out=model"]) == 0
    processor = AutoProcessor.from_pretrained("model")
    model = AutoModelForImageTextToText.from_pretrained("model")
    batch = processor(text=["<image>How many red?"], images=[[Image.new("RGB", (24, 24), "red")]], return_tensors="pt")
    with torch.no_grad():
        assert model(**batch).logits.shape[1] == 9 + len("How many red?")


def test_predictions_and_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"<image>{text}", "image": f"{text}.png"} for text in ("red", "blue")]
    for row in rows:
        Image.new("RGB", (24, 24), row["image"][:-4]).save(row["image"])
    Path("rows.jsonl").write_text("".join(json.dumps(row | {"answer": "9"}) + "\n" for row in rows), encoding="utf-8")
    table = ["--data.task=JsonPrompts", "--data.task.images=image", "--data.task.train=rows.jsonl"]
    table += ["--data.task.predict=rows.jsonl", "--data.task.val=rows.jsonl"]
    cli.run(["predict", *SMALL[:2], *table, "--trainer.default_root_dir=runs/predicted"])
    cli.run(["validate", *SMALL, *table, "--trainer.default_root_dir=runs/validated"])
    [file] = Path("runs/predicted").rglob("*.jsonl")
    assert "red" in file.read_text() and "data:image" not in file.read_text()
    capsys.readouterr()
    cli.run(["plan", *SMALL, *table])
    # Nine tokens of the image, and four letters of `blue`.
    assert "longest prompt 13 tokens" in capsys.readouterr().out


def test_evaluate_reads_images(capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (24, 24), "red").save("nine.png")
    row = {"question": "How many red?", "answer": "9", "image": "nine.png"}
    Path("nine.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    task = {"class_path": "JsonPrompts", "init_args": {"val": "nine.jsonl", "images": "image"}}
    options = {"data": {"validations": {"nine": {"task": task, "split": "val", "grader": "MathVerifier"}}}}
    Path("nine.yaml").write_text(json.dumps(options), encoding="utf-8")
    command = ["evaluate", "policy", "--benchmarks", "nine.yaml", "--samples=2", "--model.sampling.max_new_tokens=4"]
    if answer(command) is None:
        cli.run()
    assert "nine" in capsys.readouterr().out


def test_an_engine_of_text_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text_engine.py").write_text(ENGINE, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        cli.run(["fit", *SMALL, "--model.engine=text_engine.TextEngine", "--trainer.default_root_dir=runs/refused"])
    assert ended.value.code == 2
    assert "model.engine=TextEngine: train:1 has images, and this engine reads text" in capsys.readouterr().err
    assert not Path("runs/refused").exists()
