"""The same validation prompts at every recorded step, so that one can follow how their answers change."""

from dataclasses import dataclass

import numpy as np

from grpo_lightning import ranks
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.groups import VALIDATION, completion_record, group_record
from grpo_lightning.plugins.inspect.measuring import Measure
from grpo_lightning.plugins.inspect.record import CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.plugins.inspect.tokens import Row
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.evaluation import Answer
from grpo_lightning.training.explorer import of_conversations, sampler_logp
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import Prompt

FOLLOWED = "followed"
"""The role of these groups."""


@dataclass(slots=True)
class Followed:
    """The first validation questions, each answered greedily and `num_samples` times as validation draws.

    Distribution and random numbers are those of validation. So the answers are among those that a validation of the
    same weights scores, and two steps differ only in the policy.

    Args:
        module: Its policy answers.
        data: It has the questions; none, if the run does not validate.
        num_prompts: How many questions, over all ranks.
        num_samples: Answers drawn for each besides the greedy one.
    """

    module: GRPOModule
    data: PromptDataModule
    num_prompts: int
    num_samples: int

    @property
    def temperature(self) -> float:
        """What the answers are measured at: the temperature that they are drawn at; 1 where validation is greedy."""
        return self.module.evaluation.sampling.temperature or 1.0

    def expect(self) -> None:
        """Lets the next validation keep its answers to the prompts. They count if no update follows it."""
        self.module.evaluation.kept = {prompt.id: [] for prompt in self._mine}

    @property
    def _mine(self) -> list[Prompt]:
        """The prompts of this rank, which are those that it validates."""
        return self.prompts[ranks.rank() :: ranks.world_size()]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all ranks; their ids are those of validation."""
        questions = self.data.questions.get("val", [])
        return [self.data.prompt(questions[row], id=row) for row in range(min(self.num_prompts, len(questions)))]

    def records(self, measure: Measure) -> list[GroupRecord]:
        """The groups of all ranks, by prompt id. Call it in eval mode, without gradients, on every rank."""
        kept, self.module.evaluation.kept = self.module.evaluation.kept, {}
        if not self.prompts:
            return []
        mine, version = self._mine, self.module.policy.version
        answers = [answer for prompt in mine for answer in self._chosen(kept.get(prompt.id, []))]
        is_enough = len(answers) == len(mine) * (1 + self.num_samples)
        if not all(ranks.gather(is_enough and all(answer.version == version for answer in answers))):
            answers = self._answers(mine)
        groups = self._groups(mine, answers, measure)
        return sorted((one for groups in ranks.gather(groups) for one in groups), key=lambda group: group.prompt_id)

    def _chosen(self, answers: list[Answer]) -> list[Answer]:
        """The answers that are recorded, of those that validation kept."""
        drawn = [answer for answer in answers if not answer.greedy]
        return [*(answer for answer in answers if answer.greedy), *drawn[: self.num_samples]]

    def _answers(self, prompts: list[Prompt]) -> list[Answer]:
        """Answers prompt by prompt, the greedy one first."""
        module = self.module
        with module.explorer.awake():
            answers = module.evaluation.answer(module.policy, prompts, 1, greedy=True)
            if self.num_samples:
                answers += module.evaluation.answer(module.policy, prompts, self.num_samples, greedy=False)
        return sorted(answers, key=lambda answer: (answer.sample.prompt.id, not answer.greedy))

    def _groups(self, prompts: list[Prompt], answers: list[Answer], measure: Measure) -> list[GroupRecord]:
        """The groups of this rank."""
        module, tokenizer = self.module, self.module.policy.tokenizer
        rollouts = self._rollouts(prompts, answers)
        rollouts.temperature = self.temperature
        if not module.evaluation.sampling.unfiltered:
            rollouts.sampler_logp = None
        after = measure(rollouts)
        ref_logp = None if module.reference is None else measure.logp(rollouts, module.reference)
        scores = module.evaluation.scorer([answer.sample for answer in answers])
        rows = [*Row.all_of(rollouts)]
        found: dict[int, list[CompletionRecord]] = {prompt.id: [] for prompt in prompts}
        for number, answer in enumerate(answers):
            own = [row for row in rows if int(row.rollouts.row) == number]
            records = [
                (
                    row.record(
                        tokenizer,
                        sampler_logp=None if answer.greedy else row.rollouts.sampler_logp,
                        after_logp=after.logp[row.tokens],
                        ref_logp=None if ref_logp is None else ref_logp[row.tokens],
                        entropy_after=after.entropy[row.tokens],
                        top_after_ids=None if after.top_ids is None else after.top_ids[row.tokens],
                        top_after_logp=None if after.top_logp is None else after.top_logp[row.tokens],
                    ),
                    row.drawn.tolist(),
                )
                for row in own
            ]
            # One whose environment failed has nothing to measure, and is shown all the same.
            for piece, (tokens, drawn) in enumerate(records or [(TokenRecord(np.zeros(0, np.int32), []), [])]):
                found[answer.sample.prompt.id].append(
                    completion_record(answer.sample, scores, number, tokens, drawn, answer.greedy, piece)
                )
        samples = [answers[int(row.rollouts.row)].sample for row in rows]
        shown = {sample.prompt.id: row.prompt(sample, tokenizer) for row, sample in zip(rows, samples, strict=True)}
        return [
            group_record(VALIDATION, [FOLLOWED], shown.get(prompt.id, prompt), None, found[prompt.id], tokenizer)
            for prompt in prompts
        ]

    def _rollouts(self, prompts: list[Prompt], answers: list[Answer]) -> Rollouts:
        """The answers; `Rollouts.row` is an index into them. Of a conversation every piece."""
        if self.data.conversations is not None:
            return of_conversations([answer.sample for answer in answers], 1 + self.num_samples)
        index = {prompt.id: i for i, prompt in enumerate(prompts)}
        rollouts = Rollouts.from_lists(
            prompts=[prompt.token_ids for prompt in prompts],
            group=[index[answer.sample.prompt.id] for answer in answers],
            completions=[answer.completion.token_ids for answer in answers],
        )
        rollouts.sampler_logp = sampler_logp([answer.completion for answer in answers])
        return rollouts
