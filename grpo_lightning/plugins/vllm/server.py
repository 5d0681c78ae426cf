"""An engine for large models: vLLM on GPUs or nodes of its own, over HTTP."""

import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from safetensors import SafetensorError

from grpo_lightning import ranks
from grpo_lightning.engines.base import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.plugins.vllm.http import Server, ServerError, everywhere
from grpo_lightning.plugins.vllm.requests import Call, Completions, calls_of, check_lengths
from grpo_lightning.plugins.vllm.weight_transfer import SharedFolder, Weights, WeightTransfer
from grpo_lightning.policy.named_weights import named_weights
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request, UsageError

CONNECTIONS = 512
"""Requests of one rank that wait for answers at once."""

THREADS = "grpo-vllm"
"""How the names of the threads begin that wait for answers."""

GENERATE = "/inference/v1/generate"

SETTINGS = "/server_info?config_format=json"

GO_ON = "Start the server again and continue with --ckpt_path last"


class VLLMServerEngine(RolloutEngine):
    """Decodes with `vllm serve` on other GPUs or nodes, whose weights are renewed after every update.

    Take it where a model does not fit beside the training, or where sampling gets GPUs of its own. The servers are
    plain vLLM: docs/vllm.md has the line that starts one. Prompts are distributed over the servers, and a group stays
    on one. With several ranks each asks all servers, and rank 0 brings the weights. A server belongs to one run.

    Completions are those of `VLLMEngine` with the same seeds, up to rounding.

    Args:
        urls: The servers, such as `[http://node1:8000, http://node2:8000]`.
        transfer: How the weights reach them. None is `SharedFolder()`.
        timeout: Longest silence of a server in seconds: it must have drawn a group, or read the weights, in this time.
        wait: Seconds to wait at the beginning for servers that are still starting.
    """

    gathers_weights = True

    gap_causes = (
        "Likely causes: a server has another model than model.policy.path, or computes this architecture in another "
        "way; a weight that vLLM did not take (the server's log shows which)"
    )

    def __init__(
        self,
        urls: Sequence[str],
        transfer: WeightTransfer | None = None,
        timeout: float = 1800.0,
        wait: float = 0.0,
    ) -> None:
        if isinstance(urls, str) or not urls:
            raise UsageError(f"model.engine.urls={urls!r}: give a list of addresses, such as [http://node1:8000]")
        if timeout <= 0:
            raise UsageError(f"model.engine.timeout={timeout}: give more than 0 seconds")
        if wait < 0:
            raise UsageError(f"model.engine.wait={wait}: give 0 seconds or more")
        self.urls = list(urls)
        self.transfer = transfer or SharedFolder()
        self.timeout = timeout
        self.wait = wait
        self._servers = [Server(url, timeout) for url in self.urls]
        self._pushed = ""
        self._max_model_len = 0
        self._names_head = False
        self._synced = False

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError where a server does not answer, or was started for something else."""
        self._until = time.monotonic() + self.wait
        try:
            configs = [self._config_of(server) for server in self._servers]
        except ServerError as error:
            raise UsageError(f"model.engine.urls: {error}. Start it with: {self._command(policy)}") from error
        for server, config in zip(self._servers, configs, strict=True):
            self._compare(server, config, policy, sampling)
        if ranks.rank() == 0:
            self.transfer.check_room(sum(p.numel() for p in policy.parameters()) * compute_dtype(policy).itemsize)
        self._max_model_len = min(int(config["model_config"]["max_model_len"]) for config in configs)
        self._names_head = any(str(config["device_config"]["device"]) == "cpu" for config in configs)

    def _config_of(self, server: Server) -> Mapping[str, Any]:
        """The configuration of a server, once it has started."""
        told = False
        while True:
            try:
                server.get("/health")
                break
            except ServerError:
                if time.monotonic() >= self._until:
                    raise
            if not told:
                rank_zero_info(f"waiting for {server.url}")
                told = True
            time.sleep(1)
        try:
            server.post(GENERATE, {})
        except ServerError as error:
            if error.status == 404:
                raise
            # It is there: it wants more than nothing.
        try:
            found: Mapping[str, Any] = server.get(SETTINGS)["vllm_config"]
            if {"model_config", "device_config"} <= found.keys():
                return found
        except (KeyError, TypeError, AttributeError):
            pass
        raise ServerError(f"{server.url}{SETTINGS}: this is no vLLM 0.30")

    def _compare(self, server: Server, config: Mapping[str, Any], policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError where a server draws or computes otherwise than `policy` is scored.

        vLLM does not tell the sizes of its model. Another model is noticed when it gets the weights.
        """
        model = config["model_config"]
        limit, actual = int(model["max_model_len"]), str(model["dtype"]).removeprefix("torch.")
        if limit <= sampling.max_new_tokens:
            raise UsageError(
                f"model.engine.urls: {server.url} has max_model_len={limit}: no room for a prompt beside "
                f"sampling.max_new_tokens={sampling.max_new_tokens}; start it with a larger --max-model-len"
            )
        problem = ""
        if actual != dtype_of(policy):
            problem = f"it computes in {actual}, the policy in {dtype_of(policy)}"
        elif model["logprobs_mode"] != "processed_logprobs":
            problem = f"its log-probs are {model['logprobs_mode']}, those before temperature and filters"
        if problem:
            raise UsageError(f"model.engine.urls: {server.url}: {problem}. Start it with: {self._command(policy)}")

    def _command(self, policy: Policy) -> str:
        """The line that starts a server for `policy`."""
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {policy.path} --tokens-only --dtype {dtype_of(policy)} "
            "--logprobs-mode processed_logprobs"
        )

    def sync(self, policy: Policy) -> None:
        """Gives the servers the policy's weights, while they are paused."""
        weights = iter(named_weights(policy, self._names_head))
        problem, pushed = "", ""
        if ranks.rank() == 0:
            pushed = f"{secrets.token_hex(4)}-{policy.version}"
            try:
                self._push(as_computed(weights, compute_dtype(policy)), pushed)
            except (RuntimeError, OSError, SafetensorError) as error:
                problem = str(error)
        # Sharded weights are assembled by all ranks together, whatever happened.
        for _ in weights:
            pass
        problem, self._pushed = ranks.gather((problem, pushed))[0]
        if problem and self._synced:
            raise RuntimeError(f"model.engine=VLLMServerEngine: the weights were not handed over: {problem}. {GO_ON}")
        if problem:
            raise UsageError(
                f"model.engine.urls: the weights were not handed over: {problem}. A server must have the model of "
                f"model.policy.path. Start it with: {self._command(policy)}"
            )
        self._synced = True
        super().sync(policy)

    def _push(self, weights: Weights, version: str) -> None:
        everywhere(self._servers, lambda server: server.post("/pause?mode=abort"))
        self.transfer.send(self._servers, weights)
        everywhere(self._servers, lambda server: _resume(server, version))

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None, "call sync(policy) first"
        check_lengths(requests, sampling, self._max_model_len, "--max-model-len", "start the servers with a larger one")
        stops = StopStrings(self.policy, sampling.stop)
        # Completions that are searched for strings end one by one.
        calls = calls_of(requests, sampling, key, together=not stops.strings)
        return self._draw(calls, self._servers_of(calls, requests), sampling, Completions(stops))

    def _draw(
        self, calls: Sequence[Call], servers: Sequence[Server], sampling: Sampling, completions: Completions
    ) -> Drawn:
        """As `generate`."""
        try:
            yield from _run(calls, servers, sampling, completions)
            self._check_weights(set(servers))
        except ServerError as error:
            raise RuntimeError(f"model.engine=VLLMServerEngine: {error}. {GO_ON}") from error

    def _servers_of(self, calls: Sequence[Call], requests: Sequence[Request]) -> list[Server]:
        """Who draws each call: prompts take turns, and ranks begin with different servers."""
        turns: dict[int, int] = {}
        for call in calls:
            turns.setdefault(requests[call.rows[0][0]].prompt_id, len(turns))
        turn = (turns[requests[call.rows[0][0]].prompt_id] + ranks.rank() for call in calls)
        return [self._servers[index % len(self._servers)] for index in turn]

    def _check_weights(self, servers: Iterable[Server]) -> None:
        """Raises ServerError where a server was started anew, or got weights from another run."""
        for server in servers:
            version = server.get("/weight_info")["weight_version"]
            if version != self._pushed:
                raise ServerError(
                    f"{server.url} has other weights (version {version}, expected {self._pushed}): it was started "
                    "anew, or another run uses it"
                )

    def close(self) -> None:
        """Ends the transfer. The servers go on, with the weights that they have."""
        super().close()
        self.transfer.close()


