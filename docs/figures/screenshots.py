"""Takes the pictures of docs/how_to/inspect.md from a run's page, with Chromium.

python docs/figures/screenshots.py runs/quickstart [--compare runs/RUN2] [--out docs]

inspect.png           a group of the step whose rewards differ most, and the card of one of its tokens
inspect_follow.png    a validation prompt over the run
inspect_compare.png   the same prompt in two runs, with --compare
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from grpo_lightning.plugins.looking.inspector.inspector_page import write
from grpo_lightning.plugins.looking.inspector.record import GroupRecord, StepRecord, TokenRecord, read

SIZE = (1366, 768)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str:
    """The path of Chromium; without one the program ends."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or sys.exit(f"screenshots: none of {', '.join(NAMES)} is installed")


def views(records: Sequence[StepRecord], compares: bool) -> dict[str, dict[str, object]]:
    """The name of each picture and what the page shows in it."""
    record, index = liveliest(records)
    shown: dict[str, object] = {"step": record.step, "group": index, "token": telling_token(record.groups[index])}
    found = {"inspect": shown}
    prompt = changing_prompt(records)
    if prompt is not None:
        found["inspect_follow"] = {"view": "follow", "prompt": prompt, "colour": "probability"}
    if compares:
        # The first step behind the start: later ones have little left to tell apart.
        record = records[min(1, len(records) - 1)]
        followed = [number for number, group in enumerate(record.groups) if group.kind == "validation"]
        shown = {"step": record.step, "group": (followed or [0])[0], "colour": "probability"}
        found["inspect_compare"] = {"view": "compare"} | shown
    return found


def liveliest(records: Sequence[StepRecord]) -> tuple[StepRecord, int]:
    """The step and the index of the training group in it whose rewards differ most; of equals the later step's."""
    groups = [
        (group.std or 0.0, record.step, record, index)
        for record in records
        for index, group in enumerate(record.groups)
        if group.kind == "train"
    ]
    if not groups:
        sys.exit("screenshots: no training group was recorded")
    _, _, record, index = max(groups, key=lambda one: one[:2])
    return record, index


def changing_prompt(records: Sequence[StepRecord]) -> int | None:
    """The followed prompt whose answers differ most over the steps; None if none was recorded."""
    answers: dict[int, set[str]] = {}
    for group in (group for record in records for group in record.groups if group.kind == "validation"):
        answers.setdefault(group.prompt_id, set()).update(completion.text for completion in group.completions)
    return max(answers, key=lambda prompt: len(answers[prompt]), default=None)


def telling_token(group: GroupRecord) -> str:
    """The token that moved most of those that are neither almost sure nor almost impossible: `completion.token`."""
    found = [
        (change(completion.tokens, index), f"{number}.{index}")
        for number, completion in enumerate(group.completions)
        for index in range(len(completion.tokens))
    ]
    return max(found)[1]


def change(tokens: TokenRecord, index: int) -> float:
    """|Δ log p|; -1 for a token with a probability below 0.1 or above 0.9, or without one."""
    if tokens.old_logp is None or tokens.after_logp is None:
        return -1.0
    old, after = float(tokens.old_logp[index]), float(tokens.after_logp[index])
    return abs(after - old) if 0.1 < math.exp(old) < 0.9 else -1.0


def shoot(page: Path, view: dict[str, object], picture: Path, size: tuple[int, int] = SIZE, scale: float = 1) -> None:
    """Takes one picture of the page, `scale` pixels for each of `size`."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += [
            f"--window-size={size[0]},{size[1]}",
            f"--force-device-scale-factor={scale}",
            "--virtual-time-budget=3000",
            f"--screenshot={picture}",
        ]
        address = f"{page.resolve().as_uri()}#{urlencode(view | {'theme': 'light'})}"
        done = subprocess.run([browser(), *options, address], capture_output=True, text=True, check=False)
    if done.returncode or not picture.exists():
        sys.exit(f"screenshots: Chromium failed: {done.stderr[-1000:]}")


def main(args: Sequence[str] | None = None) -> None:
    """Takes all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run with records")
    parser.add_argument("--compare", type=Path, help="that of a second run")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the pictures go")
    given = parser.parse_args(args)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write(given.run, page, given.compare)
        for name, view in views(read(given.run), given.compare is not None).items():
            shoot(page, view, (given.out / f"{name}.png").resolve())
            print(given.out / f"{name}.png")


if __name__ == "__main__":
    main()
