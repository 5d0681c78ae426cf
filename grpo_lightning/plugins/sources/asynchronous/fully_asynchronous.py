"""A source that samples several steps ahead, and renews the weights in the middle of completions."""

from dataclasses import replace
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs
from grpo_lightning.plugins.sources.asynchronous.one_step_off_policy import VERSION, OneStepOffPolicy
from grpo_lightning.types import UsageError, at_least


class FullyAsynchronous(OneStepOffPolicy):
    """Samples up to `max_staleness` steps ahead, while servers get new weights in the middle of completions.

    There are slots for the prompts of max_staleness + 1 steps: the step that is trained, and the steps being sampled.
    The slots of a step are free once it was trained and its weights have arrived. So a step is at most `max_staleness`
    steps late when its first token is sampled. Prompts are trained in the order in which they began to be sampled:
    short completions are not preferred, and nothing is dropped.

    When weights arrive, the servers pause their completions, read the weights, and continue with them. The column
    `version` of the rollouts says which weights sampled each token. Log π_old is the log-prob recorded with the token,
    or `Proximal` with a correction. With `max_staleness` 1 no completion is under way when weights arrive: the result
    equals `OneStepOffPolicy`, bit for bit.

    Args:
        max_staleness: S, the most steps between the weights that sample a token and the weights that learn from it.
    """

    def __init__(self, max_staleness: int = 1) -> None:
        super().__init__()
        at_least("loop.source.max_staleness", max_staleness, 1)
        self.max_staleness = self.depth = max_staleness
        self._begun: dict[int, int] = {}
        """The step that began with the weights of each `Policy.version`."""

    def setup(self, inputs: SourceInputs) -> None:
        super().setup(inputs)
        engine = inputs.explorer.engine
        if self.depth > 1 and not getattr(engine, "renews_midway", False):
            raise UsageError(
                f"loop.source.max_staleness={self.depth}: {type(engine).__name__} takes no weights while it samples. "
                "Use model.engine=VLLMServerEngine, or max_staleness=1"
            )

    def next(self, step: int) -> Exploration:
        exploration = super().next(step)
        if self.depth > 1:
            # The lag of every token, over all ranks.
            versions, num_tokens = exploration.rollouts.columns[VERSION].unique(return_counts=True)
            lags = [step - self._begun[int(version)] for version in versions.tolist()]
            total_lag = sum(lag * count for lag, count in zip(lags, num_tokens.tolist(), strict=True))
            lag_of_rank = total_lag, int(num_tokens.sum()), max(lags, default=0)
            totals, counts, largest = zip(*ranks.gather(lag_of_rank), strict=True)
            lag = sum(totals) / max(1, sum(counts))
            metrics = {**exploration.metrics, "rollout/lag": lag, "rollout/lag_max": max(largest)}
            exploration = replace(exploration, metrics=metrics)
        return exploration

    def _begin(self, step: int, stop: int) -> None:
        self._begun[self.inputs.policy.version] = step
        super()._begin(step, stop)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._begun = state.get("begun", {thread.version: thread.begun for thread in self._threads})
