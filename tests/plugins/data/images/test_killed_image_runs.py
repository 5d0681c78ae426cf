"""A run on images through the command line that is killed at random moments, and goes on."""

import json
from pathlib import Path

import pytest
import torch
from helpers.killing import check_alike, die_and_go_on, prepare
from make_seeing_policy import make_model, make_processor
from PIL import Image

NUM_ROWS = 10


@pytest.mark.whole
def test_sigkills_at_random_moments_change_nothing_of_a_run_on_images(tmp_path: Path) -> None:
    """Every second question has an image, and the encoder is trained."""
    prepare(tmp_path)
    torch.manual_seed(0)
    processor = make_processor()
    make_model(processor, hidden=64, layers=1).save_pretrained(tmp_path / "seeing")
    processor.save_pretrained(tmp_path / "seeing")
    for split in ("train", "val"):
        rows = []
        for row in range(NUM_ROWS):
            Image.effect_noise((24, 24), 20 * row).save(tmp_path / f"{row}.png")
            image = None if row % 2 else f"{row}.png"
            rows.append({"question": "How many?", "answer": str(row), "image": image})
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--data.task.images=image", f"--model.policy.path={tmp_path / 'seeing'}", "--model.policy.vision=true"]
    die_and_go_on(tmp_path, 1, *options, "--model.policy.dropout=false")
    check_alike(tmp_path)
