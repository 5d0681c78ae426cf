"""The configuration of a run: in its folder, with those of earlier starts, and in its loggers."""

from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.tensorboard.summary import hparams

from grpo_lightning.training import disk, internals
from grpo_lightning.training.module import GRPOModule


class SaveConfig(SaveConfigCallback):
    """Keeps the newest configuration as `config.yaml`; earlier ones move to `config.1.yaml`, `config.2.yaml` ...

    Every logger gets the options too; TensorBoard shows them on its page for comparing runs.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing: the model may fail to load, and `validate` must leave the config.yaml of a run alone."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file, on rank 0, and shows the options in every logger."""
        if not trainer.is_global_zero:
            return
        config = self.config.clone()
        # The file describes the run, not how it was started.
        config["ckpt_path"] = None
        text = self.parser.dump(config, skip_none=False)
        self._keep(Path(trainer.default_root_dir) / "config.yaml", text, resumed=trainer.ckpt_path is not None)
        options = yaml.safe_load(text)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                assert isinstance(pl_module, GRPOModule)
                parts = flat({key: options[key] for key in ("model", "data", "loop")})
                # The HPARAMS tab shows the last value of these beside the options.
                shown = dict.fromkeys(["reward/mean", *(f"val/{name}" for name in pl_module.evaluation.metrics)], 0.0)
                for summary in hparams(parts, shown):
                    internals.summary_writer(logger).add_summary(summary)
            else:
                logger.log_hyperparams(options)

    def _keep(self, path: Path, text: str, resumed: bool) -> None:
        if path.exists():
            earlier = path.read_text(encoding="utf-8")
            changes = differences(earlier, text)
            if not changes:
                return
            number = 1
            while (old := path.with_name(f"config.{number}.yaml")).exists():
                number += 1
            disk.write_whole(old, earlier)
            if resumed:
                rank_zero_info(f"continued with other options ({old.name} has the earlier ones): {', '.join(changes)}")
        disk.write_whole(path, text)


def differences(earlier: str, later: str) -> list[str]:
    """`loop.mu 1 -> 2` for every option that differs between two configurations in YAML."""
    try:
        before, now = (flat(yaml.safe_load(text) or {}) for text in (earlier, later))
    except yaml.YAMLError:  # edited by hand
        return ["config.yaml, which was no YAML"]
    before.pop("ckpt_path", None)
    now.pop("ckpt_path", None)
    return [
        f"{key} {before.get(key, 'not set')} -> {now.get(key, 'not set')}"
        for key in {**before, **now}
        if before.get(key) != now.get(key) or (key in before) != (key in now)
    ]


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"loop": {"mu": 1}} -> {"loop.mu": 1}; values other than numbers, text and booleans become text."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix: tree if isinstance(tree, (bool, int, float, str)) else str(tree)}
    return {
        key: value
        for name, part in tree.items()
        for key, value in flat(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }
