"""Nothing that runs attention leaves its kernel to a default that depends on the card."""

import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT, environment

IMPORTS = """
import importlib, sys, torch
for name in sys.argv[1:]:
    for module in [module for module in sys.modules if module.startswith("grpo_lightning")]:
        del sys.modules[module]
    torch.backends.cuda.enable_cudnn_sdp(True)
    getattr(importlib.import_module("grpo_lightning"), name)
    print(name, torch.backends.cuda.cudnn_sdp_enabled())
"""

OTHER_SIDE = """
import sys, types, torch
from pathlib import Path
import sides
from race import Race

class Trainer:
    def __init__(self, **options):
        print("TRL", torch.backends.cuda.cudnn_sdp_enabled())
        sys.exit()

rows = types.SimpleNamespace(from_list=list)
sys.modules["datasets"] = types.SimpleNamespace(Dataset=rows)
sys.modules["trl"] = types.SimpleNamespace(GRPOConfig=dict, GRPOTrainer=Trainer)
torch.backends.cuda.enable_cudnn_sdp(True)
race = Race(8, 4, 4, 2, warm_up=1, steps=1, max_tokens=64, trl_rows=8)
sides.prompts_file(Path("."), race).write_text("")
sides.run_trl(Path("."), race)
"""


def lines_of(program: str, *args: str, folder: Path = ROOT) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=folder,
        env=environment(ROOT / "experiments" / "versus_trl"),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


def test_cudnn_attention_is_off_where_attention_runs() -> None:
    names = ["Compute", "PlainEngine", "Policy", "Fast", "NativeEngine"]
    assert lines_of(IMPORTS, *names) == [f"{name} False" for name in names]


def test_cudnn_attention_is_off_on_the_other_side_of_the_race(tmp_path: Path) -> None:
    assert lines_of(OTHER_SIDE, folder=tmp_path) == ["TRL False"]
