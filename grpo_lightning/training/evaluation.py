"""Validation and prediction: samples completions of questions, scores them, and computes metrics."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import lightning as L
import torch
from jsonargparse.typing import import_object
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import ranks
from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.grpo.explore import Explorer
from grpo_lightning.maths.metrics import (
    clustered_half_width,
    majority_at_k,
    nan_mean,
    pass_at_k,
    with_half_width,
)
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.function import as_reward
from grpo_lightning.rewards.results import Scores
from grpo_lightning.rewards.reward import Reward, meaning_of_mean, title_of
from grpo_lightning.rewards.scorer import Scorer, Scoring
from grpo_lightning.sandbox.pool import WorkerPool
from grpo_lightning.tasks.question_digest import digest_of_question, digest_of_set
from grpo_lightning.training import internals
from grpo_lightning.training.question_values import QuestionValues
from grpo_lightning.training.task_data import PromptBatch
from grpo_lightning.types import Prompt, RandomKey, Sample, UsageError, at_least

STEP = 2**32 - 1
"""The step that keys the random numbers of evaluation. It is constant, so two validations differ only in the policy."""

PLAIN_TYPES = (str, int, float, list, tuple, dict, set, type(None))
"""Types of arguments that are compared by value; two other objects may act differently although they are equal."""


@dataclass
class Validation:
    """Settings of validation, test and prediction: the completions to sample, and the grader of their answers.

    Args:
        grader: The reward that decides which answers are right, in training too. It adds nothing to the total. None
            takes the grader of the task, such as `MathVerifier` for `Arithmetic`; if the task names none, the reward
            `correct` decides. A grader that costs money or much time, such as `JudgeReward`, grades training only if
            it is among the rewards.
        samples: k of avg@k, pass@k and maj@k.
        sampling: Settings of `model.sampling` that these stages override. None: the same as in training.
        correct: Name of the reward that decides what is right in training, instead of the grader. None takes the
            grader, or the first reward if there is no grader or it costs too much.
    """

    grader: Reward | None = None
    """The reward that decides which answers are right; None: the grader of the task."""
    samples: int = 8
    """k, completions per question beside the greedy one."""
    sampling: ValidationSampling = field(default_factory=ValidationSampling)
    """Settings of `model.sampling` that these stages override."""
    correct: str | None = None
    """Name of the reward that decides what is right in training; None: the grader."""

    def __post_init__(self) -> None:
        at_least("model.validation.samples", self.samples, 1)
        self.grader = self.grader and as_reward(self.grader)


@dataclass(slots=True)
class Answer:
    """An answer to a validation question."""

    sample: Sample
    """The completion."""
    greedy: bool
    """True if it was sampled at temperature 0."""
    version: int
    """`Policy.version` of the weights that sampled it."""
    fingerprint: bytes = b""
    """`Policy.fingerprint` of these weights, which may be an average; empty unless answers are collected."""


class Measurement(NamedTuple):
    """A mean over validation questions, and how far it may be off."""

    mean: float
    """The mean over the questions."""
    half_width: float
    """Half the 95 % interval of the mean over questions: the larger side, where the sides differ."""
    num_questions: int
    """The number of questions with a value."""
    questions: str
    """The digest of all questions of the validation."""

    @classmethod
    def of(cls, values: Sequence[float], questions: str = "") -> "Measurement":
        """Returns the mean of a value per question, without those that are NaN.

        Args:
            values: The value of each question.
            questions: The digest of the questions.
        """
        numbers = [value for value in values if not math.isnan(value)]
        return cls(nan_mean(numbers), clustered_half_width(numbers), len(numbers), questions)

    def __str__(self) -> str:
        """Returns `0.39 ± 0.04`."""
        return with_half_width(self.mean, self.half_width)


def with_questions(scores: Mapping[str, Measurement], texts: Mapping[str, str] | None = None) -> str:
    """Returns `avg@8 0.72 ± 0.03, greedy 0.98 ± 0.02 (256 questions)`, a number of questions per validation.

    Args:
        scores: The scores by name.
        texts: A text for each score, in place of its mean and interval.
    """
    groups = groupby(scores, key=lambda name: scores[name].num_questions)
    return ", ".join(
        f"{', '.join(f'{name} {(texts or scores)[name]}' for name in names)} "
        f"({count} question{'' if count == 1 else 's'})"
        for count, names in groups
    )


class Evaluation(torch.nn.Module):
    """The metrics of a validation: the grader's value of the greedy answer; avg@k, pass@k and maj@k of k completions.

    It is a torch module so that Lightning finds its metrics, which are means over prompts and ranks.

    Args:
        explorer: Samples the answers, and holds the rewards of training.
        sampling: The distribution of the k completions. The greedy answer has the same length and stop strings.
        num_samples: k.
    """

    def __init__(self, explorer: Explorer, sampling: Sampling, num_samples: int) -> None:
        super().__init__()
        self.explorer = explorer
        self.sampling = sampling
        self.num_samples = num_samples
        self.answers_by_id: dict[int, list[Answer]] = {}
        """Answers of the last validation by prompt id. Register an id with `[]` to collect its answers."""
        self.scorer = explorer.scorer
        """The rewards and the grader; the grader is its `main` reward."""
        self._grader_argument: Reward | str | None = None
        self._digest_by_row: dict[int, str] = {}
        self._measurements: dict[str, Measurement] = {}
        self._make_metrics()

    def _apply(self, fn: Any, recurse: bool = True) -> "Evaluation":
        """Leaves the metrics on the CPU, where their values come from: on a GPU each question would wait for it."""
        return self

    @property
    def was_asked(self) -> bool:
        """Whether questions were answered since `reset`."""
        return bool(self.metrics["ci95"].update_called)

    @property
    def grader(self) -> Reward:
        """The reward that decides what is right."""
        return self.scorer.main

    @property
    def measure(self) -> str:
        """The meaning of avg@k and greedy: `fraction right by MathVerifier`, or `mean of my_rewards.brief`."""
        return meaning_of_mean(self.grader_title, self.grader.gives_verdicts)

    @property
    def grader_title(self) -> str:
        """The name of the grader in captions."""
        return title_of(type(self.grader).__name__, vars(self.grader))

    def set_grader(self, grader: Reward | str | None) -> None:
        """Sets the reward that decides what is right.

        A reward of the run with the same arguments takes its place, so that each completion is graded once. A second
        call with the same grader does nothing.

        Args:
            grader: A reward, or the name of a class of rewards; None: the main reward of training.
        """
        if grader == self._grader_argument:
            return
        self._grader_argument = grader
        trained = self.explorer.scorer
        if isinstance(grader, str):
            grader = grader_class(grader)()
        grader = grader or trained.main
        rewards = trained.rewards
        grader = next((reward for reward in rewards if same_grader(reward, grader)), grader)
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
        means = {name: QuestionValues(nan_mean) for name in names}
        self.metrics: Any = torch.nn.ModuleDict({**means, "ci95": QuestionValues(clustered_half_width)})

    def values(self) -> dict[str, list[float]]:
        """Returns each metric's value of every question of all ranks, in their order. Every rank must call it."""
        return {name: metric.of_all_ranks() for name, metric in self.metrics.items() if name != "ci95"}

    def questions(self) -> str:
        """Returns the digest of the questions of all ranks, in their order. Every rank must call it."""
        digests = [item for digest_by_row in ranks.gather(self._digest_by_row) for item in digest_by_row.items()]
        return digest_of_set([digest for _, digest in sorted(digests)])

    def measurements(self) -> dict[str, Measurement]:
        """Returns the mean of each metric with its interval. Every rank must call it."""
        if not self._measurements:
            questions = self.questions()
            self._measurements = {name: Measurement.of(values, questions) for name, values in self.values().items()}
        return self._measurements

    def reset(self) -> None:
        """Clears metrics and answers: `validate` makes metrics in inference mode, which `fit` could not add to."""
        for metric in self.metrics.values():
            metric.reset()
        self._digest_by_row.clear()
        self._measurements = {}
        for answers in self.answers_by_id.values():
            answers.clear()

    def update(self, policy: Policy, batch: PromptBatch) -> None:
        """Adds a batch to the metrics. Every rank must call it equally often."""
        self._measurements = {}
        k = self.num_samples
        greedy_answers, greedy_scores = self._scored(policy, batch, 1, greedy=True)
        sampled_answers, scores = self._scored(policy, batch, k, greedy=False)
        samples = [answer.sample for answer in sampled_answers]
        for answer in [*greedy_answers, *sampled_answers] if self.answers_by_id else ():
            self.answers_by_id.get(answer.sample.prompt.id, []).append(answer)

        questions = {prompt.id: prompt.question for prompt in batch.prompts[: batch.num_real]}
        self._digest_by_row |= {row: digest_of_question(question) for row, question in questions.items()}
        answers = scores.main.answer or [None] * len(samples)
        values_by_metric: dict[str, list[float]] = {name: [] for name in self.metrics}
        for index, greedy_value in enumerate(greedy_scores.main.value):
            group = slice(index * k, (index + 1) * k)
            values = scores.main.value[group]
            question_values = {
                "greedy": greedy_value,
                f"avg@{k}": nan_mean(values),
                "ci95": nan_mean(values),
                f"pass@{k}": pass_at_k(values),
                f"maj@{k}": majority_at_k(values, answers[group]),
                "failed": nan_mean([math.isnan(value) for value in [greedy_value, *values]]),
                "reward": nan_mean(scores.total[group]),
                "length": nan_mean([len(sample.token_ids) for sample in samples[group]]),
                "truncated": nan_mean([sample.truncated for sample in samples[group]]),
            }
            for name in self.metrics:
                values_by_metric[name].append(question_values[name])
        # A rank whose prompts are all padding still updates every metric, or the ranks would not sync alike.
        for name, metric in self.metrics.items():
            metric.update([*questions], values_by_metric[name])

    def predict(self, policy: Policy, batch: PromptBatch) -> list[dict[str, Any]]:
        """Returns k completions of each prompt as JSON-ready records; `sample` counts a prompt's completions from 0."""
        answers, scores = self._scored(policy, batch, self.num_samples, greedy=False)
        samples = [answer.sample for answer in answers]
        return [record(sample, scores, row) | {"sample": row % self.num_samples} for row, sample in enumerate(samples)]

    def _scored(self, policy: Policy, batch: PromptBatch, k: int, greedy: bool) -> tuple[list[Answer], Scores]:
        """Returns the answers to the real prompts of a batch, and their scores. Padding is answered, but not scored."""
        is_padded = batch.num_real < len(batch.prompts)
        with self.scorer.begin() as scoring:
            answers = self.answer(policy, batch.prompts, k, greedy, None if is_padded else scoring)
            answers = answers[: batch.num_real * k]
            return answers, scoring.scores([answer.sample for answer in answers])

    def answer(
        self, policy: Policy, prompts: Sequence[Prompt], num_samples: int, greedy: bool, scoring: Scoring | None = None
    ) -> list[Answer]:
        """Samples `num_samples` answers to each prompt, with the random numbers of evaluation.

        Every rank must call it. `scoring` scores the answers while others are still sampled.
        """
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        listeners = [scoring.add] if scoring else []
        samples = self.explorer.sample(policy, prompts, num_samples, sampling, RandomKey(0, STEP), listeners)
        fingerprint = policy.fingerprint() if self.answers_by_id else b""
        return [Answer(sample, greedy, policy.version, fingerprint) for sample in samples]


