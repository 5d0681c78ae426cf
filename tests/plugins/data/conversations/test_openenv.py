"""An environment of OpenEnv, of examples/openenv.py: a server of the library on loopback."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import environment

from grpo_lightning import UsageError

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Word(Action):
    word: str

class Told(Observation):
    hint: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.turns = 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns, self.wanted = 0, f"word{seed}" + kwargs.get("ending", "")
        return Told(hint=f"say {self.wanted}")
    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        right = action.word == self.wanted
        return Told(hint=f"turn {self.turns}", reward=1.0 if right else -0.5, done=right)
    @property
    def state(self):
        return State(step_count=self.turns)

app = create_fastapi_app(Echo, Word, Told, max_concurrent_envs=8)
print("ready", flush=True)
uvicorn.run(app, fd=int(sys.argv[1]), log_level="error")
"""


def test_openenv_is_played_by_its_address(tmp_path: Path) -> None:
    pytest.importorskip("openenv", reason="the extra openenv is not installed")
    from examples.openenv import OpenEnv

    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "server.py", str(listening.fileno())]
        pipes = {"pass_fds": [listening.fileno()], "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes)
        try:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            game = OpenEnv(url, action="word", observation="hint", reset={"ending": "!"}, num_train=5, num_val=2)
            splits = {
                split: [one.metadata["seed"] for one in game.questions(split)] for split in ("val", "test", "train")
            }
            assert splits == {"val": [0, 1], "test": [2, 3], "train": [4, 5, 6, 7, 8]}
            assert game.reset(game.questions("train")[0]) == [{"role": "user", "content": "say word4!"}]
            wrong, right = (game.step({"role": "assistant", "content": word}) for word in ("no", "word4!"))
            assert (wrong.reward, wrong.done, wrong.messages[0]["content"]) == (-0.5, False, "turn 1")
            assert (right.reward, right.done, right.messages[0]["content"]) == (1.0, True, "turn 2")
            game.observation = "text"
            with pytest.raises(UsageError, match="the observation has no text: give one of metadata, hint"):
                game.step({"role": "assistant", "content": "no"})
            game.close()
        finally:
            server.kill()
            server.communicate()
