"""The same validation prompts at every recorded step, so that their answers can be followed over the run."""

from dataclasses import dataclass

import numpy as np

from grpo_lightning import ranks
from grpo_lightning.plugins.looking.inspector.groups import Measure, Row, completion_record, group_record, measured
from grpo_lightning.plugins.looking.inspector.record import CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.training.evaluation import Answer
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import Prompt


@dataclass(slots=True)
class Followed:
    """The first validation questions, each answered greedily and `num_samples` times as validation samples."""

    module: GRPOModule
    """The module whose policy answers."""
    data: TaskData
    """The data with the questions."""
    num_prompts: int
    """Prompts that are followed, over all ranks."""
    num_samples: int
    """Sampled answers to each prompt."""

    @property
    def temperature(self) -> float:
        """The temperature at which answers are sampled and measured; 1 where validation is greedy."""
        return self.module.evaluation.sampling.temperature or 1.0

    def expect(self) -> None:
        """Makes the next validation keep its answers to the prompts. They count if no update follows it."""
        self.module.evaluation.answers_by_id = {prompt.id: [] for prompt in self.prompts}

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all ranks, with the ids that they have in validation."""
        questions = self.data.questions.get("val", [])
        return [self.data.prompt(questions[row], id=row) for row in range(min(self.num_prompts, len(questions)))]

    def records(self, measure: Measure) -> list[GroupRecord]:
        """Returns the groups of all ranks, by prompt id. Call it in eval mode, without gradients, on every rank."""
        policy = self.module.policy
        evaluation = self.module.evaluation
        answers_by_id, evaluation.answers_by_id = evaluation.answers_by_id, {}
        if not self.prompts:
            return []
        # The prompts that this rank validates; validation answers greedily first.
        rank_prompts = self.prompts[ranks.rank() :: ranks.world_size()]
        answers = [
            answer for prompt in rank_prompts for answer in answers_by_id.get(prompt.id, [])[: 1 + self.num_samples]
        ]

        # Answers of the validation serve if they are enough, and of the weights as they are now.
        is_enough = len(answers) == len(rank_prompts) * (1 + self.num_samples)
        weights = policy.version, policy.fingerprint()
        is_current = all((answer.version, answer.fingerprint) == weights for answer in answers)
        if not all(ranks.gather(is_enough and is_current)):
            with self.module.explorer.engine.awake():
                answers = evaluation.answer(policy, rank_prompts, 1, greedy=True)
                if self.num_samples:
                    answers += evaluation.answer(policy, rank_prompts, self.num_samples, greedy=False)
            answers.sort(key=lambda answer: (answer.sample.prompt.id, not answer.greedy))

        groups_by_rank = ranks.gather(self._groups(rank_prompts, answers, measure))
        return sorted((group for groups in groups_by_rank for group in groups), key=lambda group: group.prompt_id)

    def _groups(self, prompts: list[Prompt], answers: list[Answer], measure: Measure) -> list[GroupRecord]:
        """Returns the groups of this rank."""
        module = self.module
        tokenizer = module.policy.tokenizer
        samples = [answer.sample for answer in answers]
        # `Rollouts.sample_index` is an index into the answers, which are as many for each prompt.
        rollouts = self.data.sampler.rollouts(samples, 1 + self.num_samples, self.temperature)
        if not module.evaluation.sampling.unfiltered:
            # Log-probs of a filtered distribution do not compare with what is measured.
            rollouts = rollouts.with_columns({"sampler_logp": None})
        scored = measure(rollouts)
        ref_logp = None
        if module.reference is not None:
            module.reference.begin(module.policy, samples)
            ref_logp = measure.logp(rollouts, module.reference)
        scores = module.evaluation.scorer(samples)

        rows_by_answer: list[list[Row]] = [[] for _ in answers]
        for measured_row in Row.all_of(rollouts):
            rows_by_answer[int(measured_row.rollouts.sample_index)].append(measured_row)
        completions: dict[int, list[CompletionRecord]] = {prompt.id: [] for prompt in prompts}
        prompt_by_id = {prompt.id: prompt for prompt in prompts}
        for index, answer in enumerate(answers):
            sample = answer.sample
            # An answer whose environment failed has nothing to measure, and is shown all the same.
            for row in rows_by_answer[index] or (None,):
                tokens = TokenRecord(np.zeros(0, np.int32), [])
                if row is not None:
                    prompt_by_id[sample.prompt.id] = row.prompt(sample, tokenizer)
                    tokens = row.record(
                        tokenizer,
                        after_logp=scored.logp[row.tokens],
                        ref_logp=None if ref_logp is None else ref_logp[row.tokens],
                        sampler_logp=None if answer.greedy else row.rollouts.sampler_logp,
                        **measured(scored, row.tokens, "after"),
                    )
                completion = completion_record(sample, scores, index, row, tokens, answer.greedy)
                completions[sample.prompt.id].append(completion)
        return [
            group_record("validation", ["followed"], prompt_by_id[id], None, group, tokenizer)
            for id, group in completions.items()
        ]
