"""Hooks of mkdocs: the site mirrors the repository, so that a link works in both, and gets its reference.

`make docs` uses it, by mkdocs.yml. The generated pages of the reference come from `tools/reference`.
"""

import html
import re
from pathlib import Path, PurePosixPath
from typing import Any

import reference

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
LISTS = {"docs/reference/metrics.md": 4, "docs/reference/glossary.md": 3, "docs/reference/records.md": 1}
"""Pages with tables whose rows search finds by their first cell, as sections by their heading; how much they count."""
ROW = re.compile(r"<tr>\s*<td>(.+?)</td>")
INDEXED_ROW = re.compile(r'<tr><h6 id="([^"]+)">(.*?)</h6>')


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
    ]
    pages_by_section = {title: pages for entry in config.nav for title, pages in entry.items()}
    pages_by_section["Reference"] += reference.navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """The mirrored files at their paths in the repository, those of the theme, and the reference."""
    from mkdocs.structure.files import File, Files  # here, so that the tests need no mkdocs

    kept = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")]
    paths = sorted(path for pattern in MIRRORED for path in ROOT.glob(pattern))
    mirrored = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    pages = [File.generated(config, path, content=text) for path, text in reference.pages().items()]
    return Files([*kept, *mirrored, *pages])


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """A link to a folder becomes one to its README; search puts lists of names first."""
    if page.file.src_uri in LISTS:
        page.meta["search"] = {"boost": LISTS[page.file.src_uri]}
    here = PurePosixPath(page.file.src_uri).parent

    def to_readme(link: re.Match[str]) -> str:
        target = (ROOT / here / link[1]).resolve()
        return f"]({link[1].rstrip('/')}/README.md)" if (target / "README.md").is_file() else link[0]

    return re.sub(r"\]\(([\w./-]+)\)", to_readme, markdown)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Makes the first cells of rows headings, until the page is indexed."""
    ids = set(re.findall(r'id="([^"]+)"', content))

    def with_heading(row: re.Match[str]) -> str:
        anchor = re.sub(r"[^\w/@.]+", "-", html.unescape(re.sub(r"<[^>]*>", "", row[1]))).strip("-")
        if anchor in ids:
            return row[0]
        ids.add(anchor)
        return f'<tr><h6 id="{anchor}">{row[1]}</h6>'

    return ROW.sub(with_heading, content) if page.file.src_uri in LISTS else content


def on_page_context(context: Any, page: Any, **_: Any) -> Any:
    """Makes the headings in rows cells again, and their anchors those of the rows.

    Hooks run after plugins, so search has read the page.
    """
    if page.file.src_uri in LISTS:
        page.content = INDEXED_ROW.sub(r'<tr id="\1"><td>\2</td>', page.content)
    return context


def title_of(path: Path) -> str:
    """The first heading of a page."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
