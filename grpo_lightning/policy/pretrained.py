"""Reads what `save_pretrained` wrote: models, tokenizers and configurations."""

from pathlib import Path
from typing import Any

from grpo_lightning.types import UsageError

FIX = "Give a folder made by save_pretrained (config.json, weights, tokenizer) or a hub id"


def load(auto_class: Any, path: str, key: str, **kwargs: Any) -> Any:
    """What `auto_class` of transformers reads at `path`.

    Args:
        auto_class: `AutoConfig`, `AutoTokenizer`, `AutoModelForCausalLM` and the like.
        path: Folder made by `save_pretrained`, or a model id of the Hugging Face hub.
        key: The setting that holds `path`, as the user types it: `policy.path`.
        **kwargs: Passed to `from_pretrained`.

    Raises:
        UsageError: If there is no such folder, or nothing in it that `auto_class` can read. Names key, path and reason.
    """
    import torch  # Rewards that hold no model are imported without torch.

    try:
        return auto_class.from_pretrained(source(path, key), **kwargs)
    except (torch.OutOfMemoryError, UsageError):
        raise
    except Exception as error:  # Remote code and 200 architectures raise what they like.
        raise UsageError(
            f"{key}={path}: {auto_class.__name__} found no usable model there ({first_line(error)}). {FIX}"
        ) from error


def source(path: str, key: str) -> str:
    """What transformers is given for `path`: the folder with `~` resolved, or the hub id as it is.

    Args:
        path: As the user typed it.
        key: The setting that holds `path`.

    Raises:
        UsageError: If `path` looks like a folder and there is none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UsageError(f"{key}={path}: no such folder (looked in {Path.cwd()}). {FIX}")
    return path


def check_weights(path: str, key: str) -> None:
    """Raises UsageError if the folder at `path` holds no weights. A hub id passes.

    Args:
        path: As the user typed it.
        key: The setting that holds `path`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise UsageError(f"{key}={path}: no weights (.safetensors or .bin) in this folder. {FIX}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
