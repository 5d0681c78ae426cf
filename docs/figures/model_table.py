"""Writes docs/reference/models.md: which architectures of transformers can be trained, and which engine decodes them.

    python docs/figures/model_table.py

Each is a tiny random model, saved, loaded and compared as tests/plugins/engines/native/test_models.py does. It takes a
minute or two.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "reference" / "models.md"

HEAD = """# Which architectures work

For each architecture, a tiny random model was saved, loaded as a user loads it, and compared with plain forwards of an
independent copy (`tests/plugins/engines/native/test_models.py`; transformers {version}, float32). "yes" means that
log-probs, gradients and completions agree to rounding. [Does my model work?](../how_to/models.md) shows how to try
another model.

- **trains**: the policy's log-probs and gradients are right, in whole rows and with shared prefixes.
- **shared prefix**: a group's prompt goes through the model once.
- **NativeEngine**: the default engine samples from it.
- **PlainEngine**: `--model.engine PlainEngine` samples from it.

| architecture | class | trains | attention | shared prefix | NativeEngine | PlainEngine |
|---|---|---|---|---|---|---|
"""

FOOT = """
This page is written by `python docs/figures/model_table.py` in a clone; a test compares it with what the tests find.
"""


def row(finding: Any) -> str:
    """A line of the table."""
    if finding.refused:
        cells = [reason(finding.refused), "", "", "", ""]
    else:
        cells = [
            "yes",
            finding.attention,
            "yes" if finding.shares_prefix else "no",
            reason(finding.native) or "yes",
            reason(finding.plain) or "yes",
        ]
    return f"| {' | '.join([finding.family, finding.name, *cells])} |"


def reason(refusal: str) -> str:
    """The reason in a refusal, without figures that differ between machines."""
    if not refusal:
        return ""
    bracketed = re.search(r"cannot decode \w+ \((.*)\): use", refusal)
    text = bracketed.group(1) if bracketed else refusal.split("; use another model")[0]
    text = re.sub(r"^policy\.path=PATH: \w+ ", "it ", text)
    if text[:1].isupper():  # an exception of the model's own
        text = "its forward raises an error there"
    return "no: " + re.sub(r" by [\d.e+-]+$", "", text)


def main() -> None:
    """The command line."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from helpers.architectures import examine
    from helpers.families import FAMILIES

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    findings = [examine(family) for family in sorted(FAMILIES)]
    for finding in findings:
        print(row(finding), *finding.errors, sep="\n  ")
    if any(finding.errors for finding in findings):
        sys.exit("wrong numbers or raw exceptions: the page is not written")
    lines = [row(finding) for finding in findings]
    head = HEAD.format(version=transformers.__version__)
    TABLE.write_text(head + "\n".join(lines) + "\n" + FOOT, encoding="utf-8")


if __name__ == "__main__":
    main()
