"""The policy of a run as a folder for transformers and vLLM, which do not need this package."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_lightning.plugins.inspect.model_card import Facts, model_card
from grpo_lightning.policy import pretrained
from grpo_lightning.policy.adapter import LoRA, fingerprint, merge
from grpo_lightning.policy.adapter import save as save_adapter
from grpo_lightning.policy.policy import stop_ids_of
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.training import disk
from grpo_lightning.training.checkpoint_files import read_checkpoint
from grpo_lightning.training.restoring import refuse_other_base, refuse_other_model
from grpo_lightning.types import UsageError

PREFIX = "policy.model."
"""What the names of the policy's weights begin with in a checkpoint."""
FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The options of sampling that transformers and vLLM have under the same names, with the defaults of `Sampling`."""


def export(run: Path, out: Path, checkpoint: Path | None = None, dtype: str | None = None, kind: str = "model") -> None:
    """Writes the policy of a checkpoint as a folder, with tokenizer, generation config and model card.

    The folder appears whole or not at all. Checkpoints of every strategy serve, for they hold whole weights.

    Args:
        run: Folder of the run, with its `config.yaml` and event files.
        out: The folder to make. It must not exist, or be empty.
        checkpoint: None takes the run's `checkpoints/last.ckpt`.
        dtype: Type of the weights. None keeps the trained one, and with it the log-probs, bit for bit.
        kind: `model` writes a whole model, into whose weights an adapter is merged: that changes log-probs by rounding.
            `adapter` writes the adapter alone, for PEFT.

    Raises:
        UsageError: No run or no checkpoint is there, they do not fit together, or `out` holds something.
        DiskFailure: The disk is full, or refuses to write.
    """
    config = config_of(run)
    refuse_overwriting(out)
    path = checkpoint or run / "checkpoints" / "last.ckpt"
    if not path.exists():
        raise UsageError(f"{run}: there is no checkpoint {path}. Let a step of the run end, or give --ckpt_path")
    policy, sampling = config["model"]["policy"], config["model"].get("sampling") or {}
    adapter = adapter_of(policy)
    if kind == "adapter" and adapter is None:
        raise UsageError(f"--as=adapter: {run} has trained all weights, and has no adapter. Give --as model")
    saved = read_checkpoint(path, mmap=True)
    tokenizer = read(AutoTokenizer, policy)
    if kind == "adapter":
        assert adapter is not None
        model = with_adapter(policy, adapter, saved["state_dict"], path)
    else:
        model = (
            with_weights(policy, saved["state_dict"], path) if adapter is None else merged(policy, adapter, saved, path)
        )
        set_generation(model, tokenizer, sampling)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    exported = [p for p in model.parameters() if p.requires_grad or kind == "model"]
    count, type_ = sum(p.numel() for p in exported), str(exported[0].dtype).removeprefix("torch.")
    card = model_card(Facts(run, path, config, count, type_, saved["epoch"] + 1, kind == "adapter"))
    with whole_folder(out) as folder:
        if kind == "adapter":
            save_adapter(model, folder, str(policy["path"]))
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")


def config_of(run: Path) -> dict[str, Any]:
    """The configuration that a run has written.

    Raises:
        UsageError: There is none, or it is none of `grpo fit`.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise UsageError(
            f"{run}: no run is there, for it has no config.yaml. Give the folder that `grpo fit` wrote to. A run in "
            "Python has none: call module.policy.save_pretrained(folder)"
        )
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        _ = config["model"]["policy"]["path"], config["data"].get("template")
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: no configuration of `grpo fit`. Restore the one that the run has written") from error
    return dict(config)


def refuse_overwriting(out: Path) -> None:
    """Raises UsageError where `out` holds something."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"--out={out}: something is there already. Give a folder that does not exist, or delete it")


def with_weights(policy: Mapping[str, Any], saved: Mapping[str, Tensor], checkpoint: Path) -> PreTrainedModel:
    """The model of `policy.path` with the weights of a checkpoint.

    Args:
        policy: Arguments of the run's policy.
        saved: The weights in the checkpoint, by name.
        checkpoint: Its path, for messages.
    """
    trained = {name: value for name, value in saved.items() if name.startswith(PREFIX)}
    model: PreTrainedModel = read(AutoModelForCausalLM, policy, dtype=dtype_of(policy, trained))
    own = {f"{PREFIX}{name}": value for name, value in model.state_dict().items()}
    refuse_other_model(trained, own, checkpoint, str(policy["path"]))
    model.load_state_dict({name.removeprefix(PREFIX): value for name, value in trained.items()})
    return model


def dtype_of(policy: Mapping[str, Any], trained: Mapping[str, Tensor]) -> Any:
    """The type of the run's weights: `policy.dtype`, or float64 where `trainer.precision` has made them so."""
    double = any(value.dtype == torch.float64 for value in trained.values())
    return torch.float64 if double else getattr(torch, policy.get("dtype", "float32"))


