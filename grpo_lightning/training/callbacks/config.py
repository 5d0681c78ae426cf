"""The configuration of a run: in its folder, with those of earlier starts, and in its loggers."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.tensorboard.summary import hparams

import grpo_lightning
from grpo_lightning import history
from grpo_lightning.rewards.base import title_of
from grpo_lightning.training import disk, internals
from grpo_lightning.training.evaluation import judge_class


class SaveConfig(SaveConfigCallback):
    """Keeps the newest configuration as `config.yaml`; earlier ones move to `config.1.yaml`, `config.2.yaml` ...

    The first line of an earlier one says until which step it was in force.

    Every logger gets the options too; TensorBoard shows them on its page for comparing runs.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing: the model may fail to load, and `validate` must leave the config.yaml of a run alone."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file, on rank 0, and shows the options in every logger."""
        if not trainer.is_global_zero:
            return
        config = self.config.clone()
        task_judge = trainer.datamodule.task.judge  # type: ignore[attr-defined]
        if config.model.validation.judge is None and task_judge is not None:
            # Whoever reads the file knows by what validation was judged.
            config["model.validation.judge"] = as_made(judge_class(task_judge))
        # The file describes the run, not how it was started.
        config["ckpt_path"] = None
        text = self.parser.dump(config, skip_none=False)
        folder = Path(trainer.default_root_dir)
        self._keep(folder / "config.yaml", text, trainer.current_epoch, resumed=trainer.ckpt_path is not None)
        options = yaml.safe_load(text)
        before = [(until, flat(hyperparameters(old))) for until, old in history.earlier(folder)]
        varied = history.merged(before, flat(hyperparameters(options)), str)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # Without the summary of an experiment, the tab HPARAMS begins with what differs between the runs.
                _, start, _ = hparams(varied, {})
                internals.summary_writer(logger).add_summary(start)
            else:
                logger.log_hyperparams(options)

    def _keep(self, path: Path, text: str, steps: int, resumed: bool) -> None:
        for until, old in history.earlier_files(path.parent):
            if until > steps:  # the run goes on from an earlier checkpoint
                rest = old.read_text(encoding="utf-8").partition("\n")[2]
                disk.write_whole(old, f"{history.UNTIL}{steps}\n{rest}")
        if path.exists():
            earlier = path.read_text(encoding="utf-8")
            changes = differences(earlier, text)
            if not changes:
                return
            number = 1
            while (old := path.with_name(f"config.{number}.yaml")).exists():
                number += 1
            disk.write_whole(old, f"{history.UNTIL}{steps}\n{earlier}")
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
        "rewards": ", ".join(map(title, model.get("rewards") or [])),
        "judge": title((model.get("validation") or {}).get("judge")),
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


def as_made(kind: type) -> Namespace:
    """A class without arguments, as the configuration has it."""
    module = "grpo_lightning" if kind.__name__ in grpo_lightning.__all__ else kind.__module__
    given = inspect.signature(kind).parameters.values()
    defaults = {one.name: one.default for one in given if one.default is not one.empty}
    return Namespace(class_path=f"{module}.{kind.__name__}", init_args=Namespace(**defaults))


def title(reward: Any) -> str:
    """The name of a reward in captions; empty where there is none."""
    given = reward.get("init_args") if isinstance(reward, dict) else None
    return "" if reward is None else title_of(class_name(reward), given or {})


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
