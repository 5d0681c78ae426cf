"""The index of papers: for each arXiv number that the repository names, where the paper is in it."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import grpo_lightning
from reference import api
from reference.places import MODULES, REFERENCE, ROOT, Section, hand_written, relative

PAGE = f"{REFERENCE}/papers.md"

NUMBER = re.compile(r"(?<![\d.])(?:0[7-9]|1\d|2\d)(?:0[1-9]|1[0-2])\.\d{5}(?![\d.]*\d)")
"""An arXiv number, since 2015: year, month, and five digits."""

NAMED = re.compile(
    r"(?<![\w.])(?P<name>[A-Z][\w.+-]*(?: (?:[A-Z][\w.+-]*|with baseline|et al\.))*)"
    rf"(?:, | \()(?:arXiv\s)?(?P<number>{NUMBER.pattern})"
)
"""The name of a paper or method before its number: `DAPO, arXiv 2503.14476`, `Dr. GRPO (arXiv 2503.20783)`."""

NAMED_IN_CELL = re.compile(rf"(?<=[^\\]\| )(?P<name>[^|,;:()\n]+), (?P<number>{NUMBER.pattern})")
"""The name before its number in a cell of a table."""


@dataclass
class Paper:
    """What the repository has of a paper."""

    names: Counter[str] = field(default_factory=Counter)
    """How often each name stands before its number."""
    classes: dict[str, None] = field(default_factory=dict)
    """The public names, or else the files, whose code or module names it."""
    configurations: dict[str, None] = field(default_factory=dict)
    tests: dict[str, None] = field(default_factory=dict)
    examples: dict[tuple[str, str], None] = field(default_factory=dict)
    """The files, and the class or function in each; empty for the file itself."""
    pages: dict[str, Section] = field(default_factory=dict)
    """The first section of each page that names it, by the page's path."""


@cache
def papers() -> dict[str, Paper]:
    """Returns the papers by number."""
    paper_by_number: dict[str, Paper] = defaultdict(Paper)
    for path in files("grpo_lightning/**/*.py"):
        for number, line in numbers_in(path, paper_by_number):
            paper_by_number[number].classes |= dict.fromkeys(owners_of(path, line))
    for path in files("configs/**/*.yaml"):
        for number, _ in numbers_in(path, paper_by_number):
            paper_by_number[number].configurations[path] = None
    for path in files("examples/*.py"):
        for number, line in numbers_in(path, paper_by_number):
            paper_by_number[number].examples[path, definition_of(path, line)] = None
    for path in files("tests/**/*.py"):
        for number, _ in numbers_in(path, paper_by_number):
            paper_by_number[number].tests[path] = None
    for path in files("docs/**/*.md"):
        list(numbers_in(path, paper_by_number))
    for section in hand_written():
        for number in NUMBER.findall(section.text):
            paper_by_number[number].pages.setdefault(section.path, section)
    for paper in paper_by_number.values():
        for name in paper.classes:
            paper.tests |= dict.fromkeys(tests_of(name))
    return dict(sorted(paper_by_number.items()))


def files(pattern: str) -> list[str]:
    """Returns the paths of files, from the top of the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def numbers_in(path: str, paper_by_number: dict[str, Paper]) -> Iterator[tuple[str, int]]:
    """Yields the arXiv numbers of a file with their lines, and counts the names before them."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for match in (NAMED_IN_CELL if path.endswith(".md") else NAMED).finditer(text):
        paper_by_number[match["number"]].names[" ".join(match["name"].split())] += 1
    for line, content in enumerate(text.splitlines(), start=1):
        for number in NUMBER.findall(content):
            yield number, line


def owners_of(path: str, line: int) -> list[str]:
    """Returns the public name that a line of the package belongs to, or all public names of its file, or its path."""
    name = definition_of(path, line)
    module = path.removesuffix(".py").replace("/", ".")
    public_names = [name for name in MODULES if MODULES[name] == module]
    return [name] if name in MODULES else public_names or [path]


def definition_of(path: str, line: int) -> str:
    """Returns the class or function of a file that a line belongs to; empty for a line between them."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    return ""


@cache
def tests_of(name: str) -> list[str]:
    """Returns the test file that names a public name most often, if there is one in the folder of the name's tests."""
    if name not in MODULES:
        return []
    pattern = re.compile(rf"\b{name}\b")
    counts = {path: len(pattern.findall(text)) for path, text in texts_of_tests().items()}
    folder = "/".join(["tests", *MODULES[name].split(".")[1:-1], ""])
    paths = sorted(counts, key=lambda path: (path.startswith(folder), counts[path]), reverse=True)
    return [path for path in paths if counts[path]][:1]


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
        name = name_of(paper)
        lines += [f"## {number}{f' · {name}' if name else ''} {{ #{number} }}", ""]
        rows = {
            "Paper": [f"[arxiv.org/abs/{number}](https://arxiv.org/abs/{number})"],
            "Classes": [class_text(owner) for owner in paper.classes],
            "Configurations": [file_text(path) for path in paper.configurations],
            "Examples": [file_text(path) + (f": `{name}`" if name else "") for path, name in paper.examples],
            "Tests": [f"`{path}`" for path in paper.tests],
            "Pages": [page_text(section) for section in paper.pages.values()],
        }
        lines += [*(f"- {title}: {', '.join(items)}" for title, items in rows.items() if items), ""]
    return "\n".join(lines)


def name_of(paper: Paper) -> str:
    """Returns the name that stands before its number most often, or else a docstring's first word: `CHORD: ...`."""
    if paper.names:
        return paper.names.most_common(1)[0][0]
    docstrings = [getattr(grpo_lightning, name).__doc__ or "" for name in paper.classes if name in MODULES]
    for path, name in paper.examples:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        docstrings += [ast.get_docstring(node) or "" for node in classes]
    names = [re.match(r"([A-Z][\w.+-]*): ", text) for text in docstrings]
    return next((match[1] for match in names if match), "")


def file_text(path: str) -> str:
    """Returns the link to a file of the repository that the site has too."""
    return f"[{path}]({relative(path, PAGE)})"


def page_text(section: Section) -> str:
    """Returns the link to a section of a page."""
    anchor = f"#{section.anchor}" if section.anchor else ""
    return f"[{section.page_title}]({relative(section.path, PAGE)}{anchor})"


def class_text(owner: str) -> str:
    """Returns the link to the API of a public name; a file is named only."""
    return f"[`{owner}`]({relative(api.page_of(owner), PAGE)}#{owner})" if owner in MODULES else f"`{owner}`"
