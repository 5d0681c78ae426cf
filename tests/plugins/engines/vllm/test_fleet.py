"""Servers that die, hang, answer nonsense, come back, or get weights while they draw: no sample is lost or doubled."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drawing import PROMPTS, draw, tokens, update
from helpers.tiny import read_policy
from helpers.vllm_server_stand_in import StandIn
from helpers.waiting import LIMIT

from grpo_lightning import LoRA, Policy, Request, Sampling, UsageError
from grpo_lightning.plugins.engines.http.http_client import Server
from grpo_lightning.plugins.engines.vllm import fleet
from grpo_lightning.plugins.engines.vllm.fleet import Fleet
from grpo_lightning.plugins.engines.vllm.vllm_requests import Generation, seeds_of
from grpo_lightning.plugins.engines.vllm.vllm_server import VLLMServerEngine
from grpo_lightning.types import Completion, RandomKey

REQUESTS = Request.from_prompts(PROMPTS, 3)


@pytest.fixture
def engine(servers: list[StandIn], policy: Policy) -> Iterator[VLLMServerEngine]:
    engine = VLLMServerEngine([server.url for server in servers], timeout=200)
    engine.check(policy, Sampling(24))
    engine.sync(policy)
    yield engine
    engine.close()


def die(server: StandIn) -> None:
    server.refusals["/inference/v1/generate"] = (0, None)


def fail(server: StandIn) -> None:
    server.refusals["/inference/v1/generate"] = (500, {"error": "out of memory"})


def hang(server: StandIn) -> None:
    server.seconds_per_token = 1.0


def lie(change: Callable[[dict[str, Any]], Any]) -> Callable[[StandIn], None]:
    def begin(server: StandIn) -> None:
        def spoil(answer: Any) -> Any:
            change(answer["choices"][-1])
            return answer

        server.spoils = spoil

    return begin


def no_json(server: StandIn) -> None:
    server.spoils = lambda answer: ["<html>", None]


FAULTS = {
    "dies": die,
    "fails": fail,
    "hangs": hang,
    "no choices": no_json,
    "a completion twice": lie(lambda one: one.update(index=0)),
    "no log-probs": lie(lambda one: one["logprobs"]["content"].clear()),
    "not a number": lie(lambda one: one["logprobs"]["content"][0].update(logprob=float("nan"))),
    "no token": lie(lambda one: one["token_ids"].__setitem__(0, 10**6)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_draw_what_a_lost_server_was_asked_for(
    fault: str, servers: list[StandIn], engine: VLLMServerEngine, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(draw(engine, policy, REQUESTS, length=6))
    FAULTS[fault](servers[1])
    if fault == "hangs":
        engine._servers[1].timeout = 0.3
    ended = [*engine.generate(REQUESTS, Sampling(6), RandomKey(0, 0))]
    assert sorted(index for index, _ in ended) == [*range(len(REQUESTS))]
    assert tokens([completion for _, completion in sorted(ended, key=itemgetter(0))]) == expected
    assert [server.url for server in engine._fleet.live] == [servers[0].url]
    assert f"{servers[1].url} is left out until the next weights" in caplog.text
    # The last one ends the run, in one sentence.
    FAULTS[fault](servers[0])
    engine._servers[0].timeout = 0.3
    with pytest.raises(RuntimeError, match=rf"VLLMServerEngine: {servers[0].url}.*continue with --ckpt_path last"):
        draw(engine, policy, REQUESTS, length=6)


def test_what_a_server_had_streamed_when_it_was_lost_is_drawn_anew(
    servers: list[StandIn], engine: VLLMServerEngine, policy: Policy
) -> None:
    expected = tokens(draw(engine, policy, REQUESTS, length=12, stop=["a"]))
    generate = servers[1].generate
    servers[1].generate = lambda body: islice(generate(body), 2)  # type: ignore[method-assign]
    completions = draw(engine, policy, REQUESTS, length=12, stop=["a"])
    assert tokens(completions) == expected and any(one.stop_string for one in completions)
    assert [len(one.versions or []) for one in completions] == [len(ids) for ids in expected]
    assert [server.url for server in engine._fleet.live] == [servers[0].url]


def test_a_completion_that_goes_on_is_drawn_anew_from_where_it_went_on(policy: Policy) -> None:
    generation = Generation(REQUESTS[:1], Sampling(9, stop=["a"]), RandomKey(0, 0), policy, 100, ("", ""))
    generation.add(0, 0, [7, 8], [-1.0, -2.0], None, 0)
    later = generation.carry_on(0, 0)
    generation.add(later, 0, [9], [-3.0], None, 1)
    generation.restart(later)
    ((_, completion),) = generation.add(later, 0, [10], [-4.0], "length", 1)
    assert (completion.token_ids, completion.logp, completion.versions) == ([7, 8, 10], [-1.0, -2.0, -4.0], [0, 0, 1])


def test_the_shortest_context_of_all_servers_counts(
    servers: list[StandIn], engine: VLLMServerEngine, policy: Policy
) -> None:
    servers[1].config["model_config"]["max_model_len"] = 30
    engine.check(policy, Sampling(24))
    with pytest.raises(UsageError, match=r"--max-model-len=30: a prompt with sampling.max_new_tokens=24 has 33"):
        draw(engine, policy, REQUESTS, length=24)


def test_a_server_that_was_lost_comes_back_with_the_next_weights(
    servers: list[StandIn], engine: VLLMServerEngine, policy: Policy
) -> None:
    die(servers[1])
    draw(engine, policy, REQUESTS, length=6)
    servers[1].refusals["/health"] = (503, None)
    update(policy)
    engine.sync(policy)
    assert len(engine._fleet.live) == 1
    servers[1].refusals.clear()
    update(policy)
    expected = tokens(draw(engine, policy, REQUESTS, length=6))
    assert len(engine._fleet.live) == 2
    # It draws from the new weights, as the other does.
    servers[0].prompts.clear()
    die(servers[0])
    assert tokens(draw(engine, policy, REQUESTS, length=6)) == expected


def test_requests_go_where_there_is_room(servers: list[StandIn], engine: VLLMServerEngine, policy: Policy) -> None:
    engine._fleet.slots = 3
    servers[1].seconds_per_token = 0.2
    for server in servers:
        server.prompts.clear()
    draw(engine, policy, REQUESTS, length=3)
    quick, slow = (len(server.prompts) for server in servers)
    assert (quick + slow, slow) == (len(PROMPTS), 1)


def test_a_prompt_stays_on_its_server_until_that_is_full() -> None:
    one, other = Server("http://one", 1), Server("http://other", 1)
    homes: dict[int, Server] = {}
    fleet = Fleet([one, other], slots=4)
    with ExitStack() as stack:
        seats = [stack.enter_context(fleet.seat(size, 7, homes)) for size in (2, 2, 1)]
    assert [server for server, _ in seats] == [one, one, other]


def test_a_server_with_foreign_weights_is_left_out(
    servers: list[StandIn], engine: VLLMServerEngine, policy: Policy
) -> None:
    servers[1].version = "default"
    servers[1].prompts.clear()
    draw(engine, policy, REQUESTS, length=6)
    assert not servers[1].prompts and len(engine._fleet.live) == 1


# Weights while they draw


def test_what_is_being_drawn_continues_with_new_weights(
    servers: list[StandIn], engine: VLLMServerEngine, policy: Policy, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "DRAIN_SECONDS", 0.5)
    for server in servers:
        server.seconds_per_token = 0.03
    found: list[tuple[int, Completion]] = []
    sampling = Sampling(20)
    drawing = threading.Thread(
        target=lambda: found.extend(engine.generate(REQUESTS, sampling, RandomKey(0, 0))), name="drawing"
    )
    first = read_policy(served)
    drawing.start()
    time.sleep(0.5)
    update(policy)
    engine.sync(policy)
    drawing.join(60)
    assert sorted(index for index, _ in found) == [*range(len(REQUESTS))]
    changed = 0
    for index, one in found:
        assert one.versions is not None and len(one.versions) == len(one.token_ids) == len(one.logp or [])
        assert one.versions == sorted(one.versions) and len(one.token_ids) <= 20
        changed += len({*one.versions}) > 1
        ids = torch.tensor([[*REQUESTS[index].token_ids, *one.token_ids]])
        for version, model in ((0, first.model), (policy.version, policy.model)):
            with torch.no_grad():
                logp = model(input_ids=ids).logits.log_softmax(-1)[0, len(REQUESTS[index].token_ids) - 1 : -1]
            own = [logp[row, id] for row, id in enumerate(one.token_ids) if one.versions[row] == version]
            recorded = [p for p, drawn_by in zip(one.logp or [], one.versions, strict=True) if drawn_by == version]
            assert torch.allclose(torch.tensor(own), torch.tensor(recorded), atol=1e-4)
    assert changed > 0


class Aborting(Server):
    """Completions end at once with one token, 7; those of a group because of new weights, which are there by then."""

    def __init__(self, slots: int) -> None:
        super().__init__("http://server", 1)
        self.fleet = Fleet([self], slots)
        self.parameters: list[dict[str, Any]] = []
        self.all_are_here = threading.Barrier(slots, timeout=LIMIT)

    def get(self, path: str) -> Any:
        return {"weight_version": ""}

    def post(self, path: str, body: Any = None, method: str = "POST") -> Any:
        self.parameters.append(body["sampling_params"])
        reason, count = "length", body["sampling_params"]["n"]
        if count > 1:
            reason = "abort"
            self.fleet.release([self], 1, "")
        else:
            self.all_are_here.wait()
        content = {"content": [{"logprob": -1.0}]}
        choice = {"token_ids": [7], "logprobs": content, "finish_reason": reason}
        return {"choices": [choice | {"index": index} for index in range(count)]}


def test_a_continued_completion_has_versions_and_random_numbers_by_token(policy: Policy) -> None:
    server, requests = Aborting(slots=2), Request.from_prompts(PROMPTS[:1], 2)
    generation = Generation(requests, Sampling(5), RandomKey(0, 0), policy, 100, ("", ""))
    completions = dict(server.fleet.generate(generation, Sampling(5), 64))
    assert [(completions[row].token_ids, completions[row].versions) for row in (0, 1)] == [([7, 7], [0, 1])] * 2
    later = [replace(request, position=request.position + 1) for request in requests]
    found = {(one["seed"], one["max_tokens"]) for one in server.parameters[1:]}
    assert found == {(seed, 4) for seed in seeds_of(later, RandomKey(0, 0))}


def test_as_many_completions_go_on_at_once_as_a_server_has_slots(policy: Policy) -> None:
    server = Aborting(slots=24)
    generation = Generation(Request.from_prompts(PROMPTS[:3], 8), Sampling(5), RandomKey(0, 0), policy, 100, ("", ""))
    assert len(generation.calls) == 3
    assert len([*server.fleet.generate(generation, Sampling(5), 64)]) == 24


@pytest.mark.parametrize(("most_files", "expected"), [(1024, 512), (10_000, 601), (resource.RLIM_INFINITY, 601)])
def test_connections_leave_half_of_the_files(most_files: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.resource, "getrlimit", lambda kind: (most_files, most_files))
    assert fleet.num_connections(600) == expected


# Weights that do not arrive


def every_second(server: StandIn) -> None:
    loads = cycle([server.load, lambda path: None])
    server.load = lambda path: next(loads)(path)  # type: ignore[method-assign]


def half(server: StandIn) -> None:
    layer, load = server.model.model.layers[0], server.load
    kept: dict[str, torch.Tensor] = {}

    def keeping(path: Path) -> None:
        load(path)
        if not kept:
            kept.update({name: weight.detach().clone() for name, weight in layer.state_dict().items()})
        layer.load_state_dict(kept)

    server.load = keeping  # type: ignore[method-assign]


@pytest.mark.parametrize("ignores", [every_second, half])
@pytest.mark.parametrize("adapter", [None, LoRA(rank=4)], ids=["whole", "LoRA"])
def test_weights_that_do_not_arrive_are_noticed_before_the_run(
    ignores: Callable[[StandIn], None], adapter: Any, servers: list[StandIn], served: str
) -> None:
    ignores(servers[1])  # one of two
    policy = read_policy(served, adapter=adapter)
    engine = VLLMServerEngine([server.url for server in servers])
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    engine.check(policy, Sampling(24))
    with pytest.raises(UsageError, match="the weights do not arrive: all matrices were scaled by"):
        engine.sync(policy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    engine.close()


def test_an_adapter_that_stays_at_its_base_is_noticed_before_the_run(
    servers: list[StandIn], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = read_policy(served, adapter=LoRA(rank=4))
    engine = VLLMServerEngine([servers[0].url])
    engine.check(policy, Sampling(24))
    engine.sync(policy)
    engine.close()
    monkeypatch.setattr("grpo_lightning.plugins.engines.vllm.named_weights.plus_adapter", lambda weight, layer: weight)
    with pytest.raises(UsageError, match="the weights do not arrive"):
        engine.sync(policy)
    engine.close()
