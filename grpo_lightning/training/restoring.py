"""The weights in a checkpoint, brought into line with a module that may have other options than the one that saved."""

from collections.abc import Mapping
from typing import Any

from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import UsageError


def refuse_half_a_step(checkpoint: Mapping[str, Any], path: Any) -> None:
    """Raises UsageError for a checkpoint that was saved in the middle of a step, whose completions are gone."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    if progress["started"] != progress["processed"]:
        raise UsageError(
            f"ckpt_path={path}: it was saved in the middle of step {progress['started']}, from where no run can go on. "
            "Continue from a checkpoint of the end of a step, such as last.ckpt; `grpo validate` and `grpo export` "
            "read this one too"
        )


def refuse_other_model(saved: Mapping[str, Any], own: Mapping[str, Any], checkpoint: Any, path: str) -> None:
    """Raises UsageError for a checkpoint of another model.

    Args:
        saved: The weights in the checkpoint, by name.
        own: Those of the module.
        checkpoint: Where the checkpoint is.
        path: Where the policy's weights are.
    """
    shapes = [
        {name: tuple(value.shape) for name, value in state.items() if name.startswith("policy.")}
        for state in (own, saved)
    ]
    names = shapes[0] | shapes[1]
    differ = [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
    if differ:
        adapted = ["an adapter" if any(".lora_" in name for name in names) else "all weights" for names in shapes]
        if adapted[0] != adapted[1]:
            raise UsageError(
                f"ckpt_path={checkpoint}: it is of a run that trained {adapted[1]}, and this one trains {adapted[0]}. "
                "Give model.policy.adapter as that run had it; to train further in another way, make a folder of it "
                "with `grpo export` and give that as model.policy.path"
            )
        here, there = (str(list(by_name[differ[0]])) if differ[0] in by_name else "missing" for by_name in shapes)
        raise UsageError(
            f"ckpt_path={checkpoint}: it is of another model than policy.path={path}: "
            f"{differ[0].removeprefix('policy.model.')} is {there} in the checkpoint and {here} in the model "
            f"({len(differ)} of {len(names)} weights differ)"
        )


def refuse_other_base(checkpoint: Mapping[str, Any], base: str, where: Any, path: str) -> None:
    """Raises UsageError for a checkpoint whose adapter was trained on other weights than these.

    Args:
        checkpoint: With an adapter it has trained tensors only.
        base: The fingerprint of the weights beneath the adapter here; empty without an adapter.
        where: Where the checkpoint is.
        path: Where the policy's weights are.
    """
    if base and checkpoint.get("base") not in (None, base):
        raise UsageError(
            f"ckpt_path={where}: its adapter was trained on other weights than those of policy.path={path}. Give the "
            "model and the quantise that the run was started with"
        )


def fit_snapshots(saved: dict[str, Any], snapshots: Mapping[str, PolicySnapshot | None]) -> None:
    """Makes the snapshots in a checkpoint, by name, those that there are now.

    One that the checkpoint lacks starts as the policy in it; `reference` as the model in `policy.path`.
    """
    for part, snapshot in snapshots.items():
        own = {} if snapshot is None else snapshot.state_dict(prefix=f"{part}.")
        for name in [name for name in saved if name.startswith(f"{part}.") and name not in own]:
            del saved[name]
        for name in own.keys() - saved.keys():
            of_policy = saved.get(name.removeprefix(f"{part}."))
            saved[name] = own[name] if part == "reference" or of_policy is None else of_policy
