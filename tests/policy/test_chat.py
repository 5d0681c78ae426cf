"""`chat_text`: the turns of a chat template, and a message where there is none."""

import pytest
from helpers.chats import GEMMA_3, QWEN_2_5, TAGS
from helpers.tiny import tokenizer

from grpo_lightning.policy.chat import chat_text
from grpo_lightning.types import UsageError


def test_the_turns_of_a_chat() -> None:
    spell = tokenizer()
    spell.chat_template = TAGS
    assert chat_text(spell, "1+1?") == "<user>1+1?<assistant>"
    assert chat_text(spell, "1+1?", system="Add.") == "<system>Add.<user>1+1?<assistant>"
    assert chat_text(spell, "1+1?", "2") == "<user>1+1?<assistant>2"
    assert chat_text(spell, "1+1?", "") == "<user>1+1?<assistant>"


def test_a_template_that_is_missing_or_refuses_is_the_users_mistake() -> None:
    spell = tokenizer()
    with pytest.raises(UsageError, match=r"data.chat=true: .* no chat template; set data.chat=false"):
        chat_text(spell, "1+1?", key="data.chat=true", fix="set data.chat=false")
    spell.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(UsageError, match=r"chat=true: .* refuses this \(no system turn\); set chat=false"):
        chat_text(spell, "1+1?")


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN_2_5, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nSo "),
        (GEMMA_3, "<bos><start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\nSo "),
        # It has no mark for the beginning of an answer, but writes a space before one.
        (MISTRAL, "<bos>[INST] Q [/INST] So "),
        # Its mark opens the thinking; what it does with whole answers does not matter.
        (THINKING, "<user>Q</s><assistant><think>So "),
    ],
    ids=["ChatML", "Gemma", "Mistral", "thinking"],
)
def test_an_answer_prefix_ends_the_text_and_is_not_closed(template: str, expected: str) -> None:
    spell = tokenizer()
    spell.chat_template = template
    assert chat_text(spell, "Q", answer_prefix="So ") == expected
    assert chat_text(spell, "Q") == expected.removesuffix("So ").removesuffix(" " if template == MISTRAL else "")


@pytest.mark.parametrize("template", [TRIMMING, "{% for m in messages[:1] %}{{ m['content'] }}{% endfor %}"])
def test_a_prefix_that_the_template_changes_is_refused(template: str) -> None:
    spell = tokenizer()
    spell.chat_template = template
    with pytest.raises(
        UsageError, match=r"data.answer_prefix='So ': .* cannot begin an answer with it .*data.chat=fal"
    ):
        chat_text(spell, "Q", answer_prefix="So ")


def test_a_system_turn_that_is_refused_or_left_out_is_one_message() -> None:
    spell = tokenizer()
    for template, why in ((GEMMA_3, "no system role"), (MISTRAL, "it leaves it out")):
        spell.chat_template = template
        with pytest.raises(
            UsageError, match=rf"data.system='Add.': .* no system turn \({why}\); leave data.system empty"
        ):
            chat_text(spell, "Q", system="Add.")
        assert "Q" in chat_text(spell, "Q")
