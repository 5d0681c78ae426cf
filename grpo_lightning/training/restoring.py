"""The weights in a checkpoint, brought into line with a module that may have other options than the one that saved."""

from collections.abc import Mapping
from typing import Any

from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import UsageError


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
        here, there = (str(list(by_name[differ[0]])) if differ[0] in by_name else "missing" for by_name in shapes)
        raise UsageError(
            f"ckpt_path={checkpoint}: it is of another model than policy.path={path}: "
            f"{differ[0].removeprefix('policy.model.')} is {there} in the checkpoint and {here} in the model "
            f"({len(differ)} of {len(names)} weights differ)"
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
