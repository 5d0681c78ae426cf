"""The same validation prompts at every recorded step, so that one can follow how their answers change."""

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
    """The first validation questions, each answered greedily and `num_samples` times as validation draws."""

    module: GRPOModule
    data: TaskData
    num_prompts: int
    num_samples: int

    @property
    def temperature(self) -> float:
        """The temperature that answers are drawn and measured at; 1 where validation is greedy."""
        return self.module.evaluation.sampling.temperature or 1.0

    def expect(self) -> None:
        """Lets the next validation keep its answers to the prompts. They count if no update follows it."""
        self.module.evaluation.answers_by_id = {prompt.id: [] for prompt in self.prompts}

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all ranks; their ids are those of validation."""
        questions = self.data.questions.get("val", [])
        return [self.data.prompt(questions[row], id=row) for row in range(min(self.num_prompts, len(questions)))]

    def records(self, measure: Measure) -> list[GroupRecord]:
        """The groups of all ranks, by prompt id. Call it in eval mode, without gradients, on every rank."""
        module, evaluation, policy = self.module, self.module.evaluation, self.module.policy
        kept, evaluation.answers_by_id = evaluation.answers_by_id, {}
        if not self.prompts:
            return []
        mine = self.prompts[ranks.rank() :: ranks.world_size()]  # those that the rank validates
        # Validation answers greedily first.
        answers = [answer for prompt in mine for answer in kept.get(prompt.id, [])[: 1 + self.num_samples]]
        is_enough = len(answers) == len(mine) * (1 + self.num_samples)
        weights = policy.version, policy.fingerprint()
        is_current = all((answer.version, answer.fingerprint) == weights for answer in answers)
        if not all(ranks.gather(is_enough and is_current)):
            with module.explorer.engine.awake():
                answers = evaluation.answer(policy, mine, 1, greedy=True)
                answers += evaluation.answer(policy, mine, self.num_samples, greedy=False) if self.num_samples else []
            answers.sort(key=lambda answer: (answer.sample.prompt.id, not answer.greedy))
        groups = ranks.gather(self._groups(mine, answers, measure))
        return sorted((one for own in groups for one in own), key=lambda group: group.prompt_id)

    def _groups(self, prompts: list[Prompt], answers: list[Answer], measure: Measure) -> list[GroupRecord]:
        """The groups of this rank."""
        module, tokenizer = self.module, self.module.policy.tokenizer
        samples = [answer.sample for answer in answers]
        # `Rollouts.row` is an index into the answers, which are as many for each prompt.
        rollouts = self.data.sampler.rollouts(samples, 1 + self.num_samples, self.temperature)
        if not module.evaluation.sampling.unfiltered:
            rollouts = rollouts.with_columns({"sampler_logp": None})
        after = measure(rollouts)
        ref_logp = None
        if module.reference is not None:
            module.reference.begin(module.policy, samples)
            ref_logp = measure.logp(rollouts, module.reference)
        scores = module.evaluation.scorer(samples)
        rows = [*Row.all_of(rollouts)]
        found: dict[int, list[CompletionRecord]] = {prompt.id: [] for prompt in prompts}
        shown = {prompt.id: prompt for prompt in prompts}
        for index, answer in enumerate(answers):
            sample, own = answer.sample, [row for row in rows if int(row.rollouts.row) == index]
            # One whose environment failed has nothing to measure, and is shown all the same.
            for row in own or (None,):
                tokens = TokenRecord(np.zeros(0, np.int32), [])
                if row is not None:
                    shown[sample.prompt.id] = row.prompt(sample, tokenizer)
                    logp = {"after_logp": after.logp, "ref_logp": ref_logp}
                    numbers = {name: None if of is None else of[row.tokens] for name, of in logp.items()}
                    numbers["sampler_logp"] = None if answer.greedy else row.rollouts.sampler_logp
                    tokens = row.record(tokenizer, **numbers, **measured(after, row.tokens, "after"))
                found[sample.prompt.id].append(completion_record(sample, scores, index, row, tokens, answer.greedy))
        return [
            group_record("validation", ["followed"], shown[id], None, completions, tokenizer)
            for id, completions in found.items()
        ]
