import random
import re
from pathlib import Path

import pytest
import torch
from helpers.loading import load_tool
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.plugins.data.arithmetic.arithmetic import Arithmetic

tool = load_tool("make_tiny_policy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    out = tmp_path_factory.mktemp("policy") / "one"
    tool.make(out, digits=1, updates=60, wrong=0.0, hidden=64, layers=1)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast):
    text = "47+85=  a B?\n<think>7+5=12 4+8+1=13</think><answer>132</answer>"
    ids = tokenizer(text)["input_ids"]
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    assert len(ids) == len(re.sub("|".join(tags), "#", text))  # a tag is one token, and nothing is added
    decoded = tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True)
    assert decoded == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_model_loads_and_stops_at_eos(folder: Path, tokenizer: PreTrainedTokenizerFast):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    inputs = tokenizer(["3+4=", "9+8="], return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=60)[:, 4:]
    assert output.shape[1] < 60
    assert ((output == tokenizer.eos_token_id).sum(1) == 1).all()


def test_deterministic_for_a_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for index, seed in enumerate((0, 0, 1)):
        tool.make(tmp_path / str(index), seed=seed, digits=1, updates=3, wrong=0.0, hidden=64, layers=1)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "012"]
    assert weights[0] == weights[1] != weights[2]
    assert "10 held-out questions: greedy " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expression", "solution"),
    [
        ("47+85", "<think>7+5=12 4+8+1=13</think><answer>132</answer>"),
        ("7+85", "<think>7+5=12 0+8+1=9</think><answer>92</answer>"),
        ("0+0", "<think>0+0=0</think><answer>0</answer>"),
        ("52-38", "<think>2-8=4 5-3-1=1</think><answer>14</answer>"),
        ("7-47", "<think>7-7=0 4-0=4</think><answer>-40</answer>"),
    ],
)
def test_worked_solutions(expression: str, solution: str):
    assert tool.worked_solution(expression, 0.0, random.Random(0)) == solution


def test_a_due_carry_is_forgotten():
    assert tool.worked_solution("47+85", 1.0, random.Random(0)) == "<think>7+5=12 4+8=12</think><answer>22</answer>"


@pytest.mark.parametrize("operator", ["+", "-"])
def test_wrong_columns_are_followed(operator: str):
    rng = random.Random(0)
    for question in Arithmetic(max_digits=3, operators=[operator]).questions("train")[:500]:
        right, wrong = (
            tool.worked_solution(question.metadata["expression"], share, rng, mistakes="columns")
            for share in (0.0, 1.0)
        )
        assert right.endswith(f"<answer>{question.answer}</answer>")
        columns = re.findall(r"([\d+-]+)=(\d+)", wrong)
        assert all(eval(left) % 10 != int(value) % 10 for left, value in columns)
        answer = int(wrong.partition("<answer>")[2].removesuffix("</answer>"))
        digits = "".join(value[-1] for _, value in reversed(columns))
        carry = columns[-1][1][:-1] if operator == "+" else ""
        assert abs(answer) == int(carry + digits) != abs(int(question.answer))
