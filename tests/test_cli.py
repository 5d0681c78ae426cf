"""The command line as its users meet it: what they get wrong ends with one message and exit code 2, nothing written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.command import OPTIONS, Grpo, arguments
from helpers.fitting import scalars
from helpers.paths import ROOT
from helpers.programs import programs
from helpers.tiny import CONTEXT

from grpo_lightning.training.source import Synchronous

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
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
NO_TASK = [f"--{key}!" for key in OPTIONS if key.startswith("data.task")]


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


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    # Keys and types.
    "missing section": (NO_TASK, ["data.task"]),
    # The model.
    "no model in folder": (["--model.policy.path=no_config"], ["policy.path=no_config", "config.json"]),
    "config.json is no JSON": (["--model.policy.path=bad_config"], ["policy.path=bad_config", "JSON"]),
    "no such model on the hub": (
        ["--model.policy.path=nobody/nothing"],
        ["model.policy.path=nobody/nothing", "HF_HUB_OFFLINE"],
    ),
    # The data.
    "no such file": (["--data.task.train=nowhere.jsonl"], ["data.task.train", "nowhere.jsonl", "does not exist"]),
    "empty file": (["--data.task.train=empty.jsonl"], ["data.task.train", "empty.jsonl", "no rows"]),
    "no validation file": (["--data.task.val!"], ["data.task.val is not set", "limit_val_batches=0"]),
    "answer without the mark": (["--data.task.answer_pattern=answer=(.+)"], ["rows.jsonl:1", "answer=(.+)"]),
    "pattern in a flag is a comment": (
        ["--data.task.answer_pattern=#### (.+)"],
        ["data.task.answer_pattern=null", "[#]"],
    ),
    "half a character in a row": (["--data.task.train=half.jsonl"], ["half.jsonl:2", "'\\ud83d'", "half a character"]),
    "prompts too long": (
        ["--data.task.train=longer.jsonl"],
        ["longer.jsonl:1: the prompt", "So do 6 more of 7: longer.jsonl:2, ", "longer.jsonl:5. Lower"],
    ),
    "no room to answer": (["--model.sampling.max_new_tokens=200"], ["max_new_tokens=200", str(CONTEXT)]),
    "template without question": (["--data.template=Answer:"], ["data.template='Answer:'", "{question}"]),
    "chat without template": (["--data.chat=true"], ["data.chat", "data.template"]),
    "validation out of range": (["--model.val_sampling.top_p=2"], ["val_sampling.top_p=2.0", "above 0"]),
    "stop string with a special token": (["--model.sampling.stop=[<sep>a]"], ["sampling.stop", "'<sep>' alone"]),
    # Sizes.
    "group of one": (["--loop.group_size=1"], ["loop.group_size=1", "2 or more"]),
    "minibatches do not fit": (["--loop.num_minibatches=3"], ["loop.prompts_per_step=2", "loop.num_minibatches=3"]),
    "negative beta": (["--model.objective.beta=-1"], ["beta=-1.0", "0 (no KL term) or more"]),
    "temperature 0": (["--model.sampling.temperature=0"], ["sampling.temperature=0", "more than 0"]),
    # Rewards.
    "no rewards": (["--model.rewards=[]"], ["rewards=[]", "at least one"]),
    "same reward twice": (["--config=rewards.yaml"], ["'math_verifier'", "twice", "name"]),
    "a function of TRL": (
        ["--model.rewards+=FunctionReward", "--model.rewards.function=broken.of_trl"],
        ["takes (prompts, completions)", "def f(sample)", "def f(samples)"],
    ),
    "function does not import": (
        ["--model.rewards+=FunctionReward", "--model.rewards.function=nowhere.score"],
        ["function='nowhere.score'", "No module named 'nowhere'"],
    ),
    # The trainer.
    "clipping by the trainer": (["--trainer.gradient_clip_val=1"], ["trainer.gradient_clip_val", "model.grad_clip"]),
    "accumulation": (["--trainer.accumulate_grad_batches=2"], ["trainer.accumulate_grad_batches=2", "loop.max_tokens"]),
    "time limit": (["--trainer.max_time=soon"], ["trainer.max_time=soon", "DD:HH:MM:SS"]),
    "another progress bar": (["--trainer.callbacks+=RichProgressBar"], ["RichProgressBar", "leave this one out"]),
    "a callback that refuses": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/reward", "--trainer.callbacks.mode=up"],
        ["EarlyStopping", "mode", "up"],
    ),
    "a metric watched the wrong way": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/avg@2"],
        ["EarlyStopping.mode=min", "val/avg@2 is better the larger", "mode=max"],
    ),
    "a seed to be drawn": (["--seed_everything=true"], ["seed_everything=true", "from 0 to", "such as"]),
    "nothing around the loop": (["--trainer.barebones=true"], ["trainer.barebones=True", "trainer.logger=false"]),
    "no policy yet": (["--model.policy.path=runs/tiny_policy"], ["runs/tiny_policy", "tools/make_tiny_policy.py"]),
    "validate every 0 steps": (
        ["--trainer.check_val_every_n_epoch=0"],
        ["check_val_every_n_epoch=0", "limit_val_batches=0"],
    ),
    "float16": (["--trainer.precision=16-mixed"], ["trainer.precision=16-mixed", "bf16-mixed"]),
    "best checkpoint": (["--ckpt_path=best"], ["ckpt_path=best", "last"]),
    "checkpoints to keep": (["--checkpoint.keep=-2"], ["checkpoint.keep=-2", "-1 for all"]),
}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_with_one_message_and_writes_nothing(
    options: list[str], words: list[str], grpo: Grpo, folder: Path
) -> None:
    before = contents(folder)
    code, _, errors = grpo("fit", *options)
    assert code == 2
    assert "error: " in errors and "Traceback" not in errors
    assert len(errors.splitlines()) - errors.count("Seed set to 0") <= 3
    assert [word for word in words if word not in errors] == []
    assert contents(folder) == before and not (folder / "run").exists()


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
    assert "1 steps of 2 prompts x 2 completions" in told
    assert [noise for noise in ("FLOPs", "available: False", "eval mode", "litlogger") if noise in told] == []

    before = contents(folder)
    code, _, errors = grpo("fit", "--loop.group_size=4")
    assert code == 2
    assert str(Path("run")) in errors and "--ckpt_path last" in errors
    assert contents(folder) == before

    config = (folder / "run" / "config.yaml").read_bytes()
    assert grpo("validate", "--ckpt_path=last")[0] == 0
    assert grpo("test", "--ckpt_path=run/checkpoints/last.ckpt")[0] == 0
    assert (folder / "run" / "config.yaml").read_bytes() == config
    code, _, errors = grpo("test", "--ckpt_path=last", "--trainer.default_root_dir=elsewhere")
    assert code == 2
    assert "ckpt_path=last" in errors and str(Path("elsewhere", "checkpoints", "last.ckpt")) in errors

    assert grpo("fit", "--ckpt_path=last", "--trainer.max_epochs=2")[0] == 0
    assert len(scalars(folder / "run")["optim/lr"]) == 2


def checkpoints(folder: Path) -> dict[str, int]:
    """The exploration steps done in each checkpoint of the run."""
    files = (folder / "run" / "checkpoints").iterdir()
    return {file.name: torch.load(file, weights_only=True)["epoch"] + 1 for file in files}


def test_which_checkpoints_stay(grpo: Grpo, folder: Path) -> None:
    steps = "--trainer.max_epochs=5"
    for keep, every, kept in (
        (2, 2, {"step-4.ckpt": 4, "step-5.ckpt": 5}),
        (-1, 3, {"step-3.ckpt": 3, "step-5.ckpt": 5}),
    ):
        assert grpo("fit", steps, f"--checkpoint.keep={keep}", f"--checkpoint.every_n_steps={every}")[0] == 0
        assert checkpoints(folder) == kept | {"last.ckpt": 5}
        shutil.rmtree(folder / "run")


def test_last_is_the_last_even_if_another_is_the_best(grpo: Grpo, folder: Path) -> None:
    best = ["--checkpoint.keep=1", "--checkpoint.monitor=val/reward", "--trainer.check_val_every_n_epoch=2"]
    assert grpo("fit", *best, "--trainer.max_epochs=3")[0] == 0
    assert checkpoints(folder) == {"step-2.ckpt": 2, "last.ckpt": 3}  # every reward is 0, and the first best stays


def test_a_killed_run_has_its_last_step(grpo: Grpo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def following(source: Synchronous, step: int) -> Any:
        if step == 3:
            raise Killed
        return original(source, step)

    original = Synchronous.next
    monkeypatch.setattr(Synchronous, "next", following)
    with pytest.raises(Killed):
        grpo("fit", "--trainer.max_epochs=9")
    assert checkpoints(folder) == {"last.ckpt": 3}


def test_a_limit_on_time_ends_a_run_after_a_whole_step(grpo: Grpo, folder: Path) -> None:
    limited = ["--trainer.max_epochs=5", "--loop.mu=2", "--checkpoint.every_n_steps=7", "--loop.validate_first=false"]
    limited.append("--trainer.max_time={milliseconds: 1}")
    assert grpo("fit", *limited)[0] == 0
    assert [*checkpoints(folder).values()] == [1] and len(scalars(folder / "run")["optim/lr"]) == 1
    # A resumed run has all of the time again.
    assert grpo("fit", *limited, "--ckpt_path=last")[0] == 0
    assert checkpoints(folder)["last.ckpt"] == 2


def test_a_trial_run_leaves_nothing(grpo: Grpo, folder: Path) -> None:
    before = contents(folder)
    assert grpo("fit", "--trainer.fast_dev_run=true")[0] == 0
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
    (line,) = started["run"].errors.splitlines()
    assert "error: " in line and "nowhere" in line and not (folder / "run").exists()


def printed(grpo: Grpo, *options: str) -> dict[str, Any]:
    code, out, errors = grpo("fit", *options, "--print_config")
    assert code == 0, errors
    return yaml.safe_load(out)


def class_and_arguments(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return value["class_path"].rpartition(".")[2], value.get("init_args", {})


def test_print_config_shows_the_defaults_and_is_a_configuration(grpo: Grpo, folder: Path) -> None:
    config = printed(grpo)
    model = config["model"]
    assert class_and_arguments(model["engine"])[0] == "NativeEngine"
    assert class_and_arguments(model["advantage"]) == ("GroupStd", {"advantage_eps": 1e-6, "std": "sample"})
    assert class_and_arguments(model["objective"]["surrogate"]) == (
        "Clipped",
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    )
    assert class_and_arguments(model["objective"]["kl"])[0] == "K3"
    assert class_and_arguments(model["objective"]["weighting"])[0] == "SequenceMean"
    assert model["objective"]["beta"] == 0
    assert class_and_arguments(model["old_policy"])[0] == "RecordedLogp"
    assert model["reference"] is None  # what it is depends on whether there is an adapter
    optimizer, settings = class_and_arguments(model["optimizer"])
    assert optimizer == "AdamW" and settings["lr"] == 1e-6 and settings["weight_decay"] == 0
    filters = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    assert model["sampling"] == {"max_new_tokens": 4, "stop": []} | filters
    assert model["val_sampling"] == dict.fromkeys(model["sampling"])
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
    config = printed(grpo, "--config=hashes.yaml", "--model.rewards!", *NO_TASK, "--data.task.test=rows.jsonl")
    assert config["model"]["rewards"][0]["init_args"]["pattern"] == pattern
    assert config["data"]["task"]["init_args"]["answer_pattern"] == pattern
    assert (config["data"]["template"], config["data"]["system"]) == ("# {question}", "# Think")
    assert printed(grpo, "--data.system=# Think")["data"]["system"] == "# Think"


def test_one_flag_swaps_a_part(grpo: Grpo) -> None:
    def model(*options: str) -> dict[str, Any]:
        return printed(grpo, "--config", str(QUICKSTART), "--model.rewards!", *options)["model"]

    def rewards(*options: str) -> list[tuple[str, float]]:
        parts = [class_and_arguments(reward) for reward in model(*options)["rewards"]]
        return [(name, arguments["weight"]) for name, arguments in parts]

    weighting = ["--model.objective.weighting=FixedLength", "--model.objective.weighting.length=32"]
    optimizer = ["--model.optimizer=SGD", "--model.optimizer.lr=1"]
    schedule = ["--model.lr_scheduler=LinearLR", "--model.lr_scheduler.total_iters=9"]
    found = model(*weighting, "--model.objective.surrogate.clip_high=0.28", *optimizer, *schedule)
    assert class_and_arguments(found["objective"]["weighting"]) == ("FixedLength", {"length": 32})
    clipped = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
    assert class_and_arguments(found["objective"]["surrogate"]) == ("Clipped", clipped)
    name, settings = class_and_arguments(found["optimizer"])
    assert name == "SGD" and settings["lr"] == 1
    name, settings = class_and_arguments(found["lr_scheduler"])
    assert name == "LinearLR" and settings["total_iters"] == 9

    written = [("MathVerifier", 1.0), ("FormatReward", 0.2)]
    assert rewards("--model.rewards=[MathVerifier]") == written[:1]
    added = ["--model.rewards+=FunctionReward", "--model.rewards.function=mine.shorter"]
    assert rewards(*added, "--model.rewards.weight=0.01") == [*written, ("FunctionReward", 0.01)]
