"""Hooks of mkdocs: the site mirrors the repository, so that a link works in both, and gets an API reference.

`make docs` uses it, by mkdocs.yml. The pages of the reference list the public names of `grpo_lightning`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import grpo_lightning

ROOT = Path(__file__).resolve().parents[1]
MIRRORED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"]
MIRRORED += [
    "docs/*.png",
    "docs/**/*.md",
    "docs/**/*.svg",
    "configs/**/*.yaml",
    "examples/*.py",
    "examples/*/*.*",
    "experiments/README.md",
    "experiments/*/*.*",
]
FILES: dict[str, str] = vars(grpo_lightning)["_FILES"]
"""Every public name, and the module that has it."""
FLOORS = sorted({module.split(".")[1] for module in FILES.values()})
"""The floors that have public names: a page of the reference each."""

FOLDERS = {"inspect": "inspector"}
"""Public names that are folders, with the names of the folders."""


def on_config(config: Any) -> Any:
    """Adds the experiments and the reference to the navigation."""
    titles = {path.parent.name: title_of(path) for path in sorted(ROOT.glob("experiments/*/README.md"))}
    config.nav += [
        {
            "Experiments": [
                "experiments/README.md",
                *({title: f"experiments/{name}/README.md"} for name, title in titles.items()),
            ]
        },
        {"Reference": [{floor: f"reference/{floor}.md"} for floor in FLOORS]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The mirrored files at their paths in the repository, those of the theme, and the reference."""
    from mkdocs.structure.files import File, Files  # here, so that the tests need no mkdocs

    kept = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")]
    paths = sorted(path for pattern in MIRRORED for path in ROOT.glob(pattern))
    mirrored = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    pages = [File.generated(config, f"reference/{floor}.md", content=text) for floor, text in reference()]
    return Files([*kept, *mirrored, *pages])


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """A link to a folder becomes one to its README."""
    here = PurePosixPath(page.file.src_uri).parent

    def to_readme(link: re.Match[str]) -> str:
        target = (ROOT / here / link[1]).resolve()
        return f"]({link[1].rstrip('/')}/README.md)" if (target / "README.md").is_file() else link[0]

    return re.sub(r"\]\(([\w./-]+)\)", to_readme, markdown)


def reference() -> Iterator[tuple[str, str]]:
    """Each floor and its page: the first line of its docstring, then its public names under their files."""
    for floor in FLOORS:
        lines = [f"# {floor}", "", f"{purpose_of(floor)} Every name is in `grpo_lightning` itself.", ""]
        for module in sorted({module for module in FILES.values() if module.split(".")[1] == floor}):
            lines += [f"## {module.removeprefix('grpo_lightning.')}", ""]
            for name in sorted(name for name, file in FILES.items() if file == module):
                lines += [f"::: {module}.{FOLDERS.get(name, name)}", ""]
        yield floor, "\n".join(lines)


def purpose_of(floor: str) -> str:
    """The first line of the docstring of a floor, which is a folder or a file."""
    path = ROOT / "grpo_lightning" / floor
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def title_of(path: Path) -> str:
    """The first heading of a page."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
