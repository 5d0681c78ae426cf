"""Hooks of mkdocs: the site mirrors the repository, so that a link works in both, and gets an API reference.

`make docs` uses it, by mkdocs.yml. The pages of the reference list the public names of `grpo_lightning`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

import grpo_lightning

ROOT = Path(__file__).resolve().parents[1]
MIRRORED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"]
MIRRORED += ["docs/*.*", "docs/reading_a_run/*.svg", "configs/**/*.yaml", "examples/*.py", "experiments/*/*.*"]
FLOORS = {
    "types": "What passes between the floors",
    "maths": "Tensors in, tensors out",
    "sandbox": "Processes that can be killed",
    "tasks": "Where questions come from",
    "policy": "The model and its snapshots",
    "rewards": "What scores answers",
    "engines": "What draws completions",
    "training": "The loop on Lightning",
    "inspect": "Looking at runs",
}
"""The floors that have public names, and the first line of each page."""


def on_config(config: Any) -> Any:
    """Adds the experiments and the reference to the navigation."""
    titles = {path.parent.name: title_of(path) for path in sorted(ROOT.glob("experiments/*/README.md"))}
    config.nav += [
        {"Experiments": [{title: f"experiments/{name}/README.md"} for name, title in titles.items()]},
        {"Reference": [{floor: f"reference/{floor}.md"} for floor in FLOORS]},
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The mirrored files at their paths in the repository, those of the theme, and the reference."""
    kept = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")]
    paths = sorted(path for pattern in MIRRORED for path in ROOT.glob(pattern))
    mirrored = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    pages = [File.generated(config, f"reference/{floor}.md", content=text) for floor, text in reference()]
    return Files([*kept, *mirrored, *pages])


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """A link to a folder becomes one to its README."""
    here = PurePosixPath(page.file.src_uri).parent

    def to_readme(link: re.Match[str]) -> str:
        target = (ROOT / here / link[1]).resolve()
        return f"]({link[1].rstrip('/')}/README.md)" if (target / "README.md").is_file() else link[0]

    return re.sub(r"\]\(([\w./-]+)\)", to_readme, markdown)


def reference() -> Iterator[tuple[str, str]]:
    """Each floor and its page: the public names of the floor's files, one heading per file."""
    names: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, module in vars(grpo_lightning)["_FILES"].items():
        names[module.split(".")[1]][module].append(name)
    assert names.keys() == FLOORS.keys(), names.keys() ^ FLOORS.keys()
    for floor, modules in names.items():
        lines = [f"# {floor}", "", f"{FLOORS[floor]}. Every name is in `grpo_lightning` itself.", ""]
        for module in sorted(modules):
            lines += [f"## {module.removeprefix('grpo_lightning.')}", ""]
            for name in sorted(modules[module]):
                lines += [f"::: {module}.{name}", ""]
        yield floor, "\n".join(lines)


def title_of(path: Path) -> str:
    """The first heading of a page."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
