"""`grpo report` through its entry point, and its page as a browser sees it."""

import html.parser
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.chromium import Browser, needs_chromium
from helpers.command import table
from helpers.curves import scalars, write

from grpo_lightning.command.overview import answer

HOSTILE = "<script>document.title='hacked'</script>"


def make(folder: Path, values: list[float], seed: int = 0, **settings: Any) -> Path:
    run = scalars(values, name="val/greedy") | {"val/avg@8": scalars(values)["val/x"]}
    write(folder, run)
    config = {"seed_everything": seed, "trainer": {"default_root_dir": str(folder)}, "loop": {"mu": 1} | settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Two arms with three seeds: the last values 0.5, 0.6, 0.7 and 0.6, 0.8, 1.0."""
    for seed in range(3):
        make(tmp_path / "experiment" / "plain" / str(seed), [0.1, 0.5 + 0.1 * seed], seed)
        make(tmp_path / "experiment" / "twice" / str(seed), [0.1, 0.6 + 0.2 * seed], seed, mu=2)
    return tmp_path / "experiment"


def run(*arguments: object) -> str:
    """The page that is made."""
    out = Path(str(arguments[0])).parent / "out" / "report.html"
    assert answer(["report", *map(str, arguments), "-o", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """What a reader sees, between single spaces."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page.split("</style>")[1])))


def test_numbers_by_hand(experiment: Path) -> None:
    text = text_of(run(experiment, "--metrics", "val/avg@8:last"))
    # 0.5, 0.6, 0.7: 0.6 ± 4.3027 * 0.1 / √3; the differences are 0.1, 0.2, 0.3, which has the same half.
    assert "plain 3 0.60 ± 0.25 3 seeds, step 2 twice 3 0.80 ± 0.50 3 seeds, step 2 +0.20 ± 0.25 3 seeds" in text
    assert "Of 1 difference to plain , 0 have" in text and "about 0.05 would have one by chance" in text
    assert "val/avg@8 up to 2 exploration steps" in text


def test_every_seed_is_drawn_and_a_band_from_three_on(experiment: Path) -> None:
    page = run(experiment, "--metrics", "val/avg@8")
    assert page.count('<polyline class="seed"') == 6 and page.count('<polygon class="band"') == 2
    shutil.rmtree(experiment / "twice" / "2")
    page = run(experiment, "--metrics", "val/avg@8")
    assert page.count('<polyline class="seed"') == 5 and page.count('<polygon class="band"') == 1
    assert "fewer than 3 seeds: twice" in text_of(page)
    # The difference of two seeds is not marked whatever it is, so it is not counted.
    assert "have an interval that excludes 0" not in text_of(page)


def test_the_mean_is_drawn_where_all_seeds_are(experiment: Path) -> None:
    make(experiment / "long" / "0", [0.1, 0.2, 0.3, 0.4])
    make(experiment / "long" / "1", [0.1, 0.2], seed=1)
    page = run(experiment / "long", "--metrics", "val/avg@8")
    (mean,) = re.findall(r'<polyline class="mean" points="([^"]*)"', page)
    assert len(mean.split()) == 2
    assert re.search(r"long/1 has 2 of 4 steps: last values and means compare up to there", text_of(page))


def test_a_validation_of_one_question_has_no_interval(tmp_path: Path) -> None:
    write(tmp_path / "run", {"val/avg@8": [(0, 0.5)], "val/ci95": [(0, math.nan)]})
    assert "validation, sampled answers" in (text := text_of(run(tmp_path / "run"))) and "nan" not in text
    write(tmp_path / "more", {"val/avg@8": [(0, 0.5)], "val/ci95": [(0, 0.125)]})
    assert "± 0.125 over questions at a run's end" in text_of(run(tmp_path / "more"))


def test_axes_and_thresholds(experiment: Path) -> None:
    text = text_of(run(experiment, "--metrics", "val/avg@8>=0.65", "val/avg@8", "--x", "step", "seconds", "tokens"))
    assert "Curves over sampled tokens" in text
    for axis, x in (("exploration steps", 2), ("sampled tokens", 200)):
        cells = (f"≥ {x} 1 of 3 seeds reached it", f"≥ {x} 2 of 3 seeds reached it – not all reached it")
        assert f"val/avg@8 ≥ 0.65 {axis} plain 3 {cells[0]} twice 3 {cells[1]}" in text


def test_what_does_not_compare_is_a_dash_with_a_note(tmp_path: Path) -> None:
    """Arms with other rewards, and one that is graded otherwise."""
    for arm, reward, grader in (("a", "MathVerifier", "M"), ("b", "FormatReward", "M"), ("c", "MathVerifier", "N")):
        for seed in range(3):
            folder = tmp_path / "experiment" / arm / str(seed)
            curves = {"val/avg@8": [(0, 0.5 + 0.01 * seed)], "val/hard/avg@8": [(0, 0.5)], "reward/mean": [(0, 0.25)]}
            write(folder, curves)
            model = {"rewards": [{"class_path": reward}], "validation": {"grader": {"class_path": grader}}}
            config = {"seed_everything": seed, "model": model}
            (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    reached = text_of(run(tmp_path / "experiment", "--metrics", "val/avg@8>=0.5"))
    assert "c and a are graded differently: no difference in val/avg@8 " in reached
    # A validation with a name has a grader of its own.
    hard = text_of(run(tmp_path / "experiment", "--metrics", "val/hard/avg@8:last"))
    assert "c 3 0.5 3 seeds, all equal, step 1 +0 3 seeds, all equal" in hard
    text = text_of(run(tmp_path / "experiment", "--metrics", "val/avg@8:last", "reward/mean:last"))
    assert "b and a are trained with different rewards: no difference in reward/mean" in text
    assert "c and a are graded differently: no difference in val/avg@8" in text
    assert "9 of 9 runs have no validations.jsonl: their differences pair seeds alone" in text
    validation, reward = re.split("reward/mean up to 1 exploration steps", text.split("vs. a")[-1])
    assert re.search(r"b 3 0.510 ± 0.025 3 seeds, step 1 \+0 3 seeds, all equal", validation)
    assert re.search(r"c 3 0.510 ± 0.025 3 seeds, step 1 – another grader", validation)
    assert re.search(r"b 3 0.25 3 seeds, all equal, step 1 – other rewards c 3 0.25 .* \+0 3 seeds", reward)


def test_an_absent_option_does_not_read_as_an_empty_one(tmp_path: Path) -> None:
    arms = {"a": {"masks": [], "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.5}}}}
    arms["b"] = {"masks": [{"class_path": "Truncated"}], "optimizer": {"class_path": "torch.optim.AdamW"}}
    for arm, settings in arms.items():
        make(tmp_path / "experiment" / arm / "0", [0.5, 0.5], **settings)
    text = text_of(run(tmp_path / "experiment"))
    assert "loop.masks [] [Truncated]" in text
    assert "loop.optimizer.momentum 0.5 – (AdamW does not list it)" in text


def test_links_to_the_inspector_are_relative(experiment: Path) -> None:
    folder = experiment / "plain" / "a b:#1"
    make(folder, [0.1, 0.2], seed=7)
    (folder / "inspect.html").write_text("")
    links = re.findall(r'href="([^"]*)"', run(experiment))
    assert links == ["../experiment/plain/a%20b%3A%231/inspect.html"]


def test_names_and_values_are_text(tmp_path: Path) -> None:
    root = tmp_path / "experiment"
    for i, name in enumerate(("<script>alert(1)<", '"onload="alert(1)')):
        folder = root / f"{name}" / "\x07\u202e&<b>"
        make(folder, [0.1, 0.2], template=f"{HOSTILE}{i}")
    page = run(root)
    assert "<script" not in page and "<b>" not in page and "\x07" not in page

    class Tags(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "iframe", "img", "object", "b")
            assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]

    Tags().feed(page)
    assert f"{HOSTILE}1 {HOSTILE}0" in text_of(page)


MISTAKES = table("""
--metrics val/nothing => --metrics val/nothing: no run has logged val/nothing. Give a logged one, such as val/
--metrics val/avg@8:median => metric 'val/avg@8:median': give a scalar's name
-o out.txt => --out out.txt: give the name of a page, such as out.html
-o /proc/none/report.html => --out /proc/none/report.html: it cannot be written
""")


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(experiment: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["report", str(experiment), *arguments]) == 2
    assert f"grpo: error: {words[0]}" in capsys.readouterr().err


@needs_chromium
def test_in_a_browser(experiment: Path, tmp_path: Path, opened: Browser) -> None:
    """Its style applies under its own policy, it has no address to ask, and the console stays empty."""
    (experiment / "twice").rename(experiment / HOSTILE.replace("/", "\u2215"))
    page = run(experiment).replace("<html", '<html data-ready="1"')
    assert not re.search(r"https?:|url\(|src=|@import|href=", page)
    # What the policy forbids is seen in this way.
    forbidden = page.replace("</style>", "b {}</style>").replace("<header>", '<header><img src="http://x.test/">')
    for text, number in ((page, 0), (forbidden, 2)):
        (tmp_path / "page.html").write_text(text)
        opened.open(tmp_path / "page.html")
        assert opened.evaluate("document.title") == "experiment"
        assert len([one for one in opened.complaints() if "request:" not in one]) == number
