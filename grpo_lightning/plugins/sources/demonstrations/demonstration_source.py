"""A source of rollouts that shows the policy gold completions."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.sampler import SingleTurn
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs, Synchronous
from grpo_lightning.plugins.sources.demonstrations.demonstration_surrogates import DEMONSTRATED, EMPHASIS
from grpo_lightning.policy.chat import Chat, rendered
from grpo_lightning.rewards.results import RewardResult, Scores
from grpo_lightning.types import FinishReason, Message, Prompt, Question, Sample, UsageError, at_least, require

STATUS = "demonstration"
"""Status of every reward of a demonstration, since no reward scores it."""
ANSWER = "Answer"
"""Text of a turn that is rendered to find the token with which turns end."""


class Demonstrations(Synchronous):
    r"""Shows the policy gold completions in place of all its completions, or of some in each group.

    With `fraction: 1` nothing is sampled: with `Reinforce`, `NoBaseline` and `TokenMean` that is supervised
    fine-tuning. With less, the last completions of each group are demonstrations, for `LUFFY` or `CHORD`. Both are for
    questions that the policy cannot answer at all: groups that are all wrong teach nothing.

    No reward scores a demonstration, and its log-probs are recorded nowhere: no `correction`, `reward_kl` or
    `PerRewardStd` goes with it.

    Args:
        completion: The gold completion, with `{name}` for a column of the data, and `{answer}` for the gold answer:
            `{solution}\n\boxed{{answer}}`. The end token is added, in a chat the chat template's, unless a stop string
            ends the completion.
        fraction: Fraction of each group's completions: 1 with `loop.group_size: 1`, or a multiple of 1 / G.
        reward: Total reward of a demonstration. None leaves it out of its group's statistics, as CHORD does.
        mu: μ, the weight of all demonstrations against 1 - μ of all sampled completions, with a weighting that averages
            over completions. None weighs every completion alike.
        mu_last: μ after `mu_steps`.
        mu_steps: Steps in which μ goes from `mu` to `mu_last`, as a half cosine. 0 keeps it.
    """

    def __init__(
        self,
        completion: str = "{answer}",
        fraction: float = 1.0,
        reward: float | None = 1.0,
        mu: float | None = None,
        mu_last: float = 0.05,
        mu_steps: int = 0,
    ) -> None:
        super().__init__()
        require(0 < fraction <= 1, f"loop.source.fraction={fraction}: give more than 0, up to 1")
        require(mu is None or 0 < mu < 1, f"loop.source.mu={mu}: give a number between 0 and 1, or null")
        require(0 <= mu_last < 1, f"loop.source.mu_last={mu_last}: give 0 to less than 1")
        at_least("loop.source.mu_steps", mu_steps, 0)
        if mu is not None and fraction == 1:
            raise UsageError(
                f"loop.source.mu={mu}: with fraction=1 there is nothing to weigh demonstrations against; leave it out"
            )
        self.completion = completion
        self.fraction = fraction
        self.reward = reward
        self.mu = mu
        self.mu_last = mu_last
        self.mu_steps = mu_steps

    def setup(self, inputs: SourceInputs) -> None:
        """As `RolloutSource.setup`; reads every gold completion that may be too long."""
        self.group_size = inputs.group_size
        self.num_shown = round(self.fraction * self.group_size)
        """Demonstrations per group."""
        key = f"loop.source.fraction={self.fraction} of loop.group_size={self.group_size}"
        is_multiple = abs(self.num_shown - self.fraction * self.group_size) < 1e-3 and self.num_shown > 0
        require(is_multiple, f"{key}: give a multiple of 1 / group_size, such as {1 / self.group_size:.4g}")
        require(self.fraction < 1 or self.group_size == 1, f"{key}: all would be the same; set loop.group_size=1")
        if not isinstance(inputs.explorer.sampler, SingleTurn):
            raise UsageError(
                "loop.source=Demonstrations: with an environment nobody wrote the other side's turns; "
                "leave out data.environment"
            )
        super().setup(replace(inputs, group_size=self.group_size - self.num_shown))
        self.end = self._end_token()
        """Id of the token that ends a demonstration."""

        # A gold completion that is too long is refused before the first step.
        questions: Sequence[Question] = getattr(inputs.data, "questions", {}).get("train", [])
        for question in questions:
            # No tokenizer makes more tokens than bytes, bar a few special tokens.
            if len(self.text(question).encode()) + 8 > inputs.sampling.max_new_tokens:
                self.token_ids(question, getattr(inputs.data, "answer_prefix", ""))

    def _end_token(self) -> int:
        """Returns the id of the token that ends a completion: in a chat the token that ends the template's turns."""
        policy = self.inputs.policy
        tokenizer = policy.tokenizer
        if getattr(self.inputs.data, "chat", False):
            turns = [Message(role="user", content="Question"), Message(role="assistant", content=ANSWER)]
            text = rendered(tokenizer, turns, Chat(tokenizer).roles_of_parts)
            _, _, text_after = text.rpartition(ANSWER)
            for id in tokenizer.encode(text_after, add_special_tokens=False):
                if id in policy.stop_ids:
                    return int(id)
        return min(policy.stop_ids, key=lambda id: (id != tokenizer.eos_token_id, id))

    def next(self, step: int) -> Exploration:
        exploration = super().next(step)
        metrics = {**exploration.metrics, "rollout/demonstrations": self.fraction}
        if self.mu is not None:
            metrics["rollout/mu"] = self.mu_at(step)
        return replace(exploration, metrics=metrics)

    def mu_at(self, step: int) -> float:
        """Returns μ of a step."""
        assert self.mu is not None
        progress = min(step / self.mu_steps, 1.0) if self.mu_steps else 0.0
        return self.mu_last + (self.mu - self.mu_last) * (1 + math.cos(math.pi * progress)) / 2

    def _explore(self, ids: range, step: int) -> Exploration:
        inputs = self.inputs
        scorer = inputs.explorer.scorer

        # The policy's completions of each prompt, and its demonstrations.
        num_sampled = self.group_size - self.num_shown
        sampled = super()._explore(ids, step) if num_sampled else None
        prompts = [sample.prompt for sample in sampled.samples[::num_sampled]] if sampled else self._asked(ids)
        demonstrations = [self.demonstration(prompt) for prompt in prompts for _ in range(self.num_shown)]
        samples = [*(sampled.samples if sampled else ()), *demonstrations]

        # No reward scores a demonstration: its total is set.
        num_rows = len(demonstrations)
        total = [math.nan if self.reward is None else self.reward] * num_rows
        unscored = RewardResult([math.nan] * num_rows, [STATUS] * num_rows)
        results = {reward.name: unscored for reward in scorer.all_rewards}
        weight = {reward.name: reward.weight for reward in scorer.rewards if reward.weight != 0}
        scores = Scores(total, results, weight, scorer.grader.name)
        if sampled:
            scores = Scores.concat([sampled.scores, scores])

        # Group after group: first the sampled completions, then the demonstrations.
        first_row = len(samples) - num_rows
        rows: list[int] = []
        for group in range(len(prompts)):
            rows += range(group * num_sampled, (group + 1) * num_sampled)
            rows += range(first_row + group * self.num_shown, first_row + (group + 1) * self.num_shown)
        ordered = [replace(samples[row], logp=None) for row in rows]
        rollouts = inputs.explorer.sampler.rollouts(ordered, self.group_size, inputs.sampling.temperature)

        # The columns that surrogates for demonstrations read.
        is_shown = torch.tensor([row >= first_row for row in rows], dtype=torch.float32)
        emphasis = torch.ones_like(is_shown)
        if self.mu is not None:
            mu = self.mu_at(step)
            emphasis = torch.where(is_shown > 0, mu / self.fraction, (1 - mu) / (1 - self.fraction))
        return Exploration(
            samples=ordered,
            scores=replace(
                scores,
                total=[scores.total[row] for row in rows],
                results={name: result.rows(rows) for name, result in scores.results.items()},
            ),
            rollouts=rollouts.with_columns(
                {DEMONSTRATED: rollouts.per_token(is_shown), EMPHASIS: rollouts.per_token(emphasis)}
            ),
            seconds=sampled.seconds if sampled else {"explore": 0.0, "reward": 0.0},
            policy_version=inputs.policy.version,
        )

    def _asked(self, ids: range) -> list[Prompt]:
        """Returns the prompts of questions for which nothing is sampled, with their images encoded."""
        prompts = self.inputs.data.ask(ids)
        if not any(ranks.gather(any(prompt.images for prompt in prompts))):
            return prompts
        with self.inputs.policy.gathered():
            return self.inputs.policy.encode_images(prompts)

    def demonstration(self, prompt: Prompt) -> Sample:
        """Returns the gold completion of a prompt as a sample."""
        text = self.text(prompt.question).removeprefix(prompt.answer_prefix)
        stop = next((stop for stop in self.inputs.sampling.stop if text.endswith(stop)), "")
        return Sample(prompt, text, self.token_ids(prompt.question, prompt.answer_prefix), FinishReason.STOP, stop)

    def token_ids(self, question: Question, answer_prefix: str = "") -> list[int]:
        """Returns the token ids of a question's gold completion. Raises UsageError where there are too many."""
        sampling = self.inputs.sampling
        text = self.text(question).removeprefix(answer_prefix)
        ids: list[int] = self.inputs.policy.tokenizer.encode(text, add_special_tokens=False)
        if not any(text.endswith(stop) for stop in sampling.stop):
            ids.append(self.end)
        if len(ids) > sampling.max_new_tokens:
            raise UsageError(
                f"{question.source}: the gold completion has {len(ids)} tokens, "
                f"over model.sampling.max_new_tokens={sampling.max_new_tokens}: raise it, or leave the row out"
            )
        return ids

    def text(self, question: Question) -> str:
        """Returns the text of a question's gold completion."""
        cells = {"answer": question.answer} | question.metadata

        def cell(match: re.Match[str]) -> str:
            column = match[1]
            if column not in cells:
                raise UsageError(
                    f"loop.source.completion={self.completion!r}: {question.source} has no column {column!r}; "
                    f"there are {', '.join(cells)}"
                )
            require(column != "answer" or bool(question.answer), f"{question.source}: no gold answer to show")
            return str(cells[column])

        return re.sub(r"\{(\w+)\}", cell, self.completion)
