"""Every command in the README, in CONTRIBUTING.md, in docs/ and in the heads of configurations runs as written.

In one scratch folder, in the order of the documents, after what `make demo` leaves behind. Sizes are added behind a
command, or a whole run would take minutes; nothing in it is changed but NAME.
"""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from helpers.loading import load_tool
from helpers.paths import ROOT
from helpers.waiting import LIMIT

from grpo_lightning import cli
from grpo_lightning.command import overview
from grpo_lightning.rewards.verifier import cli as verify

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "configs").rglob("*.yaml")),
]
PROGRAMS = "grpo|grpo-verify|python|make|tensorboard|pip|source|echo|torchrun|git"

NOT_RUN = {
    r"make .*": "installs into .venv and takes minutes; what `make demo` runs is run here, with small sizes",
    r"(python -m )?pip .*": "needs the network",
    r"git .*": "needs the network",
    r"source .*": "is about the reader's shell",
    r"tensorboard .*": "serves until it is stopped",
    r"python tools/run_experiment.py .*": "a quarter of an hour; small in tests/tools/test_run_experiment.py",
    r"python tools/bench_verifier.py.*": "minutes; small in tests/tools/test_bench_verifier.py",
    r".*smollm2.*": "needs a package of 93 MB from the network; small in tests/tools/test_get_smollm2.py",
    r"python tools/model_table.py.*": "half a minute; its table is tested in tests/policy/test_models.py",
    r"python tools/measure_precision.py.*": "minutes; small in tests/tools/test_measure_precision.py",
    r"python tools/measure_memory.py.*": "minutes; small in tests/tools/test_measure_memory.py",
    r"python tools/attack_verifier.py.*": "minutes; small in tests/rewards/verifier/test_fuzz.py",
    r"python tools/measure_kl.py.*": "minutes; small in tests/tools/test_measure_kl.py",
    r"python tools/plot_objective.py.*": "minutes; small in tests/tools/test_plot_objective.py",
    r"python tools/plot_sick_runs.py.*": "minutes; small in tests/tools/test_plot_sick_runs.py",
    r".*gsm8k_qwen2.5_0.5b.yaml.*": "needs a GPU and GSM8K; small in tests/test_gsm8k.py",
    r"torchrun .*": "starts processes; this very line in tests/command/test_launched_ranks.py",
    r"(?!grpo plan).*--trainer.devices.*": "starts processes; in tests/training/test_sharding.py",
    r"(?!grpo plan).*--trainer.strategy.*": "needs several devices; in tests/training/test_sharding.py",
    r"sbatch .*": "needs SLURM; the script runs in tests/test_slurm_script.py",
    r"python tools/plan_sizes.py.*": "half a minute; its table is tested in tests/tools/test_plan_sizes.py",
    r".*--model.policy.compile true": "minutes of a C++ compiler; in tests/policy/test_policy.py and tests/gpu",
    r".*bitsandbytes.*": "needs a package of one's own; in tests/training/test_eight_bits.py, where it is there",
    r"(grpo|grpo-verify)( fit| validate| test| predict| plan| inspect| report| export|)": "a name, no command",
    r".*(vllm|VLLMEngine).*": "needs vLLM; in tests/engines/test_vllm_runs.py",
    r".*WandbLogger": "needs wandb and an account",
    r".*HubPrompts.*": "needs the network",
    r".*rock_paper_scissors.yaml.*": "needs its package; in tests/tools/test_make_turns_policy.py, where it is there",
    r"python experiments/.*": "minutes; small in tests/tools/test_roofline.py and tests/tools/test_gpu_experiment.py",
    r"python tools/make_turns_policy.py.*": "minutes; small in tests/tools/test_make_turns_policy.py",
    r".*(tools_calculator|guess_number).yaml.*": "need their policy; small in tests/tools/test_make_turns_policy.py",
    r"python tools/screenshots.py.*": "needs Chromium; small in tests/tools/test_screenshots.py",
}
"""What is not run, and why."""

ROW = "grpo fit --config configs/quickstart.yaml --trainer.default_root_dir runs/NAME"
"""What a flag alone, in a table or in the text, belongs to."""

