"""The learned reward: a reward model that is trained between the iterations of DeepSeekMath's Algorithm 1."""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import ranks
from grpo_lightning.plugins.learned.agreement import Agreement, forgotten
from grpo_lightning.plugins.learned.hacking import HackingAlarm, hacks
from grpo_lightning.plugins.learned.labelled import LabelledGroup, hash_fraction, read_labelled
from grpo_lightning.plugins.learned.loss import BinaryCrossEntropy, RewardLoss
from grpo_lightning.plugins.learned.model import RewardModel
from grpo_lightning.plugins.learned.replay import ReplayBuffer
from grpo_lightning.plugins.learned.update import RewardUpdate, Trial, scored
from grpo_lightning.policy.chat import chat_text
from grpo_lightning.rewards.base import Reward, Run
from grpo_lightning.rewards.results import RewardResult, Scores
from grpo_lightning.rewards.scorer import settle
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, Status, UsageError, at_least

log = logging.getLogger(__name__)

SEED = "seed.jsonl"
"""The file beside a reward model with its training data, as written by `tools/make_reward_model.py`."""

NO_LABEL = {Status.ERROR, Status.TIMEOUT, Status.MEMORY, Status.CRASH}
"""The statuses of a labeller that failed: its value is then not a label."""

NUM_PROBES = 8
"""The number of prompts on which the hacks are tried."""


@dataclass(slots=True)
class _Row:
    """One completion of a step with its label, which ranks exchange."""

    id: int
    prompt: str
    question: str
    completion: str
    ended: bool
    label: float
    value: float
    length: int


