"""A step's completions, drawn in a thread while an earlier step is trained."""

from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from itertools import chain
from threading import Thread
from time import perf_counter
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs
from grpo_lightning.rewards.results import Tally
from grpo_lightning.rewards.scorer import Scoring
from grpo_lightning.types import FinishReason, Prompt, RandomKey, Sample

LOOK_SECONDS = 0.1
NAMES = ("text", "token_ids", "stop_string", "logp", "versions")  # of a sample, in a checkpoint


class Draw(Thread):
    """The completions of one step on this rank. Its thread makes no collective and reads no weights."""

    def __init__(self, inputs: SourceInputs, step: int, begun: int, first: int, version: int) -> None:
        # A server that does not answer must not keep the program from ending.
        super().__init__(name="grpo-ahead", daemon=True)
        self.inputs = inputs
        self.step, self.first = step, first  # the step that learns from it, and its first question
        self.begun, self.version = begun, version  # the step that began with its weights, and their `Policy.version`
        self.rounds: list[tuple[list[Sample], Scoring | None]] = []
        """Completions of each round, and what has scored them so far; None: nothing, after a resume."""
        self.whole: Exploration | None = None  # the finished step, where its rounds could not wait
        self.is_settled = False  # True once all ranks have waited for it
        self.seconds = self.ended = 0.0  # of the first round; 0 after a resume
        self._tallies: list[Tally] = []
        self._error: BaseException | None = None

    def begin(self, prompts: list[Prompt], rewards: AbstractContextManager[Any] | None) -> None:
        """Starts the thread. Rewards score as completions come; with a lock, once all are there, while it is held."""
        self._prompts, self._rewards = prompts, rewards
        self.start()

    def run(self) -> None:
        """Draws and scores the first round."""
        try:
            self.draw(self._prompts, self._rewards)
        except BaseException as error:  # for the thread that waits
            self._error = error

    def draw(self, prompts: list[Prompt], rewards: AbstractContextManager[Any] | None = None) -> None:
        """Draws a round, and scores it as far as rewards score early."""
        run, started = self.inputs, perf_counter()
        key, scoring = RandomKey(run.seed, self.step), run.explorer.scorer.begin()
        with ExitStack() as failed:
            failed.push(scoring)
            ended: dict[int, Sample] = {}
            work = run.policy, prompts, run.group_size, run.sampling, key
            with closing(run.explorer.sampler.draw(run.explorer.engine, *work)) as drawing:
                for row, sample in drawing:
                    ended[row] = sample
                    if rewards is None:
                        scoring.add(sample)
            samples, drawn = [ended[row] for row in sorted(ended)], perf_counter()
            with rewards or nullcontext():
                for sample in samples if rewards else ():
                    scoring.add(sample)
                scoring.wait()
                if not self.rounds:  # the same rewards count other scores before the step begins
                    self.seconds, self.ended, self._tallies = (
                        drawn - started,
                        drawn,
                        [part.tally for part in self._parts],
                    )
                    for part in self._parts:
                        part.tally = Tally()
            failed.pop_all()
        self.rounds.append((samples, scoring))

    @property
    def _parts(self) -> list[Any]:
        return [part for reward in self.inputs.explorer.scorer.rewards for part in reward.with_parts()]

    def return_tallies(self) -> None:
        """Gives the rewards the counts of the first round's scores."""
        for part, tally in zip(self._parts, self._tallies, strict=bool(self._tallies)):
            part.tally = tally

    def wait(self) -> None:
        """Waits for the end; raises what went wrong. Signals and another rank's failure are heard meanwhile."""
        while self.is_alive():
            self.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error

    def state_dict(self) -> dict[str, Any]:
        """The completions of all ranks as plain values. Every rank must call it."""
        rounds = [[_packed(sample) for sample in samples] for samples, _ in self.rounds]
        everyone = [[*chain.from_iterable(parts)] for parts in zip(*ranks.gather(rounds), strict=True)]
        return {name: getattr(self, name) for name in ("step", "begun", "first", "version")} | {"rounds": everyone}

    @classmethod
    def from_state(cls, inputs: SourceInputs, state: dict[str, Any]) -> "Draw":
        """The draw that `state_dict` described, for any number of ranks."""
        draw, data = cls(inputs, *(state[name] for name in ("step", "begun", "first", "version"))), inputs.data
        draw.is_settled = True
        for rows in state["rounds"]:
            ids = sorted({row["id"] for row in rows})  # they were asked one after another
            prompts = {one.id: one for one in data.ask(range(ids[0], ids[-1] + 1))} if ids else {}
            mine = sorted((row for row in rows if row["id"] in prompts), key=lambda row: int(row["id"]))
            draw.rounds.append(([_unpacked(row, prompts[row["id"]]) for row in mine], None))
        return draw


def _packed(sample: Sample) -> dict[str, Any]:
    """A sample of one turn as plain values."""
    plain = {name: getattr(sample, name) for name in NAMES}
    return plain | {"id": sample.prompt.id, "finish_reason": str(sample.finish_reason)}


def _unpacked(row: dict[str, Any], prompt: Prompt) -> Sample:
    """The sample of such values."""
    plain = {name: row[name] for name in NAMES}
    return Sample(prompt=prompt, finish_reason=FinishReason(row["finish_reason"]), **plain)
