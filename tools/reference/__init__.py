"""The reference pages of the documentation that are written by a program, from the package itself.

`pages` returns them all. They are not on disk: `tools/docs_site.py` hands them to mkdocs, and `tests/tools` reads them.
"""

from functools import cache

from reference import api, commands, configuration, papers
from reference.places import REFERENCE


@cache
def pages() -> dict[str, str]:
    """Returns the text of each generated page, by its path in the repository."""
    written = {
        **{f"configuration/{name}.md": text for name, text in configuration.pages().items()},
        "commands.md": commands.page(),
        **{f"api/{name}.md": text for name, text in api.pages().items()},
        "papers.md": papers.page(),
    }
    return {f"{REFERENCE}/{path}": text for path, text in written.items()}


def navigation() -> list[dict[str, object]]:
    """Returns the entries of the generated pages in the navigation of the site, by title."""
    return [
        {"Configuration": [{title: f"{REFERENCE}/configuration/{name}.md"} for name, title in configuration.titles()]},
        {"Commands": f"{REFERENCE}/commands.md"},
        {"API": [{title: f"{REFERENCE}/api/{name}.md"} for name, title in api.titles()]},
        {"Papers": f"{REFERENCE}/papers.md"},
    ]
