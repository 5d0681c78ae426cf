"""The table of sampled completions that loggers of text show."""

import html
import re

import pytest

from grpo_lightning.plugins.looking.loggers.completions_table import as_page

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

    page = markdown_to_safe_html(as_page([["completion"], [text]]))
    (cell,) = re.findall(r"<td>(.*)</td>", page, re.DOTALL)
    assert not re.search(r"<(?!br)", cell), cell
    return html.unescape(re.sub(r"<br ?/?>", "\n", cell)).replace("\xa0", " ")


@pytest.mark.parametrize("text", WRITTEN)
def test_what_a_model_writes_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


def test_control_characters_are_visible() -> None:
    assert shown("a\x00b\x1bc\x7fd\te") == "a␀b␛c␡d    e"
    assert shown("pay \u202e001\u202c") == "pay <U+202E>001<U+202C>"
    assert shown("-1.0") == "-1.0"
