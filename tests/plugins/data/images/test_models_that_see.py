"""Models that see: they load, train on text and are saved with their image encoder."""

import pytest
import torch
from helpers.tiny import model_of, tokenizer
from helpers.tiny_vision import MAKERS, family_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_lightning import Policy, Rollouts
from grpo_lightning.policy import pretrained

ROLLOUTS = Rollouts.from_lists([[10, 11, 12], [13]], [0, 1, 0], [[20, 21], [22, 23, 24], [25]])


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_that_sees_is_trained_on_text_and_saved_as_a_whole(name, tmp_path):
    family = family_of(name)
    family.model.save_pretrained(tmp_path / "model")
    family.tokenizer.save_pretrained(tmp_path / "model")
    expected = family.model.state_dict()

    policy = Policy(str(tmp_path / "model"))
    policy.load()
    assert type(policy.model) is type(family.model)
    rows = [[10, 11, 12, 20, 21], [13, 22, 23, 24], [10, 11, 12, 25]]
    prompt_lengths = [3, 1, 3]
    logps = []
    for row, length in zip(rows, prompt_lengths, strict=True):
        logits = family.model(input_ids=torch.tensor([row])).logits[0, length - 1 : -1]
        logps.append(logits.log_softmax(-1)[range(len(row) - length), row[length:]])
    scored = policy(ROLLOUTS)
    torch.testing.assert_close(scored.logp, torch.cat(logps), rtol=1e-4, atol=1e-5)
    scored.logp.sum().backward()
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    assert trained and not any("vision" in name or "visual" in name or "projector" in name for name in trained)

    policy.save_pretrained(tmp_path / "saved")
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


def test_a_model_of_text_keeps_its_class(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert pretrained.model_class(AutoConfig.from_pretrained(tmp_path)) is AutoModelForCausalLM


def test_remote_code_says_which_class_reads_it():
    config = model_of("llama").config
    config.auto_map = {"AutoModelForImageTextToText": "modeling.Model"}
    assert pretrained.model_class(config) is AutoModelForImageTextToText
