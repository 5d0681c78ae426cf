"""The same validation prompts at every recorded step, so that one can follow how their answers change."""

from dataclasses import dataclass, replace

from grpo_lightning import ranks
from grpo_lightning.inspect.groups import VALIDATION, completion_record, group_record
from grpo_lightning.inspect.measuring import Measure
from grpo_lightning.inspect.record import CompletionRecord, GroupRecord
from grpo_lightning.inspect.tokens import Row
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.evaluation import STEP
from grpo_lightning.training.explorer import sampler_logp
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import Completion, Prompt, Sample

FOLLOWED = "followed"
"""The role of these groups."""


@dataclass(slots=True)
class Followed:
    """The first validation questions, each answered greedily and `num_samples` times as in training.

    The random numbers are those of validation. So the answers are among those that a validation of the same weights
    scores, and two steps differ only in the policy.

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
    def prompts(self) -> list[Prompt]:
        """The prompts of all ranks; their ids are those of validation."""
        questions = self.data.questions.get("val", [])
        return [self.data.prompt(questions[row], id=row) for row in range(min(self.num_prompts, len(questions)))]

    def records(self, measure: Measure) -> list[GroupRecord]:
        """The groups of all ranks, by prompt id. Call it in eval mode, without gradients, on every rank."""
        prompts = self.prompts
        mine = prompts[ranks.rank() :: ranks.world_size()]
        if not prompts:
            return []
        with self.module.explorer.awake():
            answers = [*self._answers(mine, 1, greedy=True), *self._answers(mine, self.num_samples, greedy=False)]
        # Prompt by prompt, the greedy answer first.
        answers.sort(key=lambda answer: (answer.sample.prompt.id, not answer.greedy))
        groups = self._groups(mine, answers, measure)
        return sorted((one for groups in ranks.gather(groups) for one in groups), key=lambda group: group.prompt_id)

    def _answers(self, prompts: list[Prompt], num_samples: int, greedy: bool) -> list["Answer"]:
        if not num_samples:
            return []
        policy, explorer, sampling = self.module.policy, self.module.explorer, self.module.sampling
        sampling = replace(sampling, temperature=0.0) if greedy else sampling
        completions, samples = explorer.sample(policy, prompts, num_samples, sampling, seed=0, step=STEP)
        return [Answer(*pair, greedy) for pair in zip(completions, samples, strict=True)]

    def _groups(self, prompts: list[Prompt], answers: list["Answer"], measure: Measure) -> list[GroupRecord]:
        """The groups of this rank."""
        module = self.module
        index = {prompt.id: i for i, prompt in enumerate(prompts)}
        rollouts = Rollouts.from_lists(
            prompts=[prompt.token_ids for prompt in prompts],
            group=[index[answer.sample.prompt.id] for answer in answers],
            completions=[answer.completion.token_ids for answer in answers],
        )
        rollouts.temperature = module.sampling.temperature
        rollouts.sampler_logp = sampler_logp([answer.completion for answer in answers])
        after = measure(rollouts)
        ref_logp = None if module.reference is None else measure.logp(rollouts, module.reference)
        scores = module.explorer.scorer([answer.sample for answer in answers])
        found: dict[int, list[CompletionRecord]] = {prompt.id: [] for prompt in prompts}
        for number, (answer, row) in enumerate(zip(answers, Row.all_of(rollouts), strict=True)):
            tokens = row.record(
                module.policy.tokenizer,
                sampler_logp=row.rollouts.sampler_logp,
                after_logp=after.logp[row.tokens],
                ref_logp=None if ref_logp is None else ref_logp[row.tokens],
                entropy_after=after.entropy[row.tokens],
                top_after_ids=None if after.top_ids is None else after.top_ids[row.tokens],
                top_after_logp=None if after.top_logp is None else after.top_logp[row.tokens],
            )
            found[answer.sample.prompt.id].append(
                completion_record(answer.sample, scores, number, tokens, row.drawn.tolist(), answer.greedy)
            )
        return [
            group_record(VALIDATION, [FOLLOWED], prompt, None, found[prompt.id], module.policy.tokenizer)
            for prompt in prompts
        ]


@dataclass(slots=True)
class Answer:
    """A completion as the engine and as the rewards see it."""

    completion: Completion
    sample: Sample
    greedy: bool
