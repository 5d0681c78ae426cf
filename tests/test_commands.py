"""Every command in the README, in CONTRIBUTING.md, in docs/ but docs/start, and in the heads of configurations works.

In one scratch folder, in the order of the documents, after what `make demo` leaves behind. What is the first of its
kind, or makes what others need, runs; the others go as far as a run, which is all that mistakes in options need.
"""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from helpers.loading import load_tool
from helpers.paths import ROOT
from helpers.waiting import LIMIT

from grpo_lightning import cli
from grpo_lightning.command import overview
from grpo_lightning.plugins.rewards.verifier import verify_command as verify

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted({*ROOT.glob("docs/**/*.md")} - {*ROOT.glob("docs/start/*")}),
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "configs").rglob("*.yaml")),
]
PROGRAMS = "grpo|grpo-verify|python|make|tensorboard|pip|source|echo|torchrun|git"

NOT_RUN = {
    r"make .*": "installs into .venv and takes minutes",
    r"(python -m )?pip .*": "needs the network",
    r"cd \w+ .*": "a line of the shell; in tests/plugins/console/start",
    r"grpo.*smollm2.*": "needs a package of 93 MB from the network; the tool checks what it has made",
    r"python docs/figures/model_table.py": "has no options",
    r".*gsm8k_qwen2.5_0.5b.yaml.*": "needs a GPU and GSM8K; small in tests/test_gsm8k.py",
    r"torchrun .*": "starts processes; this very line in tests/plugins/console/cluster/test_launched_ranks.py",
    r"(?!grpo plan).*--trainer.devices.*": "starts processes; in tests/plugins/console/cluster/test_sharding.py",
    r"(?!grpo plan).*--trainer.strategy.*": "needs several devices; in tests/plugins/console/cluster/test_sharding.py",
    r".*\$task.*|grpo export runs/warm .*": "needs runs of minutes; small in tests/plugins/sources/demonstrations",
    r".*bench_ahead.*": "needs a server of vLLM",
    r"sbatch .*": "needs SLURM; the script runs in tests/test_slurm_script.py",
    r".*bitsandbytes.*": "a package of one's own",
    r"(grpo|grpo-verify)( (fit|validate|test|predict|plan|init|inspect|report|export|evaluate|judge))?": "a name",
    r".*(vllm|VLLMEngine).*": "needs vLLM; in tests/plugins/engines/vllm/test_vllm_runs.py",
    r"grpo judge judge.yaml .*": "needs a judge; in tests/plugins/rewards/judge/test_judge_reward.py",
    r".*code_(functions|judge).yaml.*": "needs a policy; small in tests/plugins/rewards/judge/test_judged_run.py",
    r".*(Wandb|Trackio)Logger.*": "needs the package",
    r".*HubPrompts.*|.*benchmarks.*": "needs the network; small in tests/plugins/data/benchmarks",
    r".*(tools_calculator|guess_number).yaml.*": "in tests/tools/test_make_turns_policy.py",
}
"""What is not tried, and why."""

ROW = "grpo fit --config configs/quickstart.yaml --trainer.default_root_dir runs/NAME"
"""What a flag alone, in a table or in the text, belongs to."""

SIZES = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--loop.group_size=2"]
SIZES += ["--loop.prompts_per_step=4", "--data.val_limit=2", "--model.validation.samples=2"]
"""Those of a run. The other commands have the last two, which say how much is validated."""


def commands_in(text: str) -> Iterator[str]:
    """Lines of shell blocks, and what stands in backquotes, if it begins like a command or a flag."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", prose):
        command = " ".join(span.split())
        if re.match(rf"({PROGRAMS}) ", command):
            yield command.replace(ROW, "").strip() or ROW
        elif re.match(r"--(config|model|loop|data|trainer)[.+\w]* ?\S", command):
            yield f"{ROW} {command}"


def commands_of(document: Path) -> list[str]:
    """Those of a document, or of the comments at the head of a configuration."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".md":
        return list(commands_in(text))
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   ")]
    return [
        line if re.match(PROGRAMS, line) else f"{ROW} --config {document.relative_to(ROOT)} {line}" for line in lines
    ]


COMMANDS = list(dict.fromkeys(command for document in DOCUMENTS for command in commands_of(document)))
TRIED = [one for one in COMMANDS if not any(re.fullmatch(pattern, one) for pattern in NOT_RUN)]
FLAGS = [shlex.split(one.removeprefix(ROW)) for one in TRIED if one.startswith(f"{ROW} ")]
WHOLE = [one for one in TRIED if not one.startswith(f"{ROW} ")]

PAGES = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
BLOCKS = re.findall(r"^```yaml\n((?!# \().*?)^```", PAGES, re.DOTALL | re.MULTILINE)
"""Options in the pages. The first line of a block that cannot be read here says why: `# (needs a server)`."""
WHOLE += [f"{ROW} --config {number}.yaml --print_config" for number in range(len(BLOCKS))]


