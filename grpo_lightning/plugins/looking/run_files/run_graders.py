"""The judge of a run's validation, as the run's configuration tells."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.rewards.reward import meaning_of_mean, snake_case, title_of

KEY = "model.validation.judge"
INDIFFERENT = ("weight", "name", "num_workers")  # arguments of a reward that change no verdict


def grader_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The judge's class under the key `class`, and its arguments; empty where the configuration has none.

    Where no judge was set it is the reward that `model.validation.correct` names, or the first.
    """
    if found := reward_at(config, KEY):
        return found
    for key in (key for key in config if re.fullmatch(r"model\.rewards\.\d+", key)):
        function = str(config.get(f"{key}.function", "")).replace(":", ".").rpartition(".")[2]
        name = config.get(f"{key}.name") or function or snake_case(str(config[key]).rpartition(".")[2])
        if config.get("model.validation.correct") in (None, str(name)):
            return reward_at(config, key)
    return {}


def title(grader: Mapping[str, Any]) -> str:
    """The judge's name in captions."""
    return title_of(str(grader["class"]).rpartition(".")[2], grader)


def measure(configs: Sequence[Mapping[str, Any] | None]) -> str:
    """The meaning of avg@k and greedy in these runs, such as `fraction right by MathVerifier`."""
    found = {measured_by(title(grader)) for grader in map(grader_of, filter(None, configs)) if grader}
    return found.pop() if len(found) == 1 else "by the judge of each run" if found else "by the judge of the run"


def warning(graders: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence where arms were judged differently, with the arguments in which equal judges differ; or empty."""
    known = {arm: grader for arm, grader in graders.items() if grader}
    found = {}
    for arm, grader in known.items():
        alike = [other for other in known.values() if title(other) == title(grader)]
        own = [f"{key} {grader[key]}" for key in grader if any(other.get(key) != grader[key] for other in alike)]
        found[arm] = ", ".join([title(grader), *own])
    if len({*found.values()}) < 2:
        return ""
    by_arm = "; ".join(f"{arm} by {grader}" for arm, grader in found.items())
    return f"validation was judged differently, so val/ does not compare: {by_arm}"


def reward_at(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The class of the reward at a key under `class`, and its arguments; empty where there is none."""
    if config.get(key) is None:
        return {}
    below = {name.removeprefix(f"{key}."): value for name, value in config.items() if name.startswith(f"{key}.")}
    return {"class": config[key]} | {name: value for name, value in below.items() if name not in INDIFFERENT}


VERDICTS = ("MathVerifier", "ReasoningGymReward")
"""The rewards of saved configurations that give verdicts: no class is imported to read a configuration."""


def measured_by(title: str) -> str:
    """Returns the meaning of the mean of the values of the reward with this name in captions."""
    return meaning_of_mean(title, title in VERDICTS)
