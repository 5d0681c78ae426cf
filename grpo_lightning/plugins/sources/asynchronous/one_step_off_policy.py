"""A source that draws the next step's rollouts while a step is trained."""

from collections import deque
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.sampler import SingleTurn
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs, Synchronous
from grpo_lightning.plugins.sources.asynchronous.background_sampling import END_SECONDS, Draw, restored
from grpo_lightning.types import require

VERSION = "version"  # the column of rollouts with the `Policy.version` of the weights that drew each token


class OneStepOffPolicy(Synchronous):
    """Draws the rollouts of the next step while this one is scored and trained, by servers of their own.

    Step 0 is on policy. Every later step is drawn with the weights that the step before began with: the result is that
    of `StaleSource(lag=1)`, bit for bit with the same engine. Validation uses the current weights. An order of
    questions that depends on rewards is asked a step earlier.

    Validations and checkpoints wait for what is drawn. A checkpoint holds it, so a resumed run continues exactly; for
    this the last step draws for one more. Further rounds of dynamic sampling are drawn when the first was waited for.
    """

    is_late = True
    depth = 1  # steps that are drawn before they begin

    def setup(self, inputs: SourceInputs) -> None:
        super().setup(inputs)
        explorer = inputs.explorer
        name = f"loop.source={type(self).__name__}"
        rewards = [nested for reward in explorer.scorer.rewards for nested in reward.with_parts()]
        late_rewards = [reward.name for reward in rewards if not reward.scores_early]
        require(
            getattr(explorer.engine, "draws_elsewhere", False),
            f"{name}: {type(explorer.engine).__name__} draws with what the training computes with. Use "
            "model.engine=VLLMServerEngine, or loop.source=Synchronous",
        )
        require(
            isinstance(explorer.sampler, SingleTurn),
            f"{name}: conversations with an environment are not drawn ahead. Use loop.source=Synchronous",
        )
        require(
            not inputs.dynamic_sampling or (not late_rewards and self.depth == 1),
            f"{name}: loop.dynamic_sampling needs the scores of a step before the next one is drawn, and these rewards "
            f"score later: {late_rewards}. Leave it out, or use loop.source=Synchronous",
        )
        explorer.settle = self._settle
        self._draws: deque[Draw] = deque()  # of this step and those to come
        self._waited = 0.0

    def next(self, step: int) -> Exploration:
        """Waits for the step's rollouts, brings the current weights, begins to draw later steps', and scores."""
        if not self._draws:
            self._begin(step, step + 1)
        draw, started = self._draws[0], perf_counter()
        self._wait(draw)
        wait = perf_counter() - started
        self._begin(step, step + 1 + self.depth)
        idle = perf_counter() - draw.ended
        exploration = draw.exploration or self._explored(draw)
        self._draws.popleft()
        metrics = {**exploration.metrics, "rollout/lag": step - draw.begun}
        if draw.ended:  # after a resume nobody has waited
            seconds, waited, idles = zip(*ranks.gather((draw.seconds, self._waited, idle)), strict=True)
            metrics |= {
                "async/wait_rollouts": max(waited),
                "async/wait_trainer": min(idles),
                "async/overlap": 1 - min(1.0, max(waited) / max(seconds)),
            }
        self._waited = 0.0
        return replace(exploration, seconds={**exploration.seconds, "wait": wait}, metrics=metrics)

    def _begin(self, step: int, stop: int) -> None:
        """Brings the weights that `step` begins with, and begins to draw the steps before `stop` with them."""
        run = self.inputs
        with run.explorer.engine.ready(run.policy):
            for later in range(step + len(self._draws), stop):
                first = max([self.num_questions, *(draw.ids.stop for draw in self._draws)])
                ids = range(first, first + run.prompts_per_step)
                self._draws.append(Draw(run, ids, later, step, run.policy.version))
                self._draws[-1].start()

    def _settle(self) -> None:
        """As `Explorer.settle`: afterwards nothing is drawn. Every rank must call it, unless the engine is closed."""
        if self.inputs.explorer.engine.policy is not None:
            for draw in self._draws:
                self._wait(draw)
        else:  # what it was drawing has failed
            for draw in self._draws:
                if draw.is_alive():  # it would draw beside the next run
                    draw.join(END_SECONDS)
            self._draws = deque(draw for draw in self._draws if draw.is_settled)

    def _wait(self, draw: Draw) -> None:
        """Waits for a draw, on every rank."""
        if not draw.is_settled:
            started = perf_counter()
            draw.wait()
            self._waited += perf_counter() - started
            # A rank that brings weights would end what another still draws.
            ranks.gather(None)
            draw.is_settled = True
        if self.inputs.dynamic_sampling and draw.exploration is None:
            # Further rounds need the weights of the first, which are still there.
            draw.exploration = self._explored(draw)

    def _explored(self, draw: Draw) -> Exploration:
        """The step of a draw, with all its rounds and scores."""
        return super().next(draw.step)

    def _explore(self, ids: range, step: int) -> Exploration:
        """A round: drawn ahead, or drawn now with the weights of the first."""
        run, draw, started = self.inputs, self._draws[0], perf_counter()
        if ids not in draw.rounds:
            draw.draw(ids, run.data.ask(ids))
        samples = draw.rounds[ids]
        with run.explorer.scorer.begin() as scoring:
            scores = scoring.scores(samples)
        rollouts = run.explorer.sampler.rollouts(samples, run.group_size, run.sampling.temperature)
        versions = [
            version for sample in samples for version in sample.versions or [draw.version] * len(sample.token_ids)
        ]
        return Exploration(
            samples=samples,
            scores=scores,
            rollouts=rollouts.with_columns({VERSION: torch.tensor(versions, dtype=torch.float32)}),
            seconds={"reward": perf_counter() - started},
            policy_version=draw.version,
            sampler_is_policy=run.sampling.unfiltered,
        )

    def state_dict(self) -> dict[str, Any]:
        """The stream of questions, and what is drawn for later steps. Every rank must call it."""
        self._settle()
        draws = [draw.state_dict() for draw in self._draws]
        return {"drawn": self._draws[0].ids.start if draws else self.num_questions, "draws": draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from there, with any number of ranks. Rewards score again; what does not fit is drawn anew."""
        super().load_state_dict(state)
        self._draws = deque(restored(self.inputs, state.get("draws", [])))
