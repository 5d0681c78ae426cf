"""The page of conversations: turns, rewards, branches, and what an environment wrote is text."""

from pathlib import Path

import numpy as np
import pytest
from helpers.chromium import Browser, needs_chromium
from helpers.inspecting import completion_of, group_of, plain_tokens, write_page

from grpo_lightning.plugins.looking.inspector.record import CompletionRecord, ConversationRecord, TurnRecord

pytestmark = [needs_chromium, pytest.mark.whole]
OWN, USER, CALCULATE = "assistant", "user", "tool calculate"


def talk(
    *turns: tuple[str, list[str], float | None], piece: int = 0, num_pieces: int = 1, seed: int = 0, **more: object
) -> CompletionRecord:
    """A completion whose turns have a role, pieces of text and a reward; `more` sets fields of its conversation."""
    tokens = plain_tokens([piece for _, pieces, _ in turns for piece in pieces], seed)
    context = np.array([role != OWN for role, pieces, _ in turns for _ in pieces])
    tokens.context = context
    tokens.old_logp[context] = tokens.after_logp[context] = np.nan
    ends = np.cumsum([len(pieces) for _, pieces, _ in turns]) - 1
    records = [TurnRecord(role, int(end), reward) for (role, _, reward), end in zip(turns, ends, strict=True)]
    record = ConversationRecord(piece, num_pieces, records, **more)  # type: ignore[arg-type]
    return completion_of(tokens, right=bool(more.get("outcome")), conversation=record)


def tools() -> list[CompletionRecord]:
    """A conversation with a calculator, one with a branch, one whose environment failed, and one of a single turn."""
    call = (OWN, ["I ", "ask: ", "<tool>", "2+3", "</tool>"], 0.0)
    return [
        talk(
            call,
            (CALCULATE, ["\n", "5", "\n"], None),
            (OWN, ["It ", "is ", "5", "<eos>"], 1.0),
            outcome=1.0,
            num_calls=2,
            num_failed_calls=1,
            closing=[(USER, "Well done!")],
        ),
        talk((OWN, ["4", "<eos>"], 0.5), piece=0, num_pieces=2, seed=1),
        talk(
            ("history", ["guess ", "4 ", "higher"], None), (OWN, ["5", "<eos>"], -0.25), piece=1, num_pieces=2, seed=2
        ),
        completion_of(plain_tokens([]), None, conversation=ConversationRecord(0, 0, error="timeout after 10 s")),
        talk((OWN, ["5", "<eos>"], 0.0), seed=3),
    ]


def test_turns_stand_under_who_wrote_them(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(write_page(tmp_path, group_of([], completions=tools())))
    first = ".completion:first-child "
    assert chromium.texts(first + ".who") == ["turn 10", CALCULATE, "turn 2+1", "user, not read"]
    assert "|".join(chromium.texts(first + ".turn.own .token")) == "I |ask: |<tool>|2+3|</tool>|It |is |5|<eos>"
    assert chromium.texts(first + ".turn.other .token") == ["\n", "5", "\n"]
    assert chromium.texts(first + ".unread .message") == ["Well done!"]
    footer = chromium.texts(first + "footer")[0]
    assert "2 calls, 1 failed" in footer and "outcome 1" in footer and "9 tokens" in footer
    assert chromium.texts(".completion:last-child .who") == ["turn 1"], "a reward of 0 everywhere is none"


def test_branches_belong_to_their_conversation(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(write_page(tmp_path, group_of([], completions=tools())))
    assert chromium.texts(".completion .index") == ["#1", "#2", "#2", "#3", "#4"]
    assert chromium.texts(".branch") == ["part 1 of 2", "part 2 of 2"]
    assert chromium.texts(".completion:nth-child(3) .who") == ["history, as it is now", "turn 2−0.25"]
    assert len(chromium.texts("#groups .strip i")) == 4, "a branch is no conversation of its own"
    assert "environment: timeout after 10 s" in chromium.texts(".completion:nth-child(4) footer")[0]
    chromium.click(".completion:nth-child(3) .token", 3)
    assert "#2, id" in chromium.texts("#card .heading .fact")[0]


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.broken = 1</script>",
        '</script><img src="x" onerror="window.broken = 1">',
        "{{script}} ${window.broken = 1} __proto__",
        "constructor",
    ],
)
def test_what_an_environment_wrote_is_text(chromium: Browser, tmp_path: Path, text: str) -> None:
    """In its answers, in the names of its tools, in its roles, and in its errors."""
    said = talk(
        (OWN, ["a"], 0.0),
        (f"tool {text}", [text], None),
        (OWN, ["b"], 0.0),
        (text, [text], None),
        (OWN, ["c"], 0.0),
        closing=[(text, text)],
        error=text,
    )
    chromium.open(write_page(tmp_path, group_of([], completions=[said])))
    assert chromium.texts(".token.context") == [text, text] and chromium.texts(".message") == [text]
    assert chromium.texts(".who")[1] == f"tool {text}" and chromium.texts(".who")[3] == text
    assert chromium.texts(".who")[5] == f"{text}, not read"
    assert chromium.evaluate("window.broken") is None
    assert chromium.count("script:not([type])") == 1 and chromium.count("img, a, iframe") == 0
