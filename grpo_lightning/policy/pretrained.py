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

    A hub id is `name` or `owner/name` where this machine has no folder `owner`, or has the model in its cache. `runs`
    is never an owner: runs and what the tools make are there.

    Args:
        path: As the user typed it.
        key: The setting that holds `path`.

    Raises:
        UsageError: If `path` looks like a folder and there is none; or if it is a hub id that is not in the cache, and
            the hub has no such model or cannot be reached.
    """
    if folder := local(path, key):
        return folder
    if in_cache(path):
        return path
    owner = path.partition("/")[0]
    if made := made_by(path):
        raise UsageError(f"{key}={path}: no such folder (looked in {Path.cwd()}). {made}")
    if "/" in path and Path(owner).is_dir():
        raise UsageError(
            f"{key}={path}: no such folder in {owner}, which is a folder here. {FIX}. If {owner} is an owner on "
            f"the hub: hf download {path}"
        )
    if problem := hub_problem(path):
        raise UsageError(f"{key}={path}: no such folder (looked in {Path.cwd()}), and {problem}. {FIX}")
    return path


def local(path: str, key: str) -> str:
    """The folder at `path`; empty if this is a hub id. It asks neither the hub nor the cache.

    Args:
        path: As the user typed it.
        key: The setting that holds `path`.

    Raises:
        UsageError: If `path` looks like a folder and there is none, or if it is the folder of a run.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
            export = f"grpo export {path} --out {path.rstrip('/')}_model"
            raise UsageError(f"{key}={path}: this is the folder of a run. First: {export}")
        return str(folder)
    if folder.is_file():
        raise UsageError(f"{key}={path}: this is a file. {FIX}")
    if path.startswith((".", "/", "~", "runs/")) or path.endswith("/") or path.count("/") > 1:
        raise UsageError(f"{key}={path}: no such folder (looked in {Path.cwd()}). {made_by(path) or FIX}")
    return ""


def location(path: str) -> str:
    """Where other programs find the model at `path`: a folder whole from the root, or the hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


MADE_BY = {"tiny_policy": "tools/make_tiny_policy.py", "tiny_reward_model": "tools/make_reward_model.py"}
"""What the tools make, and which does."""


def made_by(path: str) -> str:
    """How to make what is missing at `path`, if a tool makes it; else nothing."""
    tool = MADE_BY.get(Path(path).name)
    return f"Make it: python {tool} --out {path}" if tool else ""


def in_cache(path: str) -> bool:
    """Whether the configuration of the hub's model `path` is on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    except HFValidationError:  # no hub id at all
        return False


def hub_problem(path: str) -> str:
    """Why the hub's model `path` cannot be read, found out by one question to the hub; empty if it can be tried."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return "this is no hub id"
    if constants.HF_HUB_OFFLINE:
        return "the hub may not be asked: HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(path, timeout=10)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        return "the hub has no such model, or not for you" if status in (401, 403, 404) else ""
    except Exception as error:  # The network raises what it likes.
        return f"{constants.ENDPOINT} cannot be reached ({first_line(error)})"
    return ""


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
