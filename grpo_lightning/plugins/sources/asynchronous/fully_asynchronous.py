"""A source that draws several steps ahead, and renews the weights of what is being drawn."""

from dataclasses import replace
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs
from grpo_lightning.plugins.sources.asynchronous.one_step_off_policy import VERSION, OneStepOffPolicy
from grpo_lightning.types import at_least, require


class FullyAsynchronous(OneStepOffPolicy):
    """Draws up to `max_staleness` steps ahead, while servers get new weights in the middle of completions.

    There are slots for the prompts of max_staleness + 1 steps: of the one that is trained, and of those that are drawn.
    The slots of a step are free once it was trained and its weights have arrived. So a step is as many steps late as
    `max_staleness` when its first token is drawn, or fewer. Prompts are trained in the order in which they were drawn:
    short completions have no advantage, and nothing is dropped.

    When weights arrive, the servers stop what they draw, read them, and continue it with them. The column `version`
    of the rollouts says which weights drew each token. Log π_old is what was recorded with it, or `Proximal` with a
    correction. With `max_staleness` 1 nothing is drawn when weights arrive: then it is `OneStepOffPolicy`, bit for bit.

    Args:
        max_staleness: S, the most steps between the weights that draw a token and those that learn from it.
    """

    def __init__(self, max_staleness: int = 1) -> None:
        super().__init__()
        at_least("loop.source.max_staleness", max_staleness, 1)
        self.max_staleness = self.depth = max_staleness
        self._begun: dict[int, int] = {}  # the step that began with the weights of each `Policy.version`

    def setup(self, inputs: SourceInputs) -> None:
        super().setup(inputs)
        engine = inputs.explorer.engine
        require(
            self.depth == 1 or getattr(engine, "renews_midway", False),
            f"loop.source.max_staleness={self.depth}: {type(engine).__name__} takes no weights while it draws. Use "
            "model.engine=VLLMServerEngine, or max_staleness=1",
        )

    def next(self, step: int) -> Exploration:
        exploration = super().next(step)
        if self.depth > 1:
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
        self._begun = state.get("begun", {draw.version: draw.begun for draw in self._draws})
