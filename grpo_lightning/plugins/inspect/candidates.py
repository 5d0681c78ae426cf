"""The groups of a step that may be recorded: measured before its updates, and again after them."""

from grpo_lightning import ranks
from grpo_lightning.plugins.inspect.choosing import Choice, rows_of, summarise
from grpo_lightning.plugins.inspect.groups import TRAIN, completion_record, group_record
from grpo_lightning.plugins.inspect.learned import Learned, learned_from
from grpo_lightning.plugins.inspect.measuring import Measure
from grpo_lightning.plugins.inspect.record import GroupRecord
from grpo_lightning.plugins.inspect.tokens import Recorder, Row
from grpo_lightning.policy.policy import TokenLogp
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.step import Step


class Candidates:
    """The groups of this rank that may be recorded. Make it before the step's updates, on every rank.

    Args:
        step: Its packs are there.
        module: The policy is as it was when the step began.
        num_groups: How many groups are recorded, over all ranks.
        measure: Measures with the policy as it is.
    """

    def __init__(self, step: Step, module: GRPOModule, num_groups: int, measure: Measure) -> None:
        self.step = step
        self.module = module
        self.measure = measure
        exploration = step.exploration
        everyone = ranks.gather(summarise(exploration))
        self.choice = Choice.from_groups([group for groups in everyone for group in groups], num_groups)
        self.rollouts = exploration.rollouts.select(rows_of(exploration, self.choice.prompt_ids))
        self.before = measure(self.rollouts)
        is_fresh = exploration.policy_version == module.policy.version or module.old_policy.is_proximal
        is_known = is_fresh and module.old_policy.is_policy
        self.old_logp = self.before.logp if is_known else None if is_fresh else self.rollouts.sampler_logp

    def records(self, num_minibatches: int) -> list[GroupRecord]:
        """The groups of all ranks that are recorded. Call it after the step's updates, on every rank.

        Args:
            num_minibatches: Updates of one pass.
        """
        after = self.measure(self.rollouts)
        roles = self.choice.roles(self._movement(after))
        prompt_ids, objective = self._prompt_ids, self.module.objective
        chosen = {row for row, id in zip(self.rollouts.row.tolist(), prompt_ids, strict=True) if id in roles}
        learned = learned_from(self.step, chosen, objective, num_minibatches)
        recorder = Recorder(
            self.module.policy.tokenizer,
            self.before,
            after,
            self.old_logp,
            objective,
            learns_from_all=not objective.learns_from_advantage_alone or self.module.reward_kl is not None,
        )
        rows = [*zip(prompt_ids, Row.all_of(self.rollouts), strict=True)]
        mine = {
            id: self._group(roles[id], [row for own, row in rows if own == id], learned, recorder)
            for id in {*prompt_ids} & {*roles}
        }
        everyone = {id: record for groups in ranks.gather(mine) for id, record in groups.items()}
        return [everyone[id] for id in roles]

    @property
    def _prompt_ids(self) -> list[int]:
        """[B] the prompt id of each completion."""
        samples = self.step.exploration.samples
        return [samples[row].prompt.id for row in self.rollouts.row.tolist()]

    def _movement(self, after: TokenLogp) -> dict[int, float]:
        """Mean |Δ log p| of each group of all ranks, by prompt id."""
        moved: dict[int, list[float]] = {}
        change = (after.logp - self.before.logp).abs().double().split(self.rollouts.lengths.tolist())
        for id, part in zip(self._prompt_ids, change, strict=True):
            moved.setdefault(id, []).extend(part.tolist())
        mine = {id: sum(parts) / len(parts) for id, parts in moved.items()}
        return {id: value for groups in ranks.gather(mine) for id, value in groups.items()}

    def _group(
        self,
        roles: list[str],
        rows: list[Row],
        learned: dict[int, list[Learned]],
        recorder: Recorder,
    ) -> GroupRecord:
        exploration = self.step.exploration
        completions, updates = [], []
        for row in rows:
            index = int(row.rollouts.row)
            seen = next((one for one in learned.get(index, []) if one.is_of(row.rollouts)), None)
            updates += [] if seen is None else [seen.update]
            sample, tokens = exploration.samples[index], recorder.record(row, seen)
            completions.append(
                completion_record(
                    sample, exploration.scores, index, tokens, row.drawn.tolist(), piece=row.number_among(rows)
                )
            )
        prompt = rows[0].prompt(exploration.samples[int(rows[0].rollouts.row)], recorder.tokenizer)
        return group_record(TRAIN, roles, prompt, max(updates, default=None), completions, recorder.tokenizer)
