"""A logger for Trackio, a dashboard on the local machine that needs no account."""

import os
import shlex
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
        save_dir: The folder of the run, whose path is the run's name. `grpo fit` gives `trainer.default_root_dir`.
        space_id: A Space on the Hub that shows the project, `owner/name`; by default the project stays on this machine.

    A run that is resumed goes on under its name.
    """

    def __init__(self, project: str = "grpo", save_dir: str | None = None, space_id: str | None = None) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UsageError(f"TrackioLogger: {error}. Install it: python -m pip install trackio") from error
        self._trackio = trackio
        self._project = project
        self._space_id = space_id
        self._folder = Path(save_dir or ".")
        self._run: Any = None
        self._early: list[tuple[dict[str, Any], int | None]] = []

    @property
    def name(self) -> str:
        """The project."""
        return self._project

    @property
    def version(self) -> str:
        """The run's name."""
        return os.path.relpath(self._folder)

    @property
    def address(self) -> str:
        """The address of the curves: a Space, or a command that shows them."""
        if self._space_id:
            return f"https://huggingface.co/spaces/{self._space_id}"
        return f"trackio show --project {shlex.quote(self._project)}"

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Starts the run with its options: Trackio takes options only at the start."""
        if self._run is not None:
            return
        goes_on = (self._folder / "checkpoints").is_dir()
        self._run = self._trackio.init(
            self._project,
            name=self.version,
            config=params if isinstance(params, dict) else vars(params),
            resume="allow" if goes_on else "never",
            space_id=self._space_id,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        for values, step in self._early:
            self._run.log(values, step=step)
        self._early = []

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs values at a step; values of the validation before the first step wait until the run is started."""
        if self._run is None:
            self._early.append((dict(metrics), step))
        else:
            self._run.log(dict(metrics), step=step)

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        """Logs completions as a table."""
        self.log_metrics({key: self._trackio.Table(columns=columns, data=data)}, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends the run, and writes values that still wait."""
        if self._early:
            self.log_hyperparams({})
        if self._run is not None:
            self._run.finish()
            self._run = None
