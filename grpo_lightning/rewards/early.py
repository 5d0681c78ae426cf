"""Scores of completions that come while others are still sampled."""

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread

from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import Sample

THREADS = "grpo-reward"
"""How the names of the threads begin that score."""

LOOK_SECONDS = 0.1
"""Longest wait without a look at what else happened."""


class EarlyScores:
    """One reward's scores of samples, found in a thread while more samples come.

    All that have come are scored together, and then those that came meanwhile.

    Args:
        reward: Scores alike whatever samples it is given together: its `scores_early` is true.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._coming: SimpleQueue[Sample | None] = SimpleQueue()
        """None comes last."""
        self._scored: list[Sample] = []
        self._parts: list[RewardResult] = []
        self._error: BaseException | None = None
        self._given_up = False
        # A server that does not answer must not keep the program from ending.
        self._thread = Thread(target=self._run, name=f"{THREADS}-{reward.name}", daemon=True)
        self._thread.start()

    def add(self, sample: Sample) -> None:
        """Scores another sample."""
        self._coming.put(sample)

    def end(self) -> None:
        """No sample comes after this."""
        self._coming.put(None)

    def result(self, samples: Sequence[Sample]) -> RewardResult:
        """Waits for the scores of `samples`, in this order, after `end`; they must be those that were added."""
        while self._thread.is_alive():
            # Another rank's failure is raised here as soon as Python runs.
            self._thread.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        index = {id(sample): index for index, sample in enumerate(self._scored)}
        return RewardResult.concat(self._parts).rows([index[id(sample)] for sample in samples])

    def give_up(self) -> None:
        """Ends the thread, if it has not ended, once the reward is closed and returns."""
        if self._thread.is_alive():
            self._given_up = True
            self.end()
            self.reward.close()

    def _run(self) -> None:
        try:
            for batch in self._batches():
                self._parts.append(self.reward(batch))
                self._scored += batch
        except BaseException as error:  # for the thread that waits
            self._error = error

    def _batches(self) -> Iterator[list[Sample]]:
        """The samples that have come since the last batch, as long as there are any to come."""
        is_last = False
        while not is_last:
            coming = [self._coming.get()]
            while not self._coming.empty():  # nobody else takes from it
                coming.append(self._coming.get())
            is_last = None in coming or self._given_up
            batch = [] if self._given_up else [sample for sample in coming if sample is not None]
            if batch:
                yield batch
