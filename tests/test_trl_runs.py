"""One run by TRL's trainer and one here: prompts per step, updates, and the learning rate of each update."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import KeepsSamples, fit, of_updates
from helpers.tiny import policy_of
from transformers import TrainerCallback

from grpo_lightning import TransformersSchedule

trl = pytest.importorskip("trl", minversion="1.16")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

LEARNING_RATE = 0.01
GROUP_SIZE = 2
PER_DEVICE = 4
ACCUMULATION = 2
STEPS_PER_GENERATION = 4
NUM_STEPS = 3

PROMPTS_PER_STEP = PER_DEVICE * STEPS_PER_GENERATION // GROUP_SIZE
UPDATES_PER_STEP = STEPS_PER_GENERATION // ACCUMULATION
"""The formulas of docs/how_to/port.md, on one device."""

SCHEDULES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "TRL's default": ("linear", 0.0, {}),
    "a fraction of warmup": ("cosine", 0.3, {}),
    "updates of warmup": ("cosine_with_min_lr", 2, {"min_lr_rate": 0.1}),
}


class Rates(TrainerCallback):  # type: ignore[misc]
    """The learning rate of each update of TRL's trainer."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(float(kwargs["optimizer"].param_groups[0]["lr"]))


def run_of_trl(folder: Path, name: str, warmup: float, options: dict[str, Any]) -> tuple[list[float], list[int]]:
    """The rate of each update, and the number of distinct prompts of each call of the reward."""
    import datasets

    policy = policy_of(scale=0.1)
    texts = [f"{row}ab" for row in range(NUM_STEPS * PROMPTS_PER_STEP)]
    num_prompts: list[int] = []

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        num_prompts.append(len({*prompts}))
        return [float(len(completion)) for completion in completions]

    args = trl.GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=options,
        warmup_steps=warmup,
        per_device_train_batch_size=PER_DEVICE,
        gradient_accumulation_steps=ACCUMULATION,
        steps_per_generation=STEPS_PER_GENERATION,
        num_generations=GROUP_SIZE,
        max_completion_length=4,
        max_steps=NUM_STEPS * UPDATES_PER_STEP,
    )
    rates = Rates()
    trl.GRPOTrainer(
        model=policy.model,
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=policy.tokenizer,
        callbacks=[rates],
    ).train()
    return rates.rates, num_prompts


@pytest.mark.parametrize("case", SCHEDULES)
def test_steps_updates_and_rates_are_those_of_trl(case: str, tmp_path: Path) -> None:
    name, warmup, options = SCHEDULES[case]
    expected_rates, expected_prompts = run_of_trl(tmp_path / "trl", name, warmup, options)
    assert len(expected_rates) == NUM_STEPS * UPDATES_PER_STEP

    reward = KeepsSamples()
    fit(
        tmp_path / "here",
        [],
        {"group_size": GROUP_SIZE, "prompts_per_step": PROMPTS_PER_STEP, "num_minibatches": UPDATES_PER_STEP, "mu": 1},
        {"max_epochs": NUM_STEPS, "limit_val_batches": 0},
        rewards=[reward],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        lr_scheduler=lambda optimizer: TransformersSchedule(optimizer, name, warmup, options),
    )
    # The policies differ in what they sample, not in their sizes.
    rates = [rate for update_rates in of_updates(tmp_path / "here", "optim/lr") for rate in update_rates]
    assert rates == pytest.approx(expected_rates, rel=1e-6)
    prompt_ids = {sample.prompt.id for sample in reward.samples}
    assert len(prompt_ids) == sum(expected_prompts) == NUM_STEPS * PROMPTS_PER_STEP
    assert {*expected_prompts} == {PROMPTS_PER_STEP}
    assert len(reward.samples) == len(prompt_ids) * GROUP_SIZE
