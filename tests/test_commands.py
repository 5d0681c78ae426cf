"""Every command in the README, in CONTRIBUTING.md, in docs/ but docs/start, and in the heads of configurations works.

Those of the how-to pages in a folder that has nothing of the repository, as for a user of the wheel, unless the first
paragraph of the page, the paragraph, or the first line of the block speaks of a clone. All others in a clone after
`make demo`. In each folder in the order of the documents. What is the first of its kind, or makes what others need,
runs; the others go as far as a run, which is all that mistakes in options need. Blocks of `sh` are not tried: they need
a GPU, or packages of others. The commands of docs/start run in tests/plugins/console/start.
"""

import argparse
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from helpers.paths import ROOT
from helpers.waiting import LIMIT

from grpo_lightning import cli
from grpo_lightning.command import overview
from grpo_lightning.packaged import POLICY
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
    r"grpo.*smollm2.*": "needs a package of 93 MB from the network; the tool checks what it has made",
    r"python docs/figures/model_table.py": "has no options",
    r".*gsm8k_qwen2.5_0.5b.yaml.*": "needs a GPU and GSM8K; small in tests/test_gsm8k.py",
    r"torchrun .*": "starts processes; this very line in tests/plugins/console/cluster/test_launched_ranks.py",
    r"(?!grpo plan).*--trainer.devices.*": "starts processes; in tests/plugins/console/cluster/test_sharding.py",
    r"(?!grpo plan).*--trainer.strategy.*": "needs several devices; in tests/plugins/console/cluster/test_sharding.py",
    r".*\$task.*|grpo export runs/warm .*": "needs runs of minutes; small in tests/plugins/sources/demonstrations",
    r".*bench_ahead.*": "needs a server of vLLM",
    r"sbatch .*": "needs SLURM; the script runs in tests/test_slurm_script.py",
    r".*--data.chat true": "needs a model with a chat template",
    r".* (RUN|FILE|DIR|MODEL)\b.*": "has a placeholder",
    r".*bitsandbytes.*": "a package of one's own",
    r"(grpo|grpo-verify)( (fit|validate|test|predict|plan|init|inspect|report|sweep|export|evaluate|judge))?": "a name",
    r"grpo sweep \S+ --workers 2": "makes 12 runs; small in tests/plugins/console/sweep",
    r".*(vllm|VLLMEngine).*": "needs vLLM; in tests/plugins/engines/vllm/test_vllm_runs.py",
    r".*grpo (judge|fit).* judge.yaml.*": "needs a judge; in tests/plugins/rewards/judge/test_judge_reward.py",
    r".*(Wandb|Trackio)Logger.*": "needs the package",
    r".*HubPrompts.*|.*benchmarks.*": "needs the network; small in tests/plugins/data/benchmarks",
}
"""What is not tried, and why."""

ROW = "grpo fit --config grpo_lightning:quickstart --trainer.default_root_dir runs/NAME"
"""What a flag alone, in a table or in the text, belongs to."""

SIZES = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--loop.group_size=2"]
SIZES += ["--loop.prompts_per_step=4", "--data.val_limit=2", "--model.validation.samples=2"]
"""Those of a run. The other commands have the last two, which say how much is validated."""


