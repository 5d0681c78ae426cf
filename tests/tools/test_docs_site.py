"""The site has every page and every public name, and its links lead somewhere. mkdocs is not needed here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.loading import load_tool
from helpers.paths import ROOT

import grpo_lightning

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("experiments/**/README.md"))


def leaves(nav: Any) -> list[str]:
    """The paths in a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [path for part in (nav.values() if isinstance(nav, dict) else nav) for path in leaves(part)]


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_navigation_has_every_page() -> None:
    pages = [str(path.relative_to(ROOT)) for path in PAGES if "experiments" not in path.parts]
    assert sorted(leaves(NAV)) == sorted([*pages, "CHANGELOG.md", "SECURITY.md"])


def test_the_reference_has_every_public_name() -> None:
    tool = load_tool("docs_site")
    pages = dict(tool.reference())
    assert [*pages] == tool.FLOORS
    shown = [name for page in pages.values() for name in re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE)]
    assert sorted(shown) == sorted(tool.FOLDERS.get(name, name) for name in grpo_lightning.__all__)
    assert all(re.match(r"# \w+\n\n\w.*\. Every name is in ", page) for page in pages.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
