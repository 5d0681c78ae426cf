"""An engine for large models: vLLM on GPUs or nodes of its own, over HTTP."""

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from safetensors import SafetensorError

from grpo_lightning import ranks
from grpo_lightning.engines.base import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.plugins.vllm.http import Server, ServerError, everywhere
from grpo_lightning.plugins.vllm.named_weights import named_weights
from grpo_lightning.plugins.vllm.requests import Drawing, dtype_of
from grpo_lightning.plugins.vllm.weight_transfer import SharedFolder
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request, UsageError, at_least, require

CONNECTIONS = 512  # requests of one rank that wait for answers at once
THREADS = "grpo-vllm"  # how the names of the threads begin that wait for answers
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
        self, urls: Sequence[str], transfer: SharedFolder | None = None, timeout: float = 1800.0, wait: float = 0.0
    ) -> None:
        is_list = bool(urls) and not isinstance(urls, str)
        require(is_list, f"model.engine.urls={urls!r}: give a list of addresses, such as [http://node1:8000]")
        require(timeout > 0, f"model.engine.timeout={timeout}: give more than 0 seconds")
        at_least("model.engine.wait", wait, 0)
        self.urls = list(urls)
        self.transfer = transfer or SharedFolder()
        self.timeout = timeout
        self.wait = wait
        self._servers = [Server(url, timeout) for url in self.urls]
        self._pushed = ""  # the version of the weights that the servers have
        self._max_model_len = 0
        self._names_head = False

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
        while True:
            try:
                server.get("/health")
                break
            except ServerError:
                if time.monotonic() >= self._until:
                    raise
            rank_zero_info(f"waiting for {server.url}")
            time.sleep(1)
        try:
            server.post(GENERATE, {})
        except ServerError as error:
            if error.status == 404:  # Otherwise it is there: it wants more than nothing.
                raise
        try:
            found: Mapping[str, Any] = server.get(SETTINGS)["vllm_config"]
            return {name: found[name] for name in ("model_config", "device_config")}
        except (KeyError, TypeError) as error:
            raise ServerError(f"{server.url}{SETTINGS}: this is no vLLM 0.30") from error

    def _compare(self, server: Server, config: Mapping[str, Any], policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError where a server draws or computes otherwise than `policy` is scored.

        vLLM does not tell the sizes of its model. Another model is noticed when it gets the weights.
        """
        model = config["model_config"]
        limit, actual = int(model["max_model_len"]), str(model["dtype"]).removeprefix("torch.")
        require(
            limit > sampling.max_new_tokens,
            f"model.engine.urls: {server.url} has max_model_len={limit}: no room for a prompt beside "
            f"sampling.max_new_tokens={sampling.max_new_tokens}; start it with a larger --max-model-len",
        )
        fix, mode = f"Start it with: {self._command(policy)}", model["logprobs_mode"]
        problem = f"it computes in {actual}, the policy in {dtype_of(policy)}"
        require(actual == dtype_of(policy), f"model.engine.urls: {server.url}: {problem}. {fix}")
        problem = f"its log-probs are {mode}, those before temperature and filters"
        require(mode == "processed_logprobs", f"model.engine.urls: {server.url}: {problem}. {fix}")

    def _command(self, policy: Policy) -> str:
        """The line that starts a server for `policy`."""
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {policy.path} --tokens-only --dtype {dtype_of(policy)} "
            "--logprobs-mode processed_logprobs"
        )

    def sync(self, policy: Policy) -> None:
        """Gives the servers the policy's weights, while they are paused."""
        weights, dtype = iter(named_weights(policy, self._names_head)), compute_dtype(policy)
        # Matrices go in the type that servers compute in: half the bytes under `bf16-mixed`.
        sent = ((name, one.to(dtype) if one.ndim > 1 and one.is_floating_point() else one) for name, one in weights)
        problem, pushed = "", ""
        if ranks.rank() == 0:
            pushed = f"{secrets.token_hex(4)}-{policy.version}"
            try:
                everywhere(self._servers, lambda server: server.post("/pause?mode=abort"))
                self.transfer.send(self._servers, sent)
                everywhere(self._servers, lambda server: _resume(server, pushed))
            except (RuntimeError, OSError, SafetensorError) as error:
                problem = str(error)
        # Sharded weights are assembled by all ranks together, whatever happened.
        for _ in weights:
            pass
        problem, self._pushed = ranks.gather((problem, pushed))[0]
        if problem and self.policy is not None:
            raise RuntimeError(f"model.engine=VLLMServerEngine: the weights were not handed over: {problem}. {GO_ON}")
        require(
            not problem,
            f"model.engine.urls: the weights were not handed over: {problem}. A server must have the model of "
            f"model.policy.path. Start it with: {self._command(policy)}",
        )
        super().sync(policy)

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None, "call sync(policy) first"
        setting = ("--max-model-len", "start the servers with a larger one")
        drawing = Drawing(requests, sampling, key, self.policy, self._max_model_len, setting)
        # Prompts take turns with the servers, and ranks begin with different ones.
        prompts = [requests[call.rows[0][0]].prompt_id for call in drawing.calls]
        turns = {prompt: turn for turn, prompt in enumerate(dict.fromkeys(prompts), ranks.rank())}
        return self._draw(drawing, [self._servers[turns[one] % len(self._servers)] for one in prompts], sampling)

    def _draw(self, drawing: Drawing, servers: Sequence[Server], sampling: Sampling) -> Drawn:
        """As `generate`."""
        try:
            yield from _run(drawing, servers, sampling)
            for server in set(servers):
                version = server.get("/weight_info")["weight_version"]
                if version != self._pushed:
                    raise ServerError(
                        f"{server.url} has other weights (version {version}, expected {self._pushed}): it was started "
                        "anew, or another run uses it"
                    )
        except ServerError as error:
            raise RuntimeError(f"model.engine=VLLMServerEngine: {error}. {GO_ON}") from error

    def close(self) -> None:
        """Ends the transfer. The servers go on, with the weights that they have."""
        super().close()
        self.transfer.close()


def _resume(server: Server, version: str) -> None:
    """Lets a server draw from its new weights."""
    # It holds keys and values of the weights before.
    if not server.post("/reset_prefix_cache")["success"]:
        raise ServerError(f"{server.url}: its prefix cache cannot be emptied: another run uses it")
    server.post("/update_weight_version", {"new_version": version})
    server.post("/resume")


def _run(drawing: Drawing, servers: Sequence[Server], sampling: Sampling) -> Drawn:
    """Lets the servers draw, and yields completions as they end."""
    calls = drawing.calls
    answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def listen(index: int) -> None:
        if index not in drawing.open:
            return
        call, server = calls[index], servers[index]
        body = {
            "token_ids": call.token_ids,
            "sampling_params": call.parameters(sampling, drawing.stops.ids),
            "stream": drawing.streams,
        }
        try:
            if not drawing.streams:
                answers.put((index, server.post(GENERATE, body)))
                return
            with closing(server.events(GENERATE, body)) as pieces:
                for piece in pieces:
                    answers.put((index, piece))
                    if index not in drawing.open:
                        break
        except Exception as error:
            answers.put((index, error))

    pool = ThreadPoolExecutor(min(len(calls), CONNECTIONS), THREADS)
    try:
        for index in range(len(calls)):
            pool.submit(listen, index)
        while drawing.open:
            index, answer = answers.get()
            if index not in drawing.open:
                continue
            if isinstance(answer, Exception):
                raise answer
            for one in answer["choices"]:
                logp = [entry["logprob"] for entry in one["logprobs"]["content"]]
                yield from drawing.add(index, one["index"], one["token_ids"], logp, one["finish_reason"])
    finally:
        # Whatever is still drawn is not wanted.
        drawing.open.clear()
        with ExitStack() as stack:
            for server in set(servers):
                stack.enter_context(server.hung_up())
            pool.shutdown(cancel_futures=True)
