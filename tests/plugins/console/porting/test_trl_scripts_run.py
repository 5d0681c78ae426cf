"""Three scripts for TRL run here after `grpo from-trl`, with the edits that its messages name."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.chats import chat_tokenizer
from helpers.fitting import scalars
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lightning import cli
from grpo_lightning.command.overview import answer

pytest.importorskip("peft")
# A script imports it, and its functions are rewards here.
pytest.importorskip("trl")
SCRIPTS = Path(__file__).with_name("trl_scripts")


@pytest.fixture(scope="module")
def chat_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A blank Qwen2 of one layer, with a chat template."""
    tokenizer = chat_tokenizer("qwen_2_5")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    folder = tmp_path_factory.mktemp("chat") / "policy"
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, chat_policy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the scripts, a policy and questions."""
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    shutil.copytree(chat_policy, tmp_path / "policy")
    texts = {"train.jsonl": [{"prompt": f"{n}+1="} for n in range(8)]}
    for name in ("chat.jsonl", "chat_test.jsonl"):
        texts[name] = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(8)]
    for name, rows in texts.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    yield tmp_path
    for name in ("plain_script", "chat_rewards", "tools_script", "my_tools"):
        sys.modules.pop(name, None)


def ported(script: str) -> str:
    """The configuration of a script, which is in run.yaml too."""
    Path("run.yaml").unlink(missing_ok=True)
    assert answer(["from-trl", script, "--out", "run.yaml"]) == 0
    return Path("run.yaml").read_text()


def fit(*options: str) -> None:
    cli.run(["fit", "--config=run.yaml", "--trainer.enable_progress_bar=false", *options])


def test_a_plain_script(place: Path) -> None:
    text = ported("plain_script.py")
    assert "plain_script.py is imported for its functions, which would start TRL: put all but functions" in text
    # The only edit: what starts TRL stands below `if __name__ == "__main__":`.
    script = Path("plain_script.py")
    head, start, tail = script.read_text().partition("dataset = load_dataset")
    script.write_text(head + 'if __name__ == "__main__":\n' + re.sub("^", "    ", start + tail, flags=re.MULTILINE))
    assert "would start TRL" not in ported("plain_script.py")
    fit()
    # 4 x 2 / 4 = 2 prompts per step, 8 questions: 4 updates. A warmup over half of them rises from 0.
    rates = [*scalars(place / "runs" / "plain")["optim/lr"].values()]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5e-4])


def test_a_script_of_conversations(place: Path) -> None:
    text = ported("conversational_script.py")
    # No edit; what is said changes nothing here.
    assert re.findall(r"^# \d\. (.*?)[:=]", text, re.MULTILINE) == ["processing_class"]
    fit()
    logged = scalars(place / "runs" / "policy-chat")
    # 8 x 2 / 4 = 4 prompts per step and 2 updates of them: 4 updates are 2 steps.
    # Their rates are 0, 2e-4, 1.5e-4 and 0.5e-4: one update of warmup, then half a cosine over three.
    assert [*logged["optim/lr"].values()] == pytest.approx([1e-4, 1e-4])
    names = ("reward/mean", "reward/right/mean", "reward/short/mean")
    for mean, right, short in zip(*(logged[name].values() for name in names), strict=True):
        assert mean == pytest.approx(right + 0.5 * short, rel=1e-5)
    assert "policy/kl_ref" in logged and "val/reward" in logged


def test_a_script_with_tools(place: Path) -> None:
    text = ported("tools_script.py")
    assert "make the functions methods of a class in a file of its own" in text
    # Two edits: the class, and its name in the configuration.
    method = re.search(r"def multiply.*?return a \* b\n", Path("tools_script.py").read_text(), re.DOTALL)
    assert method is not None
    body = re.sub("^", "    ", method[0].replace("(a:", "(self, a:"), flags=re.MULTILINE).rstrip()
    Path("my_tools.py").write_text(f"class Tools:\n    def reset(self, **row):\n        pass\n\n{body}\n")
    fit("--data.environment=my_tools.Tools")
    logged = scalars(place / "runs" / "tools")
    # A blank policy calls nothing: every conversation has one turn.
    assert [*logged["reward/mean"].values()] == [1.0, 1.0]
