"""Each mistake in an option ends with one line: the key, the value, what there is, and the nearest name."""

import sys
from pathlib import Path

import pytest
from helpers.command import Grpo, parser_of_options, refused, table

from grpo_lightning import UsageError
from grpo_lightning.plugins.mistakes import options as mistakes
from grpo_lightning.plugins.mistakes import sentences

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
    "learned.yaml": "model: {rewards: [{class_path: LearnedReward, init_args: {path: x, lr: 0.1}}]}\n",
    "replay.yaml": "model: {rewards: [{class_path: LearnedReward, init_args: {path: x, replay: 0.1}}]}\n",
    "section.yaml": "modle: {grad_clip: 1}\n",
    "loop_key.yaml": "loop: {grup_size: 4}\n",
    "text.yaml": "just words\n",
    "brackets.yaml": "model: [\n",
}

MISTAKES = table("""
--model.advantage=GroupSTD => model.advantage=GroupSTD | Did you mean GroupStd? | LeaveOneOut
--config=advantage.yaml => model.advantage=GroupSTD | Did you mean GroupStd?
--model.objective.surrogate=Cliped => model.objective.surrogate=Cliped | mean Clipped? | SAPO
--model.rewards=[MathVerfier] => model.rewards=MathVerfier | Did you mean MathVerifier? | Gated
--config=rewards.yaml --model.rewards! => model.rewards=FormatRewrd | FormatReward?
--data.task*! --data.task=JsonPrompt => data.task=JsonPrompt | Did you mean JsonPrompts? | Arithmetic
--model.advantage.sdt=sample => model.advantage.sdt | GroupStd | Did you mean std?
--config=init_arg.yaml => model.advantage.init_arg | class_path | init_args
--model.objective.surrogate.clip_hi=0.3 =>
    model.objective.surrogate.clip_hi | Clipped | Did you mean clip_high? | dual_clip
--config=surrogate_key.yaml => surrogate.clip_hihg | Clipped | mean clip_high?
--model.rewards+=FormatReward --model.rewards.wieght=2 => model.rewards.wieght | FormatReward | Did you mean weight?
--data.task.trian=rows.jsonl => data.task.trian | JsonPrompts | Did you mean train?
--completions.every=3 => --completions.every | Did you mean --completions.every_n_steps?
--predictions.file=x => --predictions.file | Did you mean --predictions.path?
--loop.grup_size=3 => --loop.grup_size | Did you mean --loop.group_size?
--model.group_size=3 => --model.group_size | Did you mean --loop.group_size?
--qqqq=3 => --qqqq | model | data | loop | checkpoint | trainer
--config=loop_key.yaml => loop.grup_size | Did you mean loop.group_size?
--config=learned.yaml => rewards.lr: LearnedReward | update.lr now
--config=replay.yaml => rewards.replay=0.1: | {fraction: 0.1}
--model.policy.threads=2 => --model.policy.threads | It is --model.policy.compute.threads now
--config=section.yaml => modle.grad_clip | Did you mean model.guard.grad_clip?
"--model.advantage={class_path: GroupStd, std: sample}" => model.advantage: | class_path | init_args
fast => fast | --
--config=nowhere.yaml => config: | nowhere.yaml | not exist
--config=text.yaml => text.yaml | just words
--config=brackets.yaml => brackets.yaml | line 2
# Names of other programs, and of options elsewhere.
--loop.num_generations=4 => there is no such option. TRL's num_generations is loop.group_size
--epsilon=0.2 => TRL's epsilon is model.objective.surrogate.clip_low and clip_high
--model.objective.surrogate.epsilon=0.2 => Clipped has no such option. TRL's epsilon is
--rollout.n=8 => verl's n is loop.group_size
--model.lr=1e-4 => Did you mean --model.optimizer.lr?
--beta=0.1 => Did you mean --model.objective.beta?
--temperature=0.1 => Did you mean --model.sampling.temperature?
--model.advantage=3 => model.advantage=3 | AdvantageEstimator | GroupStd
--config=reward_class.yaml --model.rewards! => model.rewards= | class_path | init_args
--model.reference=MovingAverage --model.objective.beta=0.1 =>
    model.reference=MovingAverage | loop.steps_per_iteration=1 | model.reference=FrozenCopy
--model.optimizer=Adamw => model.optimizer=Adamw | Did you mean AdamW? | SGD
--model.optimizer.weight_decy=1 => weight_decy | AdamW | mean weight_decay?
--trainer.callbacks+=EarlyStoping => trainer.callbacks=EarlyStoping | mean EarlyStopping?
--trainer.callbacks+=EarlyStopping => trainer.callbacks.monitor | EarlyStopping
# Values.
--model.advantage.std=sampel => advantage.std=sampel | population | mean sample?
--model.objective.surrogate.dual_clip=big => surrogate.dual_clip=big | a number or null
--trainer.max_epochs=many => trainer.max_epochs=many | a whole number (int) or null
--seed_everything=abc => seed_everything=abc | true or false | a whole number
--data.chat=perhaps => data.chat=perhaps | true or false
# Classes of one's own.
--model.advantage=mine.MaxRL --model.advantage.pwer=2 => model.advantage.pwer | MaxRL | Did you mean power?
--model.advantage=mine.MaxRl => =mine.MaxRl | mine.py | Did you mean mine.MaxRL?
--model.advantage=my_method.MaxRL => =my_method.MaxRL | no module my_method
--model.advantage=mine.NotOne => =mine.NotOne | no AdvantageEstimator | derive
--model.rewards=[mine.MaxRL] => model.rewards=mine.MaxRL | no Reward | derive
--model.advantage=needs_more.A => =needs_more.A | needs_more | nowhere_at_all
--model.advantage=no_python.A => no_python.A | no_python.py, line 1 | SyntaxError
--model.advantage=stops.A => stops.A | stops.py, line 2 | ZeroDivisionError
--model.advantage=refuses.A => refuses.A | refuses.py, line 1 | not today
# What the classes themselves raise: of one's own code with its place, of a library's without.
--model.advantage=mine.Unpacks => Unpacks: mine.py, line 18: ValueError: too many values
--model.advantage=mine.Refuses => Refuses: mine.py, line 22: ValueError: not on Sun
--model.advantage=mine.Imports => Imports: mine.py, line 26: ModuleNotFoundError: No
--trainer.callbacks=[mine.Chance] => trainer: mine.py, line 35: ValueError: invalid
--model.optimizer=mine.Falls => model.optimizer: mine.py, line 42: ValueError: too many values
--model.optimizer.weight_decay=-1 => model.optimizer: Invalid weight_decay
--model.optimizer.lr -1e-4 => model.optimizer: Invalid learning rate: -0.0001
--data.task.help JsonPrompt => data.task.help=JsonPrompt | Did you mean JsonPrompts?
""")


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
