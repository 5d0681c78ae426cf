"""The page in a browser: it opens, asks for nothing, runs nothing of a model's, and does what it offers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.chromium import Browser, needs_chromium
from helpers.fast import fit
from helpers.fitting import Digits
from helpers.inspecting import completion_of, group_of, plain_tokens, write_page

from grpo_lightning import Inspector, Objective
from grpo_lightning.plugins.looking.inspector.inspector_page import write

pytestmark = [needs_chromium, pytest.mark.whole]
HOSTILE = {
    "script": "<script>window.broken = 1</script>",
    "end of a script": "</script><script>window.broken = 1</script>",
    "comment": "<!-- <script>",
    "image": '<img src="x" onerror="window.broken = 1"><svg onload="window.broken = 1">',
    "link": '<a href="javascript:window.broken=1">&lt;b&gt; &amp;</a>',
    "template": "{{script}} ${window.broken = 1} \\u003cscript>",
    "line separators": "a\u2028b\u2029c",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f466 \U0001f1e9\U0001f1ea e\u0301 \u4f60\u597d",
    "right to left": "\u0634\u0643\u0631\u0627 \u05e9\u05dc\u05d5\u05dd",
    "long": "x" * 10_000,
}
"""What a browser must show as it is."""
TURNED = {"\x00": "␀", "\x1b": "␛", "\u202e": "U+202E", "\u2066": "U+2066", "\u200b": "U+200B", "\x85": "U+0085"}
"""What is named instead, since it cannot be seen or turns text around."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("one", 0.5), ("two", 0.1)):
        fit(
            folder / name,
            [Inspector(every_n_steps=1, num_followed=1)],
            {"group_size": 8, "mu": 2, "num_minibatches": 2},
            {"limit_val_batches": 1},
            rewards=[Digits(change=lambda sample, share: float(share > 1 / 6))],
            objective=Objective(beta=0.04),
            optimizer=lambda parameters, rate=rate: torch.optim.SGD(parameters, lr=rate),
        )
    write(folder / "one", folder / "page.html", folder / "two")
    return folder / "page.html"


@pytest.fixture
def page(chromium: Browser, runs: Path) -> Browser:
    """The page, opened."""
    chromium.open(runs)
    return chromium


def page_of(folder: Path, *pieces: str, **more: object) -> Path:
    """The page of a run with one completion of these pieces, whose other texts are these too."""
    completion = completion_of(plain_tokens(pieces), answer=pieces[0] if pieces else None)
    group = group_of([], completions=[completion], **more)
    return write_page(folder, group)


def moves(page: Browser, selector: str) -> list[float]:
    """Δ log p of the tokens."""
    delta = "({completion: {tokens}, t}) => tokens.after_logp[t] - tokens.old_logp[t]"
    return page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map({delta})")


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_model_wrote_is_text(chromium: Browser, tmp_path: Path, name: str) -> None:
    text = HOSTILE[name]
    pieces = [text, *text[:50], "end"]
    texts = {"question": text, "gold": text, "prompt": text, "source": text, "vocabulary": {5: text}, "roles": [text]}
    chromium.open(page_of(tmp_path, *pieces, **texts))
    chromium.evaluate("document.querySelectorAll('.fold').forEach((one) => one.click())")
    shown = chromium.texts(".token")
    named = text.replace("\u2028", "U+2028").replace("\u2029", "U+2029")
    assert shown[0] == named and shown[-1] == "end" and len(shown) == len(pieces)
    assert chromium.texts("details pre") == [named]
    chromium.click(".token", len(pieces) - 1)
    assert chromium.evaluate("window.broken") is None
    assert chromium.count("script:not([type])") == 1 and chromium.count("img, a, svg[onload], iframe") == 0


