"""A reward that is a reward function of TRL."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.reward import Run
from grpo_lightning.types import Message, Question, Sample, UsageError

NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not give to a function."""


class TRLReward(FunctionReward):
    """Scores with a reward function of TRL, `def f(completions, solution, **kwargs)`, as it is.

    The function gets the completions of one prompt together, by name, each argument as a list with a cell per
    completion: `prompts`, `completions`, `completion_ids` and the columns of the row. With `data.chat` prompts and
    completions are lists of messages, else text. `trainer_state` has `global_step`, the updates made so far. An
    `async def` is awaited. What it would log (`log_extra`, `log_metric`) it must do without.

    Where it returns None, the reward adds nothing to the completion's total, and its status is `not_applicable`. A
    completion to which no reward applies is left out of its group; in TRL its reward is 0.

    The function runs in worker processes, as that of a `FunctionReward` does. A failure costs the group.

    Args:
        function: Its import path: `my_rewards.accuracy`, `my_rewards:accuracy` or `path/to/my_rewards.py:accuracy`.
        timeout: CPU seconds per call, as in `FunctionReward`.
        memory_limit_mb: Memory per worker in MiB, as in `FunctionReward`.
        num_workers: Number of worker processes.
        answer: Name of the argument that gets the gold answer: the column that `data.task.answer` names.
    """

    may_skip = True

    def __init__(
        self,
        function: str,
        timeout: float = 10.0,
        memory_limit_mb: int = 4096,
        num_workers: int = 2,
        answer: str = "answer",
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(function, timeout, memory_limit_mb, num_workers, group=True, weight=weight, name=name)
        self.answer = answer
        self._run: Run | None = None
        self._probes: Sequence[Question] = ()

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Imports the function, and refuses arguments that are no columns."""
        self._probes = questions[:1]
        self._import()

    def setup(self, run: Run) -> None:
        """Tries the function once, as the run will call it."""
        self._run = run
        super().read_questions(self._probes)
        self._probes = ()

    def _take(self, key: str, arguments: list[str]) -> None:
        super()._take(key, [])
        for question in self._probes:
            names = {*self._columns(question), "prompts", "completions", "completion_ids", "trainer_state"}
            if unknown := [name for name in arguments if name not in names]:
                raise UsageError(
                    f"{key} takes {', '.join(unknown)}, and {question.source or 'the first row'} has no such column; "
                    f"there are {', '.join(sorted(names))}. Where it is the gold answer, write answer: {unknown[0]} "
                    f"beside the function"
                )

    def _columns(self, question: Question) -> dict[str, Any]:
        """Returns the cells of the question's row."""
        columns = {name: cell for name, cell in question.metadata.items() if name not in NO_COLUMNS}
        return {self.answer: question.answer} | columns

    def _group_task(self, samples: Sequence[Sample]) -> dict[str, Any]:
        columns = self._columns(samples[0].prompt.question)
        turns = [self._turns(sample) for sample in samples]
        arguments = {
            "prompts": [prompt for prompt, _ in turns],
            "completions": [completion for _, completion in turns],
            "completion_ids": [sample.token_ids for sample in samples],
            "trainer_state": {"global_step": self._run.num_updates() if self._run else 0},
        }
        return {"keywords": {name: [cell] * len(samples) for name, cell in columns.items()} | arguments}

    def _turns(self, sample: Sample) -> tuple[Any, Any]:
        """Returns prompt and completion as messages; without a chat template as text."""
        question = sample.prompt.question
        conversation = sample.conversation
        if conversation is not None:
            replies = [row for row, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
            start = replies[-len(conversation.ends)]
            return conversation.messages[:start], conversation.messages[start:]
        if self._run is None or not self._run.chat:
            return sample.prompt.text, sample.text
        prompt = [*question.history, Message(role="user", content=question.text)]
        return prompt, [Message(role="assistant", content=sample.turn)]
