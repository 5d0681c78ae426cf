"""How questions become prompts: templates from files, chat templates, the answer prefix; and what rewards see of it."""

from pathlib import Path
from typing import Any

import pytest
from helpers.chats import TAGS
from helpers.fitting import Echo
from helpers.tiny import policy_of, tokenizer
from tokenizers.processors import TemplateProcessing

from grpo_lightning import FormatReward, Sampling, Scorer, TaskData
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError


def data(chat_template: str = "", **options: Any) -> TaskData:
    policy = policy_of()
    policy.tokenizer.chat_template = chat_template
    found = TaskData(Echo(), **options)
    found.load("fit", policy, Sampling(max_new_tokens=8), Scorer([FormatReward(weight=1.0)]))
    return found


def test_a_template_file_that_cannot_be_used_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("Q: \nA:")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe{question}")
    for name, expected in (("none.txt", "must contain {question}"), ("bytes.txt", "UTF-8"), ("no.txt", "looked in")):
        with pytest.raises(UsageError, match=rf"data.template_file=.*{name}: .*{expected}"):
            TaskData(Echo(), template_file=str(tmp_path / name))
    with pytest.raises(UsageError, match="it cannot be read"):
        TaskData(Echo(), template_file=str(tmp_path))


def test_the_prompt_ends_with_the_answer_prefix() -> None:
    plain = data(template="{question}?", answer_prefix="ab").prompt(Question("12", "3"), 0)
    assert (plain.text, plain.answer_prefix) == ("12?ab", "ab")
    assert plain.token_ids == tokenizer().encode("12?ab")
    chat = data(TAGS, chat=True, answer_prefix="ab").prompt(Question("12", "3"), 0)
    assert chat.text == "<user>12<assistant>ab"
    without = data(TAGS, chat=True).prompt(Question("12", "3"), 0)
    assert (without.text, without.answer_prefix) == ("<user>12<assistant>", "")


@pytest.mark.parametrize(
    ("prompt", "prefix", "text", "turn"),
    [
        ("Q", "", "42", "42"),
        ("Q<answer>", "<answer>", "42</answer>", "<answer>42</answer>"),
        ("Q<think>\n", "", "so</think>", "<think>so</think>"),
        ("Q<think>", "<think>", "so</think>", "<think>so</think>"),
        ("Q<think>\nWell,", "Well,", " so</think>", "<think>Well, so</think>"),
    ],
)
def test_verifier_and_format_read_the_whole_turn(prompt: str, prefix: str, text: str, turn: str) -> None:
    asked = Prompt(0, prompt, [1], Question("What is 40 + 2?", "42"), prefix)
    assert Sample(asked, text, [1], FinishReason.STOP).whole_turn == turn


@pytest.mark.parametrize(("longer", "key"), [("train", "sampling"), ("val", "validation.sampling")])
def test_prompts_leave_room_for_the_longest_completion_of_their_split(longer: str, key: str) -> None:
    """Prompts of at most 7 tokens in a context of 20."""
    policy = policy_of()
    policy.model.config.max_position_embeddings = 20
    train, val = (Sampling(max_new_tokens=14 if split == longer else 5) for split in ("train", "val"))
    with pytest.raises(UsageError, match=rf"7 tokens, and with {key}.max_new_tokens=14") as raised:
        TaskData(Echo()).load("fit", policy, train, Scorer([FormatReward()]), val_sampling=val)
    assert ("limit_val_batches" in str(raised.value)) is (longer == "val")
    TaskData(Echo()).load("fit", policy, train if longer == "val" else val, Scorer([FormatReward()]))


def test_val_limit_is_of_validation_alone() -> None:
    questions = data(val_limit=5).questions
    assert [len(questions["train"]), len(questions["val"])] == [24, 5]


@pytest.mark.parametrize("chat", [False, True])
def test_special_tokens_are_added_where_no_chat_template_has_written_them(chat: bool) -> None:
    policy = policy_of()
    policy.tokenizer.chat_template = TAGS
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    found = TaskData(Echo(), chat=chat)
    found.load("fit", policy, Sampling(max_new_tokens=8), Scorer([FormatReward()]))
    assert (found.encode("ab")[0] == 2) is (not chat)