def test_what_cannot_be_seen_is_named(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(page_of(tmp_path, *TURNED, "a \n\tb", ""))
    assert chromium.texts(".token") == [*TURNED.values(), "a \n\tb", ""]
    assert chromium.count(".token .space, .token .newline, .token .tab") == 3


def test_only_its_own_script_may_run(opened: Browser, runs: Path, tmp_path: Path) -> None:
    """The policy in the page's head stops what would get past the escaping."""
    html = runs.read_text(encoding="utf-8")
    bad = (
        "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'><img src='http://127.0.0.1:9/x.png'>"
    )
    (tmp_path / "bad.html").write_text(html.replace("</main>", f"</main>{bad}"))
    opened.open(tmp_path / "bad.html")
    assert opened.evaluate("window.broken") is None
    assert len(opened.complaints()) >= 3


def test_tokens_by_keys(page: Browser) -> None:
    page.press("j", "j")
    assert page.texts("#card .heading .fact")[0].startswith("token 2 of")
    page.press("J")
    assert "#2" in page.texts("#card .heading .fact")[0]
    page.press("3", "1")
    assert "#2" in page.texts("#card .heading .fact")[0], "the card stays when tokens are drawn again"
    page.press("n")
    [shown], everywhere = moves(page, ".token.current"), moves(page, ".token")
    assert abs(shown) == max(map(abs, everywhere))
    page.press("Enter")
    assert "token=" in page.hash() and page.count(".token.pinned") == 1
    page.press("Escape")
    assert "token=" not in page.hash()


def test_the_card_has_the_records_numbers(page: Browser, runs: Path) -> None:
    page.click(".token", 2)
    [record] = [line for line in runs.read_text().splitlines() if 'id="step-0-3"' in line]
    assert json.loads(re.sub(r"<[^>]*>", "", record))[0]["step"] == 3
    term = float(page.evaluate("document.querySelector('[data-term]').dataset.term"))
    tokens = "document.querySelectorAll('.token')[2].completion.tokens"
    weight, surrogate, kl = (page.evaluate(f"{tokens}.{name}[2]") for name in ("weight", "surrogate", "kl"))
    assert term == pytest.approx(weight * (surrogate - 0.04 * kl), rel=1e-9)


def test_a_permalink_opens_what_it_names(chromium: Browser, runs: Path) -> None:
    chromium.open(runs, "#step=2&group=2&token=1.1&colour=entropy&sort=length&theme=dark")
    assert chromium.texts(".stepper b") == ["2"]
    assert chromium.texts("#colours [aria-pressed=true]") == ["7entropy"]
    assert chromium.evaluate("document.querySelector('#groups [aria-selected=true]').dataset.group") == "2"
    assert chromium.texts("#card .heading .fact")[0].startswith("token 2 of") and chromium.count(".token.pinned") == 1
    assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 23)"
    chromium.evaluate("location.hash = 'step=1&view=follow'")
    chromium.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert chromium.texts(".stepper b") == ["1"] and chromium.count(".follow .row") == 4


def test_dashed_curves_and_spreads_are_named(chromium: Browser, runs: Path) -> None:
    chromium.open(runs, "#view=compare")
    assert chromium.texts("#curves .legend span") == ["one", "two"]
    assert chromium.count("#curves .legend .other") == 1 and chromium.count(".multiples .other") > 0
    for view in ("tokens", "follow", "compare"):
        chromium.open(runs, f"#view={view}")
        text = chromium.evaluate("document.body.innerText")
        assert ", std " in text and "±" not in text


def test_a_followed_step_has_its_facts_in_one_line(chromium: Browser, runs: Path) -> None:
    chromium.open(runs, "#view=follow")
    heights = chromium.evaluate("[...document.querySelectorAll('.follow .when')].map((line) => line.offsetHeight)")
    assert len(heights) > 1 and max(heights) < 30


def test_filters(page: Browser) -> None:
    page.press("ArrowLeft", "ArrowDown")
    right = page.count(".completion.right")
    assert 0 < right < 8
    page.press("r")
    assert page.count(".completion.other") == 8 - right and "show=right" in page.hash()
    page.press("w")
    assert page.count(".completion.other") == 0
    page.press("r", "w", "!")
    assert page.texts("#groups .empty") == ["No completion of this step fits the filters."]
    page.press("Escape")
    page.press("/", *"3", "Enter")
    assert page.count(".token.hit") >= 1 and all("3" in text for text in page.texts(".token.hit"))
    assert page.evaluate("document.activeElement.id") != "search"
    page.evaluate("document.querySelector('#search').value = '('")
    page.evaluate("document.querySelector('#search').dispatchEvent(new Event('change'))")
    assert "regular expression" in page.texts("#groups .problem")[0].lower()


@pytest.mark.parametrize(
    "groups", [[], [group_of([])], [group_of([plain_tokens([])])]], ids=["no groups", "no completions", "no tokens"]
)
@pytest.mark.parametrize("view", ["tokens", "follow", "compare"])
def test_empty_records(chromium: Browser, tmp_path: Path, groups: list, view: str) -> None:
    chromium.open(write_page(tmp_path, *groups, step=0), f"#view={view}")
    chromium.press(*"jJnbxersfc1234567890", "Enter", "ArrowUp", "ArrowRight", "Escape")
    assert chromium.count(".empty") > 0


def test_numbers_at_the_edge(chromium: Browser, tmp_path: Path) -> None:
    """Log-probs of 0 and minus infinity, equal values, a single token."""
    tokens = plain_tokens(["a", "b", "c"])
    tokens.old_logp, tokens.after_logp = np.float32([0, -np.inf, -1]), np.float32([0, -np.inf, np.nan])
    tokens.update_logp = tokens.sampler_logp = tokens.ref_logp = tokens.old_logp
    tokens.advantage = tokens.weight = tokens.surrogate = tokens.kl = tokens.push = np.float32([1, 1, 1])
    chromium.open(write_page(tmp_path, group_of([tokens]), objective=Objective(beta=0.1)))
    for key in "1234567890":
        chromium.press(key, "j")
    for index in range(3):
        chromium.click(".token", index)
        assert "NaN" not in chromium.evaluate("document.body.innerText")
        assert (
            chromium.evaluate("document.querySelectorAll('[d*=NaN], [x*=NaN], [cx*=NaN], [y*=NaN], [cy*=NaN]').length")
            == 0
        )
        chromium.press("x")
