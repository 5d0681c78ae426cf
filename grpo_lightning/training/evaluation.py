"""Validation and prediction: completions of given prompts, their scores, and the metrics that follow from them."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import import_object
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torchmetrics import MeanMetric

from grpo_lightning import ranks
from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.grpo.explore import Explorer
from grpo_lightning.maths.metrics import majority_at_k, nan_mean, pass_at_k
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.function import as_reward
from grpo_lightning.rewards.results import Scores
from grpo_lightning.rewards.reward import Reward, meaning_of_mean, title_of
from grpo_lightning.rewards.scorer import Scorer, Scoring
from grpo_lightning.sandbox.pool import WorkerPool
from grpo_lightning.training import internals
from grpo_lightning.training.half_width import HalfWidth
from grpo_lightning.training.task_data import PromptBatch
from grpo_lightning.types import Prompt, RandomKey, Sample, UsageError, at_least

STEP = 2**32 - 1
"""The step that keys the random numbers of evaluation. It is constant, so two validations differ only in the policy."""


@dataclass
class Validation:
    """Validation, test and prediction: what they draw, and who decides what is right.

    Args:
        grader: The grader: the reward that decides, in training too, whatever is trained; it is no part of the total.
            None is that of the task: `MathVerifier` for `Arithmetic`, for instance. Where a task names none, it is
            `correct`. One that costs money or much time, such as `JudgeReward`, grades training only if it is among
            the rewards.
        samples: k of avg@k, pass@k and maj@k.
        sampling: Settings of `model.sampling` that these stages override. None: the same as in training.
        correct: Name of the reward that decides what is right in training, in place of the grader. None is the grader;
            where there is none, or it is too dear, it is the first.
    """

    grader: Reward | None = None
    samples: int = 8
    sampling: ValidationSampling = field(default_factory=ValidationSampling)
    correct: str | None = None

    def __post_init__(self) -> None:
        at_least("model.validation.samples", self.samples, 1)
        self.grader = self.grader and as_reward(self.grader)


@dataclass(slots=True)
class Answer:
    """An answer to a validation question."""

    sample: Sample
    greedy: bool
    version: int  # `Policy.version` of the weights that drew it
    fingerprint: bytes = b""
    """`Policy.fingerprint` of these weights, where answers are kept: they may be those of an average."""


class Evaluation(torch.nn.Module):
    """What the grader gives the greedy answer, and avg@k, pass@k and maj@k of k completions that are drawn.

    It is a torch module so that Lightning finds its metrics, which are means over prompts and ranks. `sampling` is the
    distribution of the k completions; the greedy one has its length and its stop strings.
    """

    def __init__(self, explorer: Explorer, sampling: Sampling, num_samples: int) -> None:
        super().__init__()
        self.explorer, self.sampling, self.num_samples = explorer, sampling, num_samples
        self.kept: dict[int, list[Answer]] = {}
        """By prompt id: whoever puts an empty list here finds in it the answers of the last validation since then."""
        self.scorer = explorer.scorer  # the rewards, and the grader as the one that decides what is right
        self._given: Reward | str | None = None
        self._make_metrics()

    def _apply(self, fn: Any, recurse: bool = True) -> "Evaluation":
        """Nothing: the metrics stay on the CPU, where their values come from. A GPU's would wait at each question."""
        return self

    @property
    def was_asked(self) -> bool:
        """Whether questions were asked since `reset`."""
        return bool(self.metrics["ci95"].update_called)

    @property
    def grader(self) -> Reward:
        """The reward that decides what is right."""
        return self.scorer.main

    @property
    def measure(self) -> str:
        """The meaning of avg@k and greedy: `fraction right by MathVerifier`, or `mean of my_rewards.brief`."""
        return meaning_of_mean(title_of(type(self.grader).__name__, vars(self.grader)), self.grader.gives_verdicts)

    def set_grader(self, given: Reward | str | None) -> None:
        """Lets a reward, or a class of rewards, decide what is right; None: the one that does in training.

        One that the run has already, with the same arguments, grades once for both. The second call does nothing.
        """
        if given == self._given:
            return
        trained, self._given = self.explorer.scorer, given
        grader = trained.main if given is None else grader_class(given)() if isinstance(given, str) else given
        grader = next((reward for reward in trained.rewards if grades_alike(reward, grader)), grader)
        rewards = trained.rewards
        if grader not in rewards:
            grader.weight = 0.0
            if grader.name in [reward.name for reward in rewards]:
                grader.name = "grader"
            rewards = [*rewards, grader]
        self.scorer = Scorer(rewards, trained.max_failed, grader.name)
        self._make_metrics()

    def _make_metrics(self) -> None:
        k = self.num_samples
        names = ["greedy", f"avg@{k}", *([f"pass@{k}"] if k > 1 else []), "failed", "reward", "length", "truncated"]
        names += [f"maj@{k}"] if self.grader.finds_answers else []
        means = {name: MeanMetric(nan_strategy="ignore", dist_sync_fn=ranks.gather) for name in names}
        self.metrics: Any = torch.nn.ModuleDict({**means, "ci95": HalfWidth()})

    def reset(self) -> None:
        """Forgets everything. What `validate` left was made in inference mode, and `fit` could not add to it."""
        for metric in self.metrics.values():
            metric.reset()
        for answers in self.kept.values():
            answers.clear()

    def update(self, policy: Policy, batch: PromptBatch) -> None:
        """Adds a batch to the metrics. Every rank must call it as often."""
        k = self.num_samples
        best, greedy = self._scored(policy, batch, 1, greedy=True)
        drawn, scores = self._scored(policy, batch, k, greedy=False)
        samples = [answer.sample for answer in drawn]
        for answer in [*best, *drawn] if self.kept else ():
            self.kept.get(answer.sample.prompt.id, []).append(answer)
        # A rank whose prompts are all padding still takes part in every metric, or the ranks would not sync alike.
        self._record(dict.fromkeys(self.metrics, math.nan))
        answers = scores.main.answer or [None] * len(samples)
        for index, first in enumerate(greedy.main.value):
            group = slice(index * k, (index + 1) * k)
            values = scores.main.value[group]
            self._record(
                {
                    "greedy": first,
                    f"avg@{k}": nan_mean(values),
                    "ci95": nan_mean(values),
                    f"pass@{k}": pass_at_k(values),
                    f"maj@{k}": majority_at_k(values, answers[group]),
                    "failed": nan_mean([math.isnan(value) for value in [first, *values]]),
                    "reward": nan_mean(scores.total[group]),
                    "length": nan_mean([len(sample.token_ids) for sample in samples[group]]),
                    "truncated": nan_mean([sample.truncated for sample in samples[group]]),
                }
            )

    def predict(self, policy: Policy, batch: PromptBatch) -> list[dict[str, Any]]:
        """k completions of each prompt as JSON-ready records; `sample` counts the completions of a prompt, from 0."""
        answers, scores = self._scored(policy, batch, self.num_samples, greedy=False)
        samples = [answer.sample for answer in answers]
        return [record(sample, scores, row) | {"sample": row % self.num_samples} for row, sample in enumerate(samples)]

    def _scored(self, policy: Policy, batch: PromptBatch, k: int, greedy: bool) -> tuple[list[Answer], Scores]:
        """The answers to the real prompts of a batch, and their scores. Padding is answered, but not scored."""
        is_padded = batch.num_real < len(batch.prompts)
        with self.scorer.begin() as scoring:
            answers = self.answer(policy, batch.prompts, k, greedy, None if is_padded else scoring)
            answers = answers[: batch.num_real * k]
            return answers, scoring.scores([answer.sample for answer in answers])

    def answer(
        self, policy: Policy, prompts: Sequence[Prompt], num_samples: int, greedy: bool, scoring: Scoring | None = None
    ) -> list[Answer]:
        """`num_samples` answers to each prompt, with the random numbers of evaluation. Every rank must call it."""
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        listeners = [scoring.add] if scoring else []
        samples = self.explorer.sample(policy, prompts, num_samples, sampling, RandomKey(0, STEP), listeners)
        fingerprint = policy.fingerprint() if self.kept else b""
        return [Answer(sample, greedy, policy.version, fingerprint) for sample in samples]

    def _record(self, values: dict[str, float]) -> None:
        for name, metric in self.metrics.items():
            metric.update(values[name])


