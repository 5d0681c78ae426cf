"""Mistakes in keys, classes and files are found without torch, and nothing that is right is refused."""

import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import Grpo, arguments, table
from helpers.paths import ROOT, environment

import grpo_lightning
from grpo_lightning import cli
from grpo_lightning.command import internals, overview
from grpo_lightning.command.parser import Parser
from grpo_lightning.plugins.mistakes import check as early
from grpo_lightning.plugins.mistakes import keys, sentences
from grpo_lightning.plugins.mistakes.options import classes_of

QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"

READ_HERE = [name for name, command in overview.COMMANDS.items() if command.module == "grpo_lightning.cli"]

RIGHT = [
    "--model.advantage.std sample --model.advantage GroupMean --model.objective.beta -1e-4",
    "--model.advantage.init_args.std sample --model.advantage.class_path GroupMean",
    "--model.advantage '{std: sample}' --model.objective '{surrogate: CISPO}' --model.objective.surrogate.clip_high 3",
    "--model.rewards FunctionReward --model.rewards.function mine.brief --model.rewards+ FormatReward",
    "--model.rewards '[{class_path: Gated, init_args: {reward: FormatReward, gate: MathVerifier}}]'",
    "--model.rewards.weight=2 --model.rewards+=FormatReward --model.rewards.pattern x",
    "--model.objective.reward_kl.kl ImportanceWeighted --model.objective.reward_kl.kl.kl K2",
    "--model.objective.reward_kl null",
    "--model.policy.adapter.rank 3 --model.policy.adapter null --model.sampling null --model.sampling.top_k 3",
    "--loop.stop FirstOf --loop.stop.rules '[{class_path: KLAbove, init_args: {target: 0.1}}]'",
    "--loop.dynamic_sampling '{}' --loop.dynamic_sampling.filter.reward total",
    "--model.advantage grpo_lightning.GroupStd --model.advantage.std sample",
    "--model.advantage mine.MaxRL --model.advantage.power 3 --model.reference MaxRL",
    "--trainer.callbacks '[mine.Callback]' --model.advantage MaxRL",
    "--trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor x --model.optimizer SGD",
    "--data.environment mine.Game --data.environment.seed 3 --data.template '{question}'",
    "--data.environment no_class --model.advantage given.yaml",
    "--config '{loop: {mu: 2}}' --print_config=skip_default",
    "--config https://somewhere.org/x.yaml --model.advantage.foo 3",
]