class EvaluatingModule(L.LightningModule):
    """A module whose policy can be validated and tested, and makes predictions."""

    policy: Policy
    """π_θ; its weights change with every update."""
    explorer: Explorer
    """The engine and the rewards of training."""
    evaluation: Evaluation
    """The main validation."""

    def __init__(self) -> None:
        super().__init__()
        self.named: Any = torch.nn.ModuleDict()
        """`Evaluation`s on other data, by name."""
        self._validating = ExitStack()
        """Contexts that last for a stage: the engine is awake, and the trainer logs at the step of the weights."""
        self._checkpoint_step: int | None = None
        """Step of the checkpoint that the weights were read from; None once they are trained, or without one."""

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """All validations by name; the main one has an empty name."""
        return {"": self.evaluation, **self.named}

    def on_validation_start(self) -> None:
        """Resets the metrics, and wakes the engine for all batches."""
        for evaluation in self.evaluations.values():
            evaluation.reset()
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._validating.enter_context(internals.standing(self.trainer, self._checkpoint_step))
        self._validating.enter_context(self.explorer.engine.awake())

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds a batch to its validation: the greedy answer, and avg@k, pass@k and maj@k of k completions."""
        evaluation = self.evaluations[batch.validation]
        evaluation.update(self.policy, batch)
        prefix = "/".join(filter(None, ["test" if self.trainer.testing else "val", batch.validation]))
        metrics = {f"{prefix}/{name}": metric for name, metric in evaluation.metrics.items()}
        self.log_dict(metrics, batch_size=len(batch.prompts), on_step=False, on_epoch=True, add_dataloader_idx=False)

    def validated(self) -> dict[str, float]:
        """Returns the metrics of the last validation, as `avg@k` or `NAME/avg@k`. Every rank must call it."""
        return {
            f"{validation}/{name}".removeprefix("/"): float(metric.compute())
            for validation, evaluation in self.evaluations.items()
            if evaluation.was_asked
            for name, metric in evaluation.metrics.items()
        }

    def measurements(self) -> dict[str, Measurement]:
        """Returns the means of the last validation with their intervals, as `avg@k` or `NAME/avg@k`.

        Every rank must call it.
        """
        return {
            f"{validation}/{name}".removeprefix("/"): measurement
            for validation, evaluation in self.evaluations.items()
            if evaluation.was_asked
            for name, measurement in evaluation.measurements().items()
        }

    @property
    def measure(self) -> str:
        """The meaning of avg@k and greedy in the last validation; by name, where the graders differ."""
        measure_by_name = {
            name or "val": evaluation.measure for name, evaluation in self.evaluations.items() if evaluation.was_asked
        }
        distinct = {*measure_by_name.values()}
        return "; ".join(distinct if len(distinct) == 1 else map(": ".join, measure_by_name.items()))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Returns k completions of each prompt with scores and statuses, as JSON-ready records."""
        return self.evaluation.predict(self.policy, batch)

    def on_validation_epoch_end(self) -> None:
        """Ends the run if a reward or the grader failed on more than `max_failed_rewards` of the samples."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            rank_zero_info(f"avg@k and greedy: {self.measure}; ± is half the 95 % interval over questions")
        for evaluation in self.evaluations.values():
            evaluation.scorer.stop_if_broken("validation")

    def on_predict_epoch_end(self) -> None:
        """Reports the samples that got no score."""
        self.evaluation.scorer.report()

    def on_validation_end(self) -> None:
        """Puts the engine to sleep and restores the trainer's counters, once the metrics are logged."""
        self._validating.close()

    on_test_start = on_predict_start = on_validation_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_predict_end = on_validation_end


