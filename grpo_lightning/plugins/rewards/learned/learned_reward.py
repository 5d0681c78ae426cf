"""The learned reward: a reward model that is trained between the iterations of DeepSeekMath's Algorithm 1."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from grpo_lightning import ranks
from grpo_lightning.plugins.rewards.learned.classifier import RewardModel
from grpo_lightning.plugins.rewards.learned.pairwise_loss import agreement
from grpo_lightning.plugins.rewards.learned.replay import LabelledGroup, Replay, read_labelled
from grpo_lightning.plugins.rewards.learned.reward_model_update import Iterations, RewardUpdate
from grpo_lightning.policy.chat import Chat
from grpo_lightning.rewards.results import RewardResult, Scores
from grpo_lightning.rewards.reward import Reward, Run
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.types import FinishReason, Message, Prompt, Question, Sample, Status, UsageError

SEED = "seed.jsonl"
"""The file beside a reward model with its training data, as written by `tools/make_reward_model.py`."""
NO_LABEL = {Status.ERROR, Status.TIMEOUT, Status.MEMORY, Status.CRASH}
"""The statuses of a grader that failed: its value is not a label."""


class LabelledCompletion(NamedTuple):
    """One completion of a step with its label, which ranks exchange."""

    id: int
    """The id of the prompt."""
    prompt: str
    """The prompt as the reward model reads it."""
    completion: str
    """The text of the completion."""
    length: int
    """The number of its tokens."""
    has_ended: bool
    """Whether it ended by itself."""
    label: float
    """The grader's value, from 0 to 1."""
    value: float
    """The value of this reward."""


class LearnedReward(Reward):
    """The score of a reward model r_φ. With a `grader`, the model continues training at the end of every iteration.

    Line 12 of Algorithm 1 of DeepSeekMath (arXiv 2402.03300): r_φ learns from the iteration's completions, labelled by
    a verifier, with replay of earlier ones. So the reward model keeps up with the policy, whose answers change. Put a
    `MathVerifier` of weight 0 before it and name it as the grader: it then also decides what is right in validation.
    Without `grader` the model is used as it is.

    Args:
        path: Folder made by `save_pretrained` or a hub id: a sequence classifier with `num_labels=1`, or a causal LM,
            such as the policy. A causal LM gets a new head, which at first scores every completion the same.
        grader: The reward that labels completions, from 0 to 1: the name of another reward of the list, or a reward
            that is used for nothing else. Completions on which it fails are not learned from.
        replay: The completions that the model learns from and is tested on; a tenth of each batch is from earlier
            iterations.
        update: The training at the end of an iteration, and the test that the new weights must pass.
        squash: Use the probability σ(r) as the reward instead of r.
        chat: Render the question in the reward model's own chat template. Otherwise it reads the policy's prompt.
        max_tokens: Tokens in one forward or backward of the reward model, padding included.
        dtype: Type of the reward model's weights; train it in float32.
    """

    grades_cheaply = False

    def __init__(
        self,
        path: str,
        grader: Reward | str | None = None,
        replay: Replay | None = None,
        update: RewardUpdate | None = None,
        squash: bool = True,
        chat: bool = False,
        max_tokens: int = 16384,
        dtype: Literal["float32", "bfloat16"] = "float32",
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self.model = RewardModel(path, dtype, max_tokens)
        self.grader = grader
        if isinstance(grader, str):
            self.needs = {"grader": grader}
        elif grader is not None:
            self.parts = (grader,)
        self.iterations = Iterations(self.model, update or RewardUpdate(), replay or Replay())
        self.squash = squash
        self.chat = chat
        seed_path = Path(self.model.path).expanduser() / SEED
        self.iterations.remember(0, read_labelled(seed_path) if seed_path.is_file() else [])

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Checks that model and files are there, and hands the questions to the grader."""
        _ = self.model.config, self.model.tokenizer
        if self.chat:
            _ = self._chat
        super().read_questions(questions)

    def setup(self, run: Run) -> None:
        super().setup(run)
        self.model.load(run.device)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores the completions by r_φ. The status is `ok`, or `cut` where the beginning did not fit its context."""
        texts = [(self._prompt(s.prompt), s.text, s.finish_reason is FinishReason.STOP) for s in samples]
        encoded = [self.model.encode(*text) for text in texts]
        scores = self.model.score([ids for ids, _ in encoded])
        values = [sigmoid(score) for score in scores] if self.squash else scores
        return RewardResult(values, [Status.CUT if is_cut else Status.OK for _, is_cut in encoded])

    @cached_property
    def _chat(self) -> Chat:
        """The reward model's own chat template."""
        return Chat(self.model.tokenizer, key="chat=true of LearnedReward")

    def _prompt(self, prompt: Prompt) -> str:
        """Returns the prompt as the reward model reads it."""
        if not self.chat:
            return prompt.text
        question = prompt.question
        message = Message(role="user", content=question.text)
        return self._chat.text([*question.history, message]) + prompt.answer_prefix

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """Remembers the step's completions and, at the end of an iteration, updates r_φ. Metrics are over all ranks."""
        if self.grader is None:
            return {}
        # All ranks get the completions of all ranks, in an order that is the same for any number of ranks.
        rows_by_rank = ranks.gather([*self._labelled(samples, scores)] if samples else [])
        rows = sorted((row for rows in rows_by_rank for row in rows), key=lambda row: row.id)
        if self.parts:
            Scorer(self.parts, max_failed=1).stop_if_broken()
        if bad_labels := [row.label for row in rows if not 0 <= row.label <= 1]:
            raise UsageError(f"grader of LearnedReward: it gave {bad_labels[0]}; a label is a number from 0 to 1")

        # The completions of each prompt wait for the end of the iteration.
        for _, rows_of_prompt in groupby(rows, key=lambda row: row.id):
            _, prompts, completions, _, have_ended, labels, _ = map(list, zip(*rows_of_prompt, strict=True))
            labelled = LabelledGroup(prompts[0], completions, have_ended, labels)
            self.iterations.pending.append(labelled.balanced(self.iterations.replay.per_label))

        metrics: dict[str, float] = {}
        if rows:
            values = [row.value if self.squash else sigmoid(row.value) for row in rows]
            numbers = [(value, row.label, row.id, row.length) for value, row in zip(values, rows, strict=True)]
            probability, label, id, length = torch.tensor(numbers, dtype=torch.float64).T.contiguous()
            metrics = agreement(probability, label, id.long(), length)
        if iteration_ends:
            metrics |= self.iterations.end(self.name)
        return {key: value for key, value in metrics.items() if not math.isnan(value)}

    def _labelled(self, samples: Sequence[Sample], scores: Scores) -> Iterator[LabelledCompletion]:
        """Yields the completions of this rank that have a label and a score."""
        assert self.grader is not None
        labels = scores.results[self.grader] if isinstance(self.grader, str) else self.grader(samples)
        values = scores.results[self.name].value
        for s, label, status, value in zip(samples, labels.value, labels.status, values, strict=True):
            if not (math.isnan(label) or math.isnan(value) or status in NO_LABEL):
                has_ended = s.finish_reason is FinishReason.STOP
                prompt = self._prompt(s.prompt)
                yield LabelledCompletion(s.prompt.id, prompt, s.text, len(s.token_ids), has_ended, label, value)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.grader is None else self.iterations.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iterations.load_state_dict(state)


def sigmoid(score: float) -> float:
    """Returns σ(score), without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
