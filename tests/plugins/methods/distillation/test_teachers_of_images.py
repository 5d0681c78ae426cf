"""Teachers of prompts with images: one of another width looks for itself, and one with other prompts is refused."""

import pytest
import torch
from helpers.tiny import COMPUTES
from helpers.tiny_vision import mixed_prompts, randomised, seeing_policy, smolvlm, whole_model_logp

from grpo_lightning import FinishReason, Policy, Rollouts, Sample, SelfTeacher, Teacher, UsageError

COMPLETIONS = [[20, 21, 22], [23, 24], [25, 26, 27]]
GROUP = [0, 0, 3]


def test_a_teacher_of_another_width_reads_the_images_itself(tmp_path):
    policy, family = seeing_policy("smolvlm", compute=COMPUTES[0]())
    prompts = policy.encode_images(mixed_prompts(family))
    teacher_model = smolvlm(hidden=64).model
    randomised(teacher_model, 5, 0.2).save_pretrained(tmp_path)
    family.tokenizer.save_pretrained(tmp_path)
    teacher = Teacher(str(tmp_path))
    teacher.refresh(policy)
    rollouts = Rollouts.from_lists(
        [prompt.token_ids for prompt in prompts],
        GROUP,
        COMPLETIONS,
        image_states=[prompt.image_states for prompt in prompts],
    )
    rows = zip(GROUP, COMPLETIONS, strict=True)
    expected = torch.cat([whole_model_logp(teacher_model, prompts[group], ids) for group, ids in rows])
    torch.testing.assert_close(teacher(policy, rollouts), expected.detach(), rtol=0, atol=1e-5)


def test_another_prompt_is_refused():
    """Before it looks for the question, in which another mark may stand for the image."""
    _, family = seeing_policy("smolvlm")
    prompt = mixed_prompts(family)[0]
    prompt.question.text = "<image>How?"
    sample = Sample(prompt, "", [9], FinishReason.STOP)
    with pytest.raises(UsageError, match="SelfTeacher: it reads no images"):
        SelfTeacher().begin(Policy("nowhere"), [sample])
