"""A source of rollouts that shows the policy gold completions."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_lightning.engines.sampler import SingleTurn
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs, Synchronous
from grpo_lightning.plugins.sources.demonstrations.demonstration_surrogates import DEMONSTRATED, EMPHASIS
from grpo_lightning.policy.chat import Chat, rendered
from grpo_lightning.rewards.results import RewardResult, Scores
from grpo_lightning.types import FinishReason, Message, Prompt, Question, Sample, at_least, require

STATUS = "demonstration"  # of each reward, which has not scored it
ANSWER = "Answer"  # of a turn that shows with which token turns end


class Demonstrations(Synchronous):
    r"""Gold completions in place of completions of the policy: of all, or of some in each group.

    With `fraction: 1` nothing is drawn: with `Reinforce`, `NoBaseline` and `TokenMean` that is supervised fine-tuning.
    With less, the last completions of each group are demonstrations, for `LUFFY` or `CHORD`. Both are for what the
    policy cannot do at all: groups that are all wrong teach nothing.

    No reward scores a demonstration, and its log-probs are recorded nowhere: no `correction`, `reward_kl` or
    `PerRewardStd` goes with it.

    Args:
        completion: The gold completion, with `{name}` for a column of the data, and `{answer}` for the gold answer:
            `{solution}\n\boxed{{answer}}`. The end token is added, that of the chat template in a chat, unless a stop
            string ends it.
        fraction: Fraction of each group's completions: 1 with `loop.group_size: 1`, or a multiple of 1 / G.
        reward: Total reward of a demonstration. None leaves it out of its group's statistics, as CHORD does.
        mu: μ, the weight of all demonstrations against 1 - μ of all completions drawn, with a weighting that averages
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
        only = f"loop.source.mu={mu}: with fraction=1 there is nothing to weigh demonstrations against; leave it out"
        require(mu is None or fraction < 1, only)
        self.completion, self.fraction, self.reward = completion, fraction, reward
        self.mu, self.mu_last, self.mu_steps = mu, mu_last, mu_steps

    def setup(self, inputs: SourceInputs) -> None:
        """As `RolloutSource.setup`; reads every gold completion that may be too long."""
        self.group_size, self.num_shown = inputs.group_size, round(self.fraction * inputs.group_size)
        key = f"loop.source.fraction={self.fraction} of loop.group_size={self.group_size}"
        whole = abs(self.num_shown - self.fraction * self.group_size) < 1e-3 and self.num_shown > 0
        require(whole, f"{key}: give a multiple of 1 / group_size, such as {1 / self.group_size:.4g}")
        require(self.fraction < 1 or self.group_size == 1, f"{key}: all would be the same; set loop.group_size=1")
        several = "with an environment nobody wrote the other side's turns; leave out data.environment"
        require(isinstance(inputs.explorer.sampler, SingleTurn), f"loop.source=Demonstrations: {several}")
        super().setup(replace(inputs, group_size=self.group_size - self.num_shown))
        self.end = self._end_token()
        questions: Sequence[Question] = getattr(inputs.data, "questions", {}).get("train", [])
        for question in questions:
            # No tokenizer makes more tokens than bytes, bar a few special ones.
            if len(self.text(question).encode()) + 8 > inputs.sampling.max_new_tokens:
                self.token_ids(question, getattr(inputs.data, "answer_prefix", ""))

    def _end_token(self) -> int:
        """The id of the token that ends a completion: in a chat the one with which the template ends a turn."""
        stop_ids, tokenizer, data = self.inputs.policy.stop_ids, self.inputs.policy.tokenizer, self.inputs.data
        if getattr(data, "chat", False):
            turns = [Message(role="user", content="Question"), Message(role="assistant", content=ANSWER)]
            text = rendered(tokenizer, turns, Chat(tokenizer).roles_of_parts)
            _, _, text_after = text.rpartition(ANSWER)
            ends = [id for id in tokenizer.encode(text_after, add_special_tokens=False) if id in stop_ids]
            if ends:
                return int(ends[0])
        return min(stop_ids, key=lambda id: (id != tokenizer.eos_token_id, id))

    def next(self, step: int) -> Exploration:
        exploration = super().next(step)
        shown: dict[str, float] = {"rollout/demonstrations": self.fraction}
        shown |= {} if self.mu is None else {"rollout/mu": self.mu_at(step)}
        return replace(exploration, metrics={**exploration.metrics, **shown})

    def mu_at(self, step: int) -> float:
        """μ of a step."""
        assert self.mu is not None
        done = min(step / self.mu_steps, 1.0) if self.mu_steps else 0.0
        return self.mu_last + (self.mu - self.mu_last) * (1 + math.cos(math.pi * done)) / 2

    def _explore(self, ids: range, step: int) -> Exploration:
        run, drawn_size, size = self.inputs, self.group_size - self.num_shown, self.group_size
        drawn = super()._explore(ids, step) if drawn_size else None
        prompts = [sample.prompt for sample in drawn.samples[::drawn_size]] if drawn else run.data.ask(ids)
        gold = [self.demonstration(prompt) for prompt in prompts]
        shown = [sample for sample in gold for _ in range(self.num_shown)]
        samples = [*(drawn.samples if drawn else ()), *shown]
        weight = {reward.name: reward.weight for reward in run.explorer.scorer.rewards if reward.weight != 0}
        unscored = RewardResult([math.nan] * len(shown), [STATUS] * len(shown))
        results = {reward.name: unscored for reward in run.explorer.scorer.all_rewards}
        total = [math.nan if self.reward is None else self.reward] * len(shown)
        scores = Scores(total, results, weight, run.explorer.scorer.grader.name)
        scores = Scores.concat([drawn.scores, scores]) if drawn else scores
        # Group after group: those drawn, then those shown.
        first, count = len(samples) - len(shown), len(prompts)
        parts = torch.arange(first).view(count, -1), torch.arange(first, len(samples)).view(count, -1)
        rows = torch.cat(parts, dim=1).flatten().tolist() if count else []
        ordered = [replace(samples[row], logp=None) for row in rows]
        of_shown = torch.tensor([row >= first for row in rows], dtype=torch.float32)
        rollouts = run.explorer.sampler.rollouts(ordered, size, run.sampling.temperature)
        emphasis = torch.ones_like(of_shown)
        if self.mu is not None:
            mu = self.mu_at(step)
            emphasis = torch.where(of_shown > 0, mu / self.fraction, (1 - mu) / (1 - self.fraction))
        return Exploration(
            samples=ordered,
            scores=replace(
                scores,
                total=[scores.total[row] for row in rows],
                results={name: result.rows(rows) for name, result in scores.results.items()},
            ),
            rollouts=rollouts.with_columns(
                {DEMONSTRATED: rollouts.per_token(of_shown), EMPHASIS: rollouts.per_token(emphasis)}
            ),
            seconds=drawn.seconds if drawn else {"explore": 0.0, "reward": 0.0},
            policy_version=run.policy.version,
        )

    def demonstration(self, prompt: Prompt) -> Sample:
        """The gold completion of a prompt."""
        text = self.text(prompt.question).removeprefix(prompt.answer_prefix)
        stop = next((stop for stop in self.inputs.sampling.stop if text.endswith(stop)), "")
        return Sample(prompt, text, self.token_ids(prompt.question, prompt.answer_prefix), FinishReason.STOP, stop)

    def token_ids(self, question: Question, answer_prefix: str = "") -> list[int]:
        """The token ids of a question's gold completion."""
        text, sampling = self.text(question).removeprefix(answer_prefix), self.inputs.sampling
        ends = any(text.endswith(stop) for stop in sampling.stop)
        ids = self.inputs.policy.tokenizer.encode(text, add_special_tokens=False) + ([] if ends else [self.end])
        most = sampling.max_new_tokens
        fault = f"{question.source}: the gold completion has {len(ids)} tokens"
        require(len(ids) <= most, f"{fault}, over model.sampling.max_new_tokens={most}: raise it, or leave the row out")
        return ids

    def text(self, question: Question) -> str:
        """The text of a question's gold completion."""
        cells = {"answer": question.answer} | question.metadata

        def cell(match: re.Match[str]) -> str:
            fault = f"loop.source.completion={self.completion!r}: {question.source} has no column {match[1]!r}"
            require(match[1] in cells, f"{fault}; there are {', '.join(cells)}")
            require(match[1] != "answer" or bool(question.answer), f"{question.source}: no gold answer to show")
            return str(cells[match[1]])

        return re.sub(r"\{(\w+)\}", cell, self.completion)
