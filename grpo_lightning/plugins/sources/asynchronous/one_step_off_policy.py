"""A source that samples the next step's rollouts while a step is trained."""

from collections import deque
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.sampler import SingleTurn
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs, Synchronous
from grpo_lightning.plugins.sources.asynchronous.background_sampling import (
    END_SECONDS,
    SamplingThread,
    threads_from_states,
)
from grpo_lightning.types import UsageError

VERSION = "version"
"""The column of rollouts with the `Policy.version` of the weights that sampled each token."""


class OneStepOffPolicy(Synchronous):
    """Samples the rollouts of the next step on separate servers, while this step is scored and trained.

    Step 0 is on policy. Every later step is sampled with the weights that the step before began with: the result equals
    `StaleSource(lag=1)`, bit for bit with the same engine. Validation uses the current weights. An order of questions
    that depends on rewards chooses a step's questions one step earlier.

    Validations and checkpoints wait for the sampling. A checkpoint holds its completions, so a resumed run continues
    exactly; for this the last step samples for one more. Further rounds of dynamic sampling are sampled after the first
    round has ended.
    """

    is_late = True
    depth = 1
    """Steps that are sampled before they begin."""

    def setup(self, inputs: SourceInputs) -> None:
        super().setup(inputs)
        explorer = inputs.explorer
        name = f"loop.source={type(self).__name__}"
        if not getattr(explorer.engine, "draws_elsewhere", False):
            raise UsageError(
                f"{name}: {type(explorer.engine).__name__} samples with what the training computes with. Use "
                "model.engine=VLLMServerEngine, or loop.source=Synchronous"
            )
        if not isinstance(explorer.sampler, SingleTurn):
            raise UsageError(
                f"{name}: conversations with an environment are not sampled ahead. Use loop.source=Synchronous"
            )
        rewards = [nested for reward in explorer.scorer.rewards for nested in reward.with_parts()]
        late_rewards = [reward.name for reward in rewards if not reward.scores_early]
        if inputs.dynamic_sampling and (late_rewards or self.depth > 1):
            raise UsageError(
                f"{name}: loop.dynamic_sampling needs the scores of a step before the next one is sampled, and these "
                f"rewards score later: {late_rewards}. Leave it out, or use loop.source=Synchronous"
            )
        explorer.settle = self._settle  # type: ignore[method-assign]
        self._threads: deque[SamplingThread] = deque()
        """The threads of this step and of later steps."""
        self._waited = 0.0
        """Seconds that this step has waited for rollouts."""

    def next(self, step: int) -> Exploration:
        """Waits for the step's rollouts, brings the current weights, begins to sample later steps, and scores."""
        if not self._threads:
            self._begin(step, step + 1)
        thread = self._threads[0]
        started = perf_counter()
        self._wait(thread)
        wait = perf_counter() - started

        # Servers sample later steps while this one is scored and trained.
        self._begin(step, step + 1 + self.depth)
        idle = perf_counter() - thread.ended_at
        exploration = thread.exploration or self._explored(thread)
        self._threads.popleft()

        # How long did training wait for rollouts, and servers for weights? After a resume neither has.
        metrics = {**exploration.metrics, "rollout/lag": step - thread.begun}
        if thread.ended_at:
            seconds, waited, idles = zip(*ranks.gather((thread.seconds, self._waited, idle)), strict=True)
            metrics |= {
                "async/wait_rollouts": max(waited),
                "async/wait_trainer": min(idles),
                "async/overlap": 1 - min(1.0, max(waited) / max(seconds)),
            }
        self._waited = 0.0
        return replace(exploration, seconds={**exploration.seconds, "wait": wait}, metrics=metrics)

    def _begin(self, step: int, stop: int) -> None:
        """Brings the weights that `step` begins with, and begins to sample the steps before `stop` with them."""
        inputs = self.inputs
        with inputs.explorer.engine.ready(inputs.policy):
            for later_step in range(step + len(self._threads), stop):
                start = max([self.num_questions, *(thread.ids.stop for thread in self._threads)])
                ids = range(start, start + inputs.prompts_per_step)
                self._threads.append(SamplingThread(inputs, ids, later_step, step, inputs.policy.version))
                self._threads[-1].start()

    def _settle(self) -> None:
        """Waits until nothing is sampled: `Explorer.settle`. Every rank must call it, unless the engine is closed."""
        if self.inputs.explorer.engine.policy is not None:
            for thread in self._threads:
                self._wait(thread)
        else:
            # After a failure a thread that goes on would sample beside the next run.
            for thread in self._threads:
                if thread.is_alive():
                    thread.join(END_SECONDS)
            self._threads = deque(thread for thread in self._threads if thread.is_complete)

    def _wait(self, thread: SamplingThread) -> None:
        """Waits for a thread, on every rank."""
        if not thread.is_complete:
            started = perf_counter()
            thread.wait()
            self._waited += perf_counter() - started
            # New weights would end the sampling of a rank that is slower.
            ranks.gather(None)
            thread.is_complete = True
        if self.inputs.dynamic_sampling and thread.exploration is None:
            # Further rounds need the weights of the first round, which the servers still have.
            thread.exploration = self._explored(thread)

    def _explored(self, thread: SamplingThread) -> Exploration:
        """Returns the step of a thread, with all its rounds and scores."""
        return super().next(thread.step)

    def _explore(self, ids: range, step: int) -> Exploration:
        """Scores a round, sampled ahead or now, with the weights of the first round."""
        inputs = self.inputs
        thread = self._threads[0]
        started = perf_counter()
        if ids not in thread.rounds:
            thread.sample(ids, inputs.data.ask(ids))
        samples = thread.rounds[ids]
        with inputs.explorer.scorer.begin() as scoring:
            scores = scoring.scores(samples)
        rollouts = inputs.explorer.sampler.rollouts(samples, inputs.group_size, inputs.sampling.temperature)
        versions = [
            version for sample in samples for version in sample.versions or [thread.version] * len(sample.token_ids)
        ]
        return Exploration(
            samples=samples,
            scores=scores,
            rollouts=rollouts.with_columns({VERSION: torch.tensor(versions, dtype=torch.float32)}),
            seconds={"reward": perf_counter() - started},
            policy_version=thread.version,
            sampler_is_policy=inputs.sampling.unfiltered,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream of questions, and the completions of later steps. Every rank must call it."""
        self._settle()
        # A resumed run waits for the first thread again: its questions are not taken yet.
        states = [thread.state_dict() for thread in self._threads]
        return {"drawn": self._threads[0].ids.start if states else self.num_questions, "draws": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with any number of ranks. Rewards score again; steps that do not fit are sampled anew."""
        super().load_state_dict(state)
        self._threads = deque(threads_from_states(self.inputs, state.get("draws", [])))
