"""Each mistake in an option ends with one line: the key, the value, what there is, and the nearest name."""

import sys
from pathlib import Path

import pytest
from helpers.command import Grpo, parser_of_options, refused, table

from grpo_lightning import UsageError
from grpo_lightning.plugins.console.mistakes import known_errors as sentences
from grpo_lightning.plugins.console.mistakes import option_errors as mistakes

MINE = """
import grpo_lightning
import torch
from lightning.pytorch.callbacks import Callback

class Harder(grpo_lightning.AdvantageEstimator):
    def __init__(self, power: float = 1.0):
        self.power = power

    def estimate(self, reward, group, num_groups):
        return reward

class NotOne:
    pass

class Unpacks(Harder):
    def __init__(self):
        low, high = (1, 2, 3)

class Refuses(Harder):
    def __init__(self):
        raise ValueError("not on Sundays")

class Imports(Harder):
    def __init__(self):
        import nowhere_at_all

class Calls(Harder):
    def __init__(self):
        torch.optim.SGD([torch.zeros(1)], lr=-1.0)

class Chance(Callback):
    @property
    def state_key(self):
        return int("three")

    def state_dict(self):
        return {}

class Falls(torch.optim.SGD):
    def __init__(self, parameters):
        low, high = (1, 2, 3)

number = 3
"""

FILES = {
    "mine.py": MINE,
    "needs_more.py": "import nowhere_at_all\n",
    "no_python.py": "def f(:\n",
    "stops.py": "def f():\n    return 1 / 0\n\nf()\n",
    "refuses.py": "raise ValueError('not today')\n",
    "advantage.yaml": "model: {advantage: GroupSTD}\n",
    "init_arg.yaml": "model: {advantage: {class_path: GroupStd, init_arg: {std: sample}}}\n",
    "surrogate_key.yaml": "model: {objective: {surrogate: {class_path: Clipped, init_args: {clip_hihg: 0.3}}}}\n",
    "rewards.yaml": "model: {rewards: [{class_path: MathVerifier}, {class_path: FormatRewrd}]}\n",
    "reward_class.yaml": "model: {rewards: [{class: FormatReward}]}\n",
    "replay.yaml": "model: {rewards: [{class_path: LearnedReward, init_args: {path: x, replay: 0.1}}]}\n",
    "section.yaml": "modle: {grad_clip: 1}\n",
    "loop_key.yaml": "loop: {grup_size: 4}\n",
    "text.yaml": "just words\n",
    "brackets.yaml": "model: [\n",
}

MISTAKES = table(Path(__file__).with_name("mistakes.txt").read_text())


@pytest.fixture
def grpo_with_files(grpo: Grpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grpo:
    """`grpo` in a folder with FILES, whose modules can be imported."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = mistakes.members_of
    monkeypatch.setattr(mistakes, "members_of", lambda family: [c for c in found(family) if not is_of_a_test(c)])
    for name in ("mine", "my_method", "needs_more", "no_python", "stops", "refuses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return grpo


def is_of_a_test(member: type) -> bool:
    """Whether a class stands in a test module, which other tests of this process have imported."""
    return member.__module__.partition(".")[0] not in ("grpo_lightning", "lightning", "torch")


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_the_key_the_value_and_the_nearest_name(
    options: list[str], words: list[str], grpo_with_files: Grpo, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    errors = refused(grpo_with_files, options, words)
    assert len(errors.splitlines()) == 1 and len(errors) < 500, errors
    for never in ("Expected a", "Traceback", "<class", "typing.", "NestedArg", "Namespace("):
        assert never not in errors, errors


def test_what_is_named_instead_is_there() -> None:
    parser = parser_of_options()
    for target in sentences.ELSEWHERE:
        key, _, rest = target.partition(",")[0].partition(" ")
        engine = ["--model.engine=VLLMEngine"] if "VLLMEngine" in rest else []
        reward = ["--model.rewards=FormatReward"] if key == "model.rewards.weight" else []
        with pytest.raises((UsageError, SystemExit)) as found:
            parser.parse_args(["fit", *engine, *reward, f"--{key}=@", "--print_config"])
        assert "no such option" not in str(found.value), target
