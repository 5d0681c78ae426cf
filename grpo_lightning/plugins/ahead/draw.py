"""A step's completions, drawn in a thread while an earlier step is trained."""

import logging
from contextlib import closing
from itertools import chain
from threading import Thread
from time import perf_counter
from typing import Any
from zlib import crc32

from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs
from grpo_lightning.types import FinishReason, Prompt, RandomKey, Sample

log = logging.getLogger(__name__)

LOOK_SECONDS, END_SECONDS = 0.1, 30.0
NUMBERS = ("step", "begun", "version")  # of a draw, in a checkpoint
NAMES = ("text", "token_ids", "stop_string", "logp", "versions")  # of a sample there


class Draw(Thread):
    """The completions of one step on this rank. Its thread makes no collective, reads no weights and scores nothing.

    Args:
        inputs: The run.
        ids: The questions of the first round, those of all ranks.
        step: The step that learns from it.
        begun: The step that began with the weights that it is drawn with.
        version: `Policy.version` of these weights.
    """

    def __init__(self, inputs: SourceInputs, ids: range, step: int, begun: int, version: int) -> None:
        # A server that does not answer must not keep the program from ending.
        super().__init__(name="grpo-ahead", daemon=True)
        self.inputs, self.ids, self.step, self.begun, self.version = inputs, ids, step, begun, version
        self.rounds: dict[range, list[Sample]] = {}  # the completions of each round by its questions
        self.exploration: Exploration | None = None
        """The scored step, where its further rounds could not wait."""
        self.is_settled = False  # True once all ranks have waited for it
        self.seconds = self.ended = 0.0  # of the first round; 0 after a resume
        self._prompts = inputs.data.ask(ids)
        self._error: BaseException | None = None

    def run(self) -> None:
        """Draws the first round."""
        started = perf_counter()
        try:
            self.draw(self.ids, self._prompts)
        except BaseException as error:  # for the thread that waits
            self._error = error
        self.ended = perf_counter()
        self.seconds = self.ended - started

    def draw(self, ids: range, prompts: list[Prompt]) -> None:
        """Draws a round."""
        run = self.inputs
        work = run.policy, prompts, run.group_size, run.sampling, RandomKey(run.seed, self.step)
        with closing(run.explorer.sampler.draw(run.explorer.engine, *work)) as samples_with_rows:
            sample_by_row = dict(samples_with_rows)
        self.rounds[ids] = [sample_by_row[row] for row in sorted(sample_by_row)]

    def wait(self) -> None:
        """Waits for the end; raises what went wrong. Signals and another rank's failure are heard meanwhile."""
        while self.is_alive():
            self.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error

    def state_dict(self) -> dict[str, Any]:
        """The completions of all ranks as plain values. Every rank must call it."""
        rounds_of_rank = [[_packed(sample) for sample in samples] for samples in self.rounds.values()]
        rounds_of_ranks = zip(*ranks.gather(rounds_of_rank), strict=True)
        rows_by_round = [[*chain.from_iterable(rows_by_rank)] for rows_by_rank in rounds_of_ranks]
        rounds = [(ids.start, ids.stop, rows) for ids, rows in zip(self.rounds, rows_by_round, strict=True)]
        return {name: getattr(self, name) for name in NUMBERS} | {"rounds": rounds}

    @classmethod
    def from_state(cls, inputs: SourceInputs, state: dict[str, Any]) -> "Draw | None":
        """The draw that `state_dict` described, for any number of ranks; None if prompts or group size are others."""
        rounds = {range(start, stop): rows for start, stop, rows in state["rounds"]}
        draw = cls(inputs, next(iter(rounds)), *(state[name] for name in NUMBERS))
        draw.is_settled = True
        for ids, rows in rounds.items():
            prompts = draw._prompts if ids == draw.ids else inputs.data.ask(ids)
            prompts_of_rows = [
                (row, prompt)
                for prompt in prompts
                for row in rows
                if (row["id"], row["prompt"]) == (prompt.id, mark(prompt))
            ]
            draw.rounds[ids] = [_unpacked(row, prompt) for row, prompt in prompts_of_rows]
            if len(prompts_of_rows) != len(prompts) * inputs.group_size:
                return None
        return draw if len(draw.ids) == inputs.prompts_per_step else None


def restored(inputs: SourceInputs, states: list[dict[str, Any]]) -> list[Draw]:
    """The draws of a checkpoint; none if they do not fit this run. Every rank must call it."""
    draws = [draw for state in states if (draw := Draw.from_state(inputs, state))]
    if all(ranks.gather(len(draws) == len(states))):
        return draws
    rank_zero_only(log.warning)("loop.source: other prompts or sizes before: what was drawn ahead is drawn anew")
    return []


def mark(prompt: Prompt) -> int:
    """A number that tells the prompt from others."""
    return crc32(repr([*prompt.token_ids]).encode())


def _packed(sample: Sample) -> dict[str, Any]:
    plain = {name: getattr(sample, name) for name in NAMES}
    return plain | {"id": sample.prompt.id, "prompt": mark(sample.prompt), "finish_reason": str(sample.finish_reason)}


def _unpacked(row: dict[str, Any], prompt: Prompt) -> Sample:
    plain = {name: row[name] for name in NAMES}
    return Sample(prompt=prompt, finish_reason=FinishReason(row["finish_reason"]), **plain)
