"""One loader for everything that `save_pretrained` wrote."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import model_of, tokenizer
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_lightning import Policy, UsageError
from grpo_lightning.policy import pretrained


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


@pytest.mark.parametrize(
    ("path", "auto_class"),
    [("./nowhere", AutoConfig), ("~/nowhere", AutoTokenizer), ("some/where/else", AutoModelForCausalLM)],
)
def test_a_wrong_folder_gives_one_message(auto_class, path):
    with pytest.raises(UsageError) as caught:
        pretrained.load(auto_class, path, "reward.path")
    assert str(caught.value).startswith(f"reward.path={path}: no such folder (looked in ")
    assert str(caught.value).endswith(pretrained.FIX)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that notes the ids of its requests, and raises the `answers` to them."""
    hub = SimpleNamespace(paths=[], answers={})

    def model_info(self, path, timeout=None):
        hub.paths.append(path)
        if isinstance(hub.answers.get(path), Exception):
            raise hub.answers[path]

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return hub


def test_a_folder_named_like_an_owner_hides_the_hub_but_not_the_cache(hub, tmp_path):
    with pytest.raises(UsageError, match=r"in models, which is a folder here.* hf download models/mine"):
        pretrained.source("models/mine", "policy.path")
    snapshot = tmp_path / "cache" / "models--models--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    (tmp_path / "cache" / "models--models--mine" / "blobs").mkdir()
    assert pretrained.source("models/mine", "policy.path") == "models/mine"
    assert hub.paths == []


NOT_FOUND = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
NOT_FOUND.response = SimpleNamespace(status_code=404)
REQUESTS = [
    # What looks like a folder, or is no id, is not asked of the hub.
    *((path, None, [], "no such folder") for path in ("runs/mine", "./a", "a/b/c", "a/")),
    ("runs/tiny_policy", None, [], "or grpo_lightning:tiny_policy"),
    ("what is this?", None, [], "no such folder .*no hub id"),
    ("file", None, [], "this is a file"),
    # An id is asked for once.
    ("nobody/something", None, ["nobody/something"], ""),
    ("nobody/something", ConnectionError("no route\nat all"), ["nobody/something"], "cannot be reached .no route"),
    ("nobody/nothing", NOT_FOUND, ["nobody/nothing"], "the hub has no such model"),
]


@pytest.mark.parametrize(("path", "answer", "paths", "message"), REQUESTS)
def test_requests_to_the_hub_and_messages(hub, path, answer, paths, message):
    Path("file").write_text("")
    hub.answers[path] = answer
    if message:
        with pytest.raises(UsageError, match=message) as caught:
            pretrained.source(path, "policy.path")
        assert str(caught.value).startswith(f"policy.path={path}: ") and "\n" not in str(caught.value)
    else:
        assert pretrained.source(path, "policy.path") == path
    assert hub.paths == paths


def test_without_the_hub_the_message_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        pretrained.source("nobody/something", "policy.path")


@pytest.mark.parametrize("auto_class", [AutoConfig, AutoTokenizer, AutoModelForCausalLM])
def test_a_folder_without_a_model_says_what_was_read_and_why_not(tmp_path, auto_class):
    (tmp_path / "notes.txt").write_text("no model here")
    with pytest.raises(UsageError) as caught:
        pretrained.load(auto_class, str(tmp_path), "reward.path")
    assert str(caught.value).startswith(f"reward.path={tmp_path}: {auto_class.__name__} found no usable model there (")
    assert str(caught.value).endswith(pretrained.FIX)


def test_a_folder_without_weights_is_seen_without_reading_them(folder):
    policy = Policy(str(folder))
    policy.check()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"policy\.path=.*no weights"):
        policy.check()


def test_an_adapter_is_no_model_and_the_message_has_the_way_to_one(folder, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    tokenizer().save_pretrained(adapter)
    for auto_class in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        with pytest.raises(UsageError, match=r"this is an adapter without its model. .*grpo export RUN .*merge_and_"):
            pretrained.load(auto_class, str(adapter), "model.policy.path")
    (folder / "adapter_config.json").write_text("{}")  # beside a model
    assert pretrained.load(AutoConfig, str(folder), "model.policy.path").hidden_size == 32
