"""Environments of other libraries, as they are installed: games, tasks, and a server on loopback."""

import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.paths import environment

from grpo_lightning import OpenEnv, Question, Status, TextArena, UsageError
from grpo_lightning.plugins.conversations.adapters import Seeds
from grpo_lightning.plugins.conversations.adapters.opponents import any_move, next_hand
from grpo_lightning.plugins.conversations.base import Remote
from grpo_lightning.plugins.conversations.instances import Call, Instances, Limits


def wants(package: str) -> None:
    pytest.importorskip(package, reason=f"the extra {package} is not installed")


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Counting(Seeds):
    """Nothing but questions."""

    module, extra = "json", "games"

    def reset(self, question: Question) -> list[dict[str, str]]:
        return []

    def step(self, message: dict[str, str]) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_seeds_of_the_splits_do_not_overlap() -> None:
    task = Counting("game", num_train=5, num_val=2)
    seeds = {
        split: [one.metadata["seed"] for one in task.questions(split)] for split in ("val", "test", "predict", "train")
    }  # type: ignore[arg-type]
    assert seeds == {"val": [0, 1], "test": [2, 3], "predict": [2, 3], "train": [4, 5, 6, 7, 8]}
    assert (task.questions("val")[1].text, task.questions("val")[1].source) == ("game, seed 1", "game:1")


def test_a_package_that_lacks_is_named_with_its_extra() -> None:
    class Lacking(Counting):
        module = "no_such_package.client"

    with pytest.raises(UsageError, match=r"no_such_package is not installed: pip install grpo-lightning\[games\]"):
        Lacking("game", 1, 1)


def test_any_move_is_one_that_was_offered_last() -> None:
    told = "Say '[fold]' to fold.\nYour available actions are: '[check]', '[bet]'\nPot: 2"
    random.seed(0)
    assert {any_move(told) for _ in range(20)} == {"[check]", "[bet]"}
    assert any_move("nothing to do") == ""


def test_the_next_hand_follows_from_the_last() -> None:
    told = "You may use one of: '[rock]', '[paper]', or '[scissors]'."
    shown = []
    for _ in range(4):
        shown.append(next_hand(told))
        told = f"Player 1 selects move {shown[-1][1:-1]}.\nRound result: Draw"
    assert shown == ["[rock]", "[paper]", "[scissors]", "[rock]"]


def raising(told: str) -> str:
    """Bets and calls."""
    return "[call]" if "[call]" in told.splitlines()[-1] else "[bet]"


@pytest.fixture
def poker() -> TextArena:
    wants("textarena")
    return TextArena("KuhnPoker-v0", opponent=f"{__name__}.raising", options={"max_rounds": 1})


def test_a_card_game_against_a_script(poker: TextArena) -> None:
    outcomes: dict[str, float] = {}
    for question in poker.questions("train")[:20]:
        (first,) = poker.reset(question)
        told = first["content"]
        assert told.startswith("You are Player 0") and "[bet]" in told.splitlines()[-3], "the opponent has begun"
        assert "[call]" in told.splitlines()[-1]
        card = told.partition("Your card is: '")[2][0]
        turn = poker.step(said("I say [call]"))
        assert turn.done and turn.reward == 0.0
        assert "won by having more chips" in turn.messages[0]["content"]
        outcomes[card] = poker.outcome() if card != "Q" else 0.0
    assert outcomes == {"J": -1.0, "Q": 0.0, "K": 1.0}, "the higher card wins"


def test_folding_loses_and_so_does_a_game_that_has_not_ended(poker: TextArena) -> None:
    poker.reset(poker.questions("val")[0])
    assert poker.outcome() == -1.0
    turn = poker.step(said("no move"))
    assert not turn.done and "invalid move" in turn.messages[0]["content"]
    assert poker.step(said("[fold]")).done and poker.outcome() == -1.0


def test_a_group_has_the_same_deal_and_its_own_chance() -> None:
    wants("textarena")
    game = TextArena("GuessTheNumber-v0", num_players=1)
    question = game.questions("train")[3]
    begins, after = [], []
    for seed in (1, 2):
        random.seed(seed)
        begins.append(game.reset(question))
        after.append(random.random())
        assert after[-1] == random.Random(seed).random(), "the deal leaves the numbers of the conversation as they are"
    assert begins[0] == begins[1]
    assert game.outcome() == 0.0
    while not (turn := game.step(said(f"[{question.metadata.setdefault('guess', 0) + 1}]"))).done:
        question.metadata["guess"] += 1
        if "lower" in turn.messages[0]["content"]:
            pytest.fail("numbers from 1 upwards are never too large")
    assert game.outcome() == 1.0 if question.metadata["guess"] < 9 else game.outcome() < 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "NoSuchGame-v0"}, "NoSuchGame-v0-raw not found"),
        ({"options": {"rounds": 3}}, "unexpected keyword argument 'rounds'"),
        ({"opponent": "no_such_module.play"}, "No module named 'no_such_module'"),
    ],
)
def test_a_game_that_is_none_is_refused(options: dict[str, object], message: str) -> None:
    wants("textarena")
    with pytest.raises(UsageError, match=message):
        TextArena(**options)  # type: ignore[arg-type]


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
    with pytest.raises(ValueError, match="the observation has no text: give one of metadata, hint"):
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
