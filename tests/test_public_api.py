"""The face: every public name is in `grpo_lightning`, and reading it costs nothing."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
import yaml
from helpers.command import Grpo
from helpers.contracts import members
from helpers.paths import environment

import grpo_lightning

FAMILIES = (  # noqa: SIM905
    "AdvantageEstimator Correction EntropyBonus Environment GroupFilter KLEstimator PolicySnapshot Reward RewardLoss "
    "RolloutEngine RolloutSource SegmentScorer Splitter StopRule Surrogate Task TokenMask TokenWeighting ToolFormat"
).split()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_member_of_a_family_is_public(name: str) -> None:
    own = members(getattr(grpo_lightning, name))
    assert {c.__name__ for c in own if not c.__name__.startswith("_")} <= set(grpo_lightning.__all__)


@pytest.mark.parametrize("name", grpo_lightning.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(grpo_lightning, name)
    assert value.__name__.rpartition(".")[2] == ("inspector" if name == "inspect" else name)
    first, *rest = str(inspect.getdoc(value)).split("\n")
    # The first line makes sense without the lines after it.
    assert first and (not inspect.isclass(value) or (first.endswith(".") and not "".join(rest[:1])))


def test_every_public_method_or_the_one_it_overrides_has_a_docstring() -> None:
    names = [module.name for module in pkgutil.walk_packages(grpo_lightning.__path__, "grpo_lightning.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    classes = {own for module in modules for own in vars(module).values() if inspect.isclass(own)}
    silent = [
        f"{own.__qualname__}.{name}"
        for own in classes
        if own.__module__.startswith("grpo_lightning.") and not own.__name__.startswith("_")
        for name, member in vars(own).items()
        if not name.startswith("_") and name not in getattr(own, "__dataclass_fields__", {})
        if isinstance(member, FunctionType | classmethod | staticmethod | property)
        if not inspect.getdoc(getattr(own, name))
    ]
    assert len(classes) > 200
    assert silent == []


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="'grpo_lightning' has no attribute 'GroupStdd'"):
        grpo_lightning.GroupStdd  # noqa: B018


def test_importing_the_face_imports_no_torch() -> None:
    code = (
        "import sys, grpo_lightning; assert not {'torch', 'lightning', 'transformers', 'sympy'} & {*sys.modules}; "
        "grpo_lightning.GRPOModule; from lightning.pytorch.strategies import StrategyRegistry; "
        "assert 'fsdp2' in StrategyRegistry"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_a_config_saved_by_a_run_names_no_inner_module(grpo: Grpo) -> None:
    rewards = "[MathVerifier, {class_path: Gated, init_args: {reward: MathVerifier, gate: FormatReward}}]"
    code, _, stderr = grpo(
        "fit", f"--model.rewards={rewards}", "--model.objective.reward_kl.kl=K2", "--model.objective.kl=K3"
    )
    assert code == 0, stderr
    found: list[str] = []

    def look(value: object) -> None:
        if isinstance(value, dict):
            found.extend([value["class_path"]] if "class_path" in value else [])
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(yaml.safe_load(Path("run", "config.yaml").read_text()))
    own = [path for path in found if path.startswith("grpo_lightning.")]
    assert len(own) > 10 and all(path.count(".") == 1 for path in own)