def grader_class(name: str) -> type[Reward]:
    """Finds a class of rewards by its public name or its import path, as a task gives it."""
    try:
        return import_object(name if "." in name else f"grpo_lightning.{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"model.validation.grader={name}, the task's, is not here ({error}): name another") from error


def same_grader(reward: Reward, grader: Reward) -> bool:
    """True if both rewards have one class and the same arguments, but for weight, name and number of workers."""
    return type(reward) is type(grader) and all(
        _same_argument(value, vars(grader).get(name))
        for name, value in vars(reward).items()
        if name not in ("weight", "name", "tally")
    )


def _same_argument(value: Any, argument: Any) -> bool:
    if isinstance(value, WorkerPool) and isinstance(argument, WorkerPool):
        value, argument = ((pool.timeout, pool.memory_limit_mb, pool.cpu_seconds) for pool in (value, argument))
    return value is argument or (isinstance(value, PLAIN_TYPES) and value == argument)


def record(sample: Sample, scores: Scores, row: int) -> dict[str, Any]:
    """Returns a completion with its question, and the values and statuses of its rewards: row `row` of `scores`."""
    results = scores.describe(row)
    fields: dict[str, Any] = {
        "source": sample.prompt.question.source,
        "question": sample.prompt.question.text,
        "answer": sample.answer,
        "answer_prefix": sample.prompt.answer_prefix,
        "completion": sample.text,
        "finish_reason": str(sample.finish_reason),
        "reward": none_if_nan(scores.total[row]),
        "scores": {name: none_if_nan(value) for name, (value, _) in results.items()},
        "statuses": {name: status for name, (_, status) in results.items()},
    }
    if notes := scores.notes(row):
        fields["notes"] = notes
    if (conversation := sample.conversation) is not None:
        fields |= {"messages": conversation.messages, "environment": conversation.error or conversation.status}
    return fields


def none_if_nan(value: float) -> float | None:
    """Returns the value, or None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value
