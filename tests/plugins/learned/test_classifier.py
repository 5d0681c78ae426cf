"""Classification models as rewards and as step verifiers, against one forward a text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from grpo_lightning import FinishReason, Prompt, Question, Run, Sample, SequenceClassifier, TokenModel, UsageError

EOS = 5
CHAT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<end>{% endfor %}"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def save(folder: Path, kind: str = "sequence", labels: int = 1, model_type: str = "llama", **options: Any) -> str:
    """A model with weights large enough to tell texts apart, and its tokenizer."""
    torch.manual_seed(0)
    spell: PreTrainedTokenizerFast = tokenizer()
    config_class = {"llama": LlamaConfig, "bert": BertConfig}[model_type]
    config = config_class(**SIZES, max_position_embeddings=64, num_labels=labels, **options)
    auto: Any = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}[kind]
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    spell.chat_template = CHAT
    spell.save_pretrained(folder)
    return str(folder)


def sample(text: str, prompt: str = "abc") -> Sample:
    return Sample(Prompt(0, prompt, [1], Question(prompt[:2], "1")), text, [7], FinishReason.STOP)


TEXTS = ["d", "efgh", "", "ijklmnop", "q1", "efgh"]


@torch.no_grad()
def hidden_score(folder: str, ids: list[int], place: int) -> float:
    """The head on the hidden state at one place of one unpadded text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return float(model.score(model.model(torch.tensor([ids])).last_hidden_state)[0, place, 0])


@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
@pytest.mark.parametrize("pad", [0, None], ids=["own pad", "no pad"])
def test_scores_are_those_of_one_text_at_a_time(tmp_path: Path, max_tokens, pad):
    folder = save(tmp_path, pad_token_id=pad)
    result = SequenceClassifier(folder, max_tokens=max_tokens)([sample(text) for text in TEXTS])
    spell = tokenizer()
    expected = [hidden_score(folder, spell.encode("abc" + text), -1) for text in TEXTS]
    assert result.value == pytest.approx(expected, abs=1e-5)
    assert result.status == ["ok"] * 6
    assert len({round(value, 3) for value in expected}) == 5


def test_where_the_pad_token_is_the_end_token_a_model_that_was_trained_so_does_not_see_the_end(tmp_path: Path):
    folder = save(tmp_path, pad_token_id=EOS)
    spell = tokenizer()
    ids = [[*spell.encode("u" + "ab"), EOS, *spell.encode("a" + text), EOS] for text in TEXTS]
    samples = [sample(text, prompt="ab") for text in TEXTS]
    before = SequenceClassifier(folder, chat=True, max_tokens=40)(samples).value
    assert before == pytest.approx([hidden_score(folder, own, -2) for own in ids], abs=1e-5)
    last = SequenceClassifier(folder, chat=True, max_tokens=40, pooling="last")(samples).value
    assert last == pytest.approx([hidden_score(folder, own, -1) for own in ids], abs=1e-5)


def test_an_encoder_scores_as_transformers_does(tmp_path: Path):
    folder = save(tmp_path, model_type="bert", pad_token_id=0)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    spell = tokenizer()
    with torch.no_grad():
        expected = [float(model(torch.tensor([spell.encode("abc" + text)])).logits) for text in TEXTS]
    assert SequenceClassifier(folder)([sample(text) for text in TEXTS]).value == pytest.approx(expected, abs=1e-5)


def test_an_input_that_is_too_long_loses_its_beginning(tmp_path: Path):
    folder = save(tmp_path, pad_token_id=0)
    reward = SequenceClassifier(folder, max_length=5)
    result = reward([sample("de"), sample("defgh")])
    assert result.status == ["ok", "cut"]
    spell = tokenizer()
    assert result.value[1] == pytest.approx(hidden_score(folder, spell.encode("defgh"), -1), abs=1e-5)
    assert SequenceClassifier(folder)([sample("d" * 61), sample("d" * 62)]).status == ["ok", "cut"]  # 64 positions


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: SequenceClassifier(save(folder, labels=2)), "has 2 labels; expected 1"),
        (lambda folder: SequenceClassifier(save(folder, kind="token")), "give a model that classifies sequences"),
        (lambda folder: SequenceClassifier(str(folder / "none")), "none"),
    ],
)
def test_a_wrong_model_or_argument_is_refused_before_the_run(tmp_path: Path, make, says):
    with pytest.raises(UsageError, match=says):
        make(tmp_path).setup(Run(torch.device("cpu"), None, 8))


def test_segment_models_have_one_label_or_two(tmp_path: Path):
    with pytest.raises(UsageError, match="has 3 labels"):
        TokenModel(save(tmp_path, kind="token", labels=3)).setup(Run(torch.device("cpu"), None, 8))


# Step models

STEPS = [["ab1", "cd", "e"], ["f"], ["2g", "h"]]
SAMPLES = [sample("".join(own)) for own in STEPS]


@pytest.mark.parametrize("labels", [1, 2])
def test_a_token_classifier_judges_at_the_separator(tmp_path: Path, labels):
    folder = save(tmp_path, kind="token", labels=labels, pad_token_id=0)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    spell = tokenizer()
    texts, ends = ["abcab1ZcdZeZ", "abcfZ", "abc2gZhZ"], [[6, 9, 11], [4], [5, 7]]
    found = TokenModel(folder, separator="Z", max_tokens=20).score(SAMPLES, [["ab1 ", "\ncd", "e"], *STEPS[1:]])
    for text, places, own in zip(texts, ends, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([spell.encode(text)])).logits[0, places]
        right = logits[:, 0].sigmoid() if labels == 1 else logits.softmax(-1)[:, 1]
        assert own == pytest.approx(right.tolist(), abs=1e-5)


def test_a_step_that_is_cut_off_has_no_value(tmp_path: Path):
    folder = save(tmp_path, kind="token", labels=2, pad_token_id=0)
    (found,) = TokenModel(folder, separator="Z", max_length=5).score(SAMPLES[:1], STEPS[:1])
    assert [math.isnan(value) for value in found] == [True, False, False]  # of abcab1ZcdZeZ there is cdZeZ
