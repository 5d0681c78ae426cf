"""An adapter on several ranks, replicated and sharded: the numbers of one process, and checkpoints that move."""

from pathlib import Path

import pytest
import torch
from helpers.adapters import adapted
from helpers.fitting import scalars
from helpers.tiny import policy_of, rollouts_of
from test_sharding import FSDP2, OPTIONS, TWO, assert_close, finish, is_sharded
from torch.distributed.device_mesh import DeviceMesh

from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy
from grpo_lightning.policy.trained_copy import TrainedCopy

ADAPTER = [
    "--model.policy.adapter=LoRA",
    "--model.policy.adapter.rank=4",
    "--model.optimizer.lr=0.01",
    "--seed_everything=3",
]
MOVING = [option for option in [*OPTIONS, *ADAPTER] if "Shares" not in option]
OFF = [option for option in MOVING if "MovingAverage" not in option and "steps_per_iteration" not in option]
"""The reference is the adapter switched off."""
DDP = [*TWO, "--trainer.strategy=ddp"]
FOUR = ["--trainer.devices=4"]
HALF = "--trainer.max_epochs=2"
LAST = "--ckpt_path=last"


def prepare(folder: Path) -> None:
    policy_of(scale=0.05).save_pretrained(folder / "policy")
    rows = (f'{{"question": "{"1" * row}", "answer": "{row}"}}\n' for row in range(1, 10))
    (folder / "rows.jsonl").write_text("".join(rows))


def saved(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one process and in two; and two steps in two, continued in various ways."""
    folder = tmp_path_factory.mktemp("adapters")
    prepare(folder)
    finish({"one": MOVING, "two": [*MOVING, *FSDP2], "cut": [*MOVING, *FSDP2, HALF]}, folder, of=[])
    finish({"off": OFF, "off2": [*OFF, *FSDP2]}, folder, of=[])
    last = f"--ckpt_path={folder / 'cut' / 'checkpoints' / 'last.ckpt'}"
    finish({"resumed": [*MOVING, *FSDP2, last], "ddp": [*MOVING, *DDP, last], "alone": [*MOVING, last]}, folder, of=[])
    return folder


@pytest.mark.parametrize(("one", "two"), [("one", "two"), ("off", "off2")])
def test_two_ranks_log_what_one_logs(one: str, two: str, runs: Path) -> None:
    found = scalars(runs / one)
    assert list(found["optim/grad_norm"]) == [0, 1, 2, 3] and max(found["policy/kl_ref"].values()) > 1e-5
    assert max(found["policy/logp_gap"].values()) < 1e-5
    assert_close(scalars(runs / two), found, 1e-5)


def test_a_run_that_was_cut_goes_on_exactly(runs: Path) -> None:
    whole, resumed = saved(runs / "two"), saved(runs / "resumed")
    assert whole.keys() == resumed.keys() == saved(runs / "one").keys()
    assert not any("base_layer" in name for name in whole) and any(name.startswith("reference.") for name in whole)
    assert all(resumed[name].equal(value) for name, value in whole.items())


@pytest.mark.parametrize("name", ["ddp", "alone"])
def test_it_goes_on_in_another_way(name: str, runs: Path) -> None:
    late = {key: {s: v for s, v in values.items() if s >= 2} for key, values in scalars(runs / "one").items()}
    found = scalars(runs / name)
    for key in ("optim/grad_norm", "policy/objective", "policy/kl_ref", "reward/mean"):
        assert list(late[key]) == [2, 3]
        assert found[key] == pytest.approx(late[key], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_four_two_one_ranks(strategy: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    how = f"--trainer.strategy={strategy}"
    finish({"one": [*MOVING, "--trainer.max_epochs=3"]}, tmp_path, of=[])
    finish({"moves": [*MOVING, *FOUR, "--loop.num_minibatches=1", how, "--trainer.max_epochs=1"]}, tmp_path, of=[])
    finish({"moves": [*MOVING, *TWO, "--loop.num_minibatches=1", how, LAST, HALF]}, tmp_path, of=[])
    finish({"moves": [*MOVING, "--loop.num_minibatches=1", LAST, "--trainer.max_epochs=3"]}, tmp_path, of=[])
    finish({"alone": [*MOVING, "--loop.num_minibatches=1", "--trainer.max_epochs=3"]}, tmp_path, of=[])
    found, expected = scalars(tmp_path / "moves"), scalars(tmp_path / "alone")
    for key in ("optim/grad_norm", "policy/objective", "policy/kl_ref", "reward/mean"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5)


def test_a_sharded_policy_computes_the_same_and_its_reference_too(mesh: DeviceMesh, shape: str) -> None:
    rollouts, found = rollouts_of([4, 9, 1]), []
    for sharded in (False, True):
        policy, copy, off = adapted(shape), FrozenCopy(), AdapterOff()
        copy.refresh(policy)
        if sharded:
            policy.shard(mesh)
            assert isinstance(copy.policy, TrainedCopy)
            copy.policy.shard(mesh)
            assert is_sharded(policy) and is_sharded(copy.policy)  # type: ignore[arg-type]
        with torch.no_grad():
            policy(rollouts)  # leaves some weights gathered
        move_any(policy)
        with torch.no_grad():
            values = [policy(rollouts).logp, copy(policy, rollouts), off(policy, rollouts), policy(rollouts).logp]
            copy.refresh(policy)
            values.append(copy(policy, rollouts))
        policy(rollouts).logp.sum().backward()
        found.append(values)
    for alone, spread in zip(*found, strict=True):
        assert torch.allclose(alone, spread, atol=1e-6)
    first, copied, off_, last, refreshed = found[1]
    assert first.equal(last) and first.equal(refreshed) and not first.equal(copied) and not first.equal(off_)
    assert torch.allclose(off_, policy_of(shape)(rollouts).logp, atol=1e-6)


def move_any(policy: Policy) -> None:
    with torch.no_grad():
        for value in policy.trained_state_dict().values():
            value.mul_(1.3)
