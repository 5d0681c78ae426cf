"""A step's completions, drawn in a thread while an earlier step is trained."""

import logging
from collections.abc import Sequence
from contextlib import closing
from threading import Thread
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import SourceInputs
from grpo_lightning.types import FinishReason, Prompt, RandomKey, Sample

log = logging.getLogger(__name__)

LOOK_SECONDS, END_SECONDS = 0.1, 30.0
NUMBERS = ("step", "begun", "version")  # of a draw, in a checkpoint
NAMES = ("text", "stop_string")  # of a sample there
DTYPES = {"token_ids": torch.int64, "logp": torch.float64, "versions": torch.int64}  # of its tokens there


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
        """The completions of all ranks as plain values and flat tensors. Every rank must call it."""
        by_rank = ranks.gather([packed(samples) for samples in self.rounds.values()])
        rounds = [
            {
                "ids": (ids.start, ids.stop),
                "rows": [row for rows, _ in of_ranks for row in rows],
                "tokens": {name: torch.cat([tokens[name] for _, tokens in of_ranks]) for name in DTYPES},
            }
            for ids, of_ranks in zip(self.rounds, zip(*by_rank, strict=True), strict=True)
        ]
        return {name: getattr(self, name) for name in NUMBERS} | {"rounds": rounds}

    @classmethod
    def from_state(cls, inputs: SourceInputs, state: dict[str, Any]) -> "Draw | None":
        """The draw that `state_dict` described, for any number of ranks; None if prompts or group size are others."""
        rounds = state["rounds"]
        if not all(isinstance(round, dict) for round in rounds):  # of an earlier version
            return None
        draw = cls(inputs, range(*rounds[0]["ids"]), *(state[name] for name in NUMBERS))
        draw.is_settled = True
        for round in rounds:
            ids = range(*round["ids"])
            prompts = draw._prompts if ids == draw.ids else inputs.data.ask(ids)
            draw.rounds[ids] = unpacked(round["rows"], round["tokens"], prompts)
            if len(draw.rounds[ids]) != len(prompts) * inputs.group_size:
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


def packed(samples: Sequence[Sample]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Samples as plain values, and the numbers of all their tokens end to end, of which a row has the counts."""
    rows = []
    for sample in samples:
        row = {name: getattr(sample, name) for name in (*NAMES, *DTYPES)}
        row |= {name: None if row[name] is None else len(row[name]) for name in DTYPES}
        prompt = {"id": sample.prompt.id, "prompt": mark(sample.prompt)}
        rows.append(row | prompt | {"finish_reason": str(sample.finish_reason)})
    # One tensor for all: lists of millions of numbers take minutes to read, and a tensor per sample is many records.
    tokens = {
        name: torch.tensor([value for sample in samples for value in getattr(sample, name) or ()], dtype=dtype)
        for name, dtype in DTYPES.items()
    }
    return rows, tokens


def unpacked(rows: Sequence[dict[str, Any]], tokens: dict[str, Tensor], prompts: Sequence[Prompt]) -> list[Sample]:
    """The samples of some prompts, prompt by prompt, from those of all ranks."""
    parts = {name: values.split([row[name] or 0 for row in rows]) for name, values in tokens.items()}
    indices_by_prompt: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        indices_by_prompt.setdefault((row["id"], row["prompt"]), []).append(index)

    def sample_of(prompt: Prompt, index: int) -> Sample:
        row = rows[index]
        plain = {name: row[name] for name in NAMES}
        plain |= {name: None if row[name] is None else parts[name][index].tolist() for name in DTYPES}
        return Sample(prompt=prompt, finish_reason=FinishReason(row["finish_reason"]), **plain)

    return [sample_of(one, index) for one in prompts for index in indices_by_prompt.get((one.id, mark(one)), ())]
