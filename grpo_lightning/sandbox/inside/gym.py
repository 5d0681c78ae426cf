"""What is asked of reasoning-gym, in a worker process: some of its scorers evaluate the model's answer as Python.

So once this is imported, the process writes no file, starts no program and opens no connection: an audit hook refuses.
That stops what a model writes by chance or for a reward. It is no sandbox against an attacker.

Questions are made here too. Some generators depend on the order of sets: in a worker that is the same in every run.
"""

import ctypes  # noqa: F401  (numpy wants it, and later nothing more may be loaded)
import json
import os
import sys
from functools import lru_cache
from typing import Any

import reasoning_gym

_REFUSED = ("os.", "shutil.", "subprocess.", "socket.", "ctypes.", "pty.", "urllib.", "webbrowser.")
_ALLOWED = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def entries(dataset: dict[str, Any], start: int, stop: int) -> list[tuple[str, str]]:
    """Questions and answers of the entries from `start` to before `stop`.

    Args:
        dataset: Its `name`, `config`, `seed` and `size`.
        start: First index.
        stop: Last index and one.
    """
    generator = _generator(json.dumps(dataset, sort_keys=True))
    found = [generator[index] for index in range(start, stop)]
    return [(entry["question"], "" if entry["answer"] is None else str(entry["answer"])) for entry in found]


def score(dataset: dict[str, Any], index: int, question: str, answer: str) -> float:
    """What the generator itself says of `answer`.

    Args:
        dataset: As of `entries`.
        index: Of the entry.
        question: The entry's, to make sure that it is the same one.
        answer: The model's.
    """
    key = json.dumps(dataset, sort_keys=True)
    entry = _entry(key, index)
    if entry["question"] != question:
        raise RuntimeError(f"entry {index} is another one today: {dataset['name']} does not repeat itself")
    return float(_generator(key).score_answer(answer, entry))


@lru_cache(maxsize=64)
def _generator(key: str) -> Any:
    asked = json.loads(key)
    return reasoning_gym.create_dataset(asked["name"], **asked["config"], size=asked["size"], seed=asked["seed"])


@lru_cache(maxsize=256)
def _entry(key: str, index: int) -> dict[str, Any]:
    return _generator(key)[index]


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook (PEP 578): raises on what a scorer has no business to do."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if writes or (event.startswith(_REFUSED) and event not in _ALLOWED):
        raise PermissionError(f"a scorer of reasoning-gym may not do {event}")


if "pytest" not in sys.modules:  # a hook cannot be taken away again
    sys.dont_write_bytecode = True
    sys.addaudithook(refuse)
