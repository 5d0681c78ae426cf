"""Fixtures shared by all tests. The helpers they stand on are in tiny.py."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.command import Grpo, arguments, furnish
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_lightning.cli import run
from grpo_lightning.engines import trial
from grpo_lightning.policy.policy import Policy

torch.set_num_threads(1)


WHOLE_RUN = {
    "fit",
    "fitted",
    "environment",
    "subprocess",
    "load_tool",
    "load_example",
    "ALGORITHMS",
    "needs_gsm8k",
    "examine",
    "attack_verifier",
    "GRPOCLI",
}
"""Names in a test module that makes whole runs, starts processes, or takes a while in one piece."""

LONG = {"test_engines", "test_function"}
"""Test modules of many tests that together take more than 10 seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `whole` what makes whole runs or starts processes: `make fast` leaves it out."""
    for item in items:
        if isinstance(item, pytest.Function):
            names = {*vars(item.module), *item.fixturenames}
            if names & WHOLE_RUN or {"command", "grpo"} & {*item.fixturenames} or item.path.stem in LONG:
                item.add_marker(pytest.mark.whole)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failed test at once: a run that is ended from outside never comes to its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed after {report.duration:.0f} s", file=sys.stderr, flush=True)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=tiny.SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    """Each of the architectures that every part has to work with."""
    return request.param


@pytest.fixture
def policy(shape: str) -> Policy:
    """A tiny random policy of each architecture."""
    return tiny.policy_of(shape)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy as a user has one: a folder."""
    folder = tmp_path_factory.mktemp("saved") / "policy"
    tiny.policy_of().save_pretrained(folder)
    return folder


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A world of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Grpo:
    """Runs a command line in the working directory: exit code, stdout, stderr."""
    if (
        request.node.get_closest_marker("trial") is None
    ):  # a third of a small run; plugins/compute/fast/test_check.py tests it
        monkeypatch.setattr(trial, "fault", lambda *args, **kwargs: "")
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def command(subcommand: str, *options: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            run(arguments(subcommand, *options))
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return Grpo(command)


@pytest.fixture
def grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Grpo) -> Grpo:
    """`command` in a folder of its own, with a tiny policy and eight questions."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return command
