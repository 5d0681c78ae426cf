"""The page of sampled completions that loggers of text show."""

import html
import re
from typing import Any

import pytest

from grpo_lightning.plugins.display.page import completion, escape, solid, span_of, whole
from grpo_lightning.types import Conversation, FinishReason, Prompt, Question, Sample

pytestmark = pytest.mark.filterwarnings("ignore:html5lib's sanitizer")  # which TensorBoard uses

WRITTEN = [
    "a\nb\n\n  c  d",
    "1. one\n2. two\n- three\n# four\n> five\n    code",
    "*a* _b_ `c` [d](http://e) ![f](g) ~~h~~ | i | \\j <k>&amp;&#65;",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "שלום عربى 👩‍🚀 é",
    "x" * 10_000,
]


def shown(text: str) -> str:
    """What a reader sees of a table cell in TensorBoard's Text tab."""
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(f"| completion |\n| --- |\n| {escape(text)} |")
    (cell,) = re.findall(r"<td>(.*)</td>", page, re.DOTALL)
    assert not re.search(r"<(?!br)", cell), cell
    return html.unescape(re.sub(r"<br ?/?>", "\n", cell)).replace("\xa0", " ")


@pytest.mark.parametrize("text", WRITTEN)
def test_what_a_model_writes_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


def test_control_characters_are_visible_and_columns_do_not_break() -> None:
    assert shown("a\x00b\x1bc\x7fd\te") == "a␀b␛c␡d    e"
    assert shown("pay \u202e001\u202c") == "pay <U+202E>001<U+202C>"
    assert solid("0.50 no_answer") == "0.50&nbsp;no&#95;answer"
    assert shown("-1.0") == "-1.0"


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("5 and <answer>5</answer> is 5", "5", (14, 15)),
        (r"so 7, \boxed{ 7 }", "7", (14, 15)),
        ("it is 12, not 2", "2", (14, 15)),
        ("2.5 or 25", "5", None),
        ("it is 5.", "5", (6, 7)),
        ("a+b", "a+b", (0, 3)),
        ("nothing", None, None),
        ("nothing", "", None),
    ],
)
def test_the_answer_is_found_where_it_stands(text: str, answer: str | None, found: Any) -> None:
    assert span_of(text, answer) == found


def test_the_answer_is_bold_and_nothing_else_changes() -> None:
    assert completion("<answer>4</answer>", "4") == "&lt;answer&gt;<strong>4</strong>&lt;/answer&gt;"
    assert completion("|4", None) == "&#124;4"


def sample_of(*messages: tuple[str, str], rewards: list[float]) -> Sample:
    talk = Conversation(
        [{"role": role, "content": text} for role, text in messages], [], [*range(len(rewards))], rewards
    )
    text = messages[-1][1]
    return Sample(Prompt(0, "q", [1], Question("q", "7")), text, [1], FinishReason.STOP, "", talk)


def test_a_conversation_is_shown_turn_by_turn() -> None:
    examples = [("user", "e"), ("assistant", "example"), ("user", "q")]
    sample = sample_of(*examples, ("assistant", "<b>"), ("tool", "7"), ("assistant", "it is 7"), rewards=[0.0, 1.0])
    assert sample.conversation is not None
    sample.conversation.messages[4]["name"] = "add"
    assert whole(sample, "7").split("<br>") == [
        "<em>turn 1, &#43;0.00</em> &lt;b&gt;",
        "<em>tool add</em> 7",
        "<em>turn 2, &#43;1.00</em> it is <strong>7</strong>",
    ]
    sample.conversation.rewards = [0.0, 0.0]
    assert whole(sample, "7").startswith("<em>turn 1</em> ")
    single = sample_of(("user", "q"), ("assistant", "7"), rewards=[0.0])
    assert whole(single, "7") == "<strong>7</strong>"
