"""The format reward."""

import math
import time

import pytest

from grpo_lightning import FinishReason, FormatReward, Prompt, Question, Sample


def sample(text: str, prompt: str = "q") -> Sample:
    return Sample(Prompt(0, prompt, [1], Question("q", "1")), text, [1], FinishReason.STOP)


FORMS = [
    ("<think>a</think><answer>1</answer>", 1), ("\n<think>\na\nb</think>\n\n<answer> 1 </answer>\n", 1),
    ("<think></think><answer>1</answer>", 1), ("<think>a</think><answer> </answer>", 0), ("<think>a</think>", 0),
    ("<answer>1</answer>", 0), ("Well: <think>a</think><answer>1</answer>", 0),
    ("<think>a</think> so <answer>1</answer>", 0), ("<think>a</think><answer>1</answer> done", 0),
    ("<think>a</think><answer>1</answer><answer>2</answer>", 0), ("<think>a<think>b</think><answer>1</answer>", 0),
    ("<answer>1</answer><think>a</think>", 0), ("<think>a<answer>1</answer></think>", 0), ("", 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), FORMS)
def test_the_default_form_is_one_think_and_one_answer(text, value):
    result = FormatReward()([sample(text)])
    assert result.value == [value]
    assert result.status == ["ok" if value else "no_match"]


def test_a_think_tag_in_the_prompt_counts():
    assert FormatReward()([sample("a</think><answer>1</answer>", "q\n<think>\n")]).value == [1.0]


def test_default_form_is_linear():
    start = time.process_time()
    FormatReward()([sample("<think>" * 300_000), sample("<think>" + "<" * 2_000_000)])
    assert time.process_time() - start < 20


def test_pattern_matches_the_whole_text_across_lines():
    reward = FormatReward(pattern=r"a.*b")
    assert reward([sample("a\nb"), sample("a\nbc"), sample("xab")]).value == [1.0, 0.0, 0.0]
    reward.close()


def test_a_catastrophic_pattern_costs_its_sample():
    reward = FormatReward(pattern="(a+)+b", timeout=1.0)
    result = reward([sample("ab"), sample("a" * 60), sample("c")])
    assert result.status == ["ok", "timeout", "no_match"]
    assert result.value[0] == 1.0
    assert math.isnan(result.value[1])
    assert result.value[2] == 0.0
    reward.close()
