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
                # Without the summary of an experiment, the tab HPARAMS begins with what differs between the runs.
                _, start, _ = hparams(flat(hyperparameters(options)), {})
                internals.summary_writer(logger).add_summary(start)
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


ALGORITHM = ("advantage", "reward_kl", "old_policy", "reference", "sampling", "lr_scheduler", "grad_clip")
SIZES = (
    "group_size",
    "prompts_per_step",
    "mu",
    "num_minibatches",
    "steps_per_iteration",
    "stop",
    "dynamic_sampling",
    "source",
)
"""Keys under `model` and `loop` that decide the result."""


def hyperparameters(options: dict[str, Any]) -> dict[str, Any]:
    """What one varies between runs, under short names: a class by its name, and its settings below it.

    What is not set is left out.

    Args:
        options: The whole configuration.
    """
    model, loop, trainer = (options.get(key) or {} for key in ("model", "loop", "trainer"))
    chosen = {
        **short(model.get("optimizer"), "optimizer"),
        **{key: value for key, value in (model.get("objective") or {}).items() if not isinstance(value, dict)},
        **{
            name: value
            for key, part in [*(model.get("objective") or {}).items(), *((key, model.get(key)) for key in ALGORITHM)]
            for name, value in short(part, key).items()
        },
        **{name: value for key in SIZES for name, value in short(loop.get(key), key).items()},
        "policy": (model.get("policy") or {}).get("path"),
        "rewards": ", ".join(class_name(reward) for reward in model.get("rewards") or []),
        "seed": loop.get("seed"),
        "steps": trainer.get("max_epochs"),
        "precision": trainer.get("precision"),
    }
    # Its switches are off but for a few, and its settings are what is looked for most.
    off = {name for name, value in chosen.items() if name.startswith("optimizer.") and value is False}
    chosen = {name.removeprefix("optimizer."): value for name, value in chosen.items() if name not in off}
    return {name: value for name, value in chosen.items() if value not in (None, [], {}, "")}


def short(part: Any, key: str) -> dict[str, Any]:
    """{"class_path": "x.Adam", "init_args": {"lr": 1}} -> {"adam": "Adam", "adam.lr": 1} under the name `key`."""
    if not isinstance(part, dict):
        return {key: part}
    settings = part.get("init_args", {}) if "class_path" in part else part
    names = {key: class_name(part)} if "class_path" in part else {}
    return names | {f"{key}.{name}": value for name, value in flat(settings or {}).items() if value != "None"}


def class_name(part: Any) -> str:
    """`GroupStd` of a part with the class_path `grpo_lightning.GroupStd`."""
    return str(part["class_path"]).rpartition(".")[2] if isinstance(part, dict) else str(part)


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
