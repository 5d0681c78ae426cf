"""`Chat`: what stands in a chat template, and one message where a template cannot hold it."""

from typing import Any

import pytest
from helpers.chats import GEMMA_3, QWEN_2_5, TAGS
from helpers.tiny import tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.utils import chat_template_utils

from grpo_lightning.policy.chat import Chat, prompt_ids
from grpo_lightning.types import Message, UsageError


def written(template: str, question: str = "Q", answer_prefix: str = "", **options: Any) -> str:
    spell = tokenizer()
    spell.chat_template = template
    return Chat(spell, **options).text([Message(role="user", content=question)], answer_prefix)


def test_the_turns_of_a_chat() -> None:
    assert written(TAGS, "1+1?") == "<user>1+1?<assistant>"
    assert written(TAGS, "1+1?", system="Add.") == "<system>Add.<user>1+1?<assistant>"


def test_a_template_that_is_missing_or_refuses_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match=r"data.chat=true: .* no chat template; set data.chat=false"):
        Chat(tokenizer(), key="data.chat=true", advice="set data.chat=false")
    with pytest.raises(UsageError, match=r"chat=true: .* refuses this \(no system turn\); set chat=false"):
        written("{{ raise_exception('no system turn') }}")


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
    assert written(template, answer_prefix="So ") == expected
    assert written(template) == expected.removesuffix("So ").removesuffix(" " if template == MISTRAL else "")


@pytest.mark.parametrize("template", [TRIMMING, "{% for m in messages[:1] %}{{ m['content'] }}{% endfor %}"])
def test_a_prefix_that_the_template_changes_is_refused(template: str) -> None:
    with pytest.raises(
        UsageError, match=r"data.answer_prefix='So ': .* cannot begin an answer with it .*data.chat=fal"
    ):
        written(template, answer_prefix="So ")


