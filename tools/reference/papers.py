"""The index of papers: for each arXiv number that the repository names, where the paper is in it."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from reference import api
from reference.places import MODULES, REFERENCE, ROOT, hand_written, relative

PAGE = f"{REFERENCE}/papers.md"

NUMBER = re.compile(r"(?<![\d.])(?:0[7-9]|1\d|2\d)(?:0[1-9]|1[0-2])\.\d{5}(?![\d.]*\d)")
"""An arXiv number, since 2015: year, month, and five digits."""

NAMED = re.compile(
    r"(?P<name>[A-Z][\w.+-]*(?: [A-Z][\w.+-]*)*(?: et al\.)?)"
    rf"(?:,| \(|'s \w+ \()?\s+(?:\(?arXiv )?(?P<number>{NUMBER.pattern})"
)
"""The name of a paper or method before its number: `DAPO, arXiv 2503.14476`, `Dr. GRPO (arXiv 2503.20783)`."""


@dataclass
class Paper:
    """What the repository has of a paper."""

    names: Counter[str] = field(default_factory=Counter)
    """How often each name stands before its number."""
    classes: dict[str, None] = field(default_factory=dict)
    """The public names, or else the files, whose code names it."""
    configurations: dict[str, None] = field(default_factory=dict)
    tests: dict[str, None] = field(default_factory=dict)
    examples: dict[str, None] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    """The titles of the pages that name it, by their links."""


@cache
def papers() -> dict[str, Paper]:
    """Returns the papers by number."""
    found: dict[str, Paper] = defaultdict(Paper)
    for path in files("grpo_lightning/**/*.py"):
        for number, line in numbers_in(path, found):
            found[number].classes[owner_of(path, line)] = None
    for path in files("configs/**/*.yaml"):
        for number, _ in numbers_in(path, found):
            found[number].configurations[path] = None
    for path in files("examples/*.py"):
        for number, _ in numbers_in(path, found):
            found[number].examples[path] = None
    for path in files("tests/**/*.py"):
        for number, _ in numbers_in(path, found):
            found[number].tests[path] = None
    for path in files("docs/**/*.md"):
        list(numbers_in(path, found))
    for section in hand_written():
        for number in NUMBER.findall(section.text):
            anchor = f"#{section.anchor}" if section.anchor else ""
            found[number].pages.setdefault(section.path + anchor, section.page_title)
    for paper in found.values():
        for name in paper.classes:
            paper.tests |= dict.fromkeys(tests_of(name))
    return dict(sorted(found.items()))


def files(pattern: str) -> list[str]:
    """Returns the paths of files, from the top of the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def numbers_in(path: str, found: dict[str, Paper]) -> Iterator[tuple[str, int]]:
    """Yields the arXiv numbers of a file with their lines, and counts the names before them."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for match in NAMED.finditer(text):
        found[match["number"]].names[" ".join(match["name"].split())] += 1
    for line, content in enumerate(text.splitlines(), start=1):
        for number in NUMBER.findall(content):
            yield number, line


def owner_of(path: str, line: int) -> str:
    """Returns the public name that a line of a file belongs to, or the path of the file."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name if node.name in MODULES else path
    return path


@cache
def tests_of(name: str) -> list[str]:
    """Returns the test file that names a public name most often."""
    if name not in MODULES:
        return []
    pattern = re.compile(rf"\b{name}\b")
    counts = {path: len(pattern.findall(text)) for path, text in texts_of_tests().items()}
    best = max(counts, key=lambda path: counts[path])
    return [best] if counts[best] else []


@cache
def texts_of_tests() -> dict[str, str]:
    """Returns the texts of the test files by path."""
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in files("tests/**/test_*.py")}


def page() -> str:
    """Returns the page."""
    lines = [
        "# Papers",
        "",
        "Every paper on arXiv that this package names, by number: its classes, configurations, tests and examples.",
        "",
    ]
    for number, paper in papers().items():
        name = f" · {paper.names.most_common(1)[0][0]}" if paper.names else ""
        lines += [
            f"## {number}{name} {{ #{number} }}",
            "",
            f"[arxiv.org/abs/{number}](https://arxiv.org/abs/{number})",
            "",
        ]
        rows = {
            "Classes": [class_text(owner) for owner in paper.classes],
            "Configurations": [f"[{path}]({relative(path, PAGE)})" for path in paper.configurations],
            "Examples": [f"[{path}]({relative(path, PAGE)})" for path in paper.examples],
            "Tests": [f"`{path}`" for path in paper.tests],
            "Pages": [f"[{title}]({relative(path, PAGE)})" for path, title in paper.pages.items()],
        }
        lines += [*(f"- {title}: {', '.join(items)}" for title, items in rows.items() if items), ""]
    return "\n".join(lines)


def class_text(owner: str) -> str:
    """Returns the link to the API of a public name; a file is named only."""
    return f"[`{owner}`]({relative(api.page_of(owner), PAGE)}#{owner})" if owner in MODULES else f"`{owner}`"
