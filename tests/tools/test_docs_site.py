"""The site has every page and every public name, and its links lead somewhere. mkdocs is not needed here."""

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT
from reference import api, configuration, pages, text_of
from reference.places import anchors_of

import grpo_lightning
from grpo_lightning.command.overview import COMMANDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("experiments/**/README.md"))
REFERENCE = "docs/reference/"


def test_the_navigation_has_every_page() -> None:
    paths = [str(path.relative_to(ROOT)) for path in PAGES if "experiments" not in path.parts]
    nav = re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(nav) == sorted([*paths, "CHANGELOG.md", "SECURITY.md"])


def test_the_reference_has_every_public_name_once() -> None:
    text = "\n".join(text for path, text in pages().items() if path.startswith(f"{REFERENCE}api/"))
    assert sorted(re.findall(r"^::: (.*)$", text, re.MULTILINE)) == sorted(map(api.path_of, grpo_lightning.__all__))


def test_the_reference_has_every_key() -> None:
    keys = {*configuration.keys(), "WarmupCosine.optimizer", "TransformersSchedule.optimizer"}  # these are the run's
    for line in (ROOT / "tests/keys.txt").read_text(encoding="utf-8").splitlines():
        owner, names = line.split(": ")
        if prefix := configuration.prefix_of(owner):
            assert {f"{prefix}.{name}" for name in names.split()} <= keys, owner


def test_the_reference_has_every_command_with_its_options() -> None:
    found = anchors_of(pages()[f"{REFERENCE}commands.md"])
    assert {
        *(f"grpo-{name}" for name in COMMANDS),
        "grpo-verify--jsonl",
        "grpo-evaluate--limit",
        "grpo-export--as",
    } <= found


def test_the_reference_has_every_paper() -> None:
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("grpo_lightning/**/*.py")]
    numbers = {*re.findall(r"arXiv (\d{4}\.\d{5})", "\n".join(texts))}
    assert len(numbers) > 30 and numbers <= anchors_of(pages()[f"{REFERENCE}papers.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        text = text_of(page.parent / path if path else page)
        assert text is not None and (not anchor or anchor in anchors_of(text)), link
