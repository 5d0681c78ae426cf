"""Seconds of the phases of a step, on both sides: what a trainer is given to note them."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

PHASES = ("sampling", "reward", "log-probs", "forward and backward", "optimizer")


class Timer:
    """Adds up seconds by phase, step by step.

    Args:
        wait: Called before the clock is read: waits for the device.
    """

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait
        self.steps: list[Counter[str]] = []
        self.ends: list[float] = []
        self._now: Counter[str] = Counter()

    def add(self, phase: str, seconds: float) -> None:
        """Adds to a phase of the step that runs."""
        self._now[phase] += seconds

    def end(self) -> None:
        """Ends the step."""
        self.wait()
        self.ends.append(time.perf_counter())
        self.steps.append(self._now)
        self._now = Counter()

    def time(self, phase: str, function: Callable[..., Any], but: str = "") -> Callable[..., Any]:
        """The function, with its seconds added to a phase.

        Args:
            phase: Of the step that runs.
            function: What to time.
            but: Prefix of phases inside of it, which do not count.
        """

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            before, started = self._inside(but), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.wait()
                self.add(phase, time.perf_counter() - started - (self._inside(but) - before))

        return timed

    def _inside(self, prefix: str) -> float:
        return sum(value for name, value in self._now.items() if prefix and name.startswith(prefix))

    def watch(self, optimizer: Any) -> Any:
        """Times the updates of an optimizer, which is returned."""
        started: list[float] = []

        def begins(*args: Any) -> None:
            self.wait()
            started.append(time.perf_counter())

        def ends(*args: Any) -> None:
            self.wait()
            self.add("optimizer", time.perf_counter() - started.pop())

        optimizer.register_step_pre_hook(begins)
        optimizer.register_step_post_hook(ends)
        return optimizer

    def medians(self, phases: Sequence[str], warm_up: int) -> dict[str, float]:
        """Seconds of each phase per step, of the steps after the first `warm_up`."""
        return {name: statistics.median(step[name] for step in self.steps[warm_up:]) for name in phases}


class Parts:
    """Divides the forwards and backwards of a policy into the transformer below the head and the rest.

    On a CPU only, where a function returns when its work is done.

    Args:
        policy: With its weights.
        timer: Gets `trunk` and `head`; the head comes with the objective.
    """

    def __init__(self, policy: Any, timer: Timer) -> None:
        self.timer = timer
        self.at = 0.0
        trunk = policy.trunk
        trunk.register_forward_pre_hook(self._begins)
        trunk.register_forward_hook(self._ends)
        # The last gradient of all: the first layer of the forward.
        policy.model.get_input_embeddings().weight.register_post_accumulate_grad_hook(lambda weight: self._add("trunk"))

    def _begins(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def _add(self, part: str) -> None:
        now = time.perf_counter()
        self.timer.add(part, now - self.at)
        self.at = now

    def _ends(self, module: Any, args: Any, output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            self._add("trunk")
            output.last_hidden_state.register_hook(lambda gradient: self._add("head"))


def watch_trl(trainer: Any, timer: Timer) -> None:
    """Times the phases of a GRPOTrainer; `ends` are noted by its callback."""
    trainer._generate_single_turn = timer.time("sampling", trainer._generate_single_turn)
    trainer._calculate_rewards = timer.time("reward", trainer._calculate_rewards)
    trainer._prepare_inputs = timer.time("preparing", trainer._prepare_inputs)
    trainer.training_step = timer.time("forward and backward", trainer.training_step, but="preparing")
    score = trainer._get_per_token_logps_and_entropies

    def score_timed(*args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            return score(*args, **kwargs)
        return timer.time("log-probs", score)(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = score_timed
    create = trainer.create_optimizer

    def create_watched(*args: Any, **kwargs: Any) -> Any:
        return timer.watch(create(*args, **kwargs))

    trainer.create_optimizer = create_watched
