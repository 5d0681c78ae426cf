"""Another model as the reference: what it computes, what it refuses, and where it is not."""

from pathlib import Path

import pytest
import torch
from helpers.fitting import Digits, sgd
from helpers.tiny import model_of, policy_of, read_policy, rollouts_of, tokenizer
from torch import nn

from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.maths.kl import K2
from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.checks import check_loop
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import UsageError

ROLLOUTS = rollouts_of([4, 9, 1, 6], prompt_lengths=[3, 1])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A wider and deeper model of another architecture, with dropout in its configuration."""
    model = model_of("qwen2", seed=1, hidden_size=64, num_hidden_layers=3, attention_dropout=0.3)
    model.save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


@pytest.mark.parametrize("adapter", [None, LoRA(rank=4)])
def test_its_log_probs_are_those_of_the_model_in_the_folder(folder: str, adapter: LoRA | None) -> None:
    policy = Policy.from_model(model_of("llama"), tokenizer(), adapter=adapter)
    teacher = Teacher(folder)
    assert not teacher.exists and not teacher.is_policy
    teacher.refresh(policy)
    weights = teacher.policy.model
    teacher.refresh(policy)
    assert teacher.policy.model is weights and teacher.exists
    nn.ModuleList([policy, teacher]).train()
    with torch.no_grad():
        expected = policy_of("qwen2", seed=1, hidden_size=64, num_hidden_layers=3)(ROLLOUTS).logp
        assert teacher(policy, ROLLOUTS).equal(expected)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not teacher.policy.training and policy.training
    half = Teacher(folder, dtype="bfloat16")
    half.refresh(policy)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        close = half(policy, ROLLOUTS)
    assert close.dtype == torch.float32 and 0 < float((close - expected).abs().max()) < 0.5


def test_a_teacher_of_the_policys_folder_equals_the_policy(folder: str) -> None:
    policy, teacher = read_policy(folder, dtype="bfloat16", float32_head=True), Teacher(folder, "bfloat16")
    teacher.refresh(policy)
    with torch.no_grad():
        assert teacher(policy, ROLLOUTS).equal(policy(ROLLOUTS).logp)


def test_it_is_in_no_state_dict_and_stays_when_one_is_loaded(folder: str) -> None:
    policy, teacher = policy_of(), Teacher(folder)
    teacher.refresh(policy)
    both = nn.ModuleDict({"policy": policy, "reference": teacher})
    before = teacher(policy, ROLLOUTS)
    state = both.state_dict()
    assert {name.split(".")[0] for name in state} == {"policy"}
    both.load_state_dict({name: 2 * value for name, value in state.items()})
    assert teacher(policy, ROLLOUTS).equal(before)
    with pytest.raises(RuntimeError, match="Missing key"):
        both.load_state_dict({name: value for name, value in state.items() if "lm_head" not in name})


def test_another_vocabulary_is_refused_in_one_sentence(folder: str, tmp_path: Path) -> None:
    spell = tokenizer()
    spell.add_tokens(["<new>"])
    policy = policy_of()
    policy.tokenizer = spell
    with pytest.raises(UsageError, match=rf"model.reference.path={folder}: .*'<new>' is missing there and 64 in"):
        Teacher(folder).check(policy)
    with pytest.raises(UsageError, match=r"^model\.reference\.path=./nowhere: no such folder"):
        Teacher("./nowhere").check(policy)
    spell.save_pretrained(tmp_path / "teacher")
    Teacher(folder).check(policy_of())  # It may know more tokens than the policy.


def test_it_is_refused_where_it_would_have_to_move(folder: str) -> None:
    made = GRPOModule(policy_of(), [Digits()], objective=Objective(kl=K2(), beta=1), reference=Teacher(folder))
    with pytest.raises(UsageError, match="steps_per_iteration=2: Teacher stays as it is"):
        check_loop(GRPOLoop(steps_per_iteration=2), made)
    with pytest.raises(UsageError, match=r"model\.old_policy=Teacher"):
        GRPOModule(policy_of(), [Digits()], old_policy=Teacher(folder), optimizer=sgd)