@pytest.mark.parametrize("config", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_pass(config: Path) -> None:
    assert early.mistake(["fit", f"--config={config}", "--print_config"]) is None


@pytest.mark.parametrize("options", RIGHT)
def test_what_is_right_or_not_known_passes(options: str) -> None:
    assert early.mistake(["fit", QUICKSTART, *shlex.split(options), "--print_config"]) is None


def test_the_options_are_those_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[Parser] = []

    def parse_args(self: Parser, *args: object) -> None:
        parsers.append(self)
        raise SystemExit

    monkeypatch.setattr(Parser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    for command in READ_HERE:
        with pytest.raises(SystemExit):
            cli.command_line(command)([command])
        (parser,) = parsers
        names = [option.dest for option in internals.options_of(parser, command)]
        assert {*names} <= {*keys.names_of(command)}
        parsers.clear()


@pytest.mark.parametrize("name", [name for name in grpo_lightning.__all__ if keys.find(name)])
def test_arguments_and_members_are_those_of_the_class(name: str) -> None:
    path, value = keys.find(name), getattr(grpo_lightning, name)
    known = keys.arguments(path)
    if known is not None:
        assert [*known] == [key for key in inspect.signature(value).parameters if key not in ("args", "kwargs")]
    cli.import_families()
    members = {path.rpartition(".")[2] for path in keys.members(path)}
    public = {member for member in classes_of([value]) if member in grpo_lightning.__all__}
    assert public <= members | ({name} if inspect.isabstract(value) else set())


@pytest.mark.parametrize(
    "options", [["--loop.gruop_size=3"], ["--model.policy.path=./nowhere"], ["--ckpt_path=nowhere.ckpt"]], ids=" ".join
)
def test_torch_is_not_imported(options: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_lightning.command.overview import answer; code = answer(sys.argv[1:]); "
        "assert not {'torch', 'lightning', 'transformers', 'jsonargparse'} & {*sys.modules}; sys.exit(code)"
    )
    call = [sys.executable, "-c", code, "fit", *options]
    done = subprocess.run(call, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("grpo: error: ") and options[0].partition("=")[0].removeprefix("--") in line


@pytest.mark.parametrize(
    "options",
    [
        ["--model.advantage=GroupSTD"],
        ["--model.rewards+=FormatRewrd"],
        ["--data.task.trian=rows.jsonl"],
        ["--model.objective.surrogate.clip_hi=0.3"],
        ["--loop.stop={class_path: FirstOf, init_args: {rules: [KLAbov]}}"],
        ["--model.objective.surrogate.epsilon=0.1"],
        ["--model.sampling={temprature: 1}"],
    ],
    ids=" ".join,
)
def test_the_parser_says_the_same(options: list[str], grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    said = early.mistake(arguments("fit", *options))
    monkeypatch.setattr(early, "mistake", lambda args: None)
    monkeypatch.setattr("grpo_lightning.plugins.mistakes.options.members_of", own_members)
    code, _, errors = grpo("fit", *options)
    assert code == 2 and errors.splitlines()[-1] == f"grpo: error: {said}"


def own_members(family: type) -> list[type]:
    """Public classes of this package that derive from `family`: other tests define classes too."""
    found = [getattr(grpo_lightning, path.rpartition(".")[2]) for path in keys.members(keys.find(family.__name__))]
    return [member for member in found if member is not family]


HINTS = table("""
--loop.num_generations 4 => there is no such option. TRL's num_generations is loop.group_size
--epsilon 0.2 => TRL's epsilon is model.objective.surrogate.clip_low and clip_high
--model.objective.surrogate.epsilon 0.2 => Clipped has no such option. TRL's epsilon is
--rollout.n 8 => verl's n is loop.group_size
--model.lr 1e-4 => Did you mean --model.optimizer.lr?
--beta 0.1 => Did you mean --model.objective.beta?
--temperature 0.1 => Did you mean --model.sampling.temperature?
""")


@pytest.mark.parametrize(("options", "hints"), HINTS.values(), ids=HINTS)
def test_names_of_other_programs_are_understood(options: list[str], hints: list[str]) -> None:
    assert hints[0] in str(early.mistake(["fit", *options]))


@pytest.mark.parametrize("target", sentences.ELSEWHERE)
def test_what_is_named_instead_is_there(target: str) -> None:
    key, _, rest = target.partition(",")[0].partition(" ")
    engine = ["--model.engine=VLLMEngine"] if "VLLMEngine" in rest else []
    reward = ["--model.rewards=FormatReward"] if key == "model.rewards.weight" else []
    value = f"={rest}" if rest and " " not in rest else ""
    assert early.mistake(["fit", *engine, *reward, f"--{key}{value}", "--print_config"]) is None


def test_several_ranks_leave_it_to_the_one_that_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert overview.answer(["fit", "--loop.gruop_size=3"]) is None


def test_a_folder_of_a_run_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/base/checkpoints").mkdir(parents=True)
    said = early.mistake(["fit", "--model.policy.path=runs/base"])
    assert said == (
        "model.policy.path=runs/base: this is the folder of a run. First: grpo export runs/base --out runs/base_model"
    )


def test_one_class_is_a_list_of_one(grpo: Grpo) -> None:
    options = ["--model.rewards=FunctionReward", "--model.rewards.function=mine.brief", "--print_config"]
    code, out, errors = grpo("fit", "--model.rewards!", *options)
    assert code == 0, errors
    assert "- class_path: grpo_lightning.FunctionReward\n    init_args:\n      function: mine.brief" in out
