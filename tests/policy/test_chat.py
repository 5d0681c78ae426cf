"""`chat_text`: the turns of a chat template, and a message where there is none."""

import pytest
from helpers.tiny import tokenizer

from grpo_lightning.policy.chat import chat_text
from grpo_lightning.types import UsageError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_turns_of_a_chat() -> None:
    spell = tokenizer()
    spell.chat_template = TEMPLATE
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
