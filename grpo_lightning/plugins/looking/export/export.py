"""The policy of a run as a folder for transformers and vLLM, which do not need this package."""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_lightning import disk
from grpo_lightning.plugins.console.mistakes.disk_errors import refusal
from grpo_lightning.plugins.looking.run_files.run_configs import read_config
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars, validation_names
from grpo_lightning.policy import pretrained
from grpo_lightning.policy.adapter import LoRA, adapted_layers, fingerprint
from grpo_lightning.policy.adapter import save as save_adapter
from grpo_lightning.policy.architecture import stop_ids_of
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.training.checkpoint_files import check_same_model, read_checkpoint
from grpo_lightning.types import UsageError, require

PREFIX = "policy.model."  # what the names of the policy's weights begin with in a checkpoint
FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The options of sampling that transformers and vLLM have under the same names, with the defaults of `Sampling`."""


def export(run: Path, out: Path, checkpoint: Path | None = None, dtype: str | None = None, kind: str = "model") -> None:
    """Writes the policy of a checkpoint as a folder, with tokenizer, generation config and model card.

    The folder appears whole or not at all. Checkpoints of every strategy serve, for they hold whole weights. `out` must
    not exist, or be empty. Without `checkpoint` it is the run's `last.ckpt`; without `dtype` weights keep their type,
    and with it the log-probs, bit for bit. Of kind `model` an adapter is merged into the weights, which changes
    log-probs by rounding; `adapter` writes it alone, for PEFT.
    """
    config = config_of(run)
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(is_free, f"--out={out}: something is there already. Give a folder that does not exist, or delete it")
    path = checkpoint or run / "checkpoints" / "last.ckpt"
    require(path.exists(), f"{run}: there is no checkpoint {path}. Let a step of the run end, or give --ckpt_path")
    policy, sampling = config["model"]["policy"], config["model"].get("sampling") or {}
    adapter = adapter_of(policy)
    is_there = kind == "model" or adapter is not None
    require(is_there, f"--as=adapter: {run} has trained all weights, and has no adapter. Give --as model")
    saved = read_checkpoint(path, mmap=True)
    tokenizer = read(AutoTokenizer, policy)
    model = model_of(policy, adapter, saved, path, kind)
    if kind == "model":
        assert model.generation_config is not None
        # It stops at every token that ended a completion, and samples as the run did.
        filters = {name: sampling.get(name, default) for name, default in FILTERS.items()}
        stops = sorted(stop_ids_of(model.generation_config, model.config, tokenizer))
        model.generation_config.update(do_sample=True, eos_token_id=stops or None, **filters)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    exported = [p for p in model.parameters() if p.requires_grad or kind == "model"]
    size = f"{sum(p.numel() for p in exported):,} parameters, {str(exported[0].dtype).removeprefix('torch.')}"
    made = f"after {saved['epoch'] + 1} exploration steps of GRPO: {size}. Checkpoint: `{path.name}`"
    is_own = path.resolve().is_relative_to(run.resolve())
    scores = scores_after(run, saved["epoch"]) if is_own else {}
    card = model_card(config, kind, made, out.resolve().name, scores)
    with whole_folder(out) as folder:
        if kind == "adapter":
            save_adapter(model, folder, str(policy["path"]))
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")


def scores_after(run: Path, step: int) -> dict[str, float]:
    """What validation found after a step, by metric; nothing where the run's logs cannot be read."""
    try:
        scalars = read_scalars(run)
    except (OSError, ValueError, KeyError):
        return {}
    found = {name: dict(scalars.get(name, [])).get(step, math.nan) for name in validation_names(scalars)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def model_card(config: Mapping[str, Any], kind: str, made: str, name: str, scores: Mapping[str, float]) -> str:
    """A README.md as model hubs read it: a head in YAML, how the policy was `made`, and the run's configuration.

    `scores` are those of the checkpoint's validations, by metric.
    """
    base, data = str(config["model"]["policy"]["path"]), config["data"]
    head: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    head |= {"pipeline_tag": "text-generation", "tags": ["grpo", "grpo-lightning"]}
    if on_hub(base):
        head["base_model"] = base
    if on_hub(asked := questions_of(data.get("task"), "train")["type"]):
        head["datasets"] = [asked]
    validations, results = data.get("validations") or {}, []
    for key, score in scores.items():
        _, *benchmark, metric = key.split("/")
        if not benchmark:
            dataset = questions_of(data.get("task"), "val")
        elif options := validations.get(benchmark[0]):
            dataset = questions_of(options.get("task"), options.get("split", "test")) | {"name": benchmark[0]}
        else:  # the configuration has changed
            continue
        metrics = [{"type": metric, "value": round(score, 4)}]
        results.append({"task": {"type": "text-generation"}, "dataset": dataset, "metrics": metrics})
    if results:
        head["model-index"] = [{"name": name, "results": results}]
    top, whole = (yaml.safe_dump(part, sort_keys=False, allow_unicode=True) for part in (head, dict(config)))
    prompts = "Prompts are made as under `data` in the configuration"
    return f"---\n{top}---\n\n`{base}` {made}. {prompts}:\n\n{indent(whole, '    ')}"


def on_hub(name: str) -> bool:
    """Whether a name may be one of a hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def questions_of(task: Any, split: str) -> dict[str, Any]:
    """A split in a model card: a data set of the hub, a file without its folder, or the class of the task."""
    path, options = (task["class_path"], task.get("init_args") or {}) if isinstance(task, Mapping) else (str(task), {})
    kind, asked = path.rpartition(".")[2], str(options.get(split) or "")
    if kind == "HubPrompts" and on_hub(name := str(options["id"])):
        known = {"name": name, "type": name, "config": options.get("config"), "split": asked}
        return {key: value for key, value in known.items() if value}
    return {"name": Path(asked).stem or kind, "type": kind}


def config_of(run: Path) -> dict[str, Any]:
    """The configuration that a run has written."""
    path = run / "config.yaml"
    require(
        path.is_file(),
        f"{run}: no run is there, for it has no config.yaml. Give the folder that `grpo fit` wrote to. A run in "
        "Python has none: call module.policy.save_pretrained(folder)",
    )
    try:
        config = read_config(path) or {}
        _ = config["model"]["policy"]["path"]
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path}: no configuration of `grpo fit`. Restore the one that the run has written") from error
    return config


def adapter_of(policy: Mapping[str, Any]) -> LoRA | None:
    """The adapter of the run's policy."""
    if not (options := policy.get("adapter")):
        return None
    module, _, name = str(options["class_path"]).rpartition(".")
    try:
        return getattr(import_module(module), name)(**(options.get("init_args") or {}))
    except (ImportError, AttributeError, TypeError) as error:
        wrong = f"it cannot be made here ({first_line(error)}). Run this where the run was started"
        raise UsageError(f"model.policy.adapter={options['class_path']}: {wrong}") from error


def model_of(
    policy: Mapping[str, Any], adapter: LoRA | None, checkpoint: Mapping[str, Any], path: Path, kind: str
) -> PreTrainedModel:
    """The model of `policy.path` with the weights of a checkpoint. An adapter is merged into it, or stands alone."""
    saved, trust = checkpoint["state_dict"], bool(policy.get("trust_remote_code", False))
    # `trainer.precision` may have made them float64.
    is_double = any(value.dtype == torch.float64 for value in saved.values())
    dtype = torch.float64 if is_double else getattr(torch, policy.get("dtype", "float32"))
    if kind == "adapter":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read(AutoConfig, policy), trust_remote_code=trust)
    else:
        model = read(AutoModelForCausalLM, policy, dtype=dtype)
    own, base = model.state_dict(), ""
    if adapter is not None:
        if kind == "model":
            base = fingerprint(model)
            model.double() if dtype == torch.float64 else model.float()
        with model.device:
            adapter.add(model)
        own = {name: value for name, value in model.named_parameters() if value.requires_grad}
    trained = {name: value for name, value in saved.items() if name.startswith(PREFIX)}
    own = {PREFIX + name: value for name, value in own.items()}
    check_same_model({**checkpoint, "state_dict": trained}, own, base, path, str(policy["path"]))
    weights = {name.removeprefix(PREFIX): value for name, value in trained.items()}
    model.load_state_dict(weights, strict=adapter is None, assign=adapter is not None)
    if adapter is not None and kind == "model":
        merge(model)
        model.to(dtype)
    return model


def read(auto_class: Any, policy: Mapping[str, Any], **kwargs: Any) -> Any:
    """The object that `auto_class` of transformers reads at `policy.path`."""
    trust = bool(policy.get("trust_remote_code", False))
    return pretrained.load(auto_class, str(policy["path"]), "policy.path", trust_remote_code=trust, **kwargs)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which is then renamed to `out`: readers see all of its files or none."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        for file in (path for path in partial.rglob("*") if path.is_file()):
            file.chmod(0o666 & ~mask)  # as `open` makes files
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        os.replace(partial, out)
    except Exception as error:
        refused = refusal(error, out.parent)
        if refused is None:
            raise
        raise disk.DiskFailure(f"the disk refuses to write: {refused}. There is no {out}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Adds what the adapter computes to the weights, and takes the adapter away. Do it in float32: bfloat16 rounds."""
    for name, layer in adapted_layers(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
