"""Makes and scores the puzzles of reasoning-gym. Runs in a worker process: some scorers evaluate answers as Python.

Once this is imported, an audit hook stops the process from writing files, starting programs and opening connections.
That stops what a model writes by chance or for a reward. It does not stop an attacker.

Questions are made here too, because some generators depend on the order of sets, which is fixed in a worker.
"""

import ctypes  # noqa: F401  (numpy needs it, and the hook refuses to load it later)
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
    """Returns questions and answers of the entries from `start` to `stop - 1` of the dataset with these arguments."""
    generator = _generator(json.dumps(dataset, sort_keys=True))
    in_range = [generator[index] for index in range(start, stop)]
    return [(entry["question"], "" if entry["answer"] is None else str(entry["answer"])) for entry in in_range]


def score(dataset: dict[str, Any], index: int, question: str, answer: str) -> float:
    """Returns the score of `answer` by the generator that made the question, which must still make the same one."""
    key = json.dumps(dataset, sort_keys=True)
    entry = _entry(key, index)
    if entry["question"] != question:
        raise RuntimeError(f"entry {index} of {dataset['name']} has changed: this generator is not deterministic")
    return float(_generator(key).score_answer(answer, entry))


@lru_cache(maxsize=64)
def _generator(key: str) -> Any:
    dataset = json.loads(key)
    settings = dataset["config"]
    return reasoning_gym.create_dataset(dataset["name"], **settings, size=dataset["size"], seed=dataset["seed"])


@lru_cache(maxsize=256)
def _entry(key: str, index: int) -> dict[str, Any]:
    return _generator(key)[index]


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raises PermissionError on an event that a scorer must not cause: an audit hook (PEP 578)."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if writes or (event.startswith(_REFUSED) and event not in _ALLOWED):
        raise PermissionError(f"a scorer of reasoning-gym may not do {event}")


if "pytest" not in sys.modules:  # a hook cannot be removed
    sys.dont_write_bytecode = True
    sys.addaudithook(refuse)
