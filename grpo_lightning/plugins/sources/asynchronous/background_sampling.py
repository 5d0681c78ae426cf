"""A step's completions, sampled in a thread while an earlier step is trained."""

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
from grpo_lightning.types import FinishReason, Prompt, RandomKey, Sample, UsageError

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Seconds between two looks at a thread that is waited for."""
END_SECONDS = 30.0
"""Seconds that a thread may take to end after its engine was closed."""

# What a checkpoint holds.
NUMBERS = ("step", "begun", "version")
"""Attributes of a thread."""
NAMES = ("text", "stop_string")
"""Attributes of a sample that are text."""
DTYPES = {"token_ids": torch.int64, "logp": torch.float64, "versions": torch.int64}
"""Attributes of a sample with a number per token."""


class SamplingThread(Thread):
    """Samples the completions of a step on this rank. It makes no collective, reads no weights and scores nothing.

    Args:
        inputs: What the source needs of the run.
        ids: The ids of the first round's questions, over all ranks.
        step: The step that learns from the completions.
        begun: The step that began with the weights that sample the completions.
        version: `Policy.version` of these weights.
    """

    def __init__(self, inputs: SourceInputs, ids: range, step: int, begun: int, version: int) -> None:
        # A server that does not answer must not keep the program from ending.
        super().__init__(name="grpo-sampling", daemon=True)
        self.inputs = inputs
        self.ids = ids
        self.step = step
        self.begun = begun
        self.version = version
        self.rounds: dict[range, list[Sample]] = {}
        """The completions of each round, by the ids of its questions."""
        self.exploration: Exploration | None = None
        """The scored step, where its further rounds could not wait."""
        self.is_complete = False
        """True once all ranks have waited for the thread."""
        self.seconds = 0.0
        """Seconds that the first round took; 0 after a resume."""
        self.ended_at = 0.0
        """Time at which the first round ended, in seconds of `perf_counter`; 0 after a resume."""
        self._prompts = inputs.data.ask(ids)
        self._error: BaseException | None = None

    def run(self) -> None:
        """Samples the first round."""
        started = perf_counter()
        try:
            self.sample(self.ids, self._prompts)
        except BaseException as error:  # `wait` raises it in the main thread
            self._error = error
        self.ended_at = perf_counter()
        self.seconds = self.ended_at - started

    def sample(self, ids: range, prompts: list[Prompt]) -> None:
        """Samples a round."""
        if any(prompt.images for prompt in prompts):
            raise UsageError(
                "loop.source: sampling ahead reads no images, whose encoder is in use; use Synchronous or StaleSource"
            )
        inputs = self.inputs
        explorer = inputs.explorer
        key = RandomKey(inputs.seed, self.step)
        completions = explorer.sampler.draw(
            explorer.engine, inputs.policy, prompts, inputs.group_size, inputs.sampling, key
        )
        with closing(completions):
            sample_by_row = dict(completions)
        self.rounds[ids] = [sample_by_row[row] for row in sorted(sample_by_row)]

    def wait(self) -> None:
        """Waits for the end, and raises the thread's exception. Signals and other ranks' failures end the wait."""
        while self.is_alive():
            self.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error

    def state_dict(self) -> dict[str, Any]:
        """Returns the completions of all ranks as plain values and flat tensors. Every rank must call it."""
        states_by_rank = ranks.gather([samples_to_state(samples) for samples in self.rounds.values()])
        rounds = [
            {
                "ids": (ids.start, ids.stop),
                "rows": [row for rows, _ in states for row in rows],
                "tokens": {name: torch.cat([tokens[name] for _, tokens in states]) for name in DTYPES},
            }
            for ids, states in zip(self.rounds, zip(*states_by_rank, strict=True), strict=True)
        ]
        return {name: getattr(self, name) for name in NUMBERS} | {"rounds": rounds}

    @classmethod
    def from_state(cls, inputs: SourceInputs, state: dict[str, Any]) -> "SamplingThread | None":
        """Returns a thread with the completions of `state_dict`, for any number of ranks, which need not be started.

        Returns:
            None if prompts or group size have changed.
        """
        rounds = state["rounds"]
        if not all(isinstance(round, dict) for round in rounds):  # a checkpoint of an earlier version
            return None
        thread = cls(inputs, range(*rounds[0]["ids"]), *(state[name] for name in NUMBERS))
        thread.is_complete = True
        for round in rounds:
            ids = range(*round["ids"])
            prompts = thread._prompts if ids == thread.ids else inputs.data.ask(ids)
            thread.rounds[ids] = samples_from_state(round["rows"], round["tokens"], prompts)
            if len(thread.rounds[ids]) != len(prompts) * inputs.group_size:
                return None
        return thread if len(thread.ids) == inputs.prompts_per_step else None


def threads_from_states(inputs: SourceInputs, states: list[dict[str, Any]]) -> list[SamplingThread]:
    """Returns the threads of a checkpoint; none if any does not fit this run. Every rank must call it."""
    threads = [thread for state in states if (thread := SamplingThread.from_state(inputs, state))]
    if all(ranks.gather(len(threads) == len(states))):
        return threads
    rank_zero_only(log.warning)("loop.source: other prompts or sizes before: what was sampled ahead is sampled anew")
    return []


def checksum(prompt: Prompt) -> int:
    """Returns a number that tells the prompt's tokens from others."""
    return crc32(repr([*prompt.token_ids]).encode())


def samples_to_state(samples: Sequence[Sample]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Returns samples as rows of plain values, and the numbers of all their tokens end to end.

    In a row, the name of each attribute with a number per token has their count.
    """
    rows = []
    for sample in samples:
        row = {name: getattr(sample, name) for name in (*NAMES, *DTYPES)}
        row |= {name: None if row[name] is None else len(row[name]) for name in DTYPES}
        prompt = {"id": sample.prompt.id, "prompt": checksum(sample.prompt)}
        rows.append(row | prompt | {"finish_reason": str(sample.finish_reason)})
    # One tensor for all: lists of millions of numbers take minutes to read, and a tensor per sample is many records.
    tokens = {
        name: torch.tensor([value for sample in samples for value in getattr(sample, name) or ()], dtype=dtype)
        for name, dtype in DTYPES.items()
    }
    return rows, tokens


def samples_from_state(
    rows: Sequence[dict[str, Any]], tokens: dict[str, Tensor], prompts: Sequence[Prompt]
) -> list[Sample]:
    """Returns the samples of some prompts, prompt by prompt, from the state of all ranks."""
    values_by_name = {name: values.split([row[name] or 0 for row in rows]) for name, values in tokens.items()}
    indices_by_prompt: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        indices_by_prompt.setdefault((row["id"], row["prompt"]), []).append(index)

    def sample_of(prompt: Prompt, index: int) -> Sample:
        row = rows[index]
        fields = {name: row[name] for name in NAMES}
        fields |= {name: None if row[name] is None else values_by_name[name][index].tolist() for name in DTYPES}
        return Sample(prompt=prompt, finish_reason=FinishReason(row["finish_reason"]), **fields)

    return [
        sample_of(prompt, index)
        for prompt in prompts
        for index in indices_by_prompt.get((prompt.id, checksum(prompt)), ())
    ]
