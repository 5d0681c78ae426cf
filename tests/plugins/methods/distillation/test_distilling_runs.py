"""Whole runs that distil: over ranks, without a reward, and going on from a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Grpo
from helpers.distilling import RUNS, in_every_way
from helpers.fast import fit, policy_of
from helpers.fitting import Digits, Gradients, checkpoint_of, relative, resumes_exactly, scalars
from helpers.paths import ROOT

from grpo_lightning import K2, FullVocabulary, NoAdvantage, Objective, Reinforce, RewardResult, Teacher
from grpo_lightning.plugins.looking.inspector import read


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return in_every_way(tmp_path_factory.mktemp("distilling"))


@pytest.mark.parametrize("way", ["parts", "ddp", "fsdp2"])
@pytest.mark.parametrize("run", RUNS)
def test_packs_ranks_and_shards_have_the_same_gradients(found: dict[str, dict[str, Any]], run: str, way: str) -> None:
    whole = found["whole"][run]
    assert len(whole) == len(found[way][run]) == 4
    for a, b in zip(found[way][run], whole, strict=True):
        assert relative(a, b) < 1e-6
    assert max(float(one.abs().max()) for one in whole[0].values()) > 1e-3


class Opposite(Digits):
    """The less digits the better; it counts what it scored."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = 0

    def score(self, samples: Any) -> RewardResult:
        self.scored += len(samples)
        result = super().score(samples)
        return RewardResult([1 - value for value in result.value], result.status)


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    policy_of("qwen2", seed=2, scale=0.1, hidden_size=64).save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


@pytest.mark.parametrize("kl", [K2(), FullVocabulary()], ids=["sampled", "exact"])
def test_no_reward_is_read_by_the_gradient(kl: Any, teacher: str, tmp_path: Path) -> None:
    assert not NoAdvantage.compares_group
    updates, rewards = [], [Digits(), Opposite()]
    for name, reward in zip("ab", rewards, strict=True):
        seen, objective = Gradients(), Objective(Reinforce(), kl, beta=1.0)
        options: dict[str, Any] = {"objective": objective, "advantage": NoAdvantage(), "reference": Teacher(teacher)}
        fit(tmp_path / name, [seen], rewards=[reward], **options)
        updates.append(seen.updates)
    assert len(updates[0]) == 3 and isinstance(rewards[1], Opposite) and rewards[1].scored == 3 * 16
    for one, other in zip(*updates, strict=True):
        assert all(one[name].equal(other[name]) for name in one) and any(value.any() for value in one.values())
    a, b = (scalars(tmp_path / name) for name in "ab")
    assert a["reward/mean"] != b["reward/mean"] and a["policy/kl_ref"] == b["policy/kl_ref"]
    first, *_, last = a["policy/kl_ref"].values()
    assert last < first


LAYER = f"--config={ROOT}/configs/algorithms/distillation.yaml"
REFERENCES = {
    "Teacher": ["--model.reference.path=./teacher"],
    "Teachers": [
        "--model.reference=examples.teachers.Teachers",
        "--model.reference.paths={1: ./teacher, 2: ./policy}",
    ],
    "SelfTeacher": ["--model.reference=SelfTeacher", "--model.reference.prompt={question}{answer}"],
}


@pytest.mark.parametrize("kl", ["K2", "FullVocabulary"])
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_run_of_the_command_line_needs_no_reward_and_is_recorded(
    reference: str, kl: str, teacher: str, grpo: Grpo, tmp_path: Path
) -> None:
    rows = [{"question": "abcdefgh"[row], "answer": str(row), "teacher": 1 + row % 2} for row in range(8)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [f"--model.objective.kl={kl}", "--model.rewards=NoReward", "--inspect.every_n_steps=1"]
    code, _, errors = grpo("fit", LAYER, *REFERENCES[reference], *options)
    assert code == 0, errors
    found = scalars("run")
    assert found["policy/kl_ref"][0] > 0 and found["optim/grad_norm"][0] > 0 and found["reward/mean"][0] == 0
    (step,) = read("run")[-1:]
    tokens = [one.tokens for group in step.groups if group.kind == "train" for one in group.completions]
    assert tokens and all(one.kl is not None and (one.kl > 0).any() for one in tokens)
    assert all((one.ref_logp is None) == (kl == "FullVocabulary") for one in tokens)


def test_a_run_goes_on_without_the_teacher_in_its_checkpoint(teacher: str, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        objective = Objective(Reinforce(), FullVocabulary(), beta=1.0)
        return {"objective": objective, "advantage": NoAdvantage(), "reference": Teacher(teacher)}

    resumes_exactly(tmp_path, options, steps=2)
    saved = checkpoint_of(tmp_path / "cut")["state_dict"]
    assert {name.split(".")[0] for name in saved} == {"policy", "bad_updates", "bad_updates_in_a_row"}
