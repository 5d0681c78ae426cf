"""Several teachers by a column of the data, and the policy as its own teacher with another prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distilling import gradient
from helpers.fitting import relative
from helpers.tiny import policy_of, rollouts_of, tokenizer
from tokenizers.processors import TemplateProcessing

from examples.teachers import Teachers
from grpo_lightning.maths.minibatches import idle_micro_batch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.methods.distillation.self_teacher import SelfTeacher
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError

LENGTHS = [4, 9, 1, 6]


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def samples_of(rollouts: Rollouts, columns: list[dict[str, Any]]) -> list[Sample]:
    """A sample per row, whose question stands in `Q...=`."""
    texts = [f"{row}{row}" for row in range(len(rollouts))]
    parts = rollouts.token_ids.split(rollouts.lengths.tolist())
    return [
        Sample(
            Prompt(row, f"Q{text}A", ids_of(f"Q{text}A"), Question(text, str(row), f"rows:{row}", columns[row])),
            tokenizer().decode(part.tolist()),
            part.tolist(),
            FinishReason.STOP,
        )
        for row, (text, part) in enumerate(zip(texts, parts, strict=True))
    ]


def test_each_row_has_its_teacher(tmp_path: Path) -> None:
    policy, rollouts = policy_of(), rollouts_of(LENGTHS, prompt_lengths=[3, 1])
    for name, seed, width in (("a", 1, 32), ("b", 2, 64), ("c", 3, 32)):
        policy_of(seed=seed, hidden_size=width).save_pretrained(tmp_path / name)
    names = ["b", "a", "a", "b"]
    teachers = Teachers({name: str(tmp_path / name) for name in "abc"}, column="subject")
    teachers.check(policy)
    teachers.refresh(policy)
    teachers.begin(policy, samples_of(rollouts, [{"subject": name} for name in names]))
    assert not any("policy" in name for name in teachers.state_dict())
    alone = {}
    for name in "ab":
        alone[name] = Teacher(str(tmp_path / name))
        alone[name].refresh(policy)
    rows = {name: torch.tensor([row for row, own in enumerate(names) if own == name]) for name in "ab"}
    with torch.no_grad():
        found = teachers(policy, rollouts).split(LENGTHS)
        expected = {name: alone[name](policy, rollouts).split(LENGTHS) for name in "ab"}
    for row, name in enumerate(names):
        torch.testing.assert_close(found[row], expected[name][row], rtol=0, atol=2e-6)
    parts = [gradient(policy, alone[name], rollouts.select(rows[name])) for name in "ab"]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert relative(gradient(policy, teachers, rollouts), total) < 2e-6
    assert not teachers(policy, idle_micro_batch(1.0)).isnan().any()
    with pytest.raises(UsageError, match=r"rows:1: subject=missing, and model.reference has teachers for a, b, c"):
        teachers.begin(policy, samples_of(rollouts, [{"subject": "a"}, {}, {}, {}]))


def test_the_policy_teaches_itself_from_another_prompt() -> None:
    """Told the answer, or the completion itself: as a policy that was asked so, and the gradient flows through π_θ."""
    policy, rollouts = policy_of(), rollouts_of(LENGTHS, prompt_lengths=[4] * 4, group=[0, 1, 2, 3])
    samples = samples_of(rollouts, [{"hint": "xyz"}, {"hint": "u"}, {"hint": ""}, {"hint": "t"}])
    prompts = [ids_of(f"Q{row}{row}A") for row in range(4)]
    completions = [ids.tolist() for ids in rollouts.token_ids.split(LENGTHS)]
    rollouts = Rollouts.from_lists(prompts, [0, 1, 2, 3], completions, columns=rollouts.columns)
    teacher = SelfTeacher("{question}is{answer}{hint}")
    teacher.begin(policy, samples)
    told = [ids_of(f"Q{row}{row}is{row}{hint}A") for row, hint in enumerate(["xyz", "u", "", "t"])]
    with torch.no_grad():
        expected = policy(Rollouts.from_lists(told, [0, 1, 2, 3], completions)).logp
        assert teacher(policy, rollouts).equal(expected)
        # A pack of some of the rows, in another order, and an idle one.
        micro_batch = rollouts.select(torch.tensor([3, 1]))
        of_micro_batch = torch.cat([expected.split(LENGTHS)[3], expected.split(LENGTHS)[1]])
        torch.testing.assert_close(teacher(policy, micro_batch), of_micro_batch, rtol=0, atol=2e-6)
        assert teacher(policy, idle_micro_batch(1.0)).isfinite().all()
        teacher_of_none = SelfTeacher()
        teacher_of_none.begin(policy, [])  # on a rank without samples
        assert teacher_of_none(policy, idle_micro_batch(1.0)).isfinite().all()
    copy = FrozenCopy()
    copy.refresh(policy)
    by_copy = SelfTeacher("{question}is{answer}{hint}", snapshot=copy)
    by_copy.begin(policy, samples)
    mine, of_copy = gradient(policy, teacher, rollouts), gradient(policy, by_copy, rollouts)
    assert relative(mine, of_copy) < 1e-6  # none through the teacher, whichever weights it has
    assert any(float(one.abs().max()) > 1e-3 for one in mine.values())
    feedback = SelfTeacher("{question}not{completion}")
    feedback.begin(policy, samples)
    assert feedback.prompts[0] == ids_of(f"Q00not{samples[0].text}A")


def test_a_self_teachers_prompt_has_the_special_tokens_that_the_prompt_has() -> None:
    policy, rollouts = policy_of(), rollouts_of(LENGTHS, prompt_lengths=[4] * 4, group=[0, 1, 2, 3])
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    samples = samples_of(rollouts, [{}] * 4)
    samples[0].prompt.token_ids.insert(0, 2)
    teacher = SelfTeacher("{question}is{answer}")
    teacher.begin(policy, samples)
    assert teacher.prompts[:2] == [[2, *ids_of("Q00is0A")], ids_of("Q11is1A")]


def test_mistakes_in_the_prompt_of_a_self_teacher() -> None:
    policy, rollouts = policy_of(), rollouts_of(LENGTHS, prompt_lengths=[4] * 4, group=[0, 1, 2, 3])
    samples = samples_of(rollouts, [{}] * 4)
    with pytest.raises(UsageError, match=r"model.reference.prompt: \{solution\} is none of question, answer"):
        SelfTeacher("{question}{solution}").begin(policy, samples)
    with pytest.raises(UsageError, match="exceeds the context of 128"):
        SelfTeacher("{question}" + "a" * 130).begin(policy, samples)
    for text in ("something else", "Q00, and 00A"):
        samples[0].prompt.text = text
        with pytest.raises(UsageError, match="rows:0: its question must stand in its prompt once"):
            SelfTeacher().begin(policy, samples)
    teacher = SelfTeacher("{answer}")
    teacher.prompts = [[6]] * 4
    rollouts.sample_index = torch.tensor([0, 1, 1, 2])
    with pytest.raises(UsageError, match="no conversation whose history is rewritten"):
        teacher(policy, rollouts)
