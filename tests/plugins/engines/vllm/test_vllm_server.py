"""VLLMServerEngine on stand-ins for `vllm serve`, and with `-m vllm` on a real one: both keep the same contract."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_serve
from helpers import vllm_server_stand_in, vllm_stand_in
from helpers.command import LETTERS, Grpo, arguments
from helpers.drawing import PROMPTS, EngineContract, draw, gap, interrupt, tokens, update
from helpers.fast import policy_of
from helpers.fitting import scalars
from helpers.programs import programs
from helpers.vllm_server_stand_in import StandIn

from grpo_lightning import Policy, Request, Sampling, SharedFolder, UsageError
from grpo_lightning.plugins.engines.http.http_client import Server
from grpo_lightning.plugins.engines.vllm import vllm_server, weight_transfer
from grpo_lightning.plugins.engines.vllm.fleet import THREADS
from grpo_lightning.plugins.engines.vllm.vllm_server import VLLMServerEngine

FEW = Request.from_prompts(PROMPTS[:2], 2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy whose head is tied to its embedding."""
    path = tmp_path_factory.mktemp("served") / "tied"
    policy_of("qwen2", tie_word_embeddings=True, **vllm_stand_in.SIZES).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["stand-in", pytest.param("vllm", marks=pytest.mark.vllm)])
