"""docs/reading_a_run.md names metrics that there are, and shows the pictures that there are."""

import re

from helpers.paths import ROOT
from test_docs import NAMES, pattern

TEXT = (ROOT / "docs" / "reading_a_run.md").read_text(encoding="utf-8")
GROUPS = "reward|rollout|policy|optim|time|val|update"


def test_every_metric_is_documented():
    named = set(re.findall(rf"`((?:{GROUPS})/[^`]+)`", TEXT))
    assert len(named) >= 30
    assert [
        name for name in sorted(named) if not any(pattern(known).fullmatch(as_logged(name)) for known in NAMES)
    ] == []


def test_every_picture_is_shown():
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert sorted(shown) == sorted(f"reading_a_run/{path.name}" for path in (ROOT / "docs/reading_a_run").iterdir())


def as_logged(name: str) -> str:
    """A name with `<name>`, `<status>` and `<rule>` filled in."""
    return name.replace("<name>", "verifier").replace("<status>", "ok").replace("<rule>", "KLAbove")