def adapter_of(policy: Mapping[str, Any]) -> LoRA | None:
    """The adapter of the run's policy.

    Raises:
        UsageError: Its class is not found.
    """
    if not (options := policy.get("adapter")):
        return None
    module, _, name = str(options["class_path"]).rpartition(".")
    try:
        adapter: LoRA = getattr(import_module(module), name)(**(options.get("init_args") or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(
            f"model.policy.adapter={options['class_path']}: it cannot be made here ({first_line(error)}). Run this "
            "where the run was started"
        ) from error
    return adapter


def with_adapter(
    policy: Mapping[str, Any], adapter: LoRA, saved: Mapping[str, Tensor], checkpoint: Path
) -> PreTrainedModel:
    """The model of `policy.path` without its weights, with the adapter of a checkpoint; the rest as `with_weights`."""
    trust = bool(policy.get("trust_remote_code", False))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(read(AutoConfig, policy), trust_remote_code=trust)
        adapter.add(model)
    _load_adapter(model, policy, saved, checkpoint)
    return model


def merged(policy: Mapping[str, Any], adapter: LoRA, checkpoint: Mapping[str, Any], path: Path) -> PreTrainedModel:
    """The model of `policy.path` with the adapter of a checkpoint added to its weights.

    Args:
        policy: Arguments of the run's policy.
        adapter: That of the policy.
        checkpoint: What is in the checkpoint.
        path: Where it is, for messages.

    Raises:
        UsageError: The weights were in 4 bits, to which nothing can be added.
    """
    if adapter.quantise is not None:
        raise UsageError(
            f"--as=model: the adapter was trained beside weights in {adapter.quantise}, and cannot be added to them. "
            "Give --as adapter"
        )
    dtype = dtype_of(policy, checkpoint["state_dict"])
    model: PreTrainedModel = read(AutoModelForCausalLM, policy, dtype=dtype)
    refuse_other_base(checkpoint, fingerprint(model), path, str(policy["path"]))
    model.double() if dtype == torch.float64 else model.float()
    adapter.add(model)
    _load_adapter(model, policy, checkpoint["state_dict"], path)
    merge(model)
    return model.to(dtype)


def _load_adapter(
    model: PreTrainedModel, policy: Mapping[str, Any], saved: Mapping[str, Tensor], checkpoint: Path
) -> None:
    trained = {name: value for name, value in saved.items() if name.startswith(PREFIX)}
    own = {f"{PREFIX}{name}": value for name, value in model.named_parameters() if value.requires_grad}
    refuse_other_model(trained, own, checkpoint, str(policy["path"]))
    model.load_state_dict({n.removeprefix(PREFIX): value for n, value in trained.items()}, strict=False, assign=True)


def read(auto_class: Any, policy: Mapping[str, Any], **kwargs: Any) -> Any:
    """What `auto_class` of transformers reads at `policy.path`."""
    trust = bool(policy.get("trust_remote_code", False))
    return pretrained.load(auto_class, str(policy["path"]), "policy.path", trust_remote_code=trust, **kwargs)


def set_generation(model: PreTrainedModel, tokenizer: Any, sampling: Mapping[str, Any]) -> None:
    """Lets the generation config stop at every token that ended a completion, and sample as the run did."""
    config = model.generation_config
    assert config is not None
    stops = sorted(stop_ids_of(model, tokenizer))
    config.update(do_sample=True, **{name: sampling.get(name, default) for name, default in FILTERS.items()})
    config.update(eos_token_id=stops or None)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which is then renamed to `out`: readers see all of its files or none.

    Raises:
        DiskFailure: The disk refuses.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            disk.settle(file)
        os.replace(partial, out)
    except Exception as error:
        refused = disk.refusal(error, out.parent)
        if refused is None:
            raise
        raise disk.DiskFailure(f"the disk refuses to write: {refused}. There is no {out}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