def urls(request: pytest.FixtureRequest, served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Addresses of two stand-ins, or of one vLLM."""
    if request.param == "stand-in":
        with vllm_server_stand_in.serving(served) as one, vllm_server_stand_in.serving(served) as other:
            yield [one.url, other.url]
    else:
        pytest.importorskip("vllm", reason="no vLLM here: make test-vllm")
        with vllm_serve.serving(served, tmp_path_factory.mktemp("log") / "log.txt") as url:
            yield [url]


def engine_of(urls: Sequence[str], policy: Policy, **arguments: Any) -> VLLMServerEngine:
    engine = VLLMServerEngine(urls, **arguments)
    engine.check(policy, Sampling(24))
    return engine


@pytest.fixture
def engine(urls: list[str], policy: Policy) -> Iterator[VLLMServerEngine]:
    engine = engine_of(urls, policy)
    yield engine
    engine.close()


@pytest.fixture
def single(server: StandIn, policy: Policy) -> Iterator[VLLMServerEngine]:
    """An engine with one stand-in, which has the weights."""
    engine = engine_of([server.url], policy)
    engine.sync(policy)
    yield engine
    engine.close()


def nothing_is_open(engine: VLLMServerEngine) -> bool:
    """Whether neither threads nor connections wait for answers."""
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    return not waiting and not any(server._open for server in engine._servers)


class TestContract(EngineContract):
    tolerance = 1e-4


def options_of(urls: Sequence[str], folder: str) -> list[str]:
    return [
        "--model.engine=VLLMServerEngine",
        f"--model.engine.urls=[{','.join(urls)}]",
        f"--model.policy.path={folder}",
        LETTERS,
        "--model.sampling.max_new_tokens=6",
        "--model.optimizer.lr=0.003",
        "--loop.group_size=4",
        "--loop.prompts_per_step=4",
        "--model.validation.samples=1",
        "--data.val_limit=2",
    ]


def test_a_run_learns_from_servers(urls: list[str], grpo: Grpo, served: str) -> None:
    options = options_of(urls, served)
    for root, steps, *resume in (["whole", "2"], ["half", "1"], ["half", "2", "--ckpt_path=last"]):
        more = [f"--trainer.default_root_dir={root}", f"--trainer.max_epochs={steps}", *resume]
        grpo.ok("fit", *options, *more)
    whole, half = scalars("whole"), scalars("half")
    assert max(whole["policy/logp_gap"].values()) < 1e-4
    assert whole["reward/mean"] == pytest.approx(half["reward/mean"], abs=1e-5)
    assert len(set(whole["policy/entropy"].values())) == 2


def test_two_sharded_ranks_learn_from_servers_what_one_learns(
    servers: list[StandIn], grpo: Grpo, served: str, tmp_path: Path
) -> None:
    options = [*options_of([server.url for server in servers], served), "--trainer.max_epochs=2"]
    grpo.ok("fit", *options, "--trainer.default_root_dir=one")
    pushes = [len(server.bodies) for server in servers]
    more = ["--trainer.devices=2", "--trainer.strategy=fsdp2", f"--trainer.default_root_dir={tmp_path / 'two'}"]
    with programs({"two": arguments("fit", *options, *more)}, tmp_path) as started:
        assert started["two"].wait() == 0, started["two"].errors[-3000:]
    one, two = scalars("one"), scalars(tmp_path / "two")
    assert max(two["policy/logp_gap"].values()) < 1e-4
    for name in ("reward/mean", "policy/entropy", "val/avg@1"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)
    # Two ranks bring the weights as often as one.
    assert [len(server.bodies) for server in servers] == [2 * count for count in pushes]


def test_a_group_stays_on_one_server_and_all_servers_draw(
    servers: list[StandIn], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of([server.url for server in servers], policy)
    engine.sync(policy)
    for server in servers:
        server.prompts.clear()
        server.seconds_per_token = 0.02  # so that none has ended before all have begun
    draw(engine, policy, length=6)
    draw(engine, policy, length=6, stop=["a"])
    seen = [{tuple(prompt) for prompt in server.prompts} for server in servers]
    assert not seen[0] & seen[1]
    assert [len(prompts) for prompts in seen] == [3, 2]
    assert [len(server.prompts) for server in servers] == [3 + 12, 2 + 8]
    # The next rank begins with the next server.
    monkeypatch.setattr("grpo_lightning.ranks.rank", lambda: 1)
    engine._fleet.release(engine._servers, policy.version, engine._fleet.pushed)
    draw(engine, policy, Request.from_prompts(PROMPTS[:1], 4), length=6)
    assert [len(server.prompts) for server in servers] == [15, 10 + 1]
    engine.close()


def test_weights_come_while_a_server_is_paused_and_leave_no_file(
    server: StandIn, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "FILE_BYTES", 10_000)
    engine = engine_of([server.url], policy, transfer=SharedFolder(str(tmp_path / "shared")))
    engine.sync(policy)
    server.asked.clear()
    server.bodies.clear()
    engine.sync(policy)
    assert server.asked == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    (files,) = server.bodies
    assert len(files) > 3 and files == sorted(files)
    (own,) = (tmp_path / "shared").iterdir()
    assert list(own.iterdir()) == []
    engine.close()
    engine.close()
    assert list((tmp_path / "shared").iterdir()) == []
    assert not engine.has(policy)
    assert gap(policy, PROMPTS[:2], draw(engine, policy, FEW)) < 1e-4
    engine.close()


def test_a_weight_that_is_larger_than_a_file_may_be_has_one_alone() -> None:
    weights = [(name, torch.zeros(size)) for name, size in (("a", 9), ("b", 1), ("c", 1), ("d", 9))]
    found = [[name for name, _ in batch] for batch in weight_transfer.batches(weights, max_bytes=8)]
    assert found == [["a"], ["b", "c"], ["d"]]


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (
            "/health",
            (0, None),
            r"urls: http://127\.0\.0\.1:\d+/health: no answer \(.*\)\. Start it with: VLLM_SERVER_D",
        ),
        ("/health", (503, None), r"urls: http://127\.0\.0\.1:\d+/health: 503"),
        ("/server_info", (404, {"detail": "Not Found"}), r"/server_info.*: 404 Not Found\. Start it with: VLLM_SERVER"),
        ("/inference/v1/generate", (404, {"detail": "Not Found"}), r"generate: 404 Not Found\. .* --tokens-only"),
        ("/server_info", (200, "no JSON of vLLM's"), r"/server_info.*: this is no vLLM of a version from 0\.30 on"),
        ("/server_info", (200, b"<html>login"), r"/server_info.*: the answer is no JSON: '<html>login'"),
    ],
)
def test_a_server_that_lacks_something_is_refused_at_setup(
    server: StandIn, policy: Policy, path: str, answer: tuple[int, Any], message: str
) -> None:
    server.refusals[path] = answer
    with pytest.raises(UsageError, match=message):
        VLLMServerEngine([server.url]).check(policy, Sampling(24))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "torch.bfloat16"}, "it computes in bfloat16, the policy in float32. Start it .* --dtype float32"),
        ({"logprobs_mode": "raw_logprobs"}, "its log-probs are raw_logprobs, .* --logprobs-mode processed_logprobs"),
        ({"max_model_len": None}, "this is no vLLM of a version from 0.30 on"),
        ({"max_model_len": 24}, "max_model_len=24: no room for a prompt .*=24; start it with a larger --max-model-len"),
    ],
    ids=str,
)
def test_a_server_with_other_settings_is_refused_at_setup(
    server: StandIn, policy: Policy, setting: dict[str, Any], message: str
) -> None:
    server.config["model_config"].update(setting)
    with pytest.raises(UsageError, match=rf"urls: {server.url}.*{message}"):
        VLLMServerEngine([server.url]).check(policy, Sampling(24))


def test_a_server_beyond_the_length_of_longrope_is_refused(server: StandIn, policy: Policy) -> None:
    policy.config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 32}
    message = "max_model_len=33, for which vLLM takes longrope's other .*--max-model-len 32$"
    server.config["model_config"]["max_model_len"] = 33
    with pytest.raises(UsageError, match=message):
        VLLMServerEngine([server.url]).check(policy, Sampling(24))
    server.config["model_config"]["max_model_len"] = 32
    VLLMServerEngine([server.url]).check(policy, Sampling(24))


def test_it_waits_for_a_server_that_is_starting(
    server: StandIn, policy: Policy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server.refusals["/health"] = (503, None)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            server.refusals.clear()

    monkeypatch.setattr(vllm_server, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: float(len(waited))))
    VLLMServerEngine([server.url], wait=10).check(policy, Sampling(24))
    assert len(waited) == 3
    server.refusals["/health"] = (503, None)
    with pytest.raises(UsageError, match="503"):
        VLLMServerEngine([server.url], wait=10).check(policy, Sampling(24))
    assert len(waited) == 13


def test_a_server_with_another_model_refuses_the_weights(server: StandIn, policy: Policy) -> None:
    engine = engine_of([server.url], policy)
    other = policy_of("qwen2", tie_word_embeddings=True, **vllm_stand_in.SIZES | {"hidden_size": 32})
    with pytest.raises(UsageError, match=r"not handed over: .*/collective_rpc: 500 .* must have the model of model\.p"):
        engine.sync(other)
    assert not engine.has(other)
    engine.sync(policy)
    update(policy)
    server.refusals["/collective_rpc"] = (500, {"error": "out of memory"})
    with pytest.raises(RuntimeError, match=r"not handed over: .* 500 out of memory\. Start .* --ckpt_path last"):
        engine.sync(policy)
    engine.close()


@pytest.mark.parametrize("stop", [[], ["a"]], ids=str)
def test_a_server_that_dies_or_an_interrupt_leaves_nothing_open(
    single: VLLMServerEngine, server: StandIn, policy: Policy, stop: list[str]
) -> None:
    expected = tokens(draw(single, policy, FEW, stop=stop))
    server.refusals["/inference/v1/generate"] = (0, None)
    with pytest.raises(RuntimeError, match=rf"{server.url}/inference.*: no answer \(.*\)\. Start the server again"):
        draw(single, policy, FEW, stop=stop)
    assert nothing_is_open(single)
    server.refusals.clear()
    assert tokens(draw(single, policy, FEW, stop=stop)) == expected
    with pytest.raises(KeyboardInterrupt):
        interrupt(single, FEW, Sampling(24, stop=stop))
    assert nothing_is_open(single)
    assert tokens(draw(single, policy, FEW, stop=stop)) == expected


def test_a_server_that_hangs_is_noticed(single: VLLMServerEngine, server: StandIn, policy: Policy) -> None:
    single._servers[0].timeout = 0.05
    server.delay = 0.5
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s"):
        draw(single, policy, FEW)


def test_what_finds_no_room_is_refused_before_the_run(
    server: StandIn, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * sum(p.numel() for p in policy.parameters())
    folder = tmp_path / "in" / "memory"
    paths: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        paths.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(weight_transfer.shutil, "disk_usage", usage)
    for free in (size, size - 1):
        engine = VLLMServerEngine([server.url], SharedFolder(str(folder)))
        refused = pytest.raises(
            UsageError, match=r"transfer\.folder=.*memory: the weights take .* GiB free.* --shm-size"
        )
        with refused if free < size else nullcontext():
            engine.check(policy, Sampling(24))
    assert paths == [tmp_path, tmp_path]


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/reset_prefix_cache", None, "its prefix cache cannot be emptied"),
        ("/reset_prefix_cache", {"success": False}, "its prefix cache cannot be emptied"),
        (
            "/weight_info",
            {"weight_version": "default"},
            r"other weights \(version default, expected .*-1\): it was start",
        ),
        ("/weight_info", None, r"other weights \(version None"),
        ("/inference/v1/generate", b"<html>", "/inference/v1/generate: the answer is no JSON"),
        ("/inference/v1/generate", {"choices": None}, "/inference/v1/generate: the answer makes no sense"),
    ],
)
def test_an_odd_answer_is_told_with_its_address(
    single: VLLMServerEngine, server: StandIn, policy: Policy, path: str, answer: Any, message: str
) -> None:
    server.refusals[path] = (200, answer)
    update(policy)
    with pytest.raises(RuntimeError, match=rf"{server.url}.*{message}"):
        draw(single, policy, FEW)


def test_a_secure_address_may_have_a_path() -> None:
    server = Server("https://node1/vllm/", 1)
    assert server.url == "https://node1/vllm"
    assert (server._host, server._port, server._path, server._is_secure) == ("node1", None, "/vllm", True)
