"""A file imports only from the floors below it, or from what stands before it on its own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "grpo_lightning"

FLOORS = [
    "types",
    # maths
    "ranks ragged rollouts metrics reward_batch advantages process_supervision surrogates sequence_surrogates",
    "prefix_tree target_probability kl weightings masks diagnostics objective stopping",
    # the world
    "tasks.base tasks.arithmetic tasks.tables",
    "rewards.tally rewards.base rewards.worker rewards.workers rewards.verifier",
    "rewards.verifier.units rewards.verifier.tokens rewards.verifier.number_words",
    "rewards.verifier.grammar rewards.verifier.numbers rewards.verifier.symbolic",
    "rewards.verifier.equality rewards.verifier.forms rewards.verifier.finished rewards.verifier.asked",
    "rewards.verifier.wanted rewards.verifier.restated rewards.verifier.settling rewards.verifier.spans",
    "rewards.verifier.choices rewards.verifier.spellings rewards.verifier.prose",
    "rewards.verifier.comparison rewards.verifier.extraction",
    "rewards.verifier.reading rewards.verifier.math_verifier",
    "rewards.format rewards.function rewards.overlong rewards.repetition rewards.gate",
    "rewards.length",
    "rewards.control rewards.classifier rewards.equations rewards.separators rewards.splitters",
    "rewards.step_verifiers",
    "rewards.step_models rewards.steps rewards.gym_worker rewards.reasoning_gym rewards rewards.scorer",
    "tasks.reasoning_gym tasks",
    "rewards.labelled rewards.replay rewards.reward_loss rewards.reward_metrics rewards.reward_model",
    "rewards.reward_update rewards.hacking rewards.learned",
    # material
    "disk checkpoint_files optimizer_options attention shared_prefix padded_rows sharding policy snapshots",
    "engines.philox engines.sampling engines.kv_memory engines.trial engines.base engines.slab engines.native",
    "engines.transformers",
    "engines.scripted",
    "engines simulation memory explorer records filters minibatch statistics",
    # Lightning
    "precision data module preparation callbacks.progress callbacks.interrupts callbacks.checkpoint",
    "callbacks.predictions callbacks.monitors callbacks.config loop",
    "callbacks.completions callbacks.memory callbacks",
    # doors
    "plan fellow_ranks cli verify __main__",
]
ORDER = " ".join(FLOORS).split()


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__"}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_lightning"):
            found.add((node.module or "").removeprefix("grpo_lightning").lstrip("."))
            found |= {
                f"{node.module}.{alias.name}".removeprefix("grpo_lightning.") for alias in node.names
            } & MODULES.keys()
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.startswith("grpo_lightning"))
            found |= {name.removeprefix("grpo_lightning").lstrip(".") for name in names}
    return found - {""}


def test_every_module_has_its_place() -> None:
    assert set(MODULES) == set(ORDER)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    above = {other for other in imports_of(MODULES[name]) if ORDER.index(other) >= ORDER.index(name)}
    assert not above, f"{name} imports {above}"
