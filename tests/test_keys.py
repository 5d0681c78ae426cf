"""The keys of the configuration are frozen: `python tests/test_keys.py` writes the list, so a new key is a decision."""

import inspect
from pathlib import Path

import grpo_lightning

FILE = Path(__file__).with_name("keys.txt")


def keys() -> str:
    """The arguments of every public class, a line each."""
    lines = []
    for name in grpo_lightning.__all__:
        kind = getattr(grpo_lightning, name)
        if inspect.isclass(kind) and not issubclass(kind, (Exception, str)):
            names = [one for one in inspect.signature(kind).parameters if one not in ("args", "kwargs")]
            lines += [f"{name}: {' '.join(names)}"] if names else []
    return "\n".join(lines) + "\n"


def test_the_keys_are_those_that_were_decided() -> None:
    assert keys() == FILE.read_text(encoding="utf-8")


if __name__ == "__main__":
    FILE.write_text(keys(), encoding="utf-8")
