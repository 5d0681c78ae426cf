"""A learned reward on tiny samples."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo_lightning import LearnedReward, Replay, Reward, RewardResult, RewardUpdate, Scorer, Scores
from grpo_lightning.plugins.rewards.learned.replay import LabelledGroup
from grpo_lightning.types import FinishReason, Prompt, Question, Sample
from helpers.tiny import model_of, tokenizer


class EndsInLetter(Reward):
    """Right are completions that end in a letter; those with x in them it cannot judge, those with y time out."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        values = [float("nan") if "x" in s.text else float(s.text[-1:].isalpha()) for s in samples]
        statuses = ["gold_bad" if "x" in s.text else "timeout" if "y" in s.text else "ok" for s in samples]
        return RewardResult(values, statuses)


def save_policy(folder: Path, shape: str = "llama") -> Path:
    """A causal LM to make a reward model of."""
    model_of(shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def reward_of(folder: Path, **options: Any) -> LearnedReward:
    """A fast learner; every fourth prompt is held out."""
    settings: dict[str, Any] = {"held_out": 0.25, "batch_size": 4, "lr": 3e-3, "num_passes": 3} | options
    update, replay = (
        kind(**{field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings})
        for kind in (RewardUpdate, Replay)
    )
    return LearnedReward(str(folder), **{"grader": EndsInLetter()} | settings, update=update, replay=replay)


def sample(id: int, text: str, ended: bool = True) -> Sample:
    """One completion of a prompt with this id."""
    question = Question(f"q{id}", answer="")
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    return Sample(Prompt(id, f"q{id}", [6], question), text, [6] * (len(text) + ended), reason)


def explored(step: int, num_prompts: int = 12) -> list[Sample]:
    """A step's completions: of each prompt two right and two wrong ones, but for every third that is all right."""
    texts = [("a1b", "77", "2c", "3"), ("5e", "4f"), ("1", "g", "60")]
    ids = range(step * num_prompts, (step + 1) * num_prompts)
    return [sample(id, text) for id in ids for text in texts[id % 3]]


def group(prompt: str, *labels: float, completions: Sequence[str] = ()) -> LabelledGroup:
    """One prompt with as many labelled completions as labels."""
    texts = list(completions) or [f"{prompt}{row}" for row in range(len(labels))]
    return LabelledGroup(prompt, texts, [True] * len(labels), list(labels))


def scores_of(reward: LearnedReward, samples: Sequence[Sample]) -> Scores:
    """The scores of a list with this reward alone."""
    return Scorer([reward])(samples)


def learn(reward: LearnedReward, steps: Sequence[int]) -> list[dict[str, float]]:
    """Lets the reward learn from the completions of some steps; every second ends an iteration."""
    metrics = []
    for step in steps:
        samples = explored(step)
        metrics.append(reward.learn(samples, scores_of(reward, samples), iteration_ends=step % 2 == 1))
    return metrics
