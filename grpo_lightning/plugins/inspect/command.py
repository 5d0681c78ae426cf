"""`grpo inspect`: writes the page of a run. It imports neither torch nor Lightning, so it starts at once."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.plugins.inspect.output import check_out
from grpo_lightning.types import UsageError, at_least

PAGE = "inspect.html"
"""The page's name in the run's folder."""


def parser() -> argparse.ArgumentParser:
    """The options of `grpo inspect`."""
    made = argparse.ArgumentParser(
        prog="grpo inspect",
        description="Writes one HTML file that shows what a run's updates did to each token. Open it in any browser; "
        "it needs no server and no network.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    made.add_argument("-o", "--out", type=Path, metavar="FILE", help=f"the page, .html (default: RUN/{PAGE})")
    made.add_argument("--compare", type=Path, metavar="RUN2", help="a second run, to see the same prompts side by side")
    made.add_argument(
        "--max_mb",
        type=float,
        default=25.0,
        metavar="MB",
        help="most megabytes of records; beyond it steps are left out, evenly (default: 25)",
    )
    return made


def main(args: Sequence[str] | None = None) -> int:
    """Writes the page and prints where it is; returns the exit code, 2 for the user's mistakes."""
    given = parser().parse_args(args)
    out = given.out or given.run / PAGE
    try:
        at_least("max_mb", given.max_mb, 0)
        check_out(out, PAGE)
        # tensorboard takes a second to import, which --help need not wait for.
        from grpo_lightning.plugins.inspect.page import write

        notes = write(given.run, out, given.compare, given.max_mb)
    except UsageError as error:
        print(f"grpo: error: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(note)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0