SIZES = {
    "fit": "--trainer.check_val_every_n_epoch 1 --loop.group_size 2 --loop.prompts_per_step 4",
    "validate": "",
    "test": "",
    "predict": "",
    "plan": "",
}
ALL = (
    "--data.val_limit 2 --model.val_samples 2 --trainer.enable_progress_bar false --trainer.enable_model_summary false"
)
TOOLS = {
    "make_reward_model": "--questions 32 --num-passes 1 --max-new-tokens 8",
    "label_segments": "--num-completions 1 --max-new-tokens 4",
    "make_tiny_policy": "--updates 5 --hidden 64 --layers 1",
}
"""Sizes behind the commands."""


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
        return list(dict.fromkeys(commands_in(text)))
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   ")]
    return [
        line if re.match(PROGRAMS, line) else f"{ROW} --config {document.relative_to(ROOT)} {line}" for line in lines
    ]


FIRST_IN = {command: document for document in reversed(DOCUMENTS) for command in commands_of(document)}
CASES = [(document, one) for document in DOCUMENTS for one in commands_of(document) if FIRST_IN[one] == document]


def reason(command: str) -> str | None:
    """Why a command is not run."""
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


def run_tool(name: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.syspath_prepend(ROOT / "tools")
    runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name="__main__")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone after `make demo`, and with the files that the documents tell the reader to write."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "tools", "experiments"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["grpo"])
        tool = load_tool("make_tiny_policy")
        tool.make(folder / "runs" / "tiny_policy", updates=5, hidden=64, layers=1)
        run("grpo fit --config configs/quickstart.yaml", patch)
    for document in DOCUMENTS:
        for code in re.findall(
            r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            if name := re.match(r'(?:# |""")(\w+\.py)\b', code):
                (folder / name[1]).write_text(code)
    (folder / "mine.yaml").write_text("{trainer: {default_root_dir: runs/mine}}")
    return folder


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command, run here, with its sizes behind it."""
    words = shlex.split(command, comments=True)
    match words:
        case ["grpo", *arguments] if (code := overview.answer(arguments)) is not None:
            return code
        case ["grpo", subcommand, *_]:
            sizes = f"{SIZES[subcommand]} {ALL}".split()
            if subcommand == "fit":  # one step, or one step more
                sizes += ["--trainer.max_epochs", "2" if "--ckpt_path" in words else "1"]
            elif "JsonPrompts" not in words:
                sizes += ["--data.task.num_val", "2"]
            only_prints = "--print_config" in words or any(word.endswith(".help") for word in words)
            try:
                cli.run([*words[1:], *([] if only_prints else sizes)])
            except SystemExit as stopped:
                return int(stopped.code or 0)
        case ["grpo-verify", *arguments]:
            return verify.main(arguments)
        case ["python", tool, *arguments] if Path(tool).parent.name == "tools":
            name = Path(tool).stem
            run_tool(name, [*arguments, *TOOLS.get(name, "").split()], monkeypatch)
        case _:
            return subprocess.run(["bash", "-c", command], timeout=LIMIT, check=False).returncode
    return 0


@pytest.mark.parametrize(
    ("document", "command"),
    [pytest.param(*case, id=f"{case[0].name}: {case[1][-60:]}") for case in CASES if reason(case[1]) is None],
)
def test_a_command_runs_as_it_is_written(
    document: Path, command: str, scratch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch)
    monkeypatch.syspath_prepend(scratch)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    threads = torch.get_num_threads()
    try:
        code = run(command.replace("NAME", f"own-{CASES.index((document, command))}"), monkeypatch)
    finally:
        torch.set_num_threads(threads)
    # grpo-verify ends with 1 where an answer is wrong, and an untrained policy's are.
    allowed = {0, 1} if "grpo-verify --jsonl" in command else {0}
    assert code in allowed, f"{document.name}: {command}\n{capfd.readouterr().err[-2000:]}"


def test_what_is_not_run_is_there() -> None:
    """A reason that nothing has is out of date."""
    for pattern in NOT_RUN:
        if pattern not in (r"(python -m )?pip .*", r"git .*"):
            assert any(re.fullmatch(pattern, command) for _, command in CASES), pattern


def test_the_documents_have_commands() -> None:
    assert len([case for case in CASES if reason(case[1]) is None]) >= 25
