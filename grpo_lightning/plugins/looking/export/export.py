"""The policy of a run as a folder for transformers and vLLM, which do not need this package."""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from grpo_lightning import disk
from grpo_lightning.plugins.console.mistakes.disk_errors import refusal
from grpo_lightning.plugins.looking.run_files.provenance import Start
from grpo_lightning.plugins.looking.run_files.run_configs import read_config
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars, validation_names
from grpo_lightning.plugins.looking.run_files.run_validations import read_validations
from grpo_lightning.policy import pretrained
from grpo_lightning.policy.adapter import LoRA, adapted_layers, fingerprint
from grpo_lightning.policy.adapter import save as save_adapter
from grpo_lightning.policy.architecture import stop_ids_of
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.training.checkpoint_files import check_same_model, read_checkpoint
from grpo_lightning.training.evaluation import Measurement, with_questions
from grpo_lightning.types import UsageError, require

PREFIX = "policy.model."
"""The beginning of the names of the policy's weights in a checkpoint."""
FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The options of sampling that transformers and vLLM have under the same names, with the defaults of `Sampling`."""


def export(run: Path, out: Path, checkpoint: Path | None = None, dtype: str | None = None, kind: str = "model") -> None:
    """Writes the policy of a checkpoint as a folder, with tokenizer, generation config and model card.

    The folder appears whole or not at all. Checkpoints of every strategy serve, for they hold whole weights.

    Args:
        run: The run's folder.
        out: The folder to write, which must be empty or absent.
        checkpoint: The checkpoint; by default the run's `last.ckpt`.
        dtype: The type of the weights; by default they keep their type, and log-probs are the same bit for bit.
        kind: `model` merges an adapter into the weights, which changes log-probs by rounding; `adapter` writes the
            adapter alone, for PEFT.
    """
    config = config_of(run)
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(is_free, f"--out={out}: something is there already. Give a folder that does not exist, or delete it")
    path = checkpoint or run / "checkpoints" / "last.ckpt"
    require(path.exists(), f"{run}: there is no checkpoint {path}. Let a step of the run end, or give --ckpt_path")
    policy = config["model"]["policy"]
    adapter = adapter_of(policy)
    if kind == "adapter" and adapter is None:
        raise UsageError(f"--as=adapter: {run} has trained all weights, and has no adapter. Give --as model")
    saved = read_checkpoint(path, mmap=True)
    tokenizer = read(AutoTokenizer, policy)
    model = model_of(policy, adapter, saved, path, kind)
    if kind == "model":
        assert model.generation_config is not None
        # The exported model stops at every token that ended a completion, and samples as the run did.
        sampling = config["model"].get("sampling") or {}
        filters = {name: sampling.get(name, default) for name, default in FILTERS.items()}
        stops = sorted(stop_ids_of(model.generation_config, model.config, tokenizer))
        model.generation_config.update(do_sample=True, eos_token_id=stops or None, **filters)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    exported = [weight for weight in model.parameters() if weight.requires_grad or kind == "model"]
    size = f"{sum(weight.numel() for weight in exported):,} parameters, {str(exported[0].dtype).removeprefix('torch.')}"
    origin = f"after {saved['epoch'] + 1} exploration steps of GRPO: {size}. Checkpoint: `{path.name}`"
    is_of_run = path.resolve().is_relative_to(run.resolve())
    scores = scores_after(run, saved["epoch"]) if is_of_run else {}
    starts = saved.get("provenance", {}).get("starts", [])
    card = model_card(config, kind, origin, out.resolve().name, scores, starts)
    with whole_folder(out) as folder:
        if kind == "adapter":
            save_adapter(model, folder, str(policy["path"]))
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pretrained.copy_processor(str(policy["path"]), folder)
        (folder / "README.md").write_text(card, encoding="utf-8")


def scores_after(run: Path, step: int) -> dict[str, Measurement]:
    """Returns the results of validation after a step, by metric; none if the run's logs cannot be read.

    A run of version 0.2 has no intervals.
    """
    try:
        scalars = read_scalars(run)
        values_by_name = read_validations(run)
    except (OSError, ValueError, KeyError):
        return {}
    names = validation_names(scalars)
    means = {name: dict(scalars.get(name, [])).get(step, math.nan) for name in names}
    scores = {name: Measurement(mean, math.nan, 0, "") for name, mean in means.items() if math.isfinite(mean)}
    for name in scores.keys() & values_by_name.keys():
        scores[name] = Measurement.of(values_by_name[name].by_step.get(step, [means[name]]))
    return scores


def model_card(
    config: Mapping[str, Any],
    kind: str,
    origin: str,
    name: str,
    scores: Mapping[str, Measurement],
    starts: Sequence[Start] = (),
) -> str:
    """Returns a README.md as model hubs read it: a head in YAML, the policy's origin, and the run's configuration.

    Args:
        config: The run's configuration.
        kind: `model` or `adapter`.
        origin: How the policy was made from its base.
        name: The name of the exported model.
        scores: The results of the checkpoint's validations, by metric.
        starts: What made each start of the run.
    """
    base = str(config["model"]["policy"]["path"])
    data = config["data"]
    head: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    head |= {"pipeline_tag": "text-generation", "tags": ["grpo", "grpo-lightning"]}
    if on_hub(base):
        head["base_model"] = base
    if on_hub(dataset_id := questions_of(data.get("task"), "train")["type"]):
        head["datasets"] = [dataset_id]
    validations = data.get("validations") or {}
    results = []
    for key, score in scores.items():
        _, *benchmark, metric = key.split("/")
        if not benchmark:
            dataset = questions_of(data.get("task"), "val")
        elif options := validations.get(benchmark[0]):
            dataset = questions_of(options.get("task"), options.get("split", "test")) | {"name": benchmark[0]}
        else:  # the configuration has changed
            continue
        described = {"name": with_questions({metric: score})} if score.num_questions else {}
        metrics = [{"type": metric, "value": round(score.mean, 4), **described}]
        results.append({"task": {"type": "text-generation"}, "dataset": dataset, "metrics": metrics})
    if results:
        head["model-index"] = [{"name": name, "results": results}]
    head_text, config_text, starts_text = (
        yaml.safe_dump(options, sort_keys=False, allow_unicode=True) for options in (head, dict(config), [*starts])
    )
    prompts = "Prompts are made as under `data` in the configuration"
    measured = {key.removeprefix("val/"): score for key, score in scores.items() if score.num_questions}
    if measured:
        origin += f". Validation: {with_questions(measured)}; ± is half the 95 % interval over questions"
    text = f"---\n{head_text}---\n\n`{base}` {origin}. {prompts}:\n\n{indent(config_text, '    ')}"
    return f"{text}\nEach start of the run:\n\n{indent(starts_text, '    ')}" if starts else text


def on_hub(name: str) -> bool:
    """Returns True if a name may be that of a model or data set on a hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def questions_of(task: Any, split: str) -> dict[str, Any]:
    """Returns a split for a model card: a data set of the hub, a file without its folder, or the task's class."""
    path, options = (task["class_path"], task.get("init_args") or {}) if isinstance(task, Mapping) else (str(task), {})
    class_name = path.rpartition(".")[2]
    source = str(options.get(split) or "")
    if class_name == "HubPrompts" and on_hub(name := str(options["id"])):
        dataset = {"name": name, "type": name, "config": options.get("config"), "split": source}
        return {key: value for key, value in dataset.items() if value}
    return {"name": Path(source).stem or class_name, "type": class_name}


