"""Algorithm 1 of DeepSeekMath (arXiv 2402.03300) as a callback: explore, then mu passes over what was found.

One Lightning epoch is one exploration step, one Lightning batch is one optimizer update. The numbers in the
comments are the algorithm's lines.
"""

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grpo_lightning.callbacks.progress import StepProgressBar
from grpo_lightning.data import PromptDataModule
from grpo_lightning.explorer import Exploration
from grpo_lightning.minibatch import Minibatch, idle_pack, without_idle_rows
from grpo_lightning.module import GRPOModule
from grpo_lightning.ragged import spread, take
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.snapshots import PolicySnapshot
from grpo_lightning.statistics import StepStatistics, peak_memory_gib
from grpo_lightning.types import UsageError
from grpo_lightning.weightings import BatchSize


class GRPOLoop(Callback):
    """The loop of GRPO. `trainer.max_epochs` is the number of exploration steps.

    The first five sizes decide the result; `max_tokens` decides only memory and speed.

    Args:
        group_size: G, completions of each prompt.
        prompts_per_step: Prompts of one exploration step, over all ranks together.
        mu: μ, optimisation passes over the rollouts of one step.
        minibatches: Optimizer updates of one pass; each takes its share of the prompts, groups stay whole.
        steps_per_iteration: M: the reference becomes the policy at every M-th step. None keeps the first reference.
        max_tokens: Tokens in one forward and backward, prompt, completion and padding; 0 takes the minibatch whole.
        seed: Of the random numbers completions are drawn with.
    """

    def __init__(
        self,
        group_size: int = 8,
        prompts_per_step: int = 32,
        mu: int = 1,
        minibatches: int = 1,
        steps_per_iteration: int | None = None,
        max_tokens: int = 16384,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("prompts_per_step", prompts_per_step, 1),
            ("mu", mu, 1),
            ("minibatches", minibatches, 1),
            ("steps_per_iteration", 1 if steps_per_iteration is None else steps_per_iteration, 1),
            ("max_tokens", max_tokens, 0),
        ):
            if value < least:
                raise UsageError(f"loop.{name}={value}: give {least} or more")
        if group_size < 2:
            raise UsageError(
                f"loop.group_size={group_size}: give 2 or more; advantages compare the completions of one prompt"
            )
        if prompts_per_step % minibatches:
            raise UsageError(
                f"loop.prompts_per_step={prompts_per_step} is not a multiple of loop.minibatches={minibatches}: "
                "every update takes as many prompts"
            )
        self.group_size = group_size
        self.prompts_per_step = prompts_per_step
        self.mu = mu
        self.minibatches = minibatches
        self.steps_per_iteration = steps_per_iteration
        self.max_tokens = max_tokens
        self.seed = seed
        self.exploration: Exploration | None = None
        self._packs: list[list[Rollouts]] = []
        self._seconds: dict[str, float] = {}
        self._step_started = self._updates_started = self._updates_ended = 0.0

    @staticmethod
    def of(trainer: L.Trainer) -> "GRPOLoop":
        """The loop among the trainer's callbacks."""
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        return next(callback for callback in callbacks if isinstance(callback, GRPOLoop))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.prompts_per_step % (self.minibatches * trainer.world_size):
            raise UsageError(
                f"loop.prompts_per_step={self.prompts_per_step} is not a multiple of loop.minibatches="
                f"{self.minibatches} x {trainer.world_size} ranks: every rank takes as many prompts of every update"
            )
        _data(trainer).minibatches = _MinibatchLoader(self)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = _module(pl_module)
        size = f"at most {self.max_tokens} tokens" if self.max_tokens else "the whole minibatch"
        rank_zero_info(
            f"{trainer.max_epochs} steps of {self.prompts_per_step} prompts x {self.group_size} completions of at most "
            f"{module.sampling.max_new_tokens} tokens; each step {self.mu} x {self.minibatches} updates, {size} in one "
            f"forward and backward{', prompts shared by their group' if module.policy.shares_prefix else ''}"
        )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module, data, step = _module(pl_module), _data(trainer), trainer.current_epoch
        self._step_started = time.perf_counter()
        # Whatever draws from the global generators (dropout, a user's reward) draws the same after a resume.
        torch.manual_seed(hash((self.seed, step, trainer.global_rank)))
        random.seed(hash((self.seed, step, trainer.global_rank)))
        with _exploring(trainer, module):
            # 2-3: an iteration begins
            if module.reference is not None and self.steps_per_iteration and step % self.steps_per_iteration == 0:
                module.reference.refresh(module.policy)
            # 5: sample a batch D_b
            mine = self._share(data.draw(self.prompts_per_step), trainer.global_rank, trainer.world_size)
            prompts = [data.prompt(question, id=place) for place, question in mine]
            # 6: the old policy becomes the policy
            module.old_policy.refresh(module.policy)
            # 7-9: sample G outputs, compute rewards and advantages
            progress_bar = trainer.progress_bar_callback
            progress = None
            if isinstance(progress_bar, StepProgressBar):
                progress_bar.start_exploring(len(prompts) * self.group_size)
                progress = progress_bar.explored
            exploration = module.explorer.explore(
                module.policy, prompts, self.group_size, module.sampling, self.seed, step, progress
            )
            started = time.perf_counter()
            exploration.rollouts = exploration.rollouts.to(module.device)
            self._add_logp(module, exploration.rollouts)
            self._packs = self._pack(trainer, module, exploration.rollouts)
        self.exploration = exploration
        self._updates_started = time.perf_counter()
        self._seconds = exploration.seconds | {"logp": self._updates_started - started}

    def _share(self, drawn: list[Any], rank: int, world_size: int) -> list[Any]:
        """This rank's prompts: each minibatch holds the same prompts for any number of ranks."""
        size = len(drawn) // self.minibatches
        return [item for first in range(0, len(drawn), size) for item in drawn[first : first + size][rank::world_size]]

    def _add_logp(self, module: GRPOModule, rollouts: Rollouts) -> None:
        """log π_old and log π_ref of every token, where they are needed at all.

        With one update a step π_θ is π_old in it, so the ratio is 1 and log π_old need not be known.
        """

        def logp(snapshot: PolicySnapshot) -> Tensor:
            """[N] found pack by pack, back in the rollouts' order."""
            found = torch.empty(rollouts.num_tokens, dtype=torch.float32, device=rollouts.lengths.device)
            for pack in rollouts.split(self.max_tokens, module.policy.shares_prefix):
                found[take(pack.row, rollouts.lengths)] = snapshot(module.policy, pack, module.sampling.temperature)
            return found

        if self.updates_per_step > 1:
            rollouts.old_logp = logp(module.old_policy)
        if module.reference is not None:
            rollouts.ref_logp = logp(module.reference)

    def _pack(self, trainer: L.Trainer, module: GRPOModule, rollouts: Rollouts) -> list[list[Rollouts]]:
        """The packs of each minibatch, with the weight of every token in its update."""
        size = len(rollouts) // self.minibatches
        minibatches = []
        for number in range(self.minibatches):
            rows = torch.arange(number * size, (number + 1) * size, device=rollouts.lengths.device)
            share = rollouts.select(rows)
            local = torch.tensor([len(share), len(share.prompt_lengths), share.num_tokens], device=module.device)
            total = trainer.strategy.reduce(local, reduce_op="sum").tolist()
            weight = module.objective.weighting(share.lengths, share.group, BatchSize(*total))
            share.weight = spread(weight, share.lengths)
            if module.objective.beta == 0:
                share = without_idle_rows(share)
            packs = share.split(self.max_tokens, module.policy.shares_prefix)
            most = int(trainer.strategy.reduce(torch.tensor(len(packs), device=module.device), reduce_op="max"))
            packs += [idle_pack(packs[0])] * (most - len(packs))
            minibatches.append(packs)
        return minibatches

    def stream(self) -> Iterator[Minibatch]:
        """The step's optimizer updates: mu passes over the minibatches."""
        # 10: for GRPO iteration = 1, ..., mu
        assert self.exploration is not None
        for number in range(self.mu):
            for place, packs in enumerate(self._packs):
                # 11: GRPOModule.training_step maximises the objective
                yield Minibatch(packs, on_policy=number == place == 0, exploration=self.exploration)

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one exploration step."""
        return self.mu * self.minibatches

    def on_train_batch_end(self, *args: Any) -> None:
        # Validation comes between the last update and on_train_epoch_end and is not part of the step.
        self._updates_ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = _module(pl_module)
        assert self.exploration is not None
        seconds = self._seconds | {
            "optimise": self._updates_ended - self._updates_started,
            "step": self._updates_ended - self._step_started,
        }
        statistics = StepStatistics.of(self.exploration, self.group_size, seconds).gather(trainer.world_size)
        metrics = statistics.metrics()
        metrics["time/peak_memory_gib"] = peak_memory_gib(module.device)
        module.log("reward/mean", metrics.pop("reward/mean", math.nan), prog_bar=True)
        module.log_dict(metrics)
        self._packs = []


class _MinibatchLoader:
    """The train loader: with a length, and a generator that starts only when the step has been explored.

    Without a length Lightning would fetch a batch ahead, before the exploration that makes it.
    """

    def __init__(self, loop: GRPOLoop) -> None:
        self.loop = loop

    def __len__(self) -> int:
        return self.loop.updates_per_step

    def __iter__(self) -> Iterator[Minibatch]:
        yield from self.loop.stream()


@contextmanager
def _exploring(trainer: L.Trainer, module: GRPOModule) -> Iterator[None]:
    """No gradients, eval mode, and the trainer's precision."""
    was_training = module.policy.training
    module.policy.eval()
    try:
        with torch.no_grad(), trainer.strategy.precision_plugin.forward_context():
            yield
    finally:
        module.policy.train(was_training)


def _module(pl_module: L.LightningModule) -> GRPOModule:
    assert isinstance(pl_module, GRPOModule)
    return pl_module


def _data(trainer: L.Trainer) -> PromptDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, PromptDataModule):
        raise UsageError("GRPOLoop needs prompts: trainer.fit(module, datamodule=PromptDataModule(...))")
    return data
