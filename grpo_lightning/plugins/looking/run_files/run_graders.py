"""The grader of a run's validation, from the run's configuration."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.rewards.reward import meaning_of_mean, snake_case, title_of

KEY = "model.validation.grader"
INDIFFERENT = ("weight", "name", "num_workers")
"""Arguments of a reward that change no verdict."""


def grader_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the grader's class under the key `class`, and its arguments; empty if the configuration has none.

    If no grader was set, it is the reward that `model.validation.correct` names, or the first reward.
    """
    if grader := reward_at(config, KEY):
        return grader
    for key in (key for key in config if re.fullmatch(r"model\.rewards\.\d+", key)):
        function = str(config.get(f"{key}.function", "")).replace(":", ".").rpartition(".")[2]
        name = config.get(f"{key}.name") or function or snake_case(str(config[key]).rpartition(".")[2])
        if config.get("model.validation.correct") in (None, str(name)):
            return reward_at(config, key)
    return {}


def rewards_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the rewards of training by their keys, but for names and workers."""
    return {
        key: value
        for key, value in config.items()
        if re.match(r"model\.rewards\.\d", key) and not key.endswith((".name", ".num_workers"))
    }


def title(grader: Mapping[str, Any]) -> str:
    """Returns the grader's name in captions."""
    return title_of(str(grader["class"]).rpartition(".")[2], grader)


def measure(configs: Sequence[Mapping[str, Any] | None]) -> str:
    """Returns the meaning of avg@k and greedy in these runs, such as `fraction right by MathVerifier`."""
    measures = {measured_by(title(grader)) for grader in map(grader_of, filter(None, configs)) if grader}
    if len(measures) == 1:
        return measures.pop()
    return "by the grader of each run" if measures else "by the grader of the run"


def warning(graders: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a sentence if arms have different graders, with the arguments in which graders of a class differ."""
    grader_by_arm = {arm: grader for arm, grader in graders.items() if grader}
    text_by_arm = {}
    for arm, grader in grader_by_arm.items():
        alike = [other_grader for other_grader in grader_by_arm.values() if title(other_grader) == title(grader)]
        differing = [key for key in grader if any(twin.get(key) != grader[key] for twin in alike)]
        text_by_arm[arm] = ", ".join([title(grader), *(f"{key} {grader[key]}" for key in differing)])
    if len({*text_by_arm.values()}) < 2:
        return ""
    by_arm = "; ".join(f"{arm} by {text}" for arm, text in text_by_arm.items())
    return f"validation was graded differently, so val/ does not compare: {by_arm}"


def reward_at(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the class of the reward at a key under `class`, and its arguments; empty if there is none."""
    if config.get(key) is None:
        return {}
    arguments = {name.removeprefix(f"{key}."): value for name, value in config.items() if name.startswith(f"{key}.")}
    return {"class": config[key]} | {name: value for name, value in arguments.items() if name not in INDIFFERENT}


VERDICTS = ("MathVerifier", "ReasoningGymReward")
"""The rewards of saved configurations that give verdicts: no class is imported to read a configuration."""


def measured_by(title: str) -> str:
    """Returns the meaning of the mean of the values of the reward with this name in captions."""
    return meaning_of_mean(title, title in VERDICTS)
