"""Reads models, tokenizers and configurations that `save_pretrained` wrote."""

import shutil
from pathlib import Path
from typing import Any

from grpo_lightning.packaged import packaged
from grpo_lightning.types import UsageError, require

FIX = "Give a folder made by save_pretrained (config.json, weights, tokenizer), a hub id, or grpo_lightning:tiny_policy"
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""What a processor of images has beside its tokenizer."""


def load(auto_class: Any, path: str, key: str, **kwargs: Any) -> Any:
    """Returns what `auto_class.from_pretrained` reads at `path`, the folder or hub id in the setting `key`."""
    import torch  # Rewards that hold no model are imported without torch.

    try:
        return auto_class.from_pretrained(source(path, key), **kwargs)
    except (torch.OutOfMemoryError, UsageError):
        raise
    except Exception as error:  # Remote code and 200 architectures raise exceptions of any class.
        raise UsageError(
            f"{key}={path}: {auto_class.__name__} found no usable model there ({first_line(error)}). {FIX}"
        ) from error


def model_class(config: Any) -> Any:
    """Returns the class of transformers that reads a model with this configuration, its image encoder included."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_encoder = type(config) in AutoModelForImageTextToText._model_mapping
    is_remote = AutoModelForImageTextToText.__name__ in (getattr(config, "auto_map", None) or {})
    return AutoModelForImageTextToText if has_encoder or is_remote else AutoModelForCausalLM


def source(path: str, key: str) -> str:
    """Returns the folder at `path` with `~` resolved, or the hub id as it is.

    A hub id is `name` or `owner/name` where this machine has no folder `owner`, or has the model in its cache. `runs`
    is never an owner. For an id that is not in the cache one request goes to the hub: transformers would try for a
    minute.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if folder := local(path, key):
        return folder
    owner = path.partition("/")[0]
    message = f"{key}={path}: no such folder"
    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return path
        if "/" in path and Path(owner).is_dir():
            raise UsageError(
                f"{message} in {owner}, which is a folder here. {FIX}. If {owner} is an owner on the hub: "
                f"hf download {path}"
            )
        HfApi().model_info(path, timeout=10)
    except UsageError:
        raise
    except HFValidationError:
        problem = "this is no hub id"
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) not in (401, 403, 404):
            return path
        problem = "the hub has no such model, or not for you"
    except Exception as error:  # The network raises exceptions of any class.
        problem = f"{constants.ENDPOINT} cannot be reached ({first_line(error)})"
    else:
        return path
    raise UsageError(f"{message} (looked in {Path.cwd()}), and {problem}. {FIX}")


def local(path: str, key: str) -> str:
    """Returns the folder at `path`; empty if this is a hub id. It looks neither at the hub nor into the cache."""
    folder = Path(packaged(path)).expanduser()
    if folder.is_dir():
        if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
            export = f"grpo export {path} --out {path.rstrip('/')}_model"
            raise UsageError(f"{key}={path}: this is the folder of a run. First: {export}")
        if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
            raise UsageError(
                f"{key}={path}: this is an adapter without its model. One of a run: grpo export RUN --out FOLDER "
                "merges it. Another: peft.AutoPeftModelForCausalLM.from_pretrained(PATH).merge_and_unload()"
                ".save_pretrained(FOLDER), and the tokenizer beside it"
            )
        return str(folder)
    require(not folder.is_file(), f"{key}={path}: this is a file. {FIX}")
    if path.startswith((".", "/", "~", "runs/")) or path.endswith("/") or path.count("/") > 1:
        raise UsageError(f"{key}={path}: no such folder (looked in {Path.cwd()}). {FIX}")
    return ""


def location(path: str) -> str:
    """Returns the model's name for other programs: its folder from the root, or the hub id as it is."""
    folder = Path(packaged(path)).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def copy_processor(path: str, folder: Path) -> None:
    """Copies the files of the processor of images at `path`, where the model sees, beside an exported model."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        file = cached_file(location(path), name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
