"""Questions in stages, the easy ones first."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.plugins.data.orders.adaptive import Adaptive, RowStream
from grpo_lightning.types import Question, UsageError, at_least, require


class Curriculum(Adaptive):
    """Asks questions in stages; a stage ends after some steps, or once its questions are solved often enough.

    Where most groups are all wrong, easier questions teach first what harder questions need. The last stage does not
    end.

    Args:
        column: Column of the data that tells a question's stage.
        stages: The column's values in the order of the stages; questions with another value are not asked. A number
            cuts all questions, sorted by the column's numbers, into so many equal stages.
        descending: Where `stages` is a number: the largest come first, as for a pass rate.
        steps: Steps after which a stage ends at the latest. None: only by `accuracy`.
        accuracy: Mean reward of the last `window` groups of a stage at which it ends. None: only by `steps`.
        window: Groups that the accuracy is the mean of.
        review: Fraction of the questions that are of earlier stages, so that these are not forgotten.
    """

    def __init__(
        self,
        column: str,
        stages: list[str | int | float] | int,
        descending: bool = False,
        steps: int | None = None,
        accuracy: float | None = 0.8,
        window: int = 64,
        review: float = 0.1,
    ) -> None:
        at_least("data.order.stages", stages if isinstance(stages, int) else len(stages), 1)
        at_least("data.order.steps", steps, 1)
        at_least("data.order.window", window, 1)
        require(0 <= review < 1, f"data.order.review={review}: give 0 to less than 1")
        if steps is None and accuracy is None:
            raise UsageError("data.order.steps=null, data.order.accuracy=null: no stage would end; give one of them")
        self.column = column
        self.stages = stages
        self.descending = descending
        self.steps = steps
        self.accuracy = accuracy
        self.window = window
        self.review = review

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        rows_by_stage = self.rows_by_stage()
        self.streams = [RowStream(questions, rows, seed) for rows in rows_by_stage]
        self.stage_of_row = {row: stage for stage, rows in enumerate(rows_by_stage) for row in rows}
        self.stage = 0
        """The stage, from 0."""
        self.step = 0
        """Steps that the stage has taken so far."""
        self.recent: list[float] = []
        """The mean rewards of the stage's last groups."""

    def rows_by_stage(self) -> list[list[int]]:
        """Returns the rows of each stage."""
        for question in self.questions:
            if self.column not in question.metadata:
                raise UsageError(
                    f"data.order.column={self.column!r}: {question.source} has no such column; "
                    "give one of the data's, other than question and answer"
                )
        cells = [str(question.metadata[self.column]) for question in self.questions]

        # A stage per value.
        if not isinstance(self.stages, int):
            rows_by_stage = [[row for row, cell in enumerate(cells) if cell == str(value)] for value in self.stages]
            absent = [value for value, rows in zip(self.stages, rows_by_stage, strict=True) if not rows]
            require(not absent, f"data.order.stages: no question has {absent} in column {self.column!r}")
            return rows_by_stage

        # Equal stages of the sorted rows.
        try:
            numbers = [float(cell) for cell in cells]
        except ValueError as error:
            raise UsageError(
                f"data.order.stages={self.stages}: {error} in column {self.column!r}; "
                "name the column's values as a list"
            ) from error
        rows = sorted(range(len(cells)), key=numbers.__getitem__, reverse=self.descending)
        size, count = len(cells), self.stages
        require(count <= size, f"data.order.stages={count}: there are {size} questions; give fewer stages")
        return [rows[stage * size // count : (stage + 1) * size // count] for stage in range(count)]

    def choose(self, id: int) -> int:
        chance = self.chance(id)
        is_review = self.stage > 0 and chance.random() < self.review
        return self.streams[chance.randrange(self.stage) if is_review else self.stage].take()

    def learn(self, row: int, rewards: list[float]) -> None:
        if self.stage_of_row[row] == self.stage:
            self.recent = [*self.recent, sum(rewards) / len(rewards)][-self.window :]

    def learned(self) -> dict[str, float]:
        self.step += 1
        is_full = len(self.recent) == self.window
        is_solved = self.accuracy is not None and is_full and sum(self.recent) / self.window >= self.accuracy
        if self.stage + 1 < len(self.streams) and (is_solved or self.step == self.steps):
            self.stage += 1
            self.step = 0
            self.recent = []
        return {"order/stage": self.stage}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "stage": self.stage,
            "step": self.step,
            "recent": [*self.recent],
            "taken": [stream.num_taken for stream in self.streams],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.stage = min(state["stage"], len(self.streams) - 1)  # there may be fewer stages than before
        self.step = state["step"]
        self.recent = [*state["recent"]]
        for stream, num_taken in zip(self.streams, state["taken"], strict=False):
            stream.num_taken = num_taken
