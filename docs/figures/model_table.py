"""Writes docs/how_to/models.md: which architectures of transformers can be trained, and which engine decodes them.

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
TABLE = ROOT / "docs" / "how_to" / "models.md"

HEAD = """# Models

Any causal LM that transformers loads can be tried: what does not work is refused in a sentence before a run begins.
For each architecture below, a tiny random model was saved, loaded as a user loads it, and its log-probs, gradients and
completions were compared with plain forwards of an independent copy
(`tests/plugins/engines/native/test_models.py`; transformers {version}, float32). "yes" means that they agree to
rounding.

- **Trains**: the policy's log-probs and gradients are right, in whole rows and with shared prefixes.
- **Shared prefix**: a group's prompt goes through the model once.
- **NativeEngine** is the default and the faster with long prompts. `model.engine=PlainEngine` decodes what it cannot.

| architecture | class | trains | attention | shared prefix | NativeEngine | PlainEngine |
|---|---|---|---|---|---|---|
"""

FOOT = """
A refusal reads like this:

    {example}

What is not there, for any architecture:

- **Folders that hold only an adapter** of PEFT: merge it into its base first (`merge_and_unload` of PEFT). A run makes
  an adapter of its own with `model.policy.adapter`; see [adapters.md](adapters.md).
- **Sequences beyond the original length with `longrope` or `dynamic`** rotary positions: there transformers changes the
  frequencies of everything in a forward, so that a completion would depend on the completions beside it. The
  frequencies are fixed at those of the original length, which is where the context ends.
- **The router's auxiliary loss** of mixture-of-experts models: the objective alone is trained, and nothing balances the
  experts.

This page is written by `python docs/figures/model_table.py`; a test compares it with what the tests find.
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
    example = next(finding.native for finding in findings if finding.family == "bloom")
    lines = [row(finding) for finding in findings]
    head = HEAD.format(version=transformers.__version__)
    TABLE.write_text(head + "\n".join(lines) + "\n" + FOOT.format(example=example), encoding="utf-8")


if __name__ == "__main__":
    main()
