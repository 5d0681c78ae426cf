"""The callback of experiments/keeps_speaking_english: its perplexities against the model's own logits."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.loading import load_experiment
from helpers.tiny import policy_of

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