class LearnedReward(Reward):
    """The score of a reward model r_φ. With a `labeller`, the model continues training at the end of every iteration.

    Line 12 of Algorithm 1 of DeepSeekMath (arXiv 2402.03300): r_φ learns from the iteration's completions, labelled by
    a verifier, with replay of earlier ones. So the reward model keeps up with the policy, whose answers change. Put a
    `MathVerifier` of weight 0 before it and name it as the labeller: it then also decides what is right in validation.
    Without `labeller` and `pairs` the model is used as it is.

    Args:
        path: Folder made by `save_pretrained` or a hub id: a sequence classifier with `num_labels=1`, or a causal LM,
            such as the policy. A causal LM gets a new head, which at first scores every completion the same.
        labeller: The reward that labels completions, from 0 to 1: the name of another reward of the list, or a reward
            that is used for nothing else. Completions on which it fails are not learned from.
        pairs: JSON lines file of preferences, with `prompt`, `chosen` and `rejected` in each row. Its rows are new data
            at the end of the first iteration. Rows appended later are new data at the end of their iteration.
        loss: The function that is minimised; `BinaryCrossEntropy` if left out.
        replay: Fraction of each batch that is drawn from earlier iterations, from 0 to below 1.
        buffer_size: Largest number of prompts remembered; a fraction `held_out` of them is for testing.
        per_label: Largest number of right completions, and of wrong ones, taken from one prompt.
        num_passes: Passes over an iteration's new data. At 0 the model is measured, but never trained.
        batch_size: Prompts per optimizer update of the reward model.
        lr: Peak learning rate. AdamW starts afresh in every iteration: the rate rises over a tenth of its updates, then
            falls to 0.
        held_out: Fraction of the prompts that are never trained on; the prompt's text alone decides. An iteration waits
            for the next one if none of its prompts are held out, or all are.
        max_forgetting: Largest allowed drop in accuracy on the held-out prompts of earlier iterations; an update that
            loses more is undone.
        min_gain: Smallest required gain in accuracy on this iteration's held-out prompts. At 0, equal accuracy with a
            smaller loss also passes. To keep every update set `min_gain=-1` and `max_forgetting=1`.
        alarm_after: Number of iterations over which the model's mean may rise without the labeller's before a warning.
        squash: Use the probability σ(r) as the reward instead of r.
        chat: Render the question in the reward model's own chat template. Otherwise it reads the policy's prompt.
        max_tokens: Tokens in one forward or backward of the reward model, padding included.
        dtype: Type of its weights; train it in float32.
        seed: Seed of order and draws.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.
    """

    def __init__(
        self,
        path: str,
        labeller: Reward | str | None = None,
        pairs: str | None = None,
        loss: RewardLoss | None = None,
        replay: float = 0.1,
        buffer_size: int = 4096,
        per_label: int = 4,
        num_passes: int = 1,
        batch_size: int = 16,
        lr: float = 2e-5,
        held_out: float = 0.1,
        max_forgetting: float = 0.02,
        min_gain: float = 0.0,
        alarm_after: int = 3,
        squash: bool = True,
        chat: bool = False,
        max_tokens: int = 16384,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        check = partial(at_least, owner="LearnedReward")
        check("buffer_size", buffer_size, 2)
        check("per_label", per_label, 1)
        check("num_passes", num_passes, 0)
        check("batch_size", batch_size, 1)
        check("max_forgetting", max_forgetting, 0)
        check("alarm_after", alarm_after, 1)
        if not 0 <= replay < 1:
            raise UsageError(f"replay={replay} of LearnedReward: give a fraction from 0 to below 1")
        if not -1 <= min_gain < 1:
            raise UsageError(f"min_gain={min_gain} of LearnedReward: give -1 to below 1")
        if not 0 < held_out < 1:
            raise UsageError(f"held_out={held_out} of LearnedReward: give a fraction above 0 and below 1")
        if not 0 < lr < math.inf:
            raise UsageError(f"lr={lr} of LearnedReward: give more than 0")
        self.model = RewardModel(path, dtype, max_tokens)
        self.labeller = labeller
        if isinstance(labeller, str):
            self.needs = {"labeller": labeller}
        elif labeller is not None:
            self.parts = (labeller,)
        self.pairs = None if pairs is None else Path(pairs).expanduser()
        self.update = RewardUpdate(loss or BinaryCrossEntropy(), replay, num_passes, batch_size, lr)
        self.per_label = per_label
        self.held_out = held_out
        self.max_forgetting = max_forgetting
        self.min_gain = min_gain
        self.squash = squash
        self.chat = chat
        self.seed = seed
        self.version = 0
        """The number of updates accepted so far."""
        self.iteration = 0
        """The number of iterations ended so far. In the history they count from 1; 0 is the data of `seed.jsonl`."""
        num_test = min(max(round(buffer_size * held_out), 1), buffer_size - 1)
        self.history = ReplayBuffer(buffer_size - num_test)
        self.test = ReplayBuffer(num_test)
        self.alarm = HackingAlarm(alarm_after)
        self._pending: list[LabelledGroup] = []
        self._probes: list[tuple[str, str]] = []
        self._best: dict[int, float] = {}
        self._pairs_read = 0
        self._remember(0, self._seed_set())

    def _seed_set(self) -> list[LabelledGroup]:
        path = Path(self.model.path).expanduser() / SEED
        return read_labelled(path) if path.is_file() else []

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Checks that model and files are there, and lets the labeller read the gold answers."""
        self.model.check()
        if self.chat:
            self._render("question")
        if self.pairs is not None:
            read_labelled(self.pairs)
        super().read_questions(questions)

    def setup(self, run: Run) -> None:
        """Reads the weights."""
        super().setup(run)
        self.model.to(run.device)
        _ = self.model.model

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`, or `cut` where the beginning did not fit the reward model's context."""
        encoded = [
            self.model.encode(self._prompt(s.prompt), s.text, s.finish_reason is FinishReason.STOP) for s in samples
        ]
        scores = self.model.score([ids for ids, _ in encoded])
        return RewardResult(
            [sigmoid(score) for score in scores] if self.squash else scores,
            [Status.CUT if is_cut else Status.OK for _, is_cut in encoded],
        )

    def _prompt(self, prompt: Prompt) -> str:
        return self._render(prompt.question.text) + prompt.answer_prefix if self.chat else prompt.text

    def _render(self, question: str) -> str:
        return chat_text(self.model.tokenizer, question, key="chat=true of LearnedReward")

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """Remembers the step's completions and, at the end of an iteration, updates r_φ. Numbers are of all ranks."""
        if self.labeller is None and self.pairs is None:
            return {}
        rows = [row for rank in ranks.gather(self._label(samples, scores)) for row in rank]
        settle(self.parts)
        rows.sort(key=lambda row: row.id)  # The same for any number of ranks.
        if bad := [row.label for row in rows if not 0 <= row.label <= 1]:
            raise UsageError(f"labeller of LearnedReward: it gave {bad[0]}; a label is a number from 0 to 1")
        for _, same in groupby(rows, key=lambda row: row.id):
            group = list(same)
            labelled = LabelledGroup(
                group[0].prompt,
                [row.completion for row in group],
                [row.ended for row in group],
                [row.label for row in group],
            )
            self._pending.append(labelled.balanced(self.per_label))
            if self.iteration == 0 and len(self._probes) < NUM_PROBES:
                self._probes.append((group[0].prompt, group[0].question))
        metrics = self._agreement(rows) if rows else {}
        self.alarm.add([row.value for row in rows], [row.label for row in rows])
        if iteration_ends:
            metrics |= self._end_iteration()
        return {key: value for key, value in metrics.items() if not math.isnan(value)}

    def _label(self, samples: Sequence[Sample], scores: Scores) -> list[_Row]:
        """The completions of this rank that have a label and a score."""
        if self.labeller is None or not samples:
            return []
        labels = scores.results[self.labeller] if isinstance(self.labeller, str) else self.labeller(samples)
        values = scores.results[self.name].value
        rows = []
        for sample, label, status, value in zip(samples, labels.value, labels.status, values, strict=True):
            if math.isnan(label) or math.isnan(value) or status in NO_LABEL:
                continue
            rows.append(
                _Row(
                    id=sample.prompt.id,
                    prompt=self._prompt(sample.prompt),
                    question=sample.prompt.question.text,
                    completion=sample.text,
                    ended=sample.finish_reason is FinishReason.STOP,
                    label=label,
                    value=value,
                    length=len(sample.token_ids),
                )
            )
        return rows

    def _agreement(self, rows: Sequence[_Row]) -> dict[str, float]:
        """The agreement of a step's rewards with the labels, over all completions."""
        values = [row.value for row in rows]
        agreement = Agreement(
            torch.tensor(values if self.squash else [sigmoid(value) for value in values], dtype=torch.float64),
            torch.tensor([row.label for row in rows], dtype=torch.float64),
            torch.tensor([row.id for row in rows]),
        )
        return {
            "pairwise": agreement.pairwise(),
            "auc": agreement.auc(),
            "brier": agreement.brier(),
            "ece": agreement.ece(),
            "spearman": agreement.spearman(),
            "length_correlation": agreement.correlation(torch.tensor([row.length for row in rows])),
            "verified": float(agreement.label.mean()),
            "overrated": float((agreement.probability - agreement.label).mean()),
        }

    def _end_iteration(self) -> dict[str, float]:
        """Line 12 of Algorithm 1."""
        groups = [*self._pending, *self._new_pairs()]
        new, held_out = split(groups, self.held_out)
        waits = bool(groups) and self.update.num_passes > 0 and not (new and held_out)
        self._best |= self._accuracies(known=self._best)  # The iteration remembered last has none yet.
        metrics = {"accepted": 0.0, "replayed": 0.0}
        if new and held_out and self.update.num_passes:
            trial = self.update(
                self.model, new, [*self.history], held_out, [*self.test], self.max_forgetting, self.min_gain,
                Random(f"{self.seed} train {self.iteration}"),
            )  # fmt: skip
            metrics |= self._judge(trial)
        metrics["version"] = self.version
        now = self._accuracies()
        metrics["forgetting"] = forgotten(self._best, now)
        self._best |= {iteration: max(self._best[iteration], accuracy) for iteration, accuracy in now.items()}
        if waits:
            if ranks.rank() == 0:
                log.warning(
                    "%s: of this iteration's %d prompts %s held out (held_out=%g), so no update can be trained and "
                    "judged; they wait for the next iteration. Give an iteration more prompts, or change held_out",
                    self.name, len({g.prompt for g in groups}), "all are" if held_out else "none is", self.held_out,
                )  # fmt: skip
        else:
            self._remember(self.iteration + 1, groups)
        self._pending = groups[-self.history.size :] if waits else []
        metrics["remembered"] = len(self.history)
        self.iteration += 1
        for name, scores in self._hacks().items():
            metrics[f"hack_{name}"] = sum(scores) / len(scores)
        metrics["alarm"] = float(self.alarm.end_iteration(self.name))
        return metrics

    def _judge(self, trial: Trial) -> dict[str, float]:
        accepted = trial.accepts(self.max_forgetting, self.min_gain)
        self.version += accepted
        metrics = {
            "accepted": float(accepted),
            "replayed": trial.replayed,
            "new_before": trial.new[0].accuracy,
            "new_after": trial.new[1].accuracy,
        }
        old = "no earlier iterations"
        if trial.old is not None:
            metrics |= {"old_before": trial.old[0].accuracy, "old_after": trial.old[1].accuracy}
            old = f"on earlier iterations {trial.old[0].accuracy:.3f} -> {trial.old[1].accuracy:.3f}"
        rank_zero_info(
            f"{self.name}: iteration {self.iteration + 1}, held-out accuracy {trial.new[0].accuracy:.3f} -> "
            f"{trial.new[1].accuracy:.3f}, {old}: "
            + (f"accepted as version {self.version}" if accepted else f"undone, version {self.version} stays")
        )
        return metrics

    def _remember(self, iteration: int, groups: Sequence[LabelledGroup]) -> None:
        if groups:
            new, held_out = split(groups, self.held_out)
            rng = Random(f"{self.seed} remember {iteration}")
            self.history.add(iteration, new, rng)
            self.test.add(iteration, held_out, rng)

    def _new_pairs(self) -> list[LabelledGroup]:
        if self.pairs is None:
            return []
        # Rank 0's: the file may be growing.
        rows = ranks.gather(read_labelled(self.pairs, skip=self._pairs_read))[0]
        self._pairs_read += len(rows)
        return rows

    def _accuracies(self, known: Collection[int] = ()) -> dict[int, float]:
        """The accuracy on the held-out prompts of every earlier iteration that is not `known`."""
        now = {}
        for iteration, groups in self.test.by_iteration().items():
            if iteration not in known:
                score, label, group = scored(self.model, groups)
                now[iteration] = Agreement(score.sigmoid(), label, group).accuracy()
        return now

    def _hacks(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for prompt, question in self._probes:
            texts = hacks(question)
            scores = self.model.score([self.model.encode(prompt, text, True)[0] for text in texts.values()])
            for name, score in zip(texts, scores, strict=True):
                found.setdefault(name, []).append(sigmoid(score) if self.squash else score)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Weights, buffers, the data of the running iteration, and what the metrics remember."""
        if self.labeller is None and self.pairs is None:
            return {}
        return {
            "model": self.model.model.state_dict(),
            "version": self.version,
            "iteration": self.iteration,
            "history": self.history.state_dict(),
            "test": self.test.state_dict(),
            "pending": [group.as_row() for group in self._pending],
            "probes": self._probes,
            "best": self._best,
            "pairs_read": self._pairs_read,
            "alarm": self.alarm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.model.model.load_state_dict(state["model"])
        self.version, self.iteration = state["version"], state["iteration"]
        self.history.load_state_dict(state["history"])
        self.test.load_state_dict(state["test"])
        self._pending = [LabelledGroup.from_row(row) for row in state["pending"]]
        self._probes = [(prompt, question) for prompt, question in state["probes"]]
        self._best = state["best"]
        self._pairs_read = state["pairs_read"]
        self.alarm.load_state_dict(state["alarm"])


def split(groups: Sequence[LabelledGroup], fraction: float) -> tuple[list[LabelledGroup], list[LabelledGroup]]:
    """The groups to train on, and those held out. The prompt alone decides: a held-out one is never trained on."""
    chosen = [hash_fraction(group.prompt) < fraction for group in groups]
    new = [group for group, is_held_out in zip(groups, chosen, strict=True) if not is_held_out]
    return new, [group for group, is_held_out in zip(groups, chosen, strict=True) if is_held_out]


def sigmoid(score: float) -> float:
    """σ(score), without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