def test_a_system_turn_that_is_refused_or_left_out_is_one_message() -> None:
    for template, why in ((GEMMA_3, "no system role"), (MISTRAL, "it leaves it out")):
        with pytest.raises(
            UsageError, match=rf"data.system='Add.': .* no system turn \({why}\); leave data.system empty"
        ):
            written(template, system="Add.")
        assert "Q" in written(template)


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PLAIN_SYSTEM = "{{ messages[0].content + ' ' if messages[0].role == 'system' else '' }}" + PARTS.replace(
    "messages %}<", "messages if m.role != 'system' %}<"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}<assistant>"
)
BOS = "{{ bos_token }}" + TAGS
DATE = "{{ 'Today is ' + strftime_now('%d %B %Y, %A') + '. ' }}" + TAGS
DATE_OF_LLAMA = (
    "{%- if not day is defined %}{%- if strftime_now is defined %}{%- set day = strftime_now('%d %b %Y') %}"
    "{%- endif %}{%- endif %}{{- 'Date: ' + day + ' ' }}" + TAGS
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<system>You are kind.{% endif %}" + TAGS
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TAGS
THINK = TAGS.replace("<assistant>", "<assistant>{{ '<think>\n' }}")
QWEN_3 = TAGS.replace("<assistant>", "<assistant>{% if not think %}{{ '<think>\n\n</think>\n\n' }}{% endif %}")
SPLIT = TAGS.replace("m.content", "m.content.split('</think>')[-1]")

FIELD = {
    "parts": (PARTS, "<user>{}<assistant>"),
    "parts with images": (LLAVA, "USER: {} ASSISTANT:"),
    "text or parts": (EITHER, "<user>{}<assistant>"),
    "begin token": (BOS, "<bos><user>{}<assistant>"),
    "date": (DATE, "Today is 26 July 2024, Friday. <user>{}<assistant>"),
    "date of Llama": (DATE_OF_LLAMA, "Date: 26 Jul 2024 <user>{}<assistant>"),
    "system of its own": (DEFAULT_SYSTEM, "<system>You are kind.<user>{}<assistant>"),
    "tools": (TOOLS, "<user>{}<assistant>"),
    "thinks": (THINK, "<user>{}<assistant><think>\n"),
    "need not think": (QWEN_3, "<user>{}<assistant><think>\n\n</think>\n\n"),
    "leaves thinking out": (SPLIT, "<user>{}<assistant>"),
    "trims": (TRIMMING, "[{}]"),
}


@pytest.mark.parametrize("name", FIELD)
def test_the_question_stands_in_every_prompt(name: str) -> None:
    template, expected = FIELD[name]
    for question in ("12+30=", "Is 3 < 4?\n\nSay 'yes' or \"no\"."):
        assert written(template, question) == expected.format(question)


def test_the_question_is_trimmed_and_nothing_else() -> None:
    assert written(TRIMMING, "\n1 +  1\n\nis? ") == "[1 +  1\n\nis?]"
    with pytest.raises(UsageError, match=r"leaves out or changes '1 \+  1'; set chat=false"):
        written(TAGS.replace("m.content", "m.content | replace('  ', ' ')"), "1 +  1")
    with pytest.raises(UsageError, match=r"leaves out or changes 'Is <b> bold\?'"):
        written(TAGS.replace("m.content", "m.content | e"), "Is <b> bold?")
    with pytest.raises(UsageError, match=r"leaves out or changes 'a</think>b'"):
        written(SPLIT, "a</think>b")
    code = "What is [{'type': 'text'}]?"
    assert written(PARTS, code) == f"<user>{code}<assistant>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}>{% endfor %}<assistant>",
        "<assistant>",
        "{% for m in messages %}{% for part in m.content %}{{ part['words'] }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_without_the_question_is_one_message(template: str) -> None:
    with pytest.raises(UsageError, match=r"^chat=true: the chat template of the model refuses this .*; set chat=false"):
        written(template)


def test_a_template_that_throws_dice_is_one_message() -> None:
    with pytest.raises(UsageError, match=r"refuses this \(it writes something else each time\)"):
        written("{{ range(10**5) | random }}" + TAGS)


def test_system_and_question_may_be_read_in_two_ways() -> None:
    assert written(PLAIN_SYSTEM, system="Add.") == "Add. <user>Q<assistant>"
    as_json = PLAIN_SYSTEM.replace("messages[0].content +", "(messages[0].content | tojson) +")
    assert written(as_json, system="Add.") == '"Add." <user>Q<assistant>'
    assert written(PARTS, system="Add.") == "<system>Add.<user>Q<assistant>"
    with pytest.raises(UsageError, match=r"data.system='Add.': .* no system turn"):
        written(PARTS.replace("messages %}<", "messages if m.role != 'system' %}<"), system="Add.")


def test_a_day_is_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(chat_template_utils.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2031, 5, 6)

    before = written(DATE), written("\n" + DATE)
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    assert (written(DATE), written("\n" + DATE)) == before
    assert before[1] == "\n" + before[0]
    assert written("{{ strftime_now('%-d.%m.%y, %H:%M, %%') }} " + TAGS).startswith("26.07.24, 00:00, % <user>")
    assert "1 May 1999" in written(DATE_OF_LLAMA, variables={"day": "1 May 1999"})


def test_variables_of_the_template() -> None:
    assert written(QWEN_3, variables={"think": True}) == "<user>Q<assistant>"


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (THINK, "<think>"),
        (THINK, "<think>\nWell,"),
        (THINK.replace("\n", ""), " <think>"),
        (TAGS.replace("<assistant>", "<assistant>Let me think"), "think"),
        (TAGS.replace("<assistant>", "[/INST][THINK]"), "[THINK] So"),
        (TAGS.replace("<assistant>", "<assistant><|channel|>analysis<|message|>"), "<|channel|>analysis<|message|>"),
        # Without a mark for the beginning of an answer, every answer begins so.
        (MISTRAL.replace("' ' + m", "' <think>' + m"), "<think>"),
    ],
)
def test_an_answer_prefix_that_the_template_writes_is_refused(template: str, prefix: str) -> None:
    with pytest.raises(UsageError, match=r"data.answer_prefix=.*: the chat template of the model writes it too"):
        written(template, answer_prefix=prefix)


def test_an_answer_prefix_that_is_like_the_header_is_taken() -> None:
    assert written(THINK, answer_prefix="So") == "<user>Q<assistant><think>\nSo"
    assert written(TAGS.replace("<assistant>", "assistant\n"), answer_prefix="t is") == "<user>Qassistant\nt is"


@pytest.mark.parametrize("form", ["$A <end>", "<bos> $A <end>", "<bos> $A", "<bos> $A <sep> <end>", "$A"])
def test_what_a_tokenizer_writes_after_a_text_does_not_end_a_prompt(form: str) -> None:
    spell = tokenizer()
    ids = {"<bos>": 2, "<sep>": 4, "<end>": 5}
    spell.backend_tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=[*ids.items()])
    begin = [2] if form.startswith("<bos>") else []
    assert prompt_ids(spell, "12") == [*begin, 7, 8]
    assert prompt_ids(spell, "12<end>") == [*begin, 7, 8, 5]  # as it was given: `TaskData` refuses it
