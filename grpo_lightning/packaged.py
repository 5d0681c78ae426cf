"""Files that are installed with the package, by name: `grpo_lightning:quickstart` is a configuration in any folder."""

from difflib import get_close_matches
from pathlib import Path

from grpo_lightning.types import UsageError

PREFIX = "grpo_lightning:"
CONFIGS = Path(__file__).with_name("configs")
"""The configurations; in the repository a link to the folder at its top."""
POLICY = Path(__file__).with_name("tiny_policy")
"""The tiny policy: `python tools/make_tiny_policy.py --out grpo_lightning/tiny_policy` makes it again."""


def packaged(text: str) -> str:
    """Returns the path of `grpo_lightning:NAME`, a configuration or the tiny policy; any other text as it is."""
    if not text.startswith(PREFIX):
        return text
    name = text.removeprefix(PREFIX).removesuffix(".yaml")
    path_by_name = {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in CONFIGS.rglob("*.yaml")}
    path_by_name |= {POLICY.name: POLICY}
    if name in path_by_name:
        return str(path_by_name[name])
    near = [path for path in path_by_name if get_close_matches(name, [path, path.rpartition("/")[2]])]
    hint = f"Did you mean {' or '.join(sorted(near))}?" if near else f"There are {', '.join(sorted(path_by_name))}"
    raise UsageError(f"{text}: nothing of this name is installed. {hint}")
