"""`grpo from-trl` executes nothing that it reads, and loses nothing in silence."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.console.porting.trl_rules import translate
from grpo_lightning.plugins.console.porting.trl_script import TrlScript
from grpo_lightning.types import UsageError

ATTACK = "__import__('pathlib').Path('attacked').touch()"


def read(text: str) -> tuple[dict[str, Any], list[str]]:
    script = TrlScript(Path("train.py"), textwrap.dedent(text))
    return script.options(), script.remarks


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.py", f"from trl import GRPOConfig\n{ATTACK}\nGRPOConfig(max_steps=3)\n"),
        (
            "run.py",
            f"from trl import GRPOConfig\nGRPOConfig({ATTACK}, max_steps=[{ATTACK}] and 3, beta=f'{{{ATTACK}}}')",
        ),
        ("run.yaml", f'max_steps: 3\noutput_dir: "{ATTACK}"\nlearning_rate: "{ATTACK}"\nrun_name: "{{0.__class__}}"\n'),
        ("run.json", f'{{"max_steps": 3, "model_name_or_path": "{ATTACK}", "reward_funcs": ["{ATTACK}"]}}'),
        ("run.yaml", f'max_steps: "{ATTACK}"\n'),
        ("run.yaml", "max_steps: !!python/object/apply:os.mkdir [attacked]\n"),
    ],
)
def test_nothing_is_executed(name: str, text: str) -> None:
    Path(name).write_text(text)
    assert answer(["from-trl", name]) in (0, 2)
    assert [path.name for path in Path().iterdir()] == [name]


def test_an_unknown_option_hides_no_name_of_the_rules() -> None:
    unknown = {"max": 3, "ceil": 3, "__builtins__": {}, "updates": 7}
    settings, remarks = translate({"max_steps": 10, **unknown})
    assert settings["trainer.max_epochs"].value == 10
    assert remarks[:4] == [f"{name}: TRL 1.16 has no such option" for name in unknown]


@pytest.mark.parametrize("value", ["+".join(["1"] * 20_000), "-" * 5_000 + "1"])
def test_a_deep_expression_is_one_sentence(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.py").write_text(f"from trl import GRPOConfig\nGRPOConfig(max_steps={value})\n")
    assert answer(["from-trl", "run.py"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("grpo: error: run.py: it cannot be read: ") and errors.count("\n") == 1


def test_a_dict_is_read_entry_by_entry() -> None:
    options, remarks = read(
        """
        base = {"max_steps": 5}
        options = {**base, "output_dir": os.environ["OUT"], "beta": 0.1, "model_init_kwargs": {"dtype": "bfloat16"}}
        GRPOConfig(**options, **3)
        """
    )
    assert options == {"max_steps": 5, "beta": 0.1, "model_init_kwargs": {"dtype": "bfloat16"}}
    advice = "is known only when the script runs: set what stands for {} in the file by hand"
    assert remarks == [
        f"line 3: os.environ['OUT'] {advice.format('output_dir')}",
        f"line 4: 3 {advice.format('**')}",
    ]


@pytest.mark.parametrize("change", ["x['beta'] = 0.2", "x.update(beta=0.2)", "x |= {'beta': 0.2}"])
def test_a_changed_dict_is_not_read(change: str) -> None:
    options, remarks = read(f"x = {{'beta': 0.1}}\n{change}\nGRPOConfig('run', **x)\n")
    assert options == {"output_dir": "run"}
    assert remarks == ["line 3: x is known only when the script runs: set what stands for ** in the file by hand"]


@pytest.mark.parametrize("change", ["rewards.append(lambda completions: [])", "rewards += [second]"])
def test_a_reward_that_is_added_later_is_told(change: str) -> None:
    options, remarks = read(
        f"def first(completions): ...\nrewards = [first]\n{change}\nGRPOTrainer('m', rewards, GRPOConfig())\n"
    )
    assert options["reward_funcs"] == ["my_rewards.py:NAME"]
    assert len(remarks) == 1 and remarks[0].startswith(f"line 3: {change} is known only when")


def test_a_name_of_another_function_or_class_is_another_name() -> None:
    options, _ = read(
        """
        rate = 1e-6
        def other():
            rate = 5
        class Other:
            rate = 6
        GRPOConfig(learning_rate=rate)
        """
    )
    assert options == {"learning_rate": 1e-6}


def test_none_is_no_argument() -> None:
    assert read("GRPOTrainer('m', None, GRPOConfig(), None, eval_dataset=None, callbacks=None, peft_config=None)") == (
        {"model_name_or_path": "m", "args": "GRPOConfig()"},
        [],
    )


def test_what_depends_on_the_number_of_questions_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(
        "eval_strategy: steps\neval_steps: 0.1\nsave_steps: 0.5\nper_device_train_batch_size: 8\n"
    )
    assert answer(["from-trl", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert ". eval_steps=0.1: a fraction of the run becomes" in out
    assert ". save_steps=0.5: a fraction of the run becomes" in out
    assert (
        "max_epochs: 100  # TRL's default max_steps=-1: exploration steps: as many as the training questions need"
        in out
    )
    assert answer(["from-trl", "run.yaml", "--questions", "40"]) == 0
    out = capsys.readouterr().out
    assert "a fraction of the run" not in out
    # One prompt per update, and three passes over 40 questions: 120 steps; 0.1 and 0.5 of them.
    values = yaml.safe_load(out)
    assert values["trainer"]["max_epochs"] == 120 and values["trainer"]["check_val_every_n_epoch"] == 12
    assert values["checkpoint"]["every_n_steps"] == 60


@pytest.mark.parametrize(("option", "words"), [("--questions=-2", "--questions -2"), ("--world=0", "world=0")])
def test_numbers_below_one_are_refused(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("max_steps: 3\n")
    assert answer(["from-trl", "run.yaml", option]) == 2
    assert words in capsys.readouterr().err


def test_several_loggers_are_told() -> None:
    for report_to, is_told in (("wandb", False), (["wandb"], False), ("none", False), (["wandb", "tensorboard"], True)):
        _, remarks = translate({"report_to": report_to})
        assert any("report_to=" in remark for remark in remarks) is is_told


def test_environment_variables_are_told() -> None:
    _, remarks = translate({"env": {"WANDB_PROJECT": "sums"}})
    assert "env={'WANDB_PROJECT': 'sums'}: set these environment variables in the shell" in remarks


def test_a_size_that_cannot_be_read_is_told_with_the_refusal() -> None:
    with pytest.raises(UsageError, match="where a script takes one of these from elsewhere, TRL's default stands here"):
        translate({"per_device_train_batch_size": 1})
