"""The judge of a run's validation, as the run's configuration tells."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.rewards.base import measured_by, snake_case, title_of

KEY = "model.validation.judge"
INDIFFERENT = ("weight", "name", "num_workers")
"""Arguments of a reward that change no verdict."""


def judge_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The judge's class under the key `class`, and its arguments; empty where the configuration has none.

    Where no judge was set it is the reward that `model.correct` names, or the first.

    Args:
        config: Plain values by dotted key, as `arms.flat` makes them.
    """
    found = _reward(config, KEY)
    if found:
        return found
    keys = [key for key in config if re.fullmatch(r"model\.rewards\.\d+", key)]
    named = [key for key in keys if config.get("model.correct") in (None, _name(config, key))]
    return _reward(config, named[0]) if named else {}


def title(judge: Mapping[str, Any]) -> str:
    """The judge's name in captions."""
    return title_of(str(judge["class"]).rpartition(".")[2], judge)


def measure(configs: Sequence[Mapping[str, Any] | None]) -> str:
    """What avg@k and greedy of these runs are, such as `fraction right by MathVerifier`; of several judges no more."""
    found = {measured_by(title(judge)) for judge in map(judge_of, filter(None, configs)) if judge}
    return found.pop() if len(found) == 1 else "by the judge of each run" if found else "by the judge of the run"


def warning(judges: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence where arms were judged differently, with the arguments in which judges of one title differ; or empty.

    Args:
        judges: By arm, as `judge_of` finds them.
    """
    known = {arm: judge for arm, judge in judges.items() if judge}
    found = {}
    for arm, judge in known.items():
        alike = [other for other in known.values() if title(other) == title(judge)]
        own = [f"{key} {judge[key]}" for key in judge if any(other.get(key) != judge[key] for other in alike)]
        found[arm] = ", ".join([title(judge), *own])
    if len({*found.values()}) < 2:
        return ""
    by_arm = "; ".join(f"{arm} by {judge}" for arm, judge in found.items())
    return f"validation was judged differently, so val/ does not compare: {by_arm}"


def _reward(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    if config.get(key) is None:
        return {}
    below = {name.removeprefix(f"{key}."): value for name, value in config.items() if name.startswith(f"{key}.")}
    return {"class": config[key]} | {name: value for name, value in below.items() if name not in INDIFFERENT}


def _name(config: Mapping[str, Any], key: str) -> str:
    """The name of a reward in the metrics."""
    own = str(config.get(f"{key}.function", "")).replace(":", ".").rpartition(".")[2]
    return str(config.get(f"{key}.name") or own or snake_case(str(config[key]).rpartition(".")[2]))