def texts() -> Iterator[tuple[str, Path, str]]:
    """The blocks and paragraphs of each document, and whether they are for a `clone` or for what is `installed`."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        if document.suffix != ".md":
            text = "\n".join(f"`{line.strip('# ')}`" for line in text.splitlines() if line.startswith("#   "))
        paragraphs = re.findall(r"^```.*?^```$|^[^\n].*?(?=\n\n|\n```|\Z)", text, re.DOTALL | re.MULTILINE)
        for paragraph in paragraphs:
            head = "".join(paragraph.split("\n")[:2]) if paragraph.startswith("```") else paragraph
            is_for_wheel = document.parent.name == "how_to" and "clone" not in paragraphs[1] + head
            yield "installed" if is_for_wheel else "clone", document, paragraph


def commands_in(text: str, document: Path) -> Iterator[str]:
    """Lines of a shell block, and what stands in backquotes, if it begins like a command or a flag."""
    if text.startswith("```"):
        for line in re.sub(r" *\\\n *", " ", text).splitlines()[1:-1] if text.startswith("```bash") else ():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()
        return
    layer = f" --config {document.relative_to(ROOT)}" if document.suffix == ".yaml" else ""
    for span in re.findall(r"`([^`]+)`", text):
        command = " ".join(span.split())
        if re.match(rf"({PROGRAMS}) ", command):
            yield command
        elif re.match(r"--(config|model|loop|data|trainer)[.+\w]* ?\S", command):
            yield f"{ROW}{layer} {command}"


COMMANDS = list(
    dict.fromkeys((place, command) for place, document, text in texts() for command in commands_in(text, document))
)
TRIED = [(place, one) for place, one in COMMANDS if not any(re.fullmatch(pattern, one) for pattern in NOT_RUN)]

BLOCKS = [
    (place, match[1]) for place, _, text in texts() if (match := re.match(r"```yaml\n((?!# \().*)```", text, re.DOTALL))
]
"""Options in the pages. The first line of a block that cannot be read here says why: `# (needs a server)`."""
TRIED += [(place, f"{ROW} --config {number}.yaml --print_config") for number, (place, _) in enumerate(BLOCKS)]


def runs(place: str, command: str) -> bool:
    """Whether it is the first of its subcommand, or makes a folder that others name."""
    others = [one for where, one in TRIED if where == place]
    if not command.startswith("grpo fit"):
        return command == next(one for one in others if one.split()[:2] == command.split()[:2])
    folder = re.search(r"default_root_dir (runs/\w+)", command)
    return (
        folder is not None
        and folder[1] != "runs/NAME"
        and any(re.search(rf"{folder[1]}\b", one) for one in others if one != command)
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders after the quickstart, with the files that the documents tell the reader to write."""
    folder = tmp_path_factory.mktemp("scratch")
    installed = folder / "installed"
    installed.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(installed)
        patch.setattr(sys, "argv", ["grpo"])
        cli.run(["fit", "--config=grpo_lightning:quickstart", "--trainer.enable_progress_bar=false", *SIZES])
        cli.run(["predict", "--config=grpo_lightning:quickstart", *SIZES[-2:]])
    (installed / "mine.yaml").write_text("{trainer: {default_root_dir: runs/mine}}")
    clone = shutil.copytree(installed, folder / "clone")
    shutil.copytree(installed / "runs" / "quickstart", installed / "runs" / "dapo")
    for place, _, text in texts():
        if name := re.match(r'```python\n(?:# |""")(\w+\.py)\b', text):
            (folder / place / name[1]).write_text("\n".join(text.split("\n")[1:-1]))
        if name := re.match(r"```yaml\n# \((\w+\.yaml), which the command reads\)", text):
            (folder / place / name[1]).write_text("\n".join(text.split("\n")[1:-1]))
    for number, (place, block) in enumerate(BLOCKS):
        (folder / place / f"{number}.yaml").write_text(block)
    for name in ("configs", "docs", "tools", "experiments", "examples"):
        (clone / name).symlink_to(ROOT / name)
    (clone / "runs" / "tiny_reward_model").symlink_to(POLICY)
    return folder


@pytest.fixture
def there(scratch: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The place is the working directory. Its modules are found, and of the repository the package alone."""
    monkeypatch.chdir(scratch / place)
    repository = {str(ROOT / name) for name in ("", "tools", "docs/figures")}
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *(path for path in sys.path if path not in repository)])
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
                if sizes == SIZES and "default_root_dir" not in command:
                    sizes = [*SIZES, "--trainer.default_root_dir=runs/unnamed"]
                cli.run([subcommand, *arguments, *sizes])
            case ["cd", folder, "&&", *_]:
                monkeypatch.chdir(folder)
                monkeypatch.syspath_prepend(Path.cwd())
                return code_of(command.partition(" && ")[2], whole, monkeypatch)
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
@pytest.mark.parametrize(("place", "command"), TRIED, ids=lambda text: text[-60:])
def test_a_command_works_as_it_is_written(
    place: str, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = code_of(command.replace("NAME", "own_name"), runs(place, command), monkeypatch)
    # grpo-verify ends with 1 where an answer is wrong, and an untrained policy's are.
    assert code in ({0, 1} if "grpo-verify --jsonl" in command else {0}), capfd.readouterr().err[-2000:]


def test_what_is_not_tried_is_there() -> None:
    """A reason that nothing has is out of date."""
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for _, command in COMMANDS), pattern
    assert len(TRIED) > 130
