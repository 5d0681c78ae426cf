"""The file that says what made a run, and what a start that continues a run has changed."""

import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import disk
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.plugins.looking.run_files.provenance import FILE, OF_A_START, read_starts, start_of
from grpo_lightning.plugins.looking.run_files.run_configs import Config, differing, flat, read_config, without_secrets
from grpo_lightning.types import UsageError

DEPTH = 6
"""The levels of objects inside objects that are described."""


class Provenance(Callback):
    """Keeps what made a run in `provenance.yaml` of its folder and in its checkpoints, an entry per start.

    An entry has the versions of the packages, the commit of a clone, the processor and the GPU, the command line
    without keys and passwords, the seed, and a hash of the questions. A start that continues a run, in any folder,
    prints the options, versions and data that differ from those in the checkpoint. `grpo env --run` prints the entries.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forgets an earlier start."""
        self._saved: dict[str, Any] = {"starts": []}
        self._earlier: dict[str, Any] = {"starts": []}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes the earlier starts and options from the checkpoint."""
        self._earlier = checkpoint.get("provenance", self._earlier)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the starts and the options."""
        checkpoint["provenance"] = self._saved

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file, and prints what has changed, on rank 0."""
        if not trainer.is_global_zero or disk.is_trial(trainer):
            return
        folder = Path(trainer.default_root_dir)
        options = self._saved["options"] = options_of(trainer, pl_module)
        if "seed_everything" not in options:
            # A program may make its optimizer in any function.
            options |= plain({"model.optimizer": described(trainer.optimizers[0].defaults)})
        start = {"step": trainer.current_epoch} | start_of(trainer, GRPOLoop.find(trainer).seed)
        starts = self._earlier["starts"]
        if trainer.ckpt_path is not None:
            earlier_options = self._earlier.get("options", options)
            with suppress(UsageError):
                if "options" not in self._earlier:  # a checkpoint of 0.2
                    earlier_options = plain(read_config(folder / "config.yaml") or options)
                # The file also has starts that the run made after the checkpoint.
                starts = max(starts, read_starts(folder), key=len)
            changes = changes_between(earlier_options, options)
            changes += changes_between(*(flat(entry) for entry in (*self._earlier["starts"][-1:], start)))
            if changes:
                rank_zero_info("\n  ".join([f"continued from {trainer.ckpt_path} with these changes:", *changes]))
        self._saved["starts"] = [*starts, start]
        disk.write_whole(folder / FILE, yaml.safe_dump(self._saved["starts"], sort_keys=False, allow_unicode=True))


def options_of(trainer: Any, module: Any) -> Config:
    """Returns the options of the command line; in Python the arguments of the objects, where they are attributes."""
    for callback in trainer.callbacks:
        if isinstance(callback, SaveConfigCallback):
            return plain(yaml.safe_load(callback.parser.dump(callback.config, skip_unset=False)))
    options = {"model": module, "loop": GRPOLoop.find(trainer), "data": trainer.datamodule}
    options |= {"model.rewards": module.explorer.scorer.rewards, "model.engine": module.explorer.engine}
    options |= {f"trainer.{name}": getattr(trainer, name) for name in ("default_root_dir", "max_epochs", "precision")}
    return plain(described(options))


def plain(options: Any) -> Config:
    """Returns nested options by dotted key, without secrets, as values that a checkpoint can hold."""
    return flat(json.loads(json.dumps(without_secrets(options), default=str))) | {"ckpt_path": None}


def described(value: Any, depth: int = DEPTH) -> Any:
    """Returns an object as a configuration names it: its class, and its arguments."""
    if isinstance(value, (list, tuple)):
        return [described(item, depth) for item in value]
    if isinstance(value, dict):
        return {key: described(item, depth) for key, item in value.items()}
    kind = type(value)
    if kind.__module__.startswith(("builtins", "pathlib", "torch", "transformers", "functools")) or not depth:
        is_plain = value is None or isinstance(value, (bool, int, float, str, Path))
        return value if is_plain else getattr(value, "__qualname__", kind.__name__)
    names = [name for name in inspect.signature(kind).parameters if hasattr(value, name)]
    arguments = {name: described(getattr(value, name), depth - 1) for name in names}
    return {"class_path": kind.__name__, "init_args": arguments}


def changes_between(old: Config, new: Config | None = None) -> list[str]:
    """Returns `loop.mu 1 -> 2` for each key whose value differs; nothing without a second configuration."""
    keys = differing([old, new or old])
    return [
        f"{key} {old.get(key, 'not set')} -> {(new or old).get(key, 'not set')}"
        for key in keys
        if key not in OF_A_START
    ]
