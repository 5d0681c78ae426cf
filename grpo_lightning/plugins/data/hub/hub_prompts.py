"""Questions from a dataset of the Hugging Face Hub."""

from collections.abc import Iterable
from typing import Any

from grpo_lightning.tasks.tables import Table
from grpo_lightning.tasks.task import Split
from grpo_lightning.types import UsageError


class HubPrompts(Table):
    r"""Takes questions from a dataset of the Hugging Face Hub, or from a folder laid out like a dataset.

    All columns but the question and the answer go into the question's metadata.

    Args:
        id: The dataset, such as `openai/gsm8k`.
        config: Its configuration, such as `main`, where it has several.
        train: Name of its split to train on; slices such as `train[:-500]` are allowed.
        val: Name of its split for validation, such as `train[-500:]`.
        test: Name of its split for testing.
        predict: Name of its split to answer; its rows may lack an answer.
        revision: Branch, tag or commit of the dataset; a commit makes the run repeatable.
    """

    def __init__(
        self,
        id: str,
        config: str | None = None,
        train: str | None = "train",
        val: str | None = None,
        test: str | None = "test",
        predict: str | None = None,
        question: str = "question",
        answer: str = "answer",
        answer_pattern: str = "",  # not None: YAML reads a leading # as a comment, and nothing as null
        revision: str | None = None,
        max_lines: int | None = None,
        images: str = "",
    ) -> None:
        super().__init__(
            question, answer, answer_pattern, max_lines, images, train=train, val=val, test=test, predict=predict
        )
        self.id = id
        self.config = config
        self.revision = revision

    def _table(self, split: Split, hub_split: str | None) -> tuple[str, str, Iterable[tuple[int, Any]]]:
        import datasets  # takes a second, which other tasks need not wait for

        if hub_split is None:
            raise UsageError(f"data.task.{split} is not set: give the name of a split of {self.id}")
        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(self.id, self.config, split=hub_split, revision=self.revision)
        except (ConnectionError, datasets.exceptions.DatasetsError, ValueError) as error:
            raise UsageError(
                f"data.task.id={self.id!r} (config={self.config!r}, {split}={hub_split!r}, revision={self.revision!r}) "
                f"could not be loaded: {error.__cause__ or error}: fix the name, or download it first if this machine "
                "is offline"
            ) from error
        feature = rows.features.get(self.images)
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(self.images, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(self.images, datasets.List(datasets.Image(decode=False)))
        return f"{self.id}/{hub_split}", f"{self.id}/{hub_split}", enumerate(rows, 1)
