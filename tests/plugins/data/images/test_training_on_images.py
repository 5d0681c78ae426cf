"""Runs on prompts with and without images: in parts, on two ranks, resumed, in bfloat16, with an adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.elsewhere import Elsewhere
from helpers.fitting import Gradients, Steps, fit, relative, resumes_exactly, scalars
from helpers.tiny_vision import Family, family_of, picture, prompt_of, whole_model_logp
from helpers.two_ranks import as_program, in_every_way

from grpo_lightning import (
    Demonstrations,
    FrozenCopy,
    LoRA,
    NoBaseline,
    Objective,
    OneStepOffPolicy,
    Policy,
    Question,
    Reinforce,
    StaleSource,
    Task,
    TaskData,
    TokenMean,
    UsageError,
)

NAME = "qwen3_vl"
"""With positions in rows and columns, and with states for the first layers."""
SFT = {"objective": Objective(Reinforce(), weighting=TokenMean()), "advantage": NoBaseline()}
"""Supervised fine-tuning: nothing is sampled."""


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
    recorded = Gradients()
    fit(
        folder / "shown",
        [recorded],
        {"source": Demonstrations("7c"), "group_size": 1},
        {"max_epochs": 2} | trainer,
        **SFT | options(),
    )
    return gradients | {"shown": recorded.updates}


def test_the_gradient_is_the_same_in_parts_and_on_two_ranks(tmp_path):
    gradients = in_every_way(__file__, tmp_path, runs)
    whole = gradients.pop("whole")
    assert len(whole["shown"]) == 2
    for way, found in gradients.items():
        assert max(relative(a, b) for a, b in zip(found["shown"], whole["shown"], strict=True)) < 1e-6, way
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


@pytest.mark.parametrize("vision", [False, True])
def test_supervised_fine_tuning_on_images_is_a_loop_over_the_whole_model(tmp_path, vision):
    gradients, steps = Gradients(), Steps()
    fit(
        tmp_path,
        [gradients, steps],
        {"source": Demonstrations("7c"), "group_size": 1},
        {"max_epochs": 1},
        **SFT | options(vision),
    )
    samples = steps.explorations[0].samples
    assert {sample.prompt.images is None for sample in samples} == {False, True}
    model = family_of(NAME, scale=0.05).model
    torch.cat([whole_model_logp(model, sample.prompt, sample.token_ids) for sample in samples]).mean().neg().backward()
    names = gradients.updates[0].keys()
    assert any("visual" in name for name in names) == vision
    expected = {f"policy.model.{name}": weight.grad for name, weight in model.named_parameters()}
    assert relative(gradients.updates[0], {name: expected[name] for name in names}) < 1e-6


@pytest.mark.parametrize("source", [lambda: StaleSource(1), lambda: Demonstrations("7c", 0.5)])
def test_other_sources_learn_from_images_and_resume(tmp_path, source):
    steps = Steps()

    def settings() -> dict[str, Any]:
        return options(vision=True) | {"callbacks": [steps], "loop": {"source": source(), "mu": 2}}

    resumes_exactly(tmp_path, settings, cut=2)
    assert any(exploration.rollouts.image_states for exploration in steps.explorations)


def test_sampling_ahead_is_refused(tmp_path):
    """An encoder cannot be called in a thread while the weights are updated."""
    with pytest.raises(UsageError, match=r"loop\.source: sampling ahead reads no images"):
        fit(tmp_path, [], {"source": OneStepOffPolicy()}, **options() | {"engine": Elsewhere()})


if __name__ == "__main__":
    as_program(runs)
