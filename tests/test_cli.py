"""The command line as its users meet it: what they get wrong ends with one message and exit code 2, nothing written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.command import Grpo, arguments, refused, table
from helpers.fitting import scalars
from helpers.programs import programs
from helpers.tiny import CONTEXT

FILES = {
    "rows.jsonl": "".join(f'{{"question": "{row}", "answer": "{row}"}}\n' for row in range(8)),
    "empty.jsonl": "",
    "long.jsonl": f'{{"question": "1", "answer": "1"}}\n{{"question": "{"2" * (CONTEXT + 1)}", "answer": "2"}}\n',
    "longer.jsonl": 7 * f'{{"question": "{"2" * (CONTEXT + 1)}", "answer": "2"}}\n',
    "half.jsonl": '{"question": "1", "answer": "1"}\n{"question": "2 \\ud83d", "answer": "2"}\n',
    "rewards.yaml": "model:\n  rewards:\n    - class_path: MathVerifier\n    - class_path: MathVerifier\n",
    "broken.py": "def score(sample):\n    raise KeyError('nothing like this')\n"
    "def of_trl(prompts, completions, **kwargs):\n    return [1.0 for _ in completions]\n",
}


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: FILES, a model and broken copies of it."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shutil.copytree(policy_folder, tmp_path / "policy")
    shutil.copytree(policy_folder, tmp_path / "no_config", ignore=shutil.ignore_patterns("config.json"))
    shutil.copytree(policy_folder, tmp_path / "bad_config")
    (tmp_path / "bad_config" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def grpo(folder: Path, command: Grpo) -> Grpo:
    """Runs a command line in `folder`, with OPTIONS and what overrides them: exit code, stdout, stderr."""
    return command


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


MISTAKES = table(Path(__file__).with_name("mistakes.txt").read_text().replace("CONTEXT", str(CONTEXT)))


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.usefixtures("folder")
def test_a_mistake_ends_with_one_message_and_writes_nothing(options: list[str], words: list[str], grpo: Grpo) -> None:
    errors = refused(grpo, options, words)
    assert len(errors.splitlines()) - errors.count("Seed set to 0") <= 3


def test_long_rows_can_be_left_out(grpo: Grpo, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    code, _, _ = grpo("fit", "--data.task.train=long.jsonl", "--data.skip_long=true", "--loop.prompts_per_step=1")
    assert code == 0
    assert "1 of 2 train questions do not fit the model's context and are left out" in caplog.text


def test_a_run_is_left_as_it_is_evaluated_or_continued(
    grpo: Grpo, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        code, out, errors = grpo("fit", "--trainer.enable_model_summary!")
    assert code == 0
    told = f"{out}{errors}{caplog.text}"
    assert "M parameters; 1 x " in told and "precision 32-true" in told
    assert [noise for noise in ("FLOPs", "available: False", "eval mode", "litlogger") if noise in told] == []

    before = contents(folder)
    code, _, errors = grpo("fit", "--loop.group_size=4")
    assert code == 2
    assert str(Path("run")) in errors and "ckpt_path=last" in errors
    assert contents(folder) == before

    config = (folder / "run" / "config.yaml").read_bytes()
    grpo.ok("validate", "--ckpt_path=last")
    grpo.ok("test", "--ckpt_path=run/checkpoints/last.ckpt")
    assert (folder / "run" / "config.yaml").read_bytes() == config
    code, _, errors = grpo("test", "--ckpt_path=last", "--trainer.default_root_dir=elsewhere")
    assert code == 2
    assert "ckpt_path=last" in errors and str(Path("elsewhere", "checkpoints", "last.ckpt")) in errors

    grpo.ok("fit", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert len(scalars(folder / "run")["optim/lr"]) == 2


def checkpoints(folder: Path) -> dict[str, int]:
    """The exploration steps done in each checkpoint of the run."""
    files = (folder / "run" / "checkpoints").iterdir()
    return {file.name: torch.load(file, weights_only=True)["epoch"] + 1 for file in files}


def test_which_checkpoints_stay(grpo: Grpo, folder: Path) -> None:
    grpo.ok("fit", "--trainer.max_epochs=5", "--checkpoint.keep=-1", "--checkpoint.every_n_steps=3")
    assert checkpoints(folder) == {"step-3.ckpt": 3, "step-5.ckpt": 5, "last.ckpt": 5}
    shutil.rmtree(folder / "run")
    best = ["--checkpoint.keep=1", "--checkpoint.monitor=val/reward", "--trainer.check_val_every_n_epoch=2"]
    grpo.ok("fit", *best, "--trainer.max_epochs=3")
    assert checkpoints(folder) == {"step-2.ckpt": 2, "last.ckpt": 3}  # every reward is 0, and the first best stays


def test_a_limit_on_time_ends_a_run_after_a_whole_step(grpo: Grpo, folder: Path) -> None:
    limited = ["--trainer.max_epochs=5", "--loop.mu=2", "--checkpoint.every_n_steps=7", "--loop.validate_first=false"]
    limited.append("--trainer.max_time={milliseconds: 1}")
    grpo.ok("fit", *limited)
    assert [*checkpoints(folder).values()] == [1] and len(scalars(folder / "run")["optim/lr"]) == 1
    # A resumed run has all of the time again.
    grpo.ok("fit", *limited, "--ckpt_path=last")
    assert checkpoints(folder)["last.ckpt"] == 2


def test_a_trial_run_leaves_nothing(grpo: Grpo, folder: Path) -> None:
    before = contents(folder)
    grpo.ok("fit", "--trainer.fast_dev_run=true")
    assert contents(folder) == before


def test_a_reward_that_always_fails_stops_the_run_with_exit_code_1(grpo: Grpo) -> None:
    code, _, errors = grpo("fit", "--model.rewards+=FunctionReward", "--model.rewards.function=broken.py:score")
    assert code == 1
    assert "reward score failed on 24 of 24 samples" in errors and "max_failed_rewards=0.5" in errors
    assert "Traceback" not in errors


def test_the_program_itself(folder: Path) -> None:
    with programs({"run": arguments("fit", "--model.policy.path=./nowhere")}, folder, anew=True) as started:
        assert started["run"].wait() == 2
    assert started["run"].output == ""
    *_, line = started["run"].errors.splitlines()
    assert "error: " in line and "nowhere" in line and not (folder / "run").exists()


def printed(grpo: Grpo, *options: str) -> dict[str, Any]:
    out = grpo.ok("fit", *options, "--print_config")
    return yaml.safe_load(out)


def written(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Parts of a configuration; a class as {its name: its arguments}."""
    parts = {}
    for key in keys:
        part: Any = config
        for name in key.split("."):
            part = part[name]
        parts[key] = {part["class_path"].rpartition(".")[2]: part.get("init_args", {})} if part else part
    return parts


