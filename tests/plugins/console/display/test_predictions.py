"""The file of predictions."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.command import Grpo

from grpo_lightning import PredictionWriter, Prompt, Question, ranks
from grpo_lightning.training.task_data import PromptBatch


def test_predictions_of_several_ranks_are_in_the_order_of_the_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = [PredictionWriter(), PredictionWriter()]
    trainer: Any = SimpleNamespace(is_global_zero=True, default_root_dir=tmp_path)
    # Five questions with two completions each, dealt to two ranks in batches of two; the last is padding.
    for writer, batches in zip(writers, ([[0, 2], [4]], [[1, 3], [0]]), strict=True):
        for ids, num_real in zip(batches, (2, 1 if writer is writers[0] else 0), strict=True):
            prompts = [Prompt(id, "", [1], Question("", "")) for id in ids]
            rows = [{"question": id, "sample": sample} for id in ids[:num_real] for sample in range(2)]
            writer.on_predict_batch_end(trainer, None, rows, PromptBatch(prompts, num_real), 0)
    monkeypatch.setattr(ranks, "gather", lambda rows: [writer._rows for writer in writers])
    writers[0].on_predict_end(trainer, None)
    written = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert written == [{"question": id, "sample": sample} for id in range(5) for sample in range(2)]


def test_greedy_predictions_by_the_command_line(grpo: Grpo, tmp_path: Path) -> None:
    options = ["--model.validation.sampling.max_new_tokens=9", "--model.validation.sampling.temperature=0"]
    grpo.ok("predict", *options, "--loop.*!", "--data.task.predict=rows.jsonl", "--trainer.max_epochs!")
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    texts = [line["completion"] for line in lines]
    assert texts[0::2] == texts[1::2] and max(map(len, texts)) > 4  # two greedy ones per question
