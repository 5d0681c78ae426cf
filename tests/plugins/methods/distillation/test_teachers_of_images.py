"""Teachers of prompts with images: one of another width looks for itself, and one with other prompts is refused."""

import pytest
import torch
from helpers.tiny import COMPUTES
from helpers.tiny_vision import mixed_prompts, randomised, seeing_policy, smolvlm, whole_model_logp

from grpo_lightning import Rollouts, SelfTeacher, Teacher, UsageError

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
    policy, family = seeing_policy("smolvlm")
    states = [prompt.image_states for prompt in policy.encode_images(mixed_prompts(family)[:1])]
    rollouts = Rollouts.from_lists([[7, 8]], [0], [[9]], image_states=states)
    with pytest.raises(UsageError, match="SelfTeacher: it reads no images"):
        SelfTeacher().scored(policy, rollouts)
