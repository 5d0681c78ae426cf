"""The plans of docs/multi_gpu.md are those of tools/plan_sizes.py, which are those of `grpo plan`."""

import json
from pathlib import Path

import pytest
from helpers.command import Grpo
from helpers.loading import load_tool
from helpers.paths import ROOT
from helpers.tiny import tokenizer

tool = load_tool("plan_sizes")
PAGE = (ROOT / "docs" / "multi_gpu.md").read_text(encoding="utf-8")
ROWS = PAGE.partition("<!-- plans -->\n")[2].partition("<!-- /plans -->")[0]


def test_the_page_has_every_plan() -> None:
    cells = [[cell.strip() for cell in row.split("|")[1:3]] for row in ROWS.splitlines()[2:]]
    assert cells == [[size, str(gpus)] for size in tool.SIZES for gpus in tool.GPUS]


@pytest.mark.parametrize(("size", "billions"), [("0.5B", 0.49), ("1.5B", 1.54), ("7B", 7.62), ("32B", 32.76)])
def test_the_shapes_are_those_of_the_models(size: str, billions: float) -> None:
    assert sum(one.numel() for one in tool.plan_of(size).fake.parameters()) / 1e9 == pytest.approx(billions, abs=0.006)


def test_a_plan_is_what_grpo_plan_prints(grpo: Grpo, tmp_path: Path) -> None:
    """The first row of the page, and the command line."""
    setup, peak = tool.SETUPS[0], ROWS.splitlines()[2].split("|")[4].strip()
    assert str(tool.Choice("0.5B", 1, setup, float(peak.split()[0]) * 2**30, "updating")) == ROWS.splitlines()[2]
    folder = tmp_path / "policy"
    config = tool.config_of("0.5B").to_dict() | {"model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(folder)
    settings = setup.options | {
        "trainer.accelerator": "gpu",
        "trainer.devices": 1,
        "loop.prompts_per_step": tool.PROMPTS,
        "loop.group_size": tool.GROUP,
        "model.sampling.max_new_tokens": tool.NEW_TOKENS,
        "prompt_tokens": tool.PROMPT_TOKENS,
        "memory_gib": tool.MEMORY_GIB,
        "trainer.limit_val_batches": 0,
    }
    code, out, errors = grpo("plan", *[f"--{key}={value}" for key, value in settings.items()])
    assert code == 0, errors
    assert f"the peak is {peak}, updating: it fits {tool.MEMORY_GIB}.00 GiB" in out


@pytest.mark.slow
def test_the_whole_table_is_as_it_was_written() -> None:
    assert tool.table() == ROWS
