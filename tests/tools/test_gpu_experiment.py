"""experiments/gpu on a CPU: its limits, its rows, and what it prints without a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers.experiment import imported
from helpers.paths import ROOT

SIZES = ["--prompt-tokens", "8", "--new-tokens", "6", "--prompts", "2", "--group-size", "2", "--trl-rows", "2"]


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    with imported("versus_trl", "roofline", "gpu") as modules:
        yield modules


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(parts: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match=r"^no CUDA device here: nothing to measure.*[^\n]$"):
        parts.gpu.main([])


def test_limits_of_an_h100_are_those_of_the_readme(parts: SimpleNamespace) -> None:
    options = parts.gpu.parse([])
    text = (ROOT / "experiments" / "gpu" / "README.md").read_text(encoding="utf-8")
    for shape in options.shape:
        model = parts.counts.Model.from_config(parts.gpu.config_of(shape))
        for tokens in options.prompt_tokens:
            race = parts.gpu.race_of(options, tokens)
            limits = parts.gpu.limits_of(race, model, 989e12, 3.35e12)
            rate = round(race.rows * race.new_tokens / limits["sampling"], -3)
            cells = [f"{shape}, {race.name.removesuffix(', bf16')}", f"{limits['sampling']:.2f}", f"{rate:,.0f}"]
            line = " | ".join([*cells, f"{limits['update']:.2f}"])
            assert f"| {line} |" in text


def test_a_row_with_what_was_reached_and_one_of_a_side_that_failed(parts: SimpleNamespace) -> None:
    race = parts.gpu.race_of(parts.gpu.parse([*SIZES, "--steps", "1"]), 8)
    limits = {"sampling": 0.5, "update": 1.0, "operations": 6e12}
    phases = {"sampling": 2.0, "forward and backward": 3.0, "optimizer": 1.0}
    found = {"seconds": [7.0, 6.0, 8.0], "phases": phases, "tokens": [4 * 14], "peak_gpu": 3 * 2**30}
    # 24 tokens in 2 s; 6 of 10 TFLOP/s x 4 s.
    row = parts.gpu.row_of("a side", race, limits, 10e12, found)
    assert row == ["a side", "7.00", "2.00", "12", "25 %", "4.00", "15 %", "3.0", ""]
    assert parts.gpu.row_of("a side", race, limits, 10e12, found | {"tokens": [55]})[-1] == "tokens per step: [55]"
    failed = parts.gpu.row_of("a side", race, limits, 10e12, "OutOfMemoryError: a | b")
    assert (failed[0], failed[1], failed[-1], len(failed)) == ("a side", "–", "OutOfMemoryError: a / b", len(row))
