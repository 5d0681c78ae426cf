"""Validation and prediction: completions of given prompts, their scores, and the metrics that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchmetrics import MeanMetric

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.metrics import RIGHT_ABOVE, majority_at_k, nan_mean, pass_at_k
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.results import Scores
from grpo_lightning.rewards.scorer import Scoring
from grpo_lightning.training.data import PromptBatch
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.training.records import record
from grpo_lightning.types import Completion, Prompt, Sample

STEP = 2**32 - 1
"""The step that keys the random numbers of evaluation. It is constant, so two validations differ only in the policy."""


@dataclass(slots=True)
class Answer:
    """An answer to a validation question, as the engine and as the rewards see it."""

    completion: Completion
    sample: Sample
    greedy: bool
    version: int
    """`Policy.version` of the weights that drew it."""


class Evaluation(torch.nn.Module):
    """Greedy pass@1, and avg@k, pass@k and maj@k of k completions that are drawn.

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
        self.num_samples = k = num_samples
        self.kept: dict[int, list[Answer]] = {}
        """By prompt id: whoever puts an empty list here finds in it the answers of the last validation since then."""
        # With k = 1, avg@1 says what pass@k would: pass@1 is that of the greedy answer.
        names = [*dict.fromkeys(["pass@1", f"avg@{k}", f"pass@{k}"]), "reward", "length", "truncated"]
        names += [f"maj@{k}"] if explorer.scorer.main.finds_answers else []
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
            values = scores.main.value[group]
            found = {
                f"pass@{k}": pass_at_k(values),
                "pass@1": float(greedy.main.value[index] > RIGHT_ABOVE),
                f"avg@{k}": nan_mean(values),
                "reward": nan_mean(scores.total[group]),
                "length": nan_mean([len(sample.token_ids) for sample in samples[group]]),
                "truncated": nan_mean([sample.truncated for sample in samples[group]]),
            }
            if f"maj@{k}" in self.metrics:
                answers = scores.main.answer or [None] * len(samples)
                found[f"maj@{k}"] = majority_at_k(values, answers[group])
            self._record(found)

    def predict(self, policy: Policy, batch: PromptBatch) -> list[dict[str, Any]]:
        """k completions of each prompt with their scores and statuses, as one JSON-ready record each."""
        answers, scores = self._scored(policy, batch.prompts, self.num_samples, greedy=False)
        rows = range(batch.num_real * self.num_samples)
        return [record(answers[row].sample, scores, row) for row in rows]

    def _scored(
        self, policy: Policy, prompts: Sequence[Prompt], num_samples: int, greedy: bool
    ) -> tuple[list[Answer], Scores]:
        """As `answer`, with the scores of the answers."""
        with self.explorer.scorer.begin() as scoring:
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
