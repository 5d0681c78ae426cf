"""Environments through the command line: each way of giving one, the saved configuration, and mistakes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import Grpo, refused, table

LIMITS = ["--data.limits.max_turns=3", "--model.sampling.max_new_tokens=2", "--trainer.limit_val_batches=1"]

MINE = '''
import grpo_lightning


class Game(grpo_lightning.Environment):
    """Agrees.

    Args:
        turns: Turns of a game.
    """

    def __init__(self, turns: int = 2):
        self.turns = turns

    def reset(self, question):
        return [{"role": "user", "content": question.text}]

    def step(self, message):
        self.turns -= 1
        return grpo_lightning.Turn([{"role": "user", "content": "0"}], done=not self.turns)


class Tool:
    def reset(self, **row):
        self.count = 0

    def add(self, step: int) -> int:
        """
        Adds.

        Args:
            step: How much.
        """
        self.count += step
        return self.count

    def get_reward(self):
        return self.count


class NoStep(grpo_lightning.Environment):
    def reset(self, question):
        return []


class NoReset:
    def add(self, step: int) -> int:
        """
        Adds.
        """
        return step


class NoHints(Tool):
    def double(self, step):
        return 2 * step


class NoDocs(Tool):
    def double(self, step: int) -> int:
        return 2 * step
'''


@pytest.fixture
def mine(grpo: Grpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grpo:
    """`grpo` in a folder that holds mine.py."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return grpo


def saved(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "run" / "config.yaml").read_text())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--data.environment=mine.py:Tool"], "mine.py:Tool"),
        (
            ["--data.environment=mine.Game", "--data.environment.turns=3"],
            {"class_path": "mine.Game", "init_args": {"turns": 3}},
        ),
    ],
    ids=["file", "environment"],
)
def test_an_environment_is_given_by_name_saved_and_read_again(
    mine: Grpo, tmp_path: Path, given: list[str], kept: object
) -> None:
    mine.ok("fit", "--model.rewards=[EnvironmentReward]", *LIMITS, *given)
    config = saved(tmp_path)
    assert config["data"]["environment"] == kept
    assert config["data"]["limits"]["max_turns"] == 3
    mine.ok("fit", "--config=run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert saved(tmp_path)["data"] == config["data"]


MISTAKES = table("""
--data.environment=nowhere.Tool => data.environment=nowhere.Tool | No module named 'nowhere'
--data.environment=mine.Tol => data.environment=mine.Tol | mine has no class Tol
--data.environment=Tol => data.environment=Tol | Give an import path such as
--data.environment=3 => data.environment=3
--data.environment=mine.NoReset => mine.NoReset | no method `reset`
--data.environment=mine.NoStep => mine.NoStep | lacks the method step
--data.environment=mine.NoHints => mine.NoHints | type hints | double
--data.environment=mine.NoDocs => mine.NoDocs | docstring | double
--data.environment=mine.Game --data.environment.turn=3 => data.environment.turn | Did you mean turns?
--data.environment=mine.Game --data.environment.turns=few => data.environment.turns=few | whole number
--data.environment=mine.Tool --data.limits.max_turns=0 => data.limits.max_turns=0 | 1 or more
--model.rewards=[EnvironmentReward] => environment_reward | set data.environment
--data.environment=mine.Tool --data.answer_prefix=x => data.answer_prefix='x' | leave it empty
""")


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_message(mine: Grpo, options: list[str], words: list[str]) -> None:
    refused(mine, options, words)