def runs(command: str) -> bool:
    """Whether it is the first of its subcommand, or makes a folder that others name."""
    if not command.startswith("grpo fit"):
        return command == next(one for one in WHOLE if one.split()[:2] == command.split()[:2])
    folder = re.search(r"default_root_dir (runs/\w+)", command)
    return folder is not None and any(re.search(rf"{folder[1]}\b", one) for one in WHOLE if one != command)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone after `make demo`, and with the files that the documents tell the reader to write."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "docs", "tools", "experiments", "examples"):
        (folder / name).symlink_to(ROOT / name)
    load_tool("make_tiny_policy").make(folder / "runs" / "tiny_policy", updates=5, hidden=64, layers=1)
    (folder / "runs" / "tiny_reward_model").symlink_to(folder / "runs" / "tiny_policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["grpo"])
        cli.run(["fit", "--config", "configs/quickstart.yaml", "--trainer.enable_progress_bar", "false", *SIZES])
    for code in re.findall(r"^```python\n(.*?)^```", PAGES, re.DOTALL | re.MULTILINE):
        if name := re.match(r'(?:# |""")(\w+\.py)\b', code):
            (folder / name[1]).write_text(code)
    for number, block in enumerate(BLOCKS):
        (folder / f"{number}.yaml").write_text(block)
    (folder / "mine.yaml").write_text("{trainer: {default_root_dir: runs/mine}}")
    return folder


@pytest.fixture
def there(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scratch folder is the working directory, and its modules are found."""
    monkeypatch.chdir(scratch)
    monkeypatch.syspath_prepend(scratch)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def parse_alone(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
    """Ends a script as soon as its options are read."""
    self.parse_known_args(args, namespace)[1] and self.error("unknown options")
    raise SystemExit(0)


READ = jsonargparse.ArgumentParser.parse_args


def read_alone(self: jsonargparse.ArgumentParser, *args: Any) -> None:
    """The same for a script whose options are a function's arguments."""
    READ(self, *args)
    raise SystemExit(0)


def code_of(command: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command, in small or as far as a run."""
    words = shlex.split(command, comments=True)
    if not whole:
        monkeypatch.setattr(cli.GRPOCLI, "_run_subcommand", lambda *_: None)
    try:
        match words:
            case ["grpo", *arguments] if (code := overview.answer(arguments)) is not None:
                return code
            case ["grpo", subcommand, *arguments]:
                prints = "--print_config" in words or any(word.endswith(".help") for word in words)
                sizes = [] if prints else SIZES[-2:] if subcommand != "fit" or "--ckpt_path" in words else SIZES
                cli.run([subcommand, *arguments, *sizes])
            case ["grpo-verify", *arguments]:
                return verify.main(arguments)
            case ["python", script, *arguments]:
                monkeypatch.setattr(sys, "argv", [script, *arguments])
                monkeypatch.setattr(sys, "path", [str(Path(script).parent), str(ROOT / "tools"), *sys.path])
                monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
                monkeypatch.setattr(jsonargparse.ArgumentParser, "parse_args", read_alone)
                runpy.run_path(script, run_name="__main__")
            case _:
                return subprocess.run(["bash", "-c", command], timeout=LIMIT, check=False).returncode
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("command", WHOLE, ids=lambda command: command[-60:])
def test_a_command_works_as_it_is_written(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = code_of(command.replace("NAME", "own_name"), runs(command), monkeypatch)
    # grpo-verify ends with 1 where an answer is wrong, and an untrained policy's are.
    assert code in ({0, 1} if "grpo-verify --jsonl" in command else {0}), capfd.readouterr().err[-2000:]


def together(flags: list[list[str]]) -> list[list[str]]:
    """As few command lines as possible of flags none of which belongs to another."""
    lines: list[list[str]] = []
    for words in flags:
        keys = [re.split(r"[=+]", word)[0] for word in words if word.startswith("--")]
        for line in lines:
            others = [re.split(r"[=+]", word)[0] for word in line if word.startswith("--")]
            if not any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in keys for b in others):
                line += words
                break
        else:
            lines.append([*words])
    return lines


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("flags", together(FLAGS), ids=range(len(together(FLAGS))))
def test_flags_work_as_they_are_written(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = f"{ROW.replace('NAME', 'flags')} {shlex.join(flags)}"
    assert code_of(command, False, monkeypatch) == 0, f"{command}\n{capfd.readouterr().err[-2000:]}"


def test_what_is_not_tried_is_there() -> None:
    """A reason that nothing has is out of date."""
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for command in COMMANDS), pattern
    assert len(WHOLE) > 50 and len(FLAGS) > 40
