"""Takes docs/carry.png: a carry before training and after, from the page of the quickstart's run, with Chromium.

python docs/figures/carry.py runs/quickstart [--out docs/carry.png]

The prompt is the first whose greedy answer is wrong before training and right at the last recorded step. The token is
the first in which the two answers differ: `=` where the carry is forgotten, `+` where it is written.
"""

import argparse
import html
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import screenshots
from PIL import Image

from grpo_lightning.plugins.looking.inspector.inspector_page import write
from grpo_lightning.plugins.looking.inspector.record import CompletionRecord, GroupRecord, StepRecord, read

PAGE_SIZE = (1366, 520)
CROP = (304, 44, 1366, 464)
"""Left, top, right and bottom of what is kept of each page: the completions, and the card of the token."""
CAPTION_HEIGHT = 44
SCALE = 1.5
STYLE = """
body { margin: 0; font: 17px system-ui, sans-serif; background: #fff; color: #1b1f24 }
p { margin: 0; height: HEIGHTpx; line-height: HEIGHTpx; padding-left: 18px }
code { font-size: 16px; background: #ecebf2; border-radius: 4px; padding: 2px 5px }
div { background-repeat: no-repeat }
"""


@dataclass(frozen=True)
class Moment:
    """A validation prompt at one step, and the index of the token to show."""

    record: StepRecord
    group_index: int
    token_index: int

    @property
    def group(self) -> GroupRecord:
        """The prompt with its completions."""
        return self.record.groups[self.group_index]

    @property
    def view(self) -> dict[str, object]:
        """What the page shows."""
        token = f"0.{self.token_index}"
        return {"step": self.record.step, "group": self.group_index, "token": token, "colour": "probability"}

    @property
    def caption(self) -> str:
        """When this is, and what the policy writes at the token."""
        tokens = self.group.completions[0].tokens
        assert tokens.after_logp is not None
        written = html.escape("".join(tokens.pieces[: self.token_index]).rpartition(" ")[2])
        token = tokens.pieces[self.token_index]
        when = "Before training" if self.record.step == 0 else f"After {self.record.step} steps"
        percent = f"{100 * math.exp(float(tokens.after_logp[self.token_index])):.1f} %"
        what = "writes the carry" if token == "+" else "forgets the carry"
        return f"{when} the policy {what}: <code>{written}</code> is followed by <code>{token}</code> ({percent})"


def greedy_answers(record: StepRecord) -> dict[int, tuple[int, CompletionRecord]]:
    """By prompt: the group's index and the greedy completion, which comes first."""
    groups = enumerate(record.groups)
    return {group.prompt_id: (index, group.completions[0]) for index, group in groups if group.kind == "validation"}


def before_and_after(records: Sequence[StepRecord]) -> tuple[Moment, Moment]:
    """The two moments to show."""
    first, last = records[0], records[-1]
    before, after = greedy_answers(first), greedy_answers(last)
    for prompt_id in before.keys() & after.keys():
        (index_before, wrong), (index_after, right) = before[prompt_id], after[prompt_id]
        if right.right and not wrong.right:
            pairs = zip(wrong.tokens.pieces, right.tokens.pieces, strict=False)
            token_index = next(index for index, (old, new) in enumerate(pairs) if old != new)
            return Moment(first, index_before, token_index), Moment(last, index_after, token_index)
    sys.exit("carry: no recorded prompt is wrong before training and right after it")


def main(args: Sequence[str] | None = None) -> None:
    """Takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run with records")
    parser.add_argument("--out", type=Path, default=Path("docs/carry.png"), help="where the picture goes")
    options = parser.parse_args(args)
    left, top, right, bottom = CROP
    width, height = right - left, bottom - top
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        page = folder / "page.html"
        write(options.run, page)
        blocks = [f"<meta charset=utf-8><style>{STYLE.replace('HEIGHT', str(CAPTION_HEIGHT))}</style>"]
        for number, moment in enumerate(before_and_after(read(options.run))):
            picture = folder / f"{number}.png"
            screenshots.shoot(page, moment.view, picture, PAGE_SIZE, SCALE)
            image = f"background-image: url({picture.name}); background-size: {PAGE_SIZE[0]}px"
            place = f"background-position: -{left}px -{top}px; width: {width}px; height: {height}px"
            blocks.append(f"<p>{moment.caption}</p><div style='{image}; {place}'></div>")
        both = folder / "both.html"
        both.write_text("\n".join(blocks), encoding="utf-8")
        screenshots.shoot(both, {}, options.out.resolve(), (width, 2 * (height + CAPTION_HEIGHT)), SCALE)
        # A palette: a third of the bytes.
        Image.open(options.out).convert("RGB").quantize(256).save(options.out, optimize=True)
    print(options.out)


if __name__ == "__main__":
    main()