def config_of(run: Path) -> dict[str, Any]:
    """Reads the configuration that a run has written."""
    path = run / "config.yaml"
    if not path.is_file():
        raise UsageError(
            f"{run}: no run is there, for it has no config.yaml. Give the folder that `grpo fit` wrote to. A run in "
            "Python has none: call module.policy.save_pretrained(folder)"
        )
    try:
        config = read_config(path) or {}
        _ = config["model"]["policy"]["path"]
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path}: no configuration of `grpo fit`. Restore the one that the run has written") from error
    return config


def adapter_of(policy: Mapping[str, Any]) -> LoRA | None:
    """Returns the adapter of the run's policy; None if the policy has none."""
    if not (options := policy.get("adapter")):
        return None
    module, _, name = str(options["class_path"]).rpartition(".")
    try:
        return getattr(import_module(module), name)(**(options.get("init_args") or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(
            f"model.policy.adapter={options['class_path']}: it cannot be made here ({first_line(error)}). "
            "Run this where the run was started"
        ) from error


def model_of(
    policy: Mapping[str, Any], adapter: LoRA | None, checkpoint: Mapping[str, Any], path: Path, kind: str
) -> PreTrainedModel:
    """Returns the model of `policy.path` with the weights of a checkpoint.

    Args:
        policy: The options of the run's policy.
        adapter: The run's adapter; None if it has none.
        checkpoint: The checkpoint.
        path: The path of the checkpoint, for messages.
        kind: `model` merges the adapter; with `adapter` only the adapter has weights.
    """
    saved = checkpoint["state_dict"]
    # `trainer.precision` may have made them float64.
    is_double = any(value.dtype == torch.float64 for value in saved.values())
    dtype = torch.float64 if is_double else getattr(torch, policy.get("dtype", "float32"))
    config = read(AutoConfig, policy)
    model_class = pretrained.model_class(config)
    if kind == "adapter":
        trust = bool(policy.get("trust_remote_code", False))
        with torch.device("meta"):
            model = model_class.from_config(config, trust_remote_code=trust)
    else:
        model = read(model_class, policy, dtype=dtype)
    expected = model.state_dict()
    base = ""
    if adapter is not None:
        if kind == "model":
            base = fingerprint(model)
            # The merge is made at least in float32.
            model.double() if dtype == torch.float64 else model.float()
        with model.device:
            adapter.add(model)
        expected = {name: value for name, value in model.named_parameters() if value.requires_grad}
    trained = {name: value for name, value in saved.items() if name.startswith(PREFIX)}
    expected = {PREFIX + name: value for name, value in expected.items()}
    check_same_model({**checkpoint, "state_dict": trained}, expected, base, path, str(policy["path"]))
    weights = {name.removeprefix(PREFIX): value for name, value in trained.items()}
    model.load_state_dict(weights, strict=adapter is None, assign=adapter is not None)
    if adapter is not None and kind == "model":
        merge(model)
        model.to(dtype)
    return model


def read(auto_class: Any, policy: Mapping[str, Any], **kwargs: Any) -> Any:
    """Reads an object of a class of transformers, such as `AutoTokenizer`, at `policy.path`."""
    trust = bool(policy.get("trust_remote_code", False))
    return pretrained.load(auto_class, str(policy["path"]), "policy.path", trust_remote_code=trust, **kwargs)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to write to, which is then renamed to `out`: readers see all of its files or none."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
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
    """Adds the adapter's product to the weights, and removes the adapter. Call it in float32: bfloat16 rounds."""
    for name, layer in adapted_layers(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
