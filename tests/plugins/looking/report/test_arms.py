from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.curves import scalars, write

from grpo_lightning.plugins.console.display.saved_config import differences
from grpo_lightning.plugins.looking.report.arms import arms_of, read_runs
from grpo_lightning.plugins.looking.run_files.run_configs import UNTIL, earlier, read_config, shown
from grpo_lightning.plugins.looking.run_files.run_graders import grader_of
from grpo_lightning.plugins.looking.run_files.run_scalars import EVENTS
from grpo_lightning.types import UsageError


def config(folder: Path, seed: int = 0, lr: float = 3e-4, surrogate: str = "Clipped", mu: int = 1, **more: Any) -> dict:
    own = {"class_path": f"grpo_lightning.{surrogate}"}
    own |= {"init_args": {"clip_low": 0.2}} if surrogate == "Clipped" else {}
    return {
        "seed_everything": seed,
        "trainer": {"default_root_dir": str(folder), "logger": None, "enable_progress_bar": seed == 0},
        "model": {
            "objective": {"surrogate": own, "beta": 0.0},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr, "betas": [0.9, 0.999]}},
        },
        "loop": {"mu": mu, "seed": seed},
        "predictions": {"path": f"{folder}/predictions.jsonl"},
        **more,
    }


def make(folder: Path, **settings: Any) -> Path:
    write(folder, scalars([0.1, 0.2]))
    (folder / "config.yaml").write_text(yaml.safe_dump(config(folder, **settings), sort_keys=False))
    return folder


def named(*folders: Path) -> list[tuple[str, list[str]]]:
    """The name and the seeds of each arm of these runs."""
    return [(arm.name, list(arm.runs)) for arm in arms_of(read_runs(folders))]


def test_neither_a_folder_nor_a_half_written_file_has_curves(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    expected = read_runs([run])[0].scalars
    write(tmp_path / "other", scalars([0.5, 0.6]))
    (file,) = (tmp_path / "other").glob(EVENTS)
    file.rename(run / f"{file.name}.partial")  # its program was killed
    (run / EVENTS.replace("*", "0")).mkdir()
    assert read_runs([run])[0].scalars == expected


def test_a_run_of_version_0_2_is_in_one_arm_with_a_new_one(tmp_path: Path):
    grader = {"class_path": "grpo_lightning.MathVerifier", "init_args": {"timeout": 1}}
    curves = {"reward/zero_spread": "reward/frac_zero_std", "rollout/given": "rollout/context"}
    keys = (("judge", "labeller", "Ahead"), ("grader", "grader", "OneStepOffPolicy"))
    for seed, (key, learned_key, source) in enumerate(keys):
        write(tmp_path / key, {names[seed]: [(0, 0.5)] for names in curves.items()})
        model = {"validation": {key: grader}, "rewards": [{learned_key: grader}]}
        loop = {"source": {"class_path": f"grpo_lightning.{source}"}}
        options = {"seed_everything": seed, "model": model, "loop": loop}
        (tmp_path / key / "config.yaml").write_text(yaml.safe_dump(options))
    (arm,) = arms_of(read_runs([tmp_path / "judge", tmp_path / "grader"]))
    old, new = arm.runs.values()
    assert old.scalars == new.scalars and list(new.scalars) == list(curves.values())
    assert grader_of(old.config) == {"class": "MathVerifier", "timeout": 1}


def test_runs_that_differ_in_seed_and_folder_alone_are_one_arm(tmp_path: Path):
    folders = [make(tmp_path / f"run{i}", seed=i % 2, lr=lr) for i, lr in enumerate((3e-4, 3e-4, 1e-4, 1e-4))]
    arms = arms_of(read_runs(folders))
    assert [(arm.name, list(arm.runs)) for arm in arms] == [("run0", ["0", "1"]), ("run2", ["0", "1"])]
    assert [run.folder for run in arms[1].runs.values()] == folders[2:]


def test_a_run_with_changed_options_has_had_two_configurations(tmp_path: Path):
    plain, kept, run = (make(tmp_path / name, surrogate="CISPO", lr=1e-4) for name in ("plain", "kept", "run"))
    # As `grpo fit` keeps them: two starts changed something; a third went back to step 4, so the second made no step.
    for folder, numbers in ((kept, {1: (4, 3e-4)}), (run, {1: (4, 3e-4), 2: (4, 9.0)})):
        for number, (until, lr) in numbers.items():
            before = yaml.safe_dump(config(folder, lr=lr))
            (folder / f"config.{number}.yaml").write_text(f"# until step {until}\n{before}")
    arms = arms_of(read_runs([plain, kept, run]))
    changes = "changed at step 5: model.objective.surrogate Clipped → CISPO, model.optimizer.lr 3e-4 → 1e-4"
    assert [list(one.changes) for arm in arms for one in arm.runs.values()] == [[], [changes], [changes]]
    # Alike on the way too, so one arm but for the seed that they have in common.
    assert arms[1].runs["0"].config == arms[2].runs["0"].config != arms[0].runs["0"].config
    assert arms[1].shown("model.optimizer.lr") == "3e-4 → 1e-4 at step 5"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1e-4, "1e-4"),
        (3.5e-5, "3.5e-5"),
        (0.001, "0.001"),
        (0.28, "0.28"),
        (0.0, "0"),
        (1e7, "1e7"),
        (float("inf"), "inf"),
        (True, "true"),
        (None, "null"),
        (12, "12"),
        ("torch.optim.AdamW", "AdamW"),
        ("runs/tiny_policy", "runs/tiny_policy"),
        (["+", "é"], '["+", "é"]'),
    ],
)
def test_values(value: Any, expected: str):
    assert shown(value) == expected


