"""Runs on prompts with and without images: in parts, on two ranks, resumed, in bfloat16, with an adapter."""

from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import Gradients, Steps, fit, relative, resumes_exactly, scalars
from helpers.tiny_vision import Family, family_of, picture, prompt_of
from helpers.two_ranks import as_program, in_every_way

from grpo_lightning import FrozenCopy, LoRA, Objective, Policy, Question, Task, TaskData, UsageError

NAME = "qwen3_vl"
"""With positions in rows and columns, and with states for the first layers."""


class Pictures(Task):
    """Questions of equal text, every third with a picture of its own."""

    def questions(self, split: str) -> list[Question]:
        return [
            Question("how?", "1", f"pictures:{row}", images=(picture(row),) if row % 3 == 0 else ())
            for row in range(12)
        ]


class SeeingData(TaskData):
    """Prompts as the processor of a family makes them."""

    def __init__(self, family: Family) -> None:
        super().__init__(Pictures(), val_batch_size=5)
        self.family = family

    def inputs(self, question: Question, text: str) -> tuple[list[int], Any]:
        prompt = prompt_of(self.family, 0, self.family.mark * len(question.images) + text, question.images)
        return prompt.token_ids, prompt.images


def options(vision: bool = False, name: str = NAME, **policy: Any) -> dict[str, Any]:
    family = family_of(name, scale=0.05)
    family.model.generation_config.eos_token_id = None
    seeing_policy = Policy.from_model(family.model, family.tokenizer, vision=vision, **policy)
    return {"policy": seeing_policy, "data": SeeingData(family)}


def runs(folder: Path, parts: bool, **trainer: Any) -> dict[str, Any]:
    """The gradients of each update, with a frozen and a trained encoder, and the refusal of the latter."""
    gradients: dict[str, Any] = {}
    for vision in (False, True):
        recorded = Gradients()
        loop = {"mu": 2, "max_tokens": 60 if parts else 0}
        settings = options(vision) | {"objective": Objective(beta=0.1), "reference": FrozenCopy()}
        if vision and trainer.get("strategy") == "fsdp2":
            with pytest.raises(UsageError, match=r"model\.policy\.vision=true: an encoder with sharded weights"):
                fit(folder / str(vision), [recorded], loop, {"max_epochs": 2} | trainer, **settings)
        else:
            fit(folder / str(vision), [recorded], loop, {"max_epochs": 2} | trainer, **settings)
        gradients[str(vision)] = recorded.updates
    return gradients


def test_the_gradient_is_the_same_in_parts_and_on_two_ranks(tmp_path):
    gradients = in_every_way(__file__, tmp_path, runs)
    whole = gradients.pop("whole")
    for vision in ("False", "True"):
        assert len(whole[vision]) == 4
        has_encoder = ["visual" in name for name in whole[vision][0]]
        assert any(has_encoder) == (vision == "True")
        for way, found in gradients.items():
            if (way, vision) != ("fsdp2", "True"):
                differences = [relative(a, b) for a, b in zip(found[vision], whole[vision], strict=True)]
                assert max(differences) < 1e-6, (way, vision, differences)


@pytest.mark.parametrize("vision", [False, True])
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, vision):
    resumes_exactly(tmp_path, lambda: options(vision))


@pytest.mark.parametrize("vision", [False, True])
def test_bfloat16_and_adapters_learn_and_agree_with_their_sampler(tmp_path, vision):
    for adapter, precision in ((None, "bf16-mixed"), (LoRA(rank=2), "32-true"), (LoRA(rank=2), "bf16-mixed")):
        recorded = Gradients()
        steps = Steps()
        settings = options(vision, adapter=adapter)
        trainer = {"max_epochs": 2, "precision": precision}
        folder = tmp_path / f"{precision}-{adapter is not None}"
        module = fit(folder, [recorded, steps], {}, trainer, **settings)
        names = recorded.updates[0]
        assert any("visual" in name for name in names) == vision
        assert all(gradient.isfinite().all() for gradient in names.values())
        assert steps.explorations[0].rollouts.image_states
        assert module.policy.version == 2
        gaps = scalars(folder)["policy/logp_gap"].values()
        assert max(gaps) < (0.05 if precision == "bf16-mixed" else 1e-5)


if __name__ == "__main__":
    as_program(runs)
