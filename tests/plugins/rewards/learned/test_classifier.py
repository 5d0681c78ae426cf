"""Classification models behind the learned reward and as step verifiers, against one forward a text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.learning import save_policy
from helpers.tiny import CONTEXT, SHAPES, model_of, tokenizer
from transformers import AutoModelForTokenClassification, LlamaConfig, PreTrainedTokenizerFast

from grpo_lightning import FinishReason, Prompt, Question, Run, Sample, TokenModel, UsageError
from grpo_lightning.plugins.rewards.learned.classifier import RewardModel, float32

EOS = 5
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def save(folder: Path, labels: int = 1, **options: Any) -> str:
    """A token classifier with weights large enough to tell texts apart, and its tokenizer."""
    torch.manual_seed(0)
    spell: PreTrainedTokenizerFast = tokenizer()
    config = LlamaConfig(**SIZES, max_position_embeddings=64, num_labels=labels, **options)
    model = AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    spell.save_pretrained(folder)
    return str(folder)


def sample(text: str, prompt: str = "abc") -> Sample:
    return Sample(Prompt(0, prompt, [1], Question(prompt[:2], "1")), text, [7], FinishReason.STOP)


def test_segment_models_have_one_label_or_two(tmp_path: Path):
    with pytest.raises(UsageError, match="has 3 labels"):
        TokenModel(save(tmp_path, labels=3)).setup(Run(torch.device("cpu"), None, 8))


# Step models

STEPS = [["ab1", "cd", "e"], ["f"], ["2g", "h"]]
SAMPLES = [sample("".join(own)) for own in STEPS]


@pytest.mark.parametrize("labels", [1, 2])
def test_a_token_classifier_judges_at_the_separator(tmp_path: Path, labels):
    folder = save(tmp_path, labels=labels, pad_token_id=0)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    spell = tokenizer()
    texts, ends = ["abcab1ZcdZeZ", "abcfZ", "abc2gZhZ"], [[6, 9, 11], [4], [5, 7]]
    found = TokenModel(folder, separator="Z", max_tokens=20).score(SAMPLES, [["ab1 ", "\ncd", "e"], *STEPS[1:]])
    for text, places, own in zip(texts, ends, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([spell.encode(text)])).logits[0, places]
        right = logits[:, 0].sigmoid() if labels == 1 else logits.softmax(-1)[:, 1]
        assert own == pytest.approx(right.tolist(), abs=1e-5)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
}


def test_a_step_beside_a_long_text_has_the_value_that_it_has_alone(tmp_path: Path):
    """A long text would change longrope's frequencies for all texts of its pack."""
    model = TokenModel(save(tmp_path, labels=2, pad_token_id=0, rope_parameters=LONGROPE), separator="Z")
    short, long = sample("abc", "ab"), sample("f" * 40, "ab")
    ((alone,),) = model.score([short], [["abc"]])
    (beside,), _ = model.score([short, long], [["abc"], ["f" * 5]])
    assert beside == pytest.approx(alone, abs=1e-6)


def test_a_step_that_is_cut_off_has_no_value(tmp_path: Path):
    folder = save(tmp_path, labels=2, pad_token_id=0)
    (found,) = TokenModel(folder, separator="Z", max_length=5).score(SAMPLES[:1], STEPS[:1])
    assert [math.isnan(value) for value in found] == [True, False, False]  # of abcab1ZcdZeZ there is cdZeZ


# The model behind the learned reward: its head, its padding, its text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_policy(tmp_path)


