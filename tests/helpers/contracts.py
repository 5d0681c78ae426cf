"""The members of a family, made with whatever arguments they need."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from grpo_lightning.cli import import_families
from grpo_lightning.command.overview import optional
from grpo_lightning.maths import surrogates
from grpo_lightning.maths.surrogates import Surrogate
from helpers.loading import load_example

import_families()

FixedLength = optional("FixedLength")
ARGUMENTS: dict[Any, Callable[[], Any]] = {FixedLength: lambda: FixedLength(12)}
"""Classes that cannot be made without arguments."""

# Other arguments than the defaults, for the same contract.
VARIANTS: dict[str, Callable[[], Surrogate]] = {
    "Clipped without bounds": lambda: surrogates.Clipped(None, None),
    "Clipped on one side": lambda: surrogates.Clipped(0.2, None, dual_clip=3.0),
    "Clipped twice": lambda: surrogates.Clipped(0.2, 0.28, dual_clip=3.0),
}
if SequenceClipped := optional("SequenceClipped"):
    VARIANTS["SequenceClipped without bounds"] = lambda: SequenceClipped(None, None)
if CISPO := optional("CISPO"):
    VARIANTS["CISPO with both bounds"] = lambda: CISPO(0.5, 0.5)
if OffPolicyMask := optional("OffPolicyMask"):
    VARIANTS["OffPolicyMask of Reinforce"] = lambda: OffPolicyMask(surrogates.Reinforce(), 0.0)
    VARIANTS["OffPolicyMask of dual clip"] = lambda: OffPolicyMask(surrogates.Clipped(dual_clip=1.5), 0.0)
examples = load_example("methods_of_2026")
VARIANTS |= {f"{name}, an example": getattr(examples, name) for name in ("UP", "FIPO", "ClipCov", "KLCov", "DRO")}
if DPPO := optional("DPPO"):
    VARIANTS["DPPO by KL"] = lambda: DPPO("kl", 0.02, 0.02)
if TargetProbability := optional("TargetProbability"):
    VARIANTS["OffPolicyMask of targets"] = lambda: OffPolicyMask(TargetProbability())


def needs(*found: Any) -> pytest.MarkDecorator:
    """Skips a test where one of these classes of plugins, as `optional` finds them, is not there."""
    return pytest.mark.skipif(None in found, reason="without plugins")


def members(family: type) -> list[type]:
    """Every concrete class of the package that derives from `family`."""
    found: list[type] = []
    open_classes = [family]
    while open_classes:
        derived = open_classes.pop().__subclasses__()
        open_classes += derived
        found += [c for c in derived if not inspect.isabstract(c) and c.__module__.startswith("grpo_lightning.")]
    return sorted(set(found), key=lambda cls: cls.__name__)


def make(cls: type) -> Any:
    """One member, with its defaults where it has them."""
    if cls in ARGUMENTS:
        return ARGUMENTS[cls]()
    try:
        return cls()
    except TypeError as error:
        pytest.fail(f"{cls.__name__} needs arguments: give it some in ARGUMENTS of helpers/contracts.py ({error})")


SURROGATES: dict[str, Callable[[], Surrogate]] = {
    **{cls.__name__: (lambda cls=cls: make(cls)) for cls in members(Surrogate)},
    **VARIANTS,
}
"""Every surrogate, with its defaults and with other arguments."""
