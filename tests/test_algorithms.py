"""Every method by its name: from the command line, as a file of configs/algorithms/, and as a user's own file."""

import re
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml
from helpers.command import Grpo
from helpers.contracts import members
from helpers.fitting import scalars
from helpers.tiny import policy_of
from jsonargparse.typing import import_object
from test_configs import CONFIGS, QUICKSTART, Built

import grpo_lightning
from grpo_lightning.cli import GRPOCLI

ALGORITHMS = sorted((CONFIGS / "algorithms").glob("*.yaml"))
EXTENDING = CONFIGS.parent / "docs" / "how_to" / "extending.md"
REWARD = """
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.rewards.results import RewardResult

class Digits(Reward):
    def score(self, samples):
        values = [sum(c.isdigit() for c in sample.text) / max(1, len(sample.text)) for sample in samples]
        return RewardResult(values, ["ok"] * len(values))
"""
FAMILIES = {
    "model.advantage": "AdvantageEstimator",
    "model.objective.surrogate": "Surrogate",
    "model.objective.kl": "KLEstimator",
    "model.objective.weighting": "TokenWeighting",
    "model.objective.masks": "TokenMask",
    "model.objective.correction": "Correction",
    "model.objective.entropy": "EntropyBonus",
    "model.old_policy": "PolicySnapshot",
    "model.reference": "PolicySnapshot",
    "loop.stop": "StopRule",
    "loop.source": "RolloutSource",
    "loop.dynamic_sampling.filter": "GroupFilter",
}
REQUIRED = {
    "FixedLength": ".length=12",
    "Teacher": ".path=./teacher",
}


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: questions, a policy, a reward."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{row}", "answer": "1"}}\n' for row in range(8)))
    (tmp_path / "digits.py").write_text(REWARD)
    (tmp_path / "policy").symlink_to(policy_folder)
    policy_of(seed=1).save_pretrained(tmp_path / "runs" / "quickstart_model")  # the teacher of distillation.yaml
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def fit(command: Grpo, *options: str, run: str = "run") -> dict[str, dict[int, float]]:
    """A step of 4 prompts x 4 completions."""
    sizes = ["--loop.group_size=4", "--loop.prompts_per_step=4", "--trainer.limit_val_batches=0"]
    command.ok("fit", *sizes, "--model.rewards=[digits.Digits]", *options)
    return scalars(run)


def test_the_configurations_are_those_of_the_documentation() -> None:
    table = (CONFIGS.parent / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")
    assert {path.name for path in ALGORITHMS} == set(re.findall(r"configs/algorithms/(\w+\.yaml)", table))


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_an_algorithm_fits_a_step(path: Path, folder: Path, command: Grpo) -> None:
    found = fit(command, f"--config={path}")
    assert len(found["reward/mean"]) == 1
    assert all(value > 0 for value in found["optim/grad_norm"].values())
    expected = yaml.safe_load(path.read_text()).get("loop", {})
    updates = expected.get("mu", 1) * expected.get("num_minibatches", 1)
    assert ("optim/updates" in found) == (updates > 1)
    made = found.get("optim/updates", {0: updates})
    assert max(made.values()) <= updates and ("stop" in expected or {*made.values()} == {updates})
    assert [*found["optim/lr"]] == [*found["reward/mean"]]
    model = yaml.safe_load(path.read_text())["model"]
    assert ("policy/kl_ref" in found) == (model["objective"]["beta"] > 0 or "reward_kl" in model["objective"])


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_an_algorithm_replaces_the_options_of_configs_below_it(
    path: Path, folder: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those others set a rule to stop, a reference, M and another KL estimator."""
    monkeypatch.setattr(GRPOCLI, "_run_subcommand", lambda *args: None)
    others = ("target_probability", "deepseekmath", "reinforce_plus_plus")
    layers = [f"--config={path.with_stem(name)}" for name in others]
    sizes = ["--loop.group_size=4", "--loop.prompts_per_step=4", "--model.rewards=[digits.Digits]"]
    command.ok("fit", *sizes, *layers, f"--config={path}")


def test_dr_grpo_divides_by_the_runs_own_length(folder: Path, command: Grpo) -> None:
    """The objective is linear in 1 / L, so the gradient's norm is too: by default L is `max_new_tokens`, here 4."""
    base = [f"--config={CONFIGS / 'algorithms' / 'dr_grpo.yaml'}"]
    default, longer = (
        fit(command, f"--trainer.default_root_dir={run}", *base, *options, run=run)["optim/grad_norm"][0]
        for run, options in (("default", []), ("longer", ["--model.objective.weighting.length=1024"]))
    )
    assert default == pytest.approx(256 * longer)


def test_every_member_is_reached_by_its_class_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each command line one of every family, as long as it has more."""
    monkeypatch.setattr("sys.argv", ["grpo"])
    monkeypatch.setattr(Built, "instantiate_classes", lambda self: None)
    found = {key: members(getattr(grpo_lightning, family)) for key, family in FAMILIES.items()}
    assert all(found.values())
    for line in zip_longest(*found.values()):
        chosen = {key: cls for key, cls in zip(found, line, strict=True) if cls}
        options = [
            f"--{key}={f'[{cls.__name__}]' if key.endswith('masks') else cls.__name__}" for key, cls in chosen.items()
        ]
        options += [f"--{key}{REQUIRED[cls.__name__]}" for key, cls in chosen.items() if cls.__name__ in REQUIRED]
        given = Built(["fit", "--config", str(QUICKSTART), *options]).config.fit
        for key, cls in chosen.items():
            part = given[key][0] if key.endswith("masks") else given[key]
            assert import_object(part.class_path) is cls


def test_a_method_in_a_file_of_the_users(folder: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "my_method", raising=False)  # another test may have a file of this name
    text = EXTENDING.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        (folder / code[3:].partition(":")[0]).write_text(code)
    words = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " ").split()
    assert words[3] == "grpo_lightning:quickstart"
    found = fit(command, *words[6:], "--loop.stop.nats=100", "--trainer.max_epochs=2")
    # The rule stops at the second update of each step, the first one it is asked at.
    assert set(found["optim/updates"].values()) == {1}
    assert set(found["optim/stopped_by/EntropyBelow"].values()) == {1}
    assert all(value > 0 for value in found["optim/grad_norm"].values())
    (in_yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (folder / "my_method.yaml").write_text(in_yaml)
    assert (
        Built(["fit", "--config", str(QUICKSTART), "--config", "my_method.yaml"]).model.objective.surrogate.reach == 0.3
    )
    options = ["--model.advantage=my_baseline.Slow", "--model.advantage.decay=0.5", "--trainer.max_epochs=1"]
    slow = fit(command, *options, "--trainer.default_root_dir=slow", run="slow")
    assert slow["optim/grad_norm"][0] > 0


def test_methods_of_the_examples_by_their_import_paths(
    folder: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CONFIGS.parent / "examples")
    module = "methods_of_2026"
    options = [f"--model.objective.surrogate={module}.KLCov", f"--model.objective.correction={module}.M2PO"]
    options += [f"--model.objective.masks=[{module}.GTPO]", "--model.objective.denominator=kept"]
    options += ["--model.objective.entropy=AdaptiveEntropy", "--model.objective.entropy.target=9"]
    found = fit(command, f"--model.advantage={module}.TOPD", *options, "--trainer.max_epochs=2", "--loop.mu=2")
    # Against the policy as it was at first: from the second update on c is 0.005, then there is something to learn.
    assert found["optim/grad_norm"][1] > 0 and found["policy/kl_ref"][1] > 0
    assert 0.005 < found["policy/entropy_coefficient"][1] < 0.03