def test_pages_and_cards_show_no_secrets(tmp_path: Path):
    options = {
        "loggers": [{"init_args": {"api_key": "sk-1234", "uri": "postgres://me:sk-1234@host/db"}}],
        "data": {"HF_TOKEN": "sk-1234", "password": None, "stop": ["</answer>"], "eos_token": "</s>"},
        "trainer": {"logger": {"token": ""}},
    }
    for name in ("config.yaml", "config.1.yaml"):
        (tmp_path / name).write_text(f"{UNTIL}3\n" + yaml.safe_dump(options))
    config = read_config(tmp_path / "config.yaml")
    assert "sk-1234" not in str((config, earlier(tmp_path)))
    assert config["loggers"] == [{"init_args": {"api_key": "***", "uri": "postgres://***@host/db"}}]
    assert config["data"] == options["data"] | {"HF_TOKEN": "***"} and config["trainer"] == options["trainer"]
    later = options | {"loggers": [{"init_args": {"api_key": "sk-5678", "uri": "postgres://me:sk-5678@host/db"}}]}
    told = differences(yaml.safe_dump(options), yaml.safe_dump(later))
    assert told and "sk-" not in str(told)


def test_folders_of_arms_name_them(tmp_path: Path):
    for name, lr in (("slow", 1e-4), ("fast", 3e-4)):
        for seed in (10, 9):
            make(tmp_path / "experiment" / name / str(seed), seed=seed, lr=lr)
    fast, slow = ("fast", ["9", "10"]), ("slow", ["9", "10"])
    assert named(tmp_path / "experiment") == [fast, slow]
    assert named(tmp_path / "experiment" / "slow", tmp_path / "experiment" / "fast") == [slow, fast]
    assert {name for name, _ in named(*sorted(tmp_path.glob("experiment/*/*")))} == {"fast", "slow"}


def test_equal_runs_with_equal_seeds_are_told_apart_by_their_folders(tmp_path: Path):
    folders = [make(tmp_path / part / str(seed), seed=seed) for part in ("before", "after") for seed in (0, 1)]
    assert named(*folders) == [("before", ["0", "1"]), ("after", ["0", "1"])]
    one_and_two = named(*(make(tmp_path / "runs" / name) for name in ("one", "two")))
    assert [name for name, _ in one_and_two] == ["one", "two"] and named(tmp_path / "runs") == one_and_two


def test_without_configuration_the_folders_count(tmp_path: Path):
    for name in ("a/one", "a/two", "b/one"):
        write(tmp_path / name, scalars([0.1]))
    assert [name for name, _ in named(*sorted(tmp_path.glob("*/*")))] == ["a/one", "a/two", "b/one"]
    # Two runs in a folder of their own, alike as far as is known.
    assert named(tmp_path / "a") == [("a", ["one", "two"])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [unclosed", "config.yaml: it cannot be read .*line 1.*Fix it, or remove it"),
        ("just words", "config.yaml: it holds no keys"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_a_broken_configuration(tmp_path: Path, text: str, message: str):
    make(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_runs([tmp_path / "run"])


def test_a_seed_is_no_name_of_an_arm(tmp_path: Path):
    folders = [make(tmp_path / name, lr=lr) for name, lr in (("slow/0", 1e-4), ("fast/0", 3e-4))]
    assert named(*folders) == [("slow", ["0"]), ("fast", ["0"])]
    # One of the sweep's arms has two seeds, the other one.
    folders.append(make(tmp_path / "slow" / "1", seed=1, lr=1e-4))
    assert named(*folders) == [("slow", ["0", "1"]), ("fast", ["0"])]
    # Without a folder per arm there is no better name.
    assert named(make(tmp_path / "0"), make(tmp_path / "1", seed=1, lr=1e-4)) == [("0", ["0"]), ("1", ["1"])]
