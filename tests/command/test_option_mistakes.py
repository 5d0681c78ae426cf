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
    "advantage_class.yaml": "model: {advantage: {class_path: GroupSTD}}\n",
    "advantage_key.yaml": "model: {advantage: {class_path: GroupStd, init_args: {sdt: sample}}}\n",
    "advantage_value.yaml": "model: {advantage: {class_path: GroupStd, init_args: {std: sampel}}}\n",
    "init_arg.yaml": "model: {advantage: {class_path: GroupStd, init_arg: {std: sample}}}\n",
    "surrogate.yaml": "model: {objective: {surrogate: {class_path: Cliped}}}\n",
    "surrogate_key.yaml": "model: {objective: {surrogate: {class_path: Clipped, init_args: {clip_hihg: 0.3}}}}\n",
    "objective_key.yaml": "model: {objective: {bta: 0.1}}\n",
    "rewards.yaml": "model: {rewards: [{class_path: MathVerifier}, {class_path: FormatRewrd}]}\n",
    "reward_key.yaml": "model: {rewards: [{class_path: FormatReward, init_args: {wieght: 2}}]}\n",
    "reward_value.yaml": "model: {rewards: [{class_path: FormatReward, init_args: {weight: heavy}}]}\n",
    "reward_class.yaml": "model: {rewards: [{class: FormatReward}]}\n",
    "section.yaml": "modle: {grad_clip: 1}\n",
    "loop_key.yaml": "loop: {grup_size: 4}\n",
    "task.yaml": "data: {task: {class_path: JsonPrompt}}\n",
    "optimizer.yaml": "model: {optimizer: {class_path: torch.optim.AdamW, init_args: {lr: fast}}}\n",
    "callback.yaml": "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitr: reward/mean}}]}\n",
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
    "advantage as class": (["--config=advantage_class.yaml"], ["model.advantage=GroupSTD", "Did you mean GroupStd?"]),
    "advantage is a number": (["--model.advantage=3"], ["model.advantage=3", "AdvantageEstimator", "GroupStd"]),
    "surrogate": (
        ["--model.objective.surrogate=Cliped"],
        ["model.objective.surrogate=Cliped", "mean Clipped?", "SAPO"],
    ),
    "surrogate in YAML": (["--config=surrogate.yaml"], ["model.objective.surrogate=Cliped", "Did you mean Clipped?"]),
    "kl": (["--model.objective.kl=K4"], ["model.objective.kl=K4", "Did you mean K", "ImportanceWeighted"]),
    "weighting": (["--model.objective.weighting=TokenMeen"], ["weighting=TokenMeen", "mean TokenMean?", "FixedLength"]),
    "mask": (
        ["--model.objective.masks=[Truncatd]"],
        ["model.objective.masks=Truncatd", "mean Truncated?", "TopEntropy"],
    ),
    "reward": (["--model.rewards=[MathVerfier]"], ["model.rewards=MathVerfier", "Did you mean MathVerifier?", "Gated"]),
    "reward, no list": (["--model.rewards=MathVerfier"], ["model.rewards=MathVerfier", "Did you mean MathVerifier?"]),
    "one more reward": (["--model.rewards+=FormatRewrd"], ["model.rewards=FormatRewrd", "Did you mean FormatReward?"]),
    "reward in YAML": (["--config=rewards.yaml", "--model.rewards!"], ["model.rewards=FormatRewrd", "FormatReward?"]),
    "engine": (["--model.engine=NativEngine"], ["model.engine=NativEngine", "NativeEngine?", "PlainEngine"]),
    "reference": (["--model.reference=FrozenCopi"], ["model.reference=FrozenCopi", "FrozenCopy?", "MovingAverage"]),
    "a moving reference that never moves": (
        ["--model.reference=MovingAverage", "--model.objective.beta=0.1"],
        ["model.reference=MovingAverage", "loop.steps_per_iteration=1", "model.reference=FrozenCopy"],
    ),
    "old policy": (["--model.old_policy=Recorded"], ["model.old_policy=Recorded", "Did you mean RecordedLogp?"]),
    "stop rule": (["--loop.stop=KLabove"], ["loop.stop=KLabove", "Did you mean KLAbove?", "FixedPasses"]),
    "source": (["--loop.source=Asynchronous"], ["loop.source=Asynchronous", "Did you mean Synchronous?"]),
    "task": ([*NO_TASK, "--data.task=JsonPrompt"], ["data.task=JsonPrompt", "Did you mean JsonPrompts?", "Arithmetic"]),
    "task in YAML": ([*NO_TASK, "--config=task.yaml"], ["data.task=JsonPrompt", "Did you mean JsonPrompts?"]),
    "optimizer": (["--model.optimizer=Adamw"], ["model.optimizer=Adamw", "Did you mean AdamW?", "SGD"]),
    "optimizer's path": (["--model.optimizer=torch.optim.Adan"], ["=torch.optim.Adan", "Did you mean torch.optim.Ada"]),
    "schedule": (["--model.lr_scheduler=LinearRL"], ["model.lr_scheduler=LinearRL", "mean LinearLR?", "StepLR"]),
    "logger": (["--trainer.logger=TensorboardLogger"], ["=TensorboardLogger", "mean TensorBoardLogger?", "CSVLogger"]),
    "callback": (["--trainer.callbacks+=EarlyStoping"], ["trainer.callbacks=EarlyStoping", "mean EarlyStopping?"]),
    # Keys that are not there.
    "key of an advantage": (["--model.advantage.sdt=sample"], ["model.advantage.sdt", "GroupStd", "Did you mean std?"]),
    "the same in YAML": (["--config=advantage_key.yaml"], ["model.advantage.sdt", "GroupStd", "Did you mean std?"]),
    "init_arg": (["--config=init_arg.yaml"], ["model.advantage.init_arg", "class_path", "init_args"]),
    "class": (["--config=reward_class.yaml", "--model.rewards!"], ["model.rewards=", "class_path", "init_args"]),
    "key of a surrogate": (
        ["--model.objective.surrogate.clip_hi=0.3"],
        ["model.objective.surrogate.clip_hi", "Clipped", "Did you mean clip_high?", "dual_clip"],
    ),
    "the same, in YAML": (["--config=surrogate_key.yaml"], ["surrogate.clip_hihg", "Clipped", "mean clip_high?"]),
    "key of the objective": (["--model.objective.bta=0.1"], ["model.objective.bta", "Did you mean beta?", "weighting"]),
    "key in YAML": (["--config=objective_key.yaml"], ["model.objective.bta", "Did you mean beta?"]),
    "key of a reward": (
        ["--model.rewards+=FormatReward", "--model.rewards.wieght=2"],
        ["model.rewards.wieght", "FormatReward", "Did you mean weight?"],
    ),
    "key of a reward in YAML": (["--config=reward_key.yaml", "--model.rewards!"], ["rewards.wieght", "mean weight?"]),
    "key of the engine": (["--model.engine.max_cache=3"], ["model.engine.max_cache", "mean max_cache_gib?"]),
    "key of sampling": (["--model.sampling.temprature=1"], ["model.sampling.temprature", "Did you mean temperature?"]),
    "key of a stop rule": (
        ["--loop.stop=KLAbove", "--loop.stop.treshold=1"],
        ["loop.stop.treshold", "KLAbove", "There "],
    ),
    "key of dynamic sampling": (["--loop.dynamic_sampling.max_round=1"], ["max_round", "Did you mean max_rounds?"]),
    "key of a task": (["--data.task.trian=rows.jsonl"], ["data.task.trian", "JsonPrompts", "Did you mean train?"]),
    "key of an optimizer": (["--model.optimizer.weight_decy=1"], ["weight_decy", "AdamW", "mean weight_decay?"]),
    "key of a schedule": (
        ["--model.lr_scheduler=LinearLR", "--model.lr_scheduler.total_iter=9"],
        ["model.lr_scheduler.total_iter", "LinearLR", "Did you mean total_iters?"],
    ),
    "key of a logger": (
        ["--trainer.logger=CSVLogger", "--trainer.logger.save_dri=x"],
        ["trainer.logger.save_dri", "CSVLogger", "Did you mean save_dir?"],
    ),
    "key of a callback": (
        [EARLY, "--trainer.callbacks.monitr=x"],
        ["callbacks.monitr", "EarlyStopping", "mean monitor?"],
    ),
    "key of a callback in YAML": (["--config=callback.yaml"], ["callbacks.monitr", "EarlyStopping", "mean monitor?"]),
    "callback without its key": ([EARLY], ["trainer.callbacks.monitor", "EarlyStopping"]),
    "flag": (["--loop.grup_size=3"], ["--loop.grup_size", "Did you mean --loop.group_size?"]),
    "flag, value apart": (["--loop.grup_size", "3"], ["--loop.grup_size", "Did you mean --loop.group_size?"]),
    "section of a flag": (["--lop.group_size=3"], ["--lop.group_size", "Did you mean --loop.group_size?"]),
    "flag of another section": (["--model.group_size=3"], ["--model.group_size", "Did you mean --loop.group_size?"]),
    "flag of a part": (["--model.temperature=1"], ["--model.temperature", "mean --model.sampling.temperature?"]),
    "half a flag": (["--trainer.max_epoch=2"], ["--trainer.max_epoch", "Did you mean --trainer.max_epochs?"]),
    "flag like no other": (["--qqqq=3"], ["--qqqq", "model", "data", "loop", "checkpoint", "trainer"]),
    "key of a section in YAML": (["--config=loop_key.yaml"], ["loop.grup_size", "Did you mean loop.group_size?"]),
    "section in YAML": (["--config=section.yaml"], ["modle.grad_clip", "Did you mean model.grad_clip?"]),
    "word": (["fast"], ["fast", "--"]),
    # Values.
    "choice of an advantage": (
        ["--model.advantage.std=sampel"],
        ["advantage.std=sampel", "population", "mean sample?"],
    ),
    "choice in YAML": (["--config=advantage_value.yaml"], ["model.advantage.std=sampel", "population", "mean sample?"]),
    "number of an advantage": (["--model.advantage.advantage_eps=small"], ["advantage_eps=small", "a number"]),
    "number or null": (["--model.objective.surrogate.dual_clip=big"], ["surrogate.dual_clip=big", "a number or null"]),
    "number of the objective": (["--model.objective.beta=big"], ["model.objective.beta=big", "a number"]),
    "number of a reward": (
        ["--model.rewards+=FormatReward", "--model.rewards.weight=heavy"],
        ["model.rewards.weight=heavy", "a number"],
    ),
    "number of a reward in YAML": (["--config=reward_value.yaml", "--model.rewards!"], ["weight=heavy", "a number"]),
    "learning rate": (["--model.optimizer.lr=fast"], ["model.optimizer.lr=fast", "a number"]),
    "learning rate in YAML": (["--config=optimizer.yaml"], ["model.optimizer.lr=fast", "a number"]),
    "iterations of a schedule": (
        ["--model.lr_scheduler=LinearLR", "--model.lr_scheduler.total_iters=many"],
        ["model.lr_scheduler.total_iters=many", "a whole number"],
    ),
    "temperature": (["--model.sampling.temperature=hot"], ["model.sampling.temperature=hot", "a number"]),
    "memory of the engine": (["--model.engine.max_cache_gib=lots"], ["max_cache_gib=lots", "a number or null"]),
    "steps": (["--trainer.max_epochs=many"], ["trainer.max_epochs=many", "a whole number (int) or null"]),
    "seed": (["--seed_everything=abc"], ["seed_everything=abc", "true or false", "a whole number"]),
    "type of the weights": (["--model.policy.dtype=float16"], ["policy.dtype=float16", "float32", "mean bfloat16?"]),
    "precision": (["--trainer.precision=bf17"], ["trainer.precision=bf17", "bf16-mixed", "32-true"]),
    "true or false": (["--data.chat=perhaps"], ["data.chat=perhaps", "true or false"]),
    "sampling is a word": (["--model.sampling=hot"], ["model.sampling=hot", "Sampling"]),
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
    "of another family here": (
        ["--model.advantage=K3"],
        ["model.advantage=K3", "no such AdvantageEstimator", "GroupStd"],
    ),
    "no class": (["--model.advantage=mine.number"], ["=mine.number", "no AdvantageEstimator"]),
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
    "a class that calls": (["--model.advantage=mine.Calls"], ["Calls: mine.py, line 30: ValueError: Invalid learning"]),
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
    "a seed that follows": (["--loop.seed=3"], ["loop.seed: it follows from seed_everything"]),
    "help of a class": (["--data.task.help", "JsonPrompt"], ["data.task.help=JsonPrompt", "Did you mean JsonPrompts?"]),
    "help of a part": (["--model.objective.surrogate.help=Clip"], ["surrogate.help=Clip", "Did you mean Clipped?"]),
    "help of another's class": (["--trainer.logger.help", "CSVLoger"], ["trainer.logger.help", "mean CSVLogger?"]),
    "a key beside init_args": (
        ["--model.advantage={class_path: GroupStd, std: sample}"],
        ["model.advantage.std: this belongs in init_args"],
    ),
    "a trainer that refuses": (
        ["--trainer.devices=0", "--trainer.accelerator=cpu"],
        ["error: trainer: `Trainer(devices="],
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
