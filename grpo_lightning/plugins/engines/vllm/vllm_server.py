"""An engine for large models: vLLM on GPUs or nodes of its own, over HTTP."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from safetensors import SafetensorError

from grpo_lightning import ranks
from grpo_lightning.engines.engine import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.packaged import packaged
from grpo_lightning.plugins.engines.vllm.delivery import fault
from grpo_lightning.plugins.engines.vllm.fleet import GENERATE, Fleet
from grpo_lightning.plugins.engines.vllm.http_client import Server, ServerError, everywhere
from grpo_lightning.plugins.engines.vllm.named_weights import named_weights
from grpo_lightning.plugins.engines.vllm.vllm_requests import Drawing, dtype_of
from grpo_lightning.plugins.engines.vllm.weight_transfer import SharedFolder
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request, UsageError, at_least, require

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0  # in which a server that was lost must answer, to be asked again
SETTINGS = "/server_info?config_format=json"
GO_ON = "Start the server again and continue with --ckpt_path last"


class VLLMServerEngine(RolloutEngine):
    """Decodes with `vllm serve` on other GPUs or nodes, whose weights are renewed after every update.

    Take it where a model does not fit beside the training, or where sampling gets GPUs of its own. The servers are
    plain vLLM: docs/vllm.md has the line that starts one. A prompt goes to the server with most free slots, and its
    group stays there. With several ranks each asks all servers, and rank 0 brings the weights. A server belongs to one
    run. One that dies, hangs or answers nonsense is left out until it comes back: the others draw its part.

    Completions are those of `VLLMEngine` with the same seeds, up to rounding.

    Args:
        urls: The servers, such as `[http://node1:8000, http://node2:8000]`.
        transfer: How the weights reach them. None is `SharedFolder()`.
        timeout: Longest silence of a server in seconds: it must have drawn a group, or read the weights, in this time.
        wait: Seconds to wait at the beginning for servers that are still starting.
        slots: Completions that a server draws at once, its `--max-num-seqs`. Others wait for one that has room.
    """

    draws_elsewhere = renews_midway = gathers_weights = True

    gap_causes = (
        "Likely causes: a server has another model than model.policy.path, or computes this architecture in another "
        "way; a weight that vLLM did not take (the server's log shows which)"
    )

    def __init__(
        self,
        urls: Sequence[str],
        transfer: SharedFolder | None = None,
        timeout: float = 1800.0,
        wait: float = 0.0,
        slots: int = 256,
    ) -> None:
        is_list = bool(urls) and not isinstance(urls, str)
        require(is_list, f"model.engine.urls={urls!r}: give a list of addresses, such as [http://node1:8000]")
        require(timeout > 0, f"model.engine.timeout={timeout}: give more than 0 seconds")
        at_least("model.engine.wait", wait, 0)
        at_least("model.engine.slots", slots, 1)
        self.urls = list(urls)
        self.transfer = transfer or SharedFolder()
        self.timeout = timeout
        self.wait = wait
        self._servers = [Server(url, timeout) for url in self.urls]
        self._fleet = Fleet(self._servers, slots)
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
        self._told = {server.url: told(config) for server, config in zip(self._servers, configs, strict=True)}
        self._max_model_len = min(config["max_model_len"] for config in configs)
        self._names_head = any(config["device"] == "cpu" for config in configs)

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
            model, device = found["model_config"], found["device_config"]["device"]
            return {
                "max_model_len": int(model["max_model_len"]),
                "dtype": str(model["dtype"]).removeprefix("torch."),
                "logprobs_mode": str(model["logprobs_mode"]),
                "device": str(device),
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{server.url}{SETTINGS}: this is no vLLM of a version from 0.30 on") from error

    def _compare(self, server: Server, config: Mapping[str, Any], policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError where a server draws or computes otherwise than `policy` is scored.

        vLLM does not tell the sizes of its model. Another model is noticed when it gets the weights.
        """
        limit, actual = config["max_model_len"], config["dtype"]
        require(
            limit > sampling.max_new_tokens,
            f"model.engine.urls: {server.url} has max_model_len={limit}: no room for a prompt beside "
            f"sampling.max_new_tokens={sampling.max_new_tokens}; start it with a larger --max-model-len",
        )
        fix, mode = f"Start it with: {self._command(policy)}", config["logprobs_mode"]
        require(
            policy.longrope_length is None or limit <= policy.longrope_length,
            f"model.engine.urls: {server.url} has max_model_len={limit}, for which vLLM takes longrope's other "
            f"frequencies, for short sequences too. {fix}",
        )
        problem = f"it computes in {actual}, the policy in {dtype_of(policy)}"
        require(actual == dtype_of(policy), f"model.engine.urls: {server.url}: {problem}. {fix}")
        problem = f"its log-probs are {mode}, those before temperature and filters"
        require(mode == "processed_logprobs", f"model.engine.urls: {server.url}: {problem}. {fix}")

    def _command(self, policy: Policy) -> str:
        """The line that starts a server for `policy`."""
        length = policy.longrope_length
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {packaged(policy.path)} --tokens-only --dtype {dtype_of(policy)} "
            "--logprobs-mode processed_logprobs" + (f" --max-model-len {length}" if length else "")
        )

    def sync(self, policy: Policy) -> None:
        """Gives the servers the policy's weights. The first time it is proved that they arrive."""
        is_first = self.policy is None
        self._push(policy)
        if is_first:
            why = fault(self, policy, partial(self._push, policy), len(self._servers))
            require(not why, f"model.engine.urls: the weights do not arrive: {why}. {self.gap_causes}")

    def _push(self, policy: Policy) -> None:
        """Gives the servers the policy's weights. What they draw at the moment continues with these.

        A server that does not take them is left out until the next time, unless it is the first time.
        """
        weights, dtype = iter(named_weights(policy, self._names_head)), compute_dtype(policy)
        # Matrices go in the type that servers compute in: half the bytes under `bf16-mixed`.
        sent = ((name, one.to(dtype) if one.ndim > 1 and one.is_floating_point() else one) for name, one in weights)
        fleet, failed, problem = self._fleet, dict[Server, Exception](), ""
        pushed = f"{secrets.token_hex(4)}-{policy.version}"

        def bring(ask: Callable[[list[Server]], dict[Server, Exception]]) -> None:
            nonlocal problem
            if ranks.rank() == 0 and not problem:
                try:
                    failed.update(ask([server for server in self._servers if server not in failed]))
                except (RuntimeError, OSError, SafetensorError) as error:
                    problem = str(error)
                if failed and (self.policy is None or len(failed) == len(self._servers)):
                    problem = problem or str(next(iter(failed.values())))

        fleet.hold()
        try:
            bring(lambda servers: everywhere(servers, self._pause))
            ranks.gather(None)  # all are paused: what was under way has ended
            fleet.drain()
            ranks.gather(None)
            bring(lambda servers: self.transfer.send(servers, sent))
            bring(lambda servers: everywhere(servers, partial(_resume, version=pushed)))
            # Sharded weights are assembled by all ranks together, whatever happened.
            for _ in weights:
                pass
            for server, why in failed.items():
                log.warning("%s is left out until the next weights: %s", server.url, why)
            problem, pushed, lost = ranks.gather((problem, pushed, {server.url for server in failed}))[0]
            problem = problem and f"the weights were not handed over: {problem}. "
            if problem and self.policy is not None:
                raise RuntimeError(f"model.engine=VLLMServerEngine: {problem}{GO_ON}")
            require(
                not problem,
                f"model.engine.urls: {problem}A server must have the model of model.policy.path. Start it with: "
                f"{self._command(policy)}",
            )
            fleet.release([one for one in self._servers if one.url not in lost], policy.version, pushed)
        except BaseException:
            fleet.close()
            raise
        super().sync(policy)

    def _pause(self, server: Server) -> None:
        """Ends what a server draws. One that was lost is asked first if it is there again, and as it was."""
        if server not in self._fleet.live:
            found = told(self._config_of(Server(server.url, PROBE_SECONDS)))
            if found != self._told[server.url]:
                raise ServerError(f"{server.url}: started anew with {found}, before with {self._told[server.url]}")
        server.post("/pause?mode=abort")

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """As `RolloutEngine.generate`. What a lost server was asked for is drawn by the others, with the same keys."""
        assert self.policy is not None, "call sync(policy) first"
        setting = ("--max-model-len", "start the servers with a larger one")
        drawing = Drawing(requests, sampling, key, self.policy, self._max_model_len, setting)
        return self._draw(drawing, sampling, self.policy.text_config.vocab_size)

    def _draw(self, drawing: Drawing, sampling: Sampling, vocabulary: int) -> Drawn:
        try:
            yield from self._fleet.draw(drawing, sampling, vocabulary)
        except ServerError as error:
            raise RuntimeError(f"model.engine=VLLMServerEngine: {error}. {GO_ON}") from error

    def close(self) -> None:
        """Ends what is drawn, and the transfer. The servers go on, with the weights that they have."""
        super().close()
        self._fleet.close()
        self.transfer.close()


def told(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a server's configuration must stay as it was: type, log-probs, and tokens."""
    return tuple(str(config[name]) for name in ("dtype", "logprobs_mode", "max_model_len"))


def _resume(server: Server, version: str) -> None:
    """Lets a server draw from its new weights."""
    # It holds keys and values of the weights before.
    emptied = server.post("/reset_prefix_cache")
    if not isinstance(emptied, dict) or not emptied.get("success"):
        raise ServerError(f"{server.url}: its prefix cache cannot be emptied: another run uses it")
    server.post("/update_weight_version", {"new_version": version})
    server.post("/resume")
