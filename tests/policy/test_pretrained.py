"""One loader for everything that `save_pretrained` wrote."""

import pytest
import torch
from helpers.tiny import model_of, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from grpo_lightning.policy import pretrained
from grpo_lightning.types import UsageError


@pytest.fixture
def folder(tmp_path):
    model_of("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_reads_what_the_class_reads_and_passes_arguments_on(folder):
    assert pretrained.load(AutoConfig, str(folder), "policy.path").hidden_size == 32
    assert len(pretrained.load(AutoTokenizer, str(folder), "policy.path")) == 64
    model = pretrained.load(AutoModelForCausalLM, str(folder), "policy.path", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_a_home_folder_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert pretrained.source("~/model", "policy.path") == str(folder)


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "~/nowhere", "some/where/else"])
@pytest.mark.parametrize("auto_class", [AutoConfig, AutoTokenizer, AutoModelForTokenClassification])
def test_a_wrong_folder_gives_one_message_whatever_is_read(auto_class, path):
    with pytest.raises(UsageError) as caught:
        pretrained.load(auto_class, path, "reward.path")
    assert str(caught.value).startswith(f"reward.path={path}: no such folder (looked in ")
    assert str(caught.value).endswith(pretrained.FIX)


@pytest.mark.parametrize("auto_class", [AutoConfig, AutoTokenizer, AutoModelForCausalLM])
def test_a_folder_with_something_else_says_what_was_looked_for_and_why_not(tmp_path, auto_class):
    (tmp_path / "notes.txt").write_text("no model here")
    with pytest.raises(UsageError) as caught:
        pretrained.load(auto_class, str(tmp_path), "reward.path")
    assert str(caught.value).startswith(f"reward.path={tmp_path}: {auto_class.__name__} found no usable model there (")
    assert str(caught.value).endswith(pretrained.FIX)


def test_a_folder_without_weights_is_seen_without_reading_them(folder):
    pretrained.check_weights(str(folder), "policy.path")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"policy\.path=.*no weights"):
        pretrained.check_weights(str(folder), "policy.path")


def test_a_lack_of_memory_is_not_put_down_to_the_path(folder):
    class Large:
        @staticmethod
        def from_pretrained(path):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        pretrained.load(Large, str(folder), "policy.path")
