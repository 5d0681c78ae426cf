"""What the page's formulas make of a record, in node."""

import json
import math
import subprocess
from typing import Any

from grpo_lightning.inspect.record import StepRecord
from helpers.chromium import NODE
from helpers.paths import ROOT

ASSETS = ROOT / "grpo_lightning" / "inspect" / "assets"
DRIVER = """
const rows = JSON.parse(require("fs").readFileSync(0, "utf8"));
const step = decodeStep(rows.lines.map((line) => JSON.parse(line)));
const { objective } = step;
const numberOr = (value) => (Number.isFinite(value) ? value : String(value));
const completions = step.groups.filter(({ kind }) => kind === "train").flatMap((group) => group.completions);
const found = completions.map(({ tokens }) => tokens.drawn.map((t) => {
  const token = tokenOf(tokens, t);
  const at = objectiveAt(objective, token, tokens.update_logp[t]);
  const moved = rows.elsewhere.map((logp) => surrogateAt(objective.surrogate, token, logp));
  return {
    surrogate: at.surrogate, kl: at.kl, term: tokens.weight[t] * at.total, card: termsOf(objective, tokens, t).total,
    agrees: agrees(objective, token, tokens, t), moved,
    corners: cornersOf(objective.surrogate, token).map(({ logp }) => logp).filter(Number.isFinite),
  };
}));
const finite = (_, value) => (typeof value === "number" ? numberOr(value) : value);
console.log(JSON.stringify({ known: isKnown(objective), found }, finite));
"""
ELSEWHERE = [math.log(p) for p in (0.003, 0.05, 0.2, 0.5, 0.9, 1.0)]


def in_node(record: StepRecord, elsewhere: list[float] = ELSEWHERE) -> dict[str, Any]:
    """What the page's scripts make of a record: surrogate, KL and term of every drawn token."""
    assert NODE is not None
    scripts = [(ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in ("decode", "formulas", "dom")]
    card = (ASSETS / "card.js").read_text(encoding="utf-8")
    landscape = (ASSETS / "landscape.js").read_text(encoding="utf-8")
    program = "\n".join(["'use strict';", *scripts, landscape, card, DRIVER])
    given = json.dumps({"lines": record.lines(), "elsewhere": elsewhere})
    done = subprocess.run([NODE, "-e", program], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
