"""The GSM8K configuration as it stands, on the real questions, with a tiny Qwen2 in place of Qwen2.5-0.5B."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from helpers.chats import chat_tokenizer
from helpers.fitting import scalars
from helpers.paths import DATA, ROOT, needs_gsm8k
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lightning.cli import run

FILES = DATA / "gsm8k"
TRAIN, TEST = FILES / "train.jsonl", FILES / "test.jsonl"
STEPS, PROMPTS, GROUP = 3, 4, 4
pytestmark = needs_gsm8k


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A blank Qwen2 of two layers, with a token per byte and Qwen's chat template and special tokens."""
    tokenizer = chat_tokenizer("qwen_2_5")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **ids))
    folder = tmp_path_factory.mktemp("gsm8k") / "policy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def options(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The configuration with what a CPU and a blank model need, and nothing else, changed."""
    overrides = {
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.max_epochs": STEPS,
        "trainer.check_val_every_n_epoch": STEPS,
        "trainer.default_root_dir": tmp_path_factory.mktemp("gsm8k") / "run",
        "model.policy.path": policy_folder,
        "model.sampling.max_new_tokens": 24,
        "data.task.train": TRAIN,
        "data.task.val": TEST,
        "data.task.test": TEST,
        "data.val_limit": 8,
        "data.val_batch_size": 8,
        "loop.group_size": GROUP,
        "loop.prompts_per_step": PROMPTS,
    }
    config = ROOT / "configs" / "gsm8k_qwen2.5_0.5b.yaml"
    return [f"--config={config}", *(f"--{key}={value}" for key, value in overrides.items())]


@pytest.fixture(scope="session")
def run_folder(options: list[str]) -> Path:
    """The folder of a whole run on all training questions. Nothing is warned of."""
    warned: list[str] = []
    log, watch = logging.getLogger("grpo_lightning"), logging.Handler(logging.WARNING)
    watch.emit = lambda record: warned.append(record.getMessage())
    log.addHandler(watch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["grpo"])
        run(["fit", *options])
    log.removeHandler(watch)
    assert warned == []
    return Path(next(option for option in options if "default_root_dir" in option).partition("=")[2])


def test_the_fit_is_on_policy_and_warms_up(run_folder: Path) -> None:
    logged = scalars(run_folder)
    for name in ("policy/objective", "optim/grad_norm", "reward/math_verifier/mean", "rollout/truncated"):
        assert len(logged[name]) == STEPS, name
    for name in ("greedy", "avg@8", "pass@8", "maj@8", "reward", "length", "truncated"):
        assert len(logged[f"val/{name}"]) >= 1, name
    assert "optim/bad_updates" not in logged
    assert set(logged["policy/ratio_max"].values()) == {1.0}
    assert max(logged["policy/logp_gap"].values()) < 1e-5
    assert set(logged["reward/mean"].values()) == {0.0}
    assert list(logged["optim/lr"].values()) == pytest.approx([1e-7, 1.9e-7, 2.8e-7])
