"""The reference pages of the documentation that are written by a program, from the package itself.

`pages` returns them all. They are not on disk: `tools/docs_site.py` hands them to mkdocs, and `tests/tools` reads them.
"""

import os
from functools import cache
from pathlib import Path

from reference import api, commands, configuration, papers, trl_options
from reference.places import REFERENCE, ROOT


@cache
def pages() -> dict[str, str]:
    """Returns the text of each generated page, by its path in the repository."""
    text_by_name = {
        **{f"configuration/{name}.md": text for name, text in configuration.pages().items()},
        "commands.md": commands.page(),
        **{f"api/{name}.md": text for name, text in api.pages(configuration.keys_by_api_page()).items()},
        "papers.md": papers.page(),
        "trl.md": trl_options.page(),
    }
    return {f"{REFERENCE}/{path}": text for path, text in text_by_name.items()}


def text_of(path: Path) -> str | None:
    """Returns the text of a page, generated or on disk; empty for a folder or a picture, None for nothing at all."""
    generated = pages().get(os.path.relpath(path, ROOT).replace(os.sep, "/"))
    if generated is None and path.exists():
        return path.read_text(encoding="utf-8") if path.suffix == ".md" else ""
    return generated


def navigation() -> list[dict[str, object]]:
    """Returns the entries of the generated pages in the navigation of the site, by title."""
    return [
        {"Commands": f"{REFERENCE}/commands.md"},
        {"Papers": f"{REFERENCE}/papers.md"},
        {"Every option of TRL": f"{REFERENCE}/trl.md"},
        {"Configuration": [{title: f"{REFERENCE}/configuration/{name}.md"} for name, title in configuration.titles()]},
        {"API": [{title: f"{REFERENCE}/api/{name}.md"} for name, title in api.titles()]},
    ]