def as_computed(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights with their matrices in the type that servers compute in: half the bytes under `bf16-mixed`."""
    for name, weight in weights:
        yield name, weight.to(dtype) if weight.ndim > 1 and weight.is_floating_point() else weight


def _resume(server: Server, version: str) -> None:
    """Lets a server draw from its new weights."""
    # It holds keys and values of the weights before.
    if not server.post("/reset_prefix_cache")["success"]:
        raise ServerError(f"{server.url}: its prefix cache cannot be emptied: another run uses it")
    server.post("/update_weight_version", {"new_version": version})
    server.post("/resume")


def _run(calls: Sequence[Call], servers: Sequence[Server], sampling: Sampling, completions: Completions) -> Drawn:
    """Lets the servers draw, and yields completions as they end."""
    stream = bool(completions.stops.strings)
    answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    over: set[int] = set()
    """Indices of the calls that need no further answer."""

    def listen(index: int) -> None:
        if index in over:
            return
        call, server = calls[index], servers[index]
        body = {
            "token_ids": call.token_ids,
            "sampling_params": call.parameters(sampling, completions.stops.ids),
            "stream": stream,
        }
        try:
            with closing(_pieces(server, body)) as pieces:
                for piece in pieces:
                    answers.put((index, piece))
                    if index in over:
                        break
        except Exception as error:
            answers.put((index, error))

    pool = ThreadPoolExecutor(min(len(calls), CONNECTIONS), THREADS)
    try:
        for index in range(len(calls)):
            pool.submit(listen, index)
        open_calls = {index: len(call.rows) for index, call in enumerate(calls)}
        while open_calls:
            index, answer = answers.get()
            if index in over:
                continue
            if isinstance(answer, Exception):
                raise answer
            for one in answer["choices"]:
                logp = [entry["logprob"] for entry in one["logprobs"]["content"]]
                rows = calls[index].rows[one["index"]]
                completion = completions.add(rows, one["token_ids"], logp, one["finish_reason"])
                if completion is None:
                    continue
                open_calls[index] -= 1
                if not open_calls[index]:
                    del open_calls[index]
                    over.add(index)
                for row in rows:
                    yield row, completion
    finally:
        # Whatever is still drawn is not wanted.
        over.update(range(len(calls)))
        with ExitStack() as stack:
            for server in set(servers):
                stack.enter_context(server.hung_up())
            pool.shutdown(cancel_futures=True)


def _pieces(server: Server, body: Mapping[str, Any]) -> Generator[Any, None, None]:
    """The answer to a request, in pieces if it is to be streamed."""
    if body["stream"]:
        yield from server.events(GENERATE, body)
    else:
        yield server.post(GENERATE, body)


def dtype_of(policy: Policy) -> str:
    """The type that the policy computes in, as vLLM names it."""
    return str(compute_dtype(policy)).removeprefix("torch.")
