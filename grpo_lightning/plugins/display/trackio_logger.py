"""A logger for Trackio, a dashboard on one's own machine that needs no account."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.types import UsageError


class TrackioLogger(Logger):
    """Logs curves, options and completions to Trackio; `trackio show --project grpo` shows them.

    Args:
        project: The project that the run belongs to.
        save_dir: The folder of the run, whose name is the run's; by default `trainer.default_root_dir`.
        space_id: A Space on the Hub that shows the project, `owner/name`; by default it stays on this machine.

    A run that is resumed goes on under its name.
    """

    def __init__(self, project: str = "grpo", save_dir: str | None = None, space_id: str | None = None) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UsageError("trainer.logger=TrackioLogger: install it: python -m pip install trackio") from error
        self._trackio, self._project, self._run = trackio, project, None
        self._made_with = {"name": Path(save_dir or ".").resolve().name, "space_id": space_id}

    @property
    def name(self) -> str:
        """The project."""
        return self._project

    @property
    def version(self) -> str:
        """The run's name."""
        return str(self._made_with["name"])

    @property
    def command(self) -> str:
        """The command that shows the curves."""
        return f"trackio show --project {self._project}"

    def _begun(self) -> Any:
        if self._run is None:
            self._run = self._trackio.init(self._project, resume="allow", embed=False, **self._made_with)
        return self._run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs values at a step."""
        self._begun().log(dict(metrics), step=step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Logs the options of the run."""
        self._begun().config.update(params if isinstance(params, dict) else vars(params))

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        """Logs completions as a table."""
        self._begun().log({key: self._trackio.Table(columns=columns, data=data)}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends the run; what is still to be written is written."""
        if self._run is not None:
            self._run.finish()
            self._run = None
