"""Each mistake in an option ends with one line: the key, the value, what there is, and the nearest name."""

import sys
from pathlib import Path

import pytest
from helpers.command import OPTIONS, Grpo, arguments

from grpo_lightning.command import early, mistakes
from grpo_lightning.maths.advantages import AdvantageEstimator

NO_TASK = [f"--{key}!" for key in OPTIONS if key.startswith("data.task")]

MINE = """
import grpo_lightning
import torch
from lightning.pytorch.callbacks import Callback

class MaxRL(grpo_lightning.AdvantageEstimator):
    def __init__(self, power: float = 1.0):
        self.power = power

    def estimate(self, reward, group, num_groups):
        return reward

class NotOne:
    pass

class Unpacks(MaxRL):
    def __init__(self):
        low, high = (1, 2, 3)

class Refuses(MaxRL):
    def __init__(self):
        raise ValueError("not on Sundays")

class Imports(MaxRL):
    def __init__(self):
        import nowhere_at_all

class Calls(MaxRL):
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
    "section.yaml": "modle: {grad_clip: 1}\n",
    "loop_key.yaml": "loop: {grup_size: 4}\n",
    "text.yaml": "just words\n",
    "brackets.yaml": "model: [\n",
}

EARLY = "--trainer.callbacks+=EarlyStopping"

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    # Classes that are not there.
    "advantage": (
        ["--model.advantage=GroupSTD"],
        ["model.advantage=GroupSTD", "Did you mean GroupStd?", "LeaveOneOut"],
    ),
    "advantage in YAML": (["--config=advantage.yaml"], ["model.advantage=GroupSTD", "Did you mean GroupStd?"]),
    "advantage is a number": (["--model.advantage=3"], ["model.advantage=3", "AdvantageEstimator", "GroupStd"]),
    "surrogate": (
        ["--model.objective.surrogate=Cliped"],
        ["model.objective.surrogate=Cliped", "mean Clipped?", "SAPO"],
    ),
    "reward": (["--model.rewards=[MathVerfier]"], ["model.rewards=MathVerfier", "Did you mean MathVerifier?", "Gated"]),
    "reward in YAML": (["--config=rewards.yaml", "--model.rewards!"], ["model.rewards=FormatRewrd", "FormatReward?"]),
    "a moving reference that never moves": (
        ["--model.reference=MovingAverage", "--model.objective.beta=0.1"],
        ["model.reference=MovingAverage", "loop.steps_per_iteration=1", "model.reference=FrozenCopy"],
    ),
    "task": ([*NO_TASK, "--data.task=JsonPrompt"], ["data.task=JsonPrompt", "Did you mean JsonPrompts?", "Arithmetic"]),
    "optimizer": (["--model.optimizer=Adamw"], ["model.optimizer=Adamw", "Did you mean AdamW?", "SGD"]),
    "callback": (["--trainer.callbacks+=EarlyStoping"], ["trainer.callbacks=EarlyStoping", "mean EarlyStopping?"]),
    # Keys that are not there.
    "key of an advantage": (["--model.advantage.sdt=sample"], ["model.advantage.sdt", "GroupStd", "Did you mean std?"]),
    "init_arg": (["--config=init_arg.yaml"], ["model.advantage.init_arg", "class_path", "init_args"]),
    "class": (["--config=reward_class.yaml", "--model.rewards!"], ["model.rewards=", "class_path", "init_args"]),
    "key of a surrogate": (
        ["--model.objective.surrogate.clip_hi=0.3"],
        ["model.objective.surrogate.clip_hi", "Clipped", "Did you mean clip_high?", "dual_clip"],
    ),
    "the same, in YAML": (["--config=surrogate_key.yaml"], ["surrogate.clip_hihg", "Clipped", "mean clip_high?"]),
    "key of a reward": (
        ["--model.rewards+=FormatReward", "--model.rewards.wieght=2"],
        ["model.rewards.wieght", "FormatReward", "Did you mean weight?"],
    ),
    "key of an optimizer": (["--model.optimizer.weight_decy=1"], ["weight_decy", "AdamW", "mean weight_decay?"]),
    "callback without its key": ([EARLY], ["trainer.callbacks.monitor", "EarlyStopping"]),
    "flag": (["--loop.grup_size=3"], ["--loop.grup_size", "Did you mean --loop.group_size?"]),
    "flag of another section": (["--model.group_size=3"], ["--model.group_size", "Did you mean --loop.group_size?"]),
    "flag like no other": (["--qqqq=3"], ["--qqqq", "model", "data", "loop", "checkpoint", "trainer"]),
    "key of a section in YAML": (["--config=loop_key.yaml"], ["loop.grup_size", "Did you mean loop.group_size?"]),
    "section in YAML": (["--config=section.yaml"], ["modle.grad_clip", "Did you mean model.grad_clip?"]),
    "word": (["fast"], ["fast", "--"]),
    # Values.
    "choice of an advantage": (
        ["--model.advantage.std=sampel"],
        ["advantage.std=sampel", "population", "mean sample?"],
    ),
    "number or null": (["--model.objective.surrogate.dual_clip=big"], ["surrogate.dual_clip=big", "a number or null"]),
    "steps": (["--trainer.max_epochs=many"], ["trainer.max_epochs=many", "a whole number (int) or null"]),
    "seed": (["--seed_everything=abc"], ["seed_everything=abc", "true or false", "a whole number"]),
    "true or false": (["--data.chat=perhaps"], ["data.chat=perhaps", "true or false"]),
    # Classes of one's own.
    "key of one's own class": (
        ["--model.advantage=mine.MaxRL", "--model.advantage.pwer=2"],
        ["model.advantage.pwer", "MaxRL", "Did you mean power?"],
    ),
    "no such class of one's own": (
        ["--model.advantage=mine.MaxRl"],
        ["=mine.MaxRl", "mine.py", "Did you mean mine.MaxRL?"],
    ),
    "no such module": (["--model.advantage=my_method.MaxRL"], ["=my_method.MaxRL", "no module my_method"]),
    "of no family": (["--model.advantage=mine.NotOne"], ["=mine.NotOne", "no AdvantageEstimator", "derive"]),
    "of another family": (["--model.rewards=[mine.MaxRL]"], ["model.rewards=mine.MaxRL", "no Reward", "derive"]),
    "a module that needs another": (
        ["--model.advantage=needs_more.A"],
        ["=needs_more.A", "needs_more", "nowhere_at_all"],
    ),
    "a module that is no Python": (
        ["--model.advantage=no_python.A"],
        ["no_python.A", "no_python.py, line 1", "SyntaxError"],
    ),
    "a module that stops": (["--model.advantage=stops.A"], ["stops.A", "stops.py, line 2", "ZeroDivisionError"]),
    "a module that refuses": (["--model.advantage=refuses.A"], ["refuses.A", "refuses.py, line 1", "not today"]),
    # What the classes themselves raise: of one's own code with its place, of a library's without.
    "a bug in a class": (
        ["--model.advantage=mine.Unpacks"],
        ["Unpacks: mine.py, line 18: ValueError: too many values"],
    ),
    "a class that refuses": (["--model.advantage=mine.Refuses"], ["Refuses: mine.py, line 22: ValueError: not on Sun"]),
    "a class that imports": (
        ["--model.advantage=mine.Imports"],
        ["Imports: mine.py, line 26: ModuleNotFoundError: No"],
    ),
    "a callback with a bug": (
        ["--trainer.callbacks=[mine.Chance]"],
        ["trainer: mine.py, line 35: ValueError: invalid"],
    ),
    "an optimizer with a bug": (
        ["--model.optimizer=mine.Falls"],
        ["model.optimizer: mine.py, line 42: ValueError: too many values"],
    ),
    "an optimizer that refuses": (["--model.optimizer.weight_decay=-1"], ["model.optimizer: Invalid weight_decay"]),
    "learning rate below 0": (["--model.optimizer.lr", "-1e-4"], ["model.optimizer.lr=-0.0001: give 0 or more"]),
    "help of a class": (["--data.task.help", "JsonPrompt"], ["data.task.help=JsonPrompt", "Did you mean JsonPrompts?"]),
    "a key beside init_args": (
        ["--model.advantage={class_path: GroupStd, std: sample}"],
        ["model.advantage.std: this belongs in init_args"],
    ),
    # Files.
    "no such file": (["--config=nowhere.yaml"], ["config=nowhere.yaml", "no such file"]),
    "no mapping": (["--config=text.yaml"], ["text.yaml", "just words"]),
    "no YAML": (["--config=brackets.yaml"], ["brackets.yaml", "line 2"]),
}


LATE = {"advantage is a number", "class", "a moving reference that never moves"}
OTHERS = ("optimizer", "schedule", "logger", "callback")
"""Only the parser knows values, and the classes of others."""


@pytest.fixture
def grpo_with_files(grpo: Grpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grpo:
    """`grpo` in a folder with FILES, whose modules can be imported."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = mistakes.members_of
    monkeypatch.setattr(mistakes, "members_of", lambda family: [c for c in found(family) if not is_of_a_test(c)])
    for name in ("mine", "needs_more", "no_python", "stops", "refuses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return grpo


def is_of_a_test(member: type) -> bool:
    """Whether a class stands in a test module, which other tests of this process have imported."""
    return member.__module__.partition(".")[0] not in ("grpo_lightning", "lightning", "torch")


def written(folder: Path) -> set[Path]:
    """What is under `folder`, without compiled Python."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_the_key_the_value_and_the_nearest_name(
    options: list[str], words: list[str], grpo_with_files: Grpo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tmp_path)
    capsys.readouterr()
    code, out, errors = grpo_with_files("fit", *options)
    assert code == 2, errors
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("grpo: error: "), errors
    assert len(errors) < 500, errors
    assert [word for word in words if word not in errors] == [], errors
    for never in ("Expected a", "Traceback", "<class", "typing.", "NestedArg", "Namespace("):
        assert never not in errors, errors
    assert out == "" and written(tmp_path) == before


def test_keys_and_classes_are_found_early(grpo_with_files: Grpo) -> None:
    keys_and_classes = [*MISTAKES][: [*MISTAKES].index("choice of an advantage")]
    late = {name for name in keys_and_classes if early.mistake(arguments("fit", *MISTAKES[name][0])) is None}
    assert {name for name in late if not any(other in name for other in OTHERS)} == LATE


def test_a_class_of_ones_own_is_taken(grpo_with_files: Grpo) -> None:
    code, out, errors = grpo_with_files(
        "fit", "--model.advantage=mine.MaxRL", "--model.advantage.power=2", "--print_config"
    )
    assert code == 0, errors
    assert "mine.MaxRL" in out and "power: 2.0" in out
    assert any(member.__name__ == "MaxRL" for member in AdvantageEstimator.__subclasses__())