def test_print_config_shows_the_defaults_and_is_a_configuration(grpo: Grpo, folder: Path) -> None:
    config = printed(grpo)
    model = config["model"]
    assert written(model, "advantage", "reference", "objective.surrogate") == {
        "advantage": {"GroupStd": {"advantage_eps": 1e-6, "std": "sample"}},
        "reference": None,  # what it is depends on whether there is an adapter
        "objective.surrogate": {"Clipped": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}},
    }
    names = written(model, "engine", "old_policy", "objective.kl", "objective.weighting")
    assert [[*part] for part in names.values()] == [["NativeEngine"], ["RecordedLogp"], ["K3"], ["SequenceMean"]]
    (settings,) = written(model, "optimizer")["optimizer"].values()
    assert settings["lr"] == 1e-6 and settings["weight_decay"] == model["objective"]["beta"] == 0
    filters = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    assert model["sampling"] == {"max_new_tokens": 4, "stop": []} | filters
    assert model["validation"]["sampling"] == dict.fromkeys(model["sampling"])
    assert config["loop"]["mu"] == 1 and config["loop"]["max_tokens"] == 16384
    assert config["data"]["template"] == "{question}"
    assert config["trainer"]["max_epochs"] == 1 and config["trainer"]["num_sanity_val_steps"] == 0

    (folder / "printed.yaml").write_text(yaml.safe_dump(config))
    assert printed(grpo, "--config=printed.yaml") == config


def test_text_that_starts_like_a_comment_is_text(grpo: Grpo, folder: Path) -> None:
    pattern = r"#### (\d+)"
    reward = {"class_path": "FormatReward", "init_args": {"pattern": pattern}}
    task = {"class_path": "JsonPrompts", "init_args": {"answer_pattern": pattern}}
    data = {"template": "# {question}", "system": "# Think", "chat": True, "task": task}
    (folder / "hashes.yaml").write_text(yaml.safe_dump({"model": {"rewards": [reward]}, "data": data}))
    config = printed(grpo, "--config=hashes.yaml", "--model.rewards!", "--data.task*!", "--data.task.test=rows.jsonl")
    assert config["model"]["rewards"][0]["init_args"]["pattern"] == pattern
    assert config["data"]["task"]["init_args"]["answer_pattern"] == pattern
    assert (config["data"]["template"], config["data"]["system"]) == ("# {question}", "# Think")
    assert printed(grpo, "--data.system=# Think")["data"]["system"] == "# Think"
