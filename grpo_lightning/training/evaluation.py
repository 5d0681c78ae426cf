"""Validation and prediction: completions of given prompts, their scores, and the metrics that follow from them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jsonargparse.typing import import_object
from torchmetrics import MeanMetric

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.metrics import majority_at_k, nan_mean, pass_at_k
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.base import Reward, measured_by, title_of
from grpo_lightning.rewards.results import Scores
from grpo_lightning.rewards.scorer import Scorer, Scoring
from grpo_lightning.sandbox.pool import WorkerPool
from grpo_lightning.training.data import PromptBatch
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.training.records import record
from grpo_lightning.types import Completion, Prompt, Sample

STEP = 2**32 - 1
"""The step that keys the random numbers of evaluation. It is constant, so two validations differ only in the policy."""


@dataclass
class Validation:
    """How validation and test decide what is right.

    Args:
        judge: The reward that decides, whatever is trained; it is no part of the total. None is that of the task:
            `MathVerifier` for `Arithmetic`, for instance. A task that names none is judged by `model.correct`.
    """

    judge: Reward | None = None


@dataclass(slots=True)
class Answer:
    """An answer to a validation question, as the engine and as the rewards see it."""

    completion: Completion
    sample: Sample
    greedy: bool
    version: int
    """`Policy.version` of the weights that drew it."""


class Evaluation(torch.nn.Module):
    """What the judge gives the greedy answer, and avg@k, pass@k and maj@k of k completions that are drawn.

    It is a torch module so that Lightning finds its metrics, which are means over prompts and ranks.

    Args:
        explorer: Samples and scores.
        sampling: The distribution of the k completions. The greedy one has its length and its stop strings.
        num_samples: k, the completions per prompt.
    """

    def __init__(self, explorer: Explorer, sampling: Sampling, num_samples: int) -> None:
        super().__init__()
        self.explorer = explorer
        self.sampling = sampling
        self.num_samples = num_samples
        self.kept: dict[int, list[Answer]] = {}
        """By prompt id: whoever puts an empty list here finds in it the answers of the last validation since then."""
        self.scorer = explorer.scorer
        """The rewards, and the judge as the one that decides what is right."""
        self._given: Reward | str | None = None
        self._make_metrics()

    @property
    def judge(self) -> Reward:
        """The reward that decides what is right."""
        return self.scorer.main

    @property
    def measure(self) -> str:
        """What avg@k and greedy are: `fraction right by MathVerifier`, or `mean of my_rewards.brief`."""
        return measured_by(title_of(type(self.judge).__name__, vars(self.judge)))

    def judge_by(self, given: Reward | str | None) -> None:
        """Lets a reward, or a class of rewards, decide what is right; None: the one that does in training.

        One that the run has already, with the same arguments, grades once for both. The second call does nothing.
        """
        if given == self._given:
            return
        scorer, self._given = self.explorer.scorer, given
        judge = scorer.main if given is None else given
        if isinstance(judge, str):
            judge = judge_class(judge)()
        judge = next((reward for reward in scorer.rewards if grades_alike(reward, judge)), judge)
        rewards = scorer.rewards
        if judge not in rewards:
            taken = [reward.name for reward in rewards]
            judge.weight, judge.name = 0.0, "judge" if judge.name in taken else judge.name
            rewards = [*rewards, judge]
        self.scorer = Scorer(rewards, scorer.max_failed, judge.name)
        self._make_metrics()

    def _make_metrics(self) -> None:
        k = self.num_samples
        names = ["greedy", f"avg@{k}", *([f"pass@{k}"] if k > 1 else []), "failed", "reward", "length", "truncated"]
        names += [f"maj@{k}"] if self.judge.finds_answers else []
        self.metrics = torch.nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in names})

    def reset(self) -> None:
        """Forgets everything. What `validate` left was made in inference mode, and `fit` could not add to it."""
        for name in self.metrics:
            self._metric(name).reset()
        for answers in self.kept.values():
            answers.clear()

    def update(self, policy: Policy, batch: PromptBatch) -> None:
        """Adds a batch to the metrics. Every rank must call it as often."""
        k = self.num_samples
        best, greedy = self._scored(policy, batch.prompts, 1, greedy=True)
        drawn, scores = self._scored(policy, batch.prompts, k, greedy=False)
        samples = [answer.sample for answer in drawn]
        for answer in [*best[: batch.num_real], *drawn[: batch.num_real * k]] if self.kept else ():
            self.kept.get(answer.sample.prompt.id, []).append(answer)
        # A rank whose prompts are all padding still takes part in every metric, or the ranks would not sync alike.
        self._record(dict.fromkeys(self.metrics, math.nan))
        for index in range(batch.num_real):
            group = slice(index * k, (index + 1) * k)
            values, first = scores.main.value[group], greedy.main.value[index]
            found = {
                "greedy": first,
                f"avg@{k}": nan_mean(values),
                "failed": nan_mean([math.isnan(value) for value in [first, *values]]),
                "reward": nan_mean(scores.total[group]),
                "length": nan_mean([len(sample.token_ids) for sample in samples[group]]),
                "truncated": nan_mean([sample.truncated for sample in samples[group]]),
            }
            if k > 1:
                found[f"pass@{k}"] = pass_at_k(values)
            if f"maj@{k}" in self.metrics:
                answers = scores.main.answer or [None] * len(samples)
                found[f"maj@{k}"] = majority_at_k(values, answers[group])
            self._record(found)

    def predict(self, policy: Policy, batch: PromptBatch) -> list[dict[str, Any]]:
        """k completions of each prompt with their scores and statuses, as one JSON-ready record each.

        `sample` counts the completions of a prompt, from 0.
        """
        k = self.num_samples
        answers, scores = self._scored(policy, batch.prompts, k, greedy=False)
        rows = range(batch.num_real * k)
        return [record(answers[row].sample, scores, row) | {"sample": row % k} for row in rows]

    def _scored(
        self, policy: Policy, prompts: Sequence[Prompt], num_samples: int, greedy: bool
    ) -> tuple[list[Answer], Scores]:
        """As `answer`, with the scores of the answers."""
        with self.scorer.begin() as scoring:
            answers = self.answer(policy, prompts, num_samples, greedy, scoring)
            return answers, scoring.scores([answer.sample for answer in answers])

    def answer(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        num_samples: int,
        greedy: bool,
        scoring: Scoring | None = None,
    ) -> list[Answer]:
        """`num_samples` answers to each prompt, with the random numbers of evaluation. Every rank must call it."""
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        completions, samples = self.explorer.sample(
            policy, prompts, num_samples, sampling, seed=0, step=STEP, scoring=scoring
        )
        return [Answer(*pair, greedy, policy.version) for pair in zip(completions, samples, strict=True)]

    def _record(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metric(name).update(value)

    def _metric(self, name: str) -> MeanMetric:
        metric = self.metrics[name]
        assert isinstance(metric, MeanMetric)
        return metric


def judge_class(name: str) -> type[Reward]:
    """The class of rewards that a task names, by the name of a public one or an import path."""
    found: type[Reward] = import_object(name if "." in name else f"grpo_lightning.{name}")
    return found


def grades_alike(one: Reward, other: Reward) -> bool:
    """Whether both rewards are of one class and were made with the same arguments, but for weight, name and workers.

    Arguments that are no plain values count as different.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, WorkerPool):
            return value.timeout, value.memory_limit_mb, value.cpu_seconds
        if isinstance(value, set):
            return sorted(value)
        raise TypeError

    left_out = ("weight", "name", "tally")
    try:
        texts = [
            json.dumps({key: value for key, value in vars(reward).items() if key not in left_out}, default=plain)
            for reward in (one, other)
        ]
    except TypeError:
        return one is other
    return type(one) is type(other) and texts[0] == texts[1]
