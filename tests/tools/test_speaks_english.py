"""The callback of experiments/keeps_speaking_english: its perplexities against the model's own logits."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.loading import load_experiment
from helpers.tiny import policy_of

from grpo_lightning import FormatReward, NativeEngine
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.training.explorer import Explorer

tool = load_experiment("keeps_speaking_english/perplexity")
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}Z{% endif %}"


def test_perplexities_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "english.txt").write_text("abcdefghijk\n\n0123456789\n")
    (tmp_path / "answers.jsonl").write_text(json.dumps({"instruction": "ab", "answer": "xyz"}) + "\n")
    monkeypatch.setattr(tool, "HERE", tmp_path)
    policy = policy_of()
    policy.tokenizer.chat_template = CHAT
    logged: dict[str, float] = {}
    monkeypatch.setattr(tool, "module_of", lambda module: module)
    module = SimpleNamespace(policy=policy, log=logged.__setitem__)
    callback = tool.SpeaksEnglish()
    callback.on_fit_start(SimpleNamespace(), module)
    callback.on_validation_epoch_end(SimpleNamespace(sanity_checking=False), module)

    def nll(text: str, given: int) -> list[float]:
        ids = torch.tensor([policy.tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            logp = policy.model(input_ids=ids).logits.double().log_softmax(-1)
        return [-logp[0, at - 1, ids[0, at]].item() for at in range(given, ids.shape[1])]

    english = nll("abcdefghijk", tool.OPENING) + nll("0123456789", tool.OPENING)
    answers = nll("abZxyz", 3)
    assert len(english) == 5 and len(answers) == 3
    assert logged["english/text"] == pytest.approx(math.exp(sum(english) / 5), rel=1e-5)
    assert logged["english/answers"] == pytest.approx(math.exp(sum(answers) / 3), rel=1e-5)


def test_answers_are_written_when_training_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "english.txt").write_text("abcdefghijk\n")
    rows = [{"instruction": "ab", "answer": "xyz"}, {"instruction": "c", "answer": "d"}]
    (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(tool, "HERE", tmp_path)
    monkeypatch.setattr(tool, "module_of", lambda module: module)
    policy = policy_of()
    policy.tokenizer.chat_template = CHAT
    module = SimpleNamespace(policy=policy, explorer=Explorer(NativeEngine(), Scorer([FormatReward()])))
    callback = tool.SpeaksEnglish()
    callback.on_fit_start(SimpleNamespace(), module)
    run = tmp_path / "run"
    run.mkdir()
    callback.on_fit_end(SimpleNamespace(default_root_dir=run), module)
    found = [json.loads(line) for line in (run / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["instruction"] for row in found] == ["ab", "c"]
    assert all(isinstance(row["answer"], str) for row in found)


def test_the_texts_of_the_repository_can_be_read():
    paragraphs = (tool.HERE / "english.txt").read_text(encoding="utf-8").strip().split("\n\n")
    rows = [json.loads(line) for line in (tool.HERE / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(paragraphs) == 10 and all("\n" not in paragraph for paragraph in paragraphs)
    assert len(rows) == 12 and all(row["instruction"] and row["answer"] for row in rows)


@pytest.mark.parametrize(
    ("text", "wrong", "too_much"),
    [(" 3.", 0, 0), (" 4.", 1, 0), (" 13.", 1, 1), (" three.", 0, 0), (" 13. And", 0, 0), ("13.", 0, 0)],
)
def test_rewards_for_wrong_answers(text: str, wrong: float, too_much: float):
    rewards = load_experiment("spurious_rewards/rewards")
    sample = SimpleNamespace(text=text, answer="3")
    assert (rewards.wrong_number(sample), rewards.ten_too_much(sample)) == (wrong, too_much)
