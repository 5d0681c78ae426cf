"""The page on verl's options names options and classes that exist here."""

import re

from helpers.paths import ROOT
from reference import configuration

import grpo_lightning

TEXT = (ROOT / "docs/reference/verl.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| `")]
HERE = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])]
SECTIONS = ("model.", "loop.", "data.", "trainer.", "checkpoint.", "completions.", "inspect.")
OF_TORCH = {"model.optimizer.lr", "model.optimizer.weight_decay", "model.optimizer.betas"}


def test_every_key_here_exists() -> None:
    keys = {*configuration.keys()}
    arguments = {key.rpartition(".")[2] for key in keys if key[0].isupper()}
    named = {name.rstrip("+") for name in HERE if name.startswith(SECTIONS)} - OF_TORCH
    # An argument of a class stands below the key that takes the class.
    unknown = {
        key
        for key in named - keys
        if not (key.rpartition(".")[0] in keys | {"model.lr_scheduler"} and key.rpartition(".")[2] in arguments)
    }
    assert len(named) > 50 and unknown == set()


def test_every_class_here_exists() -> None:
    names = {name for name in HERE if re.fullmatch(r"[A-Z][A-Za-z0-9]+", name)} - {"FILE", "WandbLogger"}
    assert len(names) > 20 and names <= {*grpo_lightning.__all__}


def test_a_row_has_two_cells_and_stands_once() -> None:
    assert len(ROWS) > 60 and {len(row) for row in ROWS} == {2}
    verl_cells = [row[0] for row in ROWS]
    assert len({*verl_cells}) == len(verl_cells)
