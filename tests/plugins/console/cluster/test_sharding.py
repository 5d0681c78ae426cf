"""Weights sharded over ranks (FSDP2): the same numbers as one process, through the command line."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.command import LEARNS, Grpo, arguments, furnish
from helpers.fast import policy_of
from helpers.fitting import same, scalars, weights_of
from helpers.programs import succeed
from helpers.tiny import rollouts_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from grpo_lightning import Policy, UsageError
from grpo_lightning.policy.sharding import data_mesh

OPTIONS = [
    *LEARNS,
    "--trainer.max_epochs=2",
    "--trainer.check_val_every_n_epoch=2",
    "--trainer.callbacks+=helpers.fitting.Shares",
    "--model.reference=MovingAverage",
    "--model.lr_scheduler=torch.optim.lr_scheduler.LinearLR",
    "--loop.steps_per_iteration=1",
]
TWO = ["--trainer.devices=2"]
FSDP2 = [*TWO, "--trainer.strategy=fsdp2"]
LIGHTNINGS = [
    *TWO,
    "--trainer.strategy=ModelParallelStrategy",
    "--trainer.strategy.data_parallel_size=2",
    "--trainer.strategy.tensor_parallel_size=1",
]
KEEPS = ["--checkpoint.every_n_steps=1", "--checkpoint.keep=-1"]
LETTERS = '{"class_path": "FormatReward", "init_args": {"pattern": ".*[a-m]+.*", "weight": %d}}'
LEARNED = (
    '{"class_path": "LearnedReward", "init_args": {"path": "policy", "grader": %s, "replay": {"held_out": 0.3}, '
    '"update": {"lr": 0.01, "min_gain": -1, "max_forgetting": 1}}}'
)
REWARDS = f"--model.rewards=[{LETTERS % 1}, {LEARNED % (LETTERS % 1)}]"
"""The second of two is learned."""


def finish(runs: dict[str, list[str]], folder: Path, of: list[str] = OPTIONS, anew: bool = False) -> None:
    """Fits each run in its folder, all at the same time, with the options `of` and its own."""
    commands = {
        name: arguments("fit", f"--trainer.default_root_dir={name}", *of, *options) for name, options in runs.items()
    }
    succeed(commands, folder, anew=anew)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in one process and in two; and the second again, in various ways."""
    folder = tmp_path_factory.mktemp("sharding")
    furnish(folder, {"1" * row: row for row in range(1, 10)}, scale=0.05)
    finish({"two": [*FSDP2, *KEEPS, REWARDS]}, folder, anew=True)
    finish({"one": [REWARDS, *KEEPS], "lightnings": [*LIGHTNINGS, REWARDS, "--trainer.max_epochs=1"]}, folder)
    on, spread = (f"--ckpt_path={folder / name / 'checkpoints' / 'step-1.ckpt'}" for name in ("two", "one"))
    lightnings = [*LIGHTNINGS, REWARDS, "--ckpt_path=last"]
    more = {"resumed": [*FSDP2, REWARDS, on], "moved": [REWARDS, on], "spread": [*FSDP2, REWARDS, spread]}
    finish({**more, "lightnings": lightnings}, folder)
    return folder


def assert_close(found: dict[str, dict[int, float]], expected: dict[str, dict[int, float]], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=tolerance, abs=tolerance, nan_ok=True), name


def test_two_ranks_log_what_one_logs(runs: Path) -> None:
    one, two = scalars(runs / "one"), scalars(runs / "two")
    assert list(one["optim/grad_norm"]) == [0, 1] and list(one["val/reward"]) == [-1, 1]
    assert max(one["policy/kl_ref"].values()) > 1e-5
    assert max(one["reward/learned_reward/version"].values()) > 1
    assert_close(two, one, 1e-4)


def test_each_rank_holds_half(runs: Path) -> None:
    one = [int(count) for count in (runs / "one" / "share-0.txt").read_text().split()]
    assert one[0] == one[1] == one[2] == one[3]
    for rank in (0, 1):
        held, whole, reference_held, reference_whole = map(
            int, (runs / "two" / f"share-{rank}.txt").read_text().split()
        )
        assert whole == reference_whole == one[0]
        assert held == reference_held == whole / 2


def test_a_run_that_was_cut_goes_on_exactly(runs: Path) -> None:
    assert same(runs / "two", runs / "resumed")
    late, found = scalars(runs / "two"), scalars(runs / "resumed")
    for name in ("optim/grad_norm", "optim/lr", "policy/objective", "policy/kl_ref"):
        assert found[name] == {1: late[name][1]}


@pytest.mark.parametrize("name", ["moved", "spread"])
def test_a_checkpoint_is_that_of_one_process_and_goes_on_there_and_on_two(runs: Path, name: str) -> None:
    one, moved = weights_of(runs / "one"), weights_of(runs / name)
    assert one.keys() == moved.keys()
    assert all(torch.allclose(moved[key], value, rtol=1e-4, atol=1e-5) for key, value in one.items())


def test_lightnings_own_strategy_gives_the_same_and_resumes(runs: Path) -> None:
    found, expected = scalars(runs / "lightnings"), scalars(runs / "two")
    # It ended once before, and the last step of a run is recorded and validated.
    for name in [name for name in found if name.startswith("update/") or "val" in name.replace("/", " ").split()]:
        found[name] = {update: found[name][update] for update in expected[name]}
    assert_close(found, expected, 0.0)


def test_lightnings_own_checkpoint_is_refused_elsewhere(
    runs: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    checkpoint = runs / "lightnings" / "checkpoints" / "last.ckpt"
    assert checkpoint.is_dir()
    errors = command.mistake("validate", f"--ckpt_path={checkpoint}")
    assert "ModelParallelStrategy" in errors and "fsdp2" in errors


def test_tensor_parallelism_is_refused() -> None:
    mesh = {"tensor_parallel": SimpleNamespace(size=lambda: 2)}
    with pytest.raises(UsageError, match=r"tensor_parallel_size=2.*fsdp2"):
        data_mesh(mesh)


def is_sharded(policy: Policy) -> bool:
    kinds = {isinstance(parameter, DTensor) for parameter in policy.parameters()}
    assert len(kinds) == 1
    return kinds.pop()


@pytest.mark.parametrize("inference", [True, False])
def test_gathered_weights_can_be_used_and_then_trained(mesh: DeviceMesh, shape: str, inference: bool) -> None:
    plain, policy = policy_of(shape), policy_of(shape)
    policy.shard(mesh)
    assert is_sharded(policy)
    prompt = rollouts_of([2]).prompt_token_ids[None]
    with torch.inference_mode(inference), torch.no_grad(), policy.gathered():
        assert not is_sharded(policy)
        assert policy.logits(policy.hidden(prompt)).equal(plain.logits(plain.hidden(prompt)))
    assert is_sharded(policy)
    rollouts, found = rollouts_of([4, 9, 1]), []
    for model in (plain, policy):
        model(rollouts).logp.sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert is_sharded(policy)
    assert all(torch.allclose(b.full_tensor(), a, rtol=1e-5, atol=1e-5) for a, b in zip(*found, strict=True))


def test_an_engine_that_fails_leaves_the_policy_sharded(mesh: DeviceMesh) -> None:
    policy = policy_of()
    policy.shard(mesh)
    with pytest.raises(RuntimeError, match="engine"), policy.gathered():
        raise RuntimeError("engine")
    assert is_sharded(policy)
    assert any("fsdp" in hook.__module__ for hook in policy._forward_pre_hooks.values())
