"""What `grpo from-trl` reads of a script, and what it says about the rest."""

import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.console.porting.trl_script import TrlScript

SCRIPTS = Path(__file__).with_name("trl_scripts")


def read(text: str, folder: Path = Path()) -> tuple[dict[str, Any], list[str]]:
    script = TrlScript(folder / "train.py", textwrap.dedent(text))
    return script.options(), script.remarks


def test_values_of_literals_names_and_arithmetic() -> None:
    options, remarks = read(
        """
        from trl import GRPOConfig as Config
        G, RATE = 8, 1e-6
        GROUP = 8
        STEPS: int = 2 * GROUP
        STEPS += 1
        NAME = f"runs/{GROUP}"
        kwargs = dict(beta=-0.5 + 1, top_k=GROUP // 3)
        args = Config(
            NAME,
            num_generations=GROUP,
            reward_weights=[1.0, 2],
            model_init_kwargs={"dtype": torch.bfloat16},
            max_steps=STEPS,
            learning_rate=RATE,
            temperature=float(cli.temperature),
            **kwargs,
            **vars(cli),
            seed=9**9**9,
        )
        args.epsilon_high = 0.28
        """
    )
    assert options == {
        "output_dir": "runs/8",
        "num_generations": 8,
        "reward_weights": [1.0, 2],
        "model_init_kwargs": {"dtype": "bfloat16"},
        "beta": 0.5,
        "top_k": 2,
        "epsilon_high": 0.28,
    }
    assert [(line.partition(" is known")[0], line.rpartition(" set ")[2]) for line in remarks] == [
        ("line 14: STEPS", "what stands for max_steps in the file by hand"),
        ("line 15: RATE", "what stands for learning_rate in the file by hand"),
        ("line 16: float(cli.temperature)", "what stands for temperature in the file by hand"),
        ("line 18: vars(cli)", "what stands for ** in the file by hand"),
        ("line 19: 9 ** 9 ** 9", "what stands for seed in the file by hand"),
    ]


def test_a_name_has_the_value_above_its_line() -> None:
    options, _ = read(
        """
        beta = 0.1
        def main():
            beta = 0.2
            args = GRPOConfig(beta=beta, epsilon=late)
            beta = 0.3
        late = 0.4
        """
    )
    assert options == {"beta": 0.2}


def test_arguments_of_the_trainer(tmp_path: Path) -> None:
    for name in ("mine", "train"):
        (tmp_path / f"{name}.py").touch()
    options, remarks = read(
        """
        import mine
        from trl.rewards import accuracy_reward, get_soft_overlong_punishment as overlong
        def local(completions): ...
        class Tool: ...
        data = load_dataset("openai/gsm8k", "main")
        data = data.map(prepare)
        GRPOTrainer(
            MODELS[0],
            reward_funcs=[local, accuracy_reward, mine.score, overlong(100, 20), "org/model", partial(local)],
            args=GRPOConfig(),
            train_dataset=data["train[:90%]"],
            eval_dataset=make(),
            peft_config=LoraConfig(r=4),
            environment_factory=Tool,
            callbacks=[Log()],
        )
        """,
        tmp_path,
    )
    assert options == {
        "reward_funcs": [
            f"{tmp_path}/train.py:local",
            "trl.rewards.accuracy_reward",
            f"{tmp_path}/mine.py:score",
            {"class_path": "OverlongPenalty", "init_args": {"max_length": 100, "cache": 20}},
            {"class_path": "LearnedReward", "init_args": {"path": "org/model"}},
            "my_rewards.py:NAME",
        ],
        "train_dataset": {"path": "openai/gsm8k", "name": "main", "split": "train[:90%]"},
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "environment_factory": f"{tmp_path}/train.py:Tool",
        "args": "GRPOConfig()",
        "callbacks": "[Log()]",
    }
    assert [remark.partition(":")[2].partition(" is known")[0].strip() for remark in remarks[:-1]] == [
        "MODELS[0]",
        "partial(local)",
        "data.map(prepare)",
        "make()",
    ]
    assert remarks[-1].startswith(f"{tmp_path}/train.py is imported for its functions, which would start TRL")


MISTAKES = {
    "there is no GRPOConfig(...) in it": "from trl import SFTConfig\n",
    "GRPOConfig(...) is in lines 1, 2": "GRPOConfig()\nGRPOConfig()\n",
    "GRPOTrainer(...) is in lines 2, 3": "GRPOConfig()\nGRPOTrainer()\nGRPOTrainer()\n",
    "run.py:2: this is not Python": "a = 1\nb = = 2\n",
    "is not a multiple of num_generations=3": "GRPOConfig(num_generations=3)\n",
    "it cannot be read: 'utf-8' codec": b"\xff\xfe",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = MISTAKES[words]
    Path("run.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert answer(["from-trl", "run.py", "--out", "new.yaml"]) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith("grpo: error: ") and words in errors and errors.count("\n") == 1
    assert not Path("new.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("nowhere.py", None, "nowhere.py: it cannot be read: [Errno 2] No such file"),
        ("run.yaml", "a: [", "run.yaml: it cannot be read: while parsing"),
        ("run.json", "{", "run.json: it cannot be read: while parsing"),
        ("run.yaml", "trainer: {max_epochs: 3}", "there is no option of GRPOConfig in it"),
        ("run.yaml", "- 1", "there is no option of GRPOConfig in it"),
        ("run.yaml", "beta: 0.1", "--out run.yaml: there is such a file already"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    name: str,
    text: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    assert answer(["from-trl", name, "--out", "run.yaml" if "--out" in words else "new.yaml"]) == 2
    assert words in capsys.readouterr().err


def test_the_file_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SCRIPTS / "plain_script.py", "train.py")
    assert answer(["from-trl", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert answer(["from-trl", "train.py", "--out", "run.yaml"]) == 0
    assert Path("run.yaml").read_text() == printed
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "run.yaml: written. It begins:"
    assert said[1:] == [line for line in printed.splitlines() if line.startswith("# ")]
    values = yaml.safe_load(printed)
    assert values["loop"] == {"group_size": 4, "mu": 1, "num_minibatches": 1, "prompts_per_step": 2}
    assert "  # learning_rate=0.001\n" in printed and "# TRL's default top_p=1.0\n" in printed


def test_questions_and_processes_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SCRIPTS / "plain_script.py", "train.py")
    assert answer(["from-trl", "train.py", "--world", "2", "--questions", "40"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    # 4 x 2 x 2 / 4 = 4 prompts; 40 / 4 = 10 steps.
    assert (values["loop"]["prompts_per_step"], values["trainer"]["max_epochs"], values["trainer"]["devices"]) == (
        4,
        10,
        2,
    )
    Path("train.jsonl").write_text('{"prompt": "1"}\n' * 9)
    assert answer(["from-trl", "train.py"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["trainer"]["max_epochs"] == 4 and values["data"]["chat"] is False
