"""An adapter on several ranks, replicated and sharded: the numbers of one process, and checkpoints that move."""

from pathlib import Path

import pytest
import torch
from helpers.command import furnish
from helpers.fast import adapted, policy_of
from helpers.fitting import same, scalars, weights_of
from helpers.tiny import rollouts_of
from test_sharding import FSDP2, KEEPS, OPTIONS, assert_close, finish, is_sharded
from torch.distributed.device_mesh import DeviceMesh

from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy

ADAPTER = [
    "--model.policy.adapter=LoRA",
    "--model.policy.adapter.rank=4",
    "--model.optimizer.lr=0.01",
    "--seed_everything=3",
]
MOVING = [option for option in [*OPTIONS, *ADAPTER, *KEEPS] if "Shares" not in option]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in one process and in two; and the second again, in two."""
    folder = tmp_path_factory.mktemp("adapters")
    furnish(folder, {"1" * row: row for row in range(1, 10)}, scale=0.05)
    finish({"one": MOVING, "two": [*MOVING, *FSDP2]}, folder, of=[])
    on = f"--ckpt_path={folder / 'two' / 'checkpoints' / 'step-1.ckpt'}"
    finish({"resumed": [*MOVING, *FSDP2, on]}, folder, of=[])
    return folder


def test_two_ranks_log_what_one_logs(runs: Path) -> None:
    found = scalars(runs / "one")
    assert list(found["optim/grad_norm"]) == [0, 1] and max(found["policy/kl_ref"].values()) > 1e-5
    assert max(found["policy/logp_gap"].values()) < 1e-5
    assert_close(scalars(runs / "two"), found, 1e-5)


def test_a_run_that_was_cut_goes_on_exactly(runs: Path) -> None:
    assert same(runs / "two", runs / "resumed")
    names = weights_of(runs / "two").keys()
    assert names == weights_of(runs / "one").keys() and not any("base_layer" in name for name in names)
    assert any(name.startswith("reference.") for name in names)


def test_a_sharded_policy_computes_the_same_and_its_reference_too(mesh: DeviceMesh, shape: str) -> None:
    rollouts, found = rollouts_of([4, 9, 1]), []
    for sharded in (False, True):
        policy, copy, off = adapted(shape), FrozenCopy(), AdapterOff()
        copy.refresh(policy)
        if sharded:
            policy.shard(mesh)
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