class EvaluatingModule(L.LightningModule):
    """A module whose policy is validated, tested and predicted with."""

    policy: Policy
    explorer: Explorer
    evaluation: Evaluation

    def __init__(self) -> None:
        super().__init__()
        self.named: Any = torch.nn.ModuleDict()  # validations beside the main one: `Evaluation`s of data of their own
        self._validating = ExitStack()
        """Held while a stage lasts: the engine is awake, and the trainer logs where the weights stand."""
        self._standing: int | None = None
        """Step of the checkpoint that these weights are from; None once they are trained, or if there is none."""

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """By name; that of the main validation is empty."""
        return {"": self.evaluation, **self.named}

    def on_validation_start(self) -> None:
        """Begins the metrics anew, and wakes the engine for all batches."""
        for evaluation in self.evaluations.values():
            evaluation.reset()
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._validating.enter_context(internals.standing(self.trainer, self._standing))
        self._validating.enter_context(self.explorer.engine.awake())

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds the grader's verdict on the greedy answer, and avg@k, pass@k and maj@k of k completions."""
        evaluation = self.evaluations[batch.validation]
        evaluation.update(self.policy, batch)
        place = "/".join(filter(None, ["test" if self.trainer.testing else "val", batch.validation]))
        metrics = {f"{place}/{name}": metric for name, metric in evaluation.metrics.items()}
        self.log_dict(metrics, batch_size=len(batch.prompts), on_step=False, on_epoch=True, add_dataloader_idx=False)

    def validated(self) -> dict[str, float]:
        """What the last validation found, as `avg@k` or `NAME/avg@k`. Every rank must call it."""
        return {
            f"{validation}/{name}".removeprefix("/"): float(metric.compute())
            for validation, evaluation in self.evaluations.items()
            if evaluation.was_asked
            for name, metric in evaluation.metrics.items()
        }

    @property
    def measure(self) -> str:
        """The meaning of avg@k and greedy in the last validation; by name, where the graders differ."""
        measures = {name or "val": one.measure for name, one in self.evaluations.items() if one.was_asked}
        distinct = {*measures.values()}
        return "; ".join(distinct if len(distinct) == 1 else map(": ".join, measures.items()))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """k completions of each prompt with their scores and statuses, as one JSON-ready record each."""
        return self.evaluation.predict(self.policy, batch)

    def on_validation_epoch_end(self) -> None:
        """Ends the run where a reward, or the grader, failed on more than `max_failed_rewards` of the samples."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            rank_zero_info(f"avg@k and greedy: {self.measure}")
        for one in self.evaluations.values():
            one.scorer.stop_if_broken("validation")

    def on_predict_epoch_end(self) -> None:
        """Reports what got no score."""
        self.evaluation.scorer.report()

    def on_validation_end(self) -> None:
        """Once the metrics are logged: the engine gives its memory back, and the trainer is where it was."""
        self._validating.close()

    on_test_start = on_predict_start = on_validation_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_predict_end = on_validation_end


def grader_class(name: str) -> type[Reward]:
    """The class of rewards that a task names, by the name of a public one or an import path."""
    try:
        return import_object(name if "." in name else f"grpo_lightning.{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"model.validation.grader={name}, the task's, is not here ({error}): name another") from error


def grades_alike(one: Reward, other: Reward) -> bool:
    """Whether both rewards are of one class and have the same plain arguments, but for weight, name and workers."""

    def plain(value: Any) -> Any:
        if isinstance(value, WorkerPool):
            return value.timeout, value.memory_limit_mb, value.cpu_seconds
        if isinstance(value, set):
            return sorted(value)
        raise TypeError

    arguments = [vars(reward) | dict.fromkeys(("weight", "name", "tally")) for reward in (one, other)]
    try:
        first, second = (json.dumps(values, default=plain) for values in arguments)
    except TypeError:
        return one is other
    return type(one) is type(other) and first == second


def record(sample: Sample, scores: Scores, row: int) -> dict[str, Any]:
    """A completion with its question, its reward, and the value and status of each part: row `row` of `scores`."""
    parts, notes, talk = scores.describe(row), scores.notes(row), sample.conversation
    return {
        "source": sample.prompt.question.source,
        "question": sample.prompt.question.text,
        "answer": sample.answer,
        "answer_prefix": sample.prompt.answer_prefix,
        "completion": sample.text,
        "finish_reason": str(sample.finish_reason),
        "reward": none_if_nan(scores.total[row]),
        "scores": {name: none_if_nan(value) for name, (value, _) in parts.items()},
        "statuses": {name: status for name, (_, status) in parts.items()},
        **({"notes": notes} if notes else {}),
        **({} if talk is None else {"messages": talk.messages, "environment": talk.error or talk.status}),
    }


def none_if_nan(value: float) -> float | None:
    """The value; None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value
