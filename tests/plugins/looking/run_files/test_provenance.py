"""What made a run, as plain values: without torch, without secrets, and without waiting for git."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.paths import environment
from helpers.waiting import LIMIT

from grpo_lightning.plugins.looking.run_files import provenance
from grpo_lightning.plugins.looking.run_files.provenance import command_line, commit_of, hash_of, read_starts
from grpo_lightning.types import Question, UsageError

TYPED = "/usr/bin/python3 /opt/bin/grpo fit --config run.yaml"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--model.rewards.api_key=abc", "'--model.rewards.api_key=***'"),
        ("--model.rewards.api_key abc --loop.mu 2", "--model.rewards.api_key '***' --loop.mu 2"),
        ("--hf-token abc", "--hf-token '***'"),
        ("--loop.max_tokens 512", "--loop.max_tokens 512"),
        ("--url http://me:abc@host/x", "--url 'http://***@host/x'"),
        ("--model.optimizer.lr -1e-4 --a.b! -o x", "--model.optimizer.lr -1e-4 '--a.b!' -o x"),
    ],
)
def test_a_command_line_shows_no_secrets(options: str, shown: str) -> None:
    assert command_line([*TYPED.split(), *options.split()]) == f"grpo fit --config run.yaml {shown}"


def test_a_secret_inside_an_options_value_is_hidden() -> None:
    reward = '--model.rewards=[{"class_path": "Judge", "init_args": {"api_key": "abc", "model": "m"}}]'
    shown = command_line([*TYPED.split(), reward])
    assert "abc" not in shown
    assert '"model": "m"' in shown
    assert "abc" not in command_line([*TYPED.split(), "--headers", "{Authorization: Bearer abc, a: b}"])


def test_a_command_is_shown_as_it_was_typed() -> None:
    assert command_line(["/usr/bin/python", "-m", "grpo_lightning", "fit"]) == "python -m grpo_lightning fit"
    assert command_line(["python", "scripts/train.py", "two words"]) == "train.py 'two words'"


def test_a_commit_is_that_of_a_clone(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=n@n.example"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT).stdout.strip()

    git("init", "--quiet")
    assert commit_of(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "new").write_text("not part of the clone")
    assert len(commit) == 40
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit}+changes"


def test_an_installed_package_calls_no_git(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (tmp_path / ".git").mkdir()  # of a project with its environment inside
    with patch.object(subprocess, "run") as run:
        assert commit_of(packages) is None
    run.assert_not_called()


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("git"),
        PermissionError("git"),
        subprocess.TimeoutExpired("git", 10),
        subprocess.CalledProcessError(128, "git"),
    ],
)
def test_a_git_that_fails_is_no_error(error: Exception, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    with patch.object(subprocess, "run", side_effect=error) as run:
        assert commit_of(tmp_path) is None
    assert run.call_args.kwargs["timeout"] == provenance.GIT_SECONDS


def test_the_hash_is_of_questions_and_answers_in_their_order() -> None:
    first, second = Question("1+1=", "2"), Question("1+2=", "3")
    hashes = [
        hash_of([first, second]),
        hash_of([second, first]),
        hash_of([first, Question("1+2=", "4")]),
        hash_of([first, Question("1+3=", "3")]),
        hash_of([first]),
    ]
    assert len({*hashes}) == 5
    assert hashes[0] == hash_of([Question("1+1=", "2", source="elsewhere:1"), second])
    assert hashes[0].endswith(" (2 questions)")


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "provenance.yaml").write_text("- {step: 0, torch: 2.9.0}\n")
    code = (
        "import sys; from grpo_lightning.plugins.looking.run_files.provenance import read_starts;"
        f"print(read_starts({str(tmp_path)!r}), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert run.stdout == "[{'step': 0, 'torch': '2.9.0'}] False\n", run.stderr


@pytest.mark.parametrize("text", ["{", "a: 1", "- 1", "\x00"])
def test_a_damaged_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "provenance.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"provenance\.yaml: .*Restore it"):
        read_starts(tmp_path)
    assert provenance.newest_start(tmp_path) == {}
