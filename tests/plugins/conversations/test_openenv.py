"""An environment of OpenEnv, as it is installed: a server on loopback."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.paths import environment

from grpo_lightning import OpenEnv, Status, UsageError
from grpo_lightning.plugins.conversations.base import Remote
from grpo_lightning.plugins.conversations.instances import Call, Instances, Limits


def wants(package: str) -> None:
    pytest.importorskip(package, reason=f"the extra {package} is not installed")


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_seeds_of_the_splits_do_not_overlap() -> None:
    wants("openenv")
    task = OpenEnv(num_train=5, num_val=2)
    splits = ("val", "test", "predict", "train")
    seeds = [[one.metadata["seed"] for one in task.questions(split)] for split in splits]  # type: ignore[arg-type]
    assert seeds == [[0, 1], [2, 3], [2, 3], [4, 5, 6, 7, 8]]


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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the library itself, on loopback."""
    wants("openenv")
    script = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, str(script), str(listening.fileno())]
        server = subprocess.Popen(
            command, env=environment(), pass_fds=[listening.fileno()], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.kill()
            server.communicate()


def test_openenv_is_played_by_its_address(url: str) -> None:
    environment = OpenEnv(url, action="word", observation="hint", reset={"ending": "!"})
    question = environment.questions("train")[0]
    assert environment.reset(question) == [{"role": "user", "content": "say word200!"}]
    wrong, right = environment.step(said("no")), environment.step(said("word200!"))
    assert (wrong.reward, wrong.done, wrong.messages[0]["content"]) == (-0.5, False, "turn 1")
    assert (right.reward, right.done, right.messages[0]["content"]) == (1.0, True, "turn 2")
    environment.close()
    whole = OpenEnv(url, action="word")
    assert '"hint": "say word' in whole.reset(question)[0]["content"]
    whole.close()


def test_a_field_that_an_observation_lacks_is_named(url: str) -> None:
    environment = OpenEnv(url, action="word", observation="text")
    with pytest.raises(UsageError, match="the observation has no text: give one of metadata, hint"):
        environment.reset(environment.questions("val")[0])
    environment.close()


def test_a_server_that_is_not_there_costs_the_conversation() -> None:
    wants("openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    instances = Instances(Remote(OpenEnv(gone)), Limits(seconds=30.0))
    try:
        instances.load()
        instances.start({0: 0})
        (outcome,) = instances.call([Call(0, "reset", [{"text": "", "answer": "", "metadata": {"seed": 1}}])])
        assert outcome.status == Status.ERROR and "Failed to connect" in outcome.error
    finally:
        instances.close()