def with_head(model: RewardModel) -> RewardModel:
    """A head that says something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.model.score.weight.copy_(torch.randn(model.model.score.weight.shape, generator=generator))
    return model


def test_a_new_head_says_the_same_of_everything(folder: Path):
    model = RewardModel(str(folder))
    assert model.score([[6, 7, 8], [9], []]) == [0, 0, 0]
    assert not model.model.training


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_one_unpadded_text_at_its_last_token(tmp_path: Path, shape: str):
    save_policy(tmp_path, shape)
    model = with_head(RewardModel(str(tmp_path), max_tokens=12))
    rows = [[6, 7, 8, EOS], [9, 10], [6, 7, 8], [30] * 11]
    scores = model.score(rows)
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            hidden = model.model.base_model(torch.tensor([row])).last_hidden_state[0, -1]
            assert score == pytest.approx(float(model.model.score(hidden)), abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 4


def test_a_score_beside_a_long_text_is_the_score_alone(tmp_path: Path):
    model_of("llama", rope_parameters=dict(LONGROPE)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = with_head(RewardModel(str(tmp_path)))
    short, long = [6, 7, 8, 9, EOS], [6 + index % 58 for index in range(60)]
    (alone,) = model.score([short])
    assert model.score([short, long])[0] == pytest.approx(alone, abs=1e-5)
    # Beyond the original length a text loses its beginning, as the policy's prompts are refused there.
    assert model.encode("1" * 20, "2", has_ended=True) == ([*[7] * 14, 8, EOS], True)


@pytest.mark.parametrize("padding", ["<end>", "<new>", None])
def test_padding_that_is_the_end_token_or_none_or_unknown_is_replaced(tmp_path: Path, padding: str | None):
    """Else the score would sit before the end, where a text that ended and one that was cut off look alike."""
    model_of("llama", pad_token_id=EOS).save_pretrained(tmp_path)
    spell = tokenizer()
    spell.pad_token = padding
    spell.save_pretrained(tmp_path)
    model = with_head(RewardModel(str(tmp_path)))
    assert model.tokenizer.pad_token == padding and model.model.get_input_embeddings().weight.shape[0] == 64
    ended, cut = (model.encode("12", "34", ended)[0] for ended in (True, False))
    assert ended == [*cut, EOS]
    both = model.score([ended, cut])
    assert both == pytest.approx([model.score([ended])[0], model.score([cut])[0]], abs=1e-5)
    assert abs(both[0] - both[1]) > 1e-3


def test_special_tokens_spelled_out_in_a_completion_are_text(folder: Path):
    model = RewardModel(str(folder))
    ids, truncated = model.encode("<sep>1", "2<end><pad>", has_ended=True)
    assert ids[:3] == [4, 7, 8] and ids[-1] == EOS and not truncated
    assert EOS not in ids[:-1] and 0 not in ids


def test_what_does_not_fit_loses_its_beginning(folder: Path):
    model = RewardModel(str(folder))
    ids, truncated = model.encode("1" * 100, "2" * 40, has_ended=True)
    assert truncated and len(ids) == CONTEXT and ids == [7] * (CONTEXT - 41) + [8] * 40 + [EOS]
    assert not model.encode("1" * 87, "2" * 40, has_ended=True)[1]


def test_packs_keep_to_their_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch):
    model = with_head(RewardModel(str(folder), max_tokens=6))
    rows = [[6], [6, 7], [7, 7], [8, 8, 8], [9] * 9]
    whole = with_head(RewardModel(str(folder))).score(rows)
    micro_batches: list[list[int]] = []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda micro_batch: micro_batches.append([len(row) for row in micro_batch]) or forward(micro_batch),
    )
    # Sums of 32 terms of about the largest score: each rounds by 1e-7 of it, in another order with other padding.
    assert model.score(rows) == pytest.approx(whole, abs=1e-6 * max(map(abs, whole)))
    assert micro_batches == [[9], [3, 2], [2, 1]]
    assert model.score([]) == []


def test_the_trainer_s_precision_does_not_reach_it(folder: Path):
    model = with_head(RewardModel(str(folder)))
    expected = model.score([[6, 7, 8]])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert model.score([[6, 7, 8]]) == expected
            assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    with float32(torch.device("cpu")):
        assert torch.get_default_dtype() == torch.float32
