"""An engine for large models: vLLM on other GPUs or nodes, over HTTP."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from safetensors import SafetensorError

from grpo_lightning import ranks
from grpo_lightning.engines.engine import Completions, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.packaged import packaged
from grpo_lightning.plugins.engines.http.http_client import Server, ServerError, everywhere
from grpo_lightning.plugins.engines.vllm.delivery import fault
from grpo_lightning.plugins.engines.vllm.fleet import GENERATE, Fleet
from grpo_lightning.plugins.engines.vllm.named_weights import named_weights
from grpo_lightning.plugins.engines.vllm.vllm_requests import Generation, dtype_of
from grpo_lightning.plugins.engines.vllm.weight_transfer import SharedFolder
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request, UsageError, at_least

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Time in which a server that was lost must answer to be used again."""
SETTINGS = "/server_info?config_format=json"
GO_ON = "Start the server again and continue with --ckpt_path last"


class VLLMServerEngine(RolloutEngine):
    """Decodes with `vllm serve` on other GPUs or nodes, whose weights are renewed after every update.

    Use it if a model does not fit beside the training, or if sampling has separate GPUs. The servers are plain vLLM:
    docs/how_to/vllm.md has the line that starts a server. A prompt goes to the server with most free slots, and its
    group stays there. With several ranks, each rank uses all servers, and rank 0 sends the weights. A server belongs to
    one run. A server that dies, hangs or answers nonsense is left out until it comes back; the others take its work.

    Completions equal those of `VLLMEngine` with the same seeds, up to rounding.

    Args:
        urls: Addresses of the servers, such as `[http://node1:8000, http://node2:8000]`.
        transfer: The way of the weights to the servers. None is `SharedFolder()`.
        timeout: Longest silence of a server in seconds. It must sample a group, or read the weights, in this time.
        wait: Seconds to wait at the beginning for servers that are still starting.
        slots: Completions that a server samples at once, its `--max-num-seqs`. Others wait for a server with room.
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
        if not urls or isinstance(urls, str):
            raise UsageError(f"model.engine.urls={urls!r}: give a list of addresses, such as [http://node1:8000]")
        if timeout <= 0:
            raise UsageError(f"model.engine.timeout={timeout}: give more than 0 seconds")
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
        """Raises UsageError if a server does not answer, or was started with other settings."""
        self._until = time.monotonic() + self.wait
        try:
            configs = [self._config_of(server) for server in self._servers]
        except ServerError as error:
            raise UsageError(f"model.engine.urls: {error}. Start it with: {self._command(policy)}") from error
        for server, config in zip(self._servers, configs, strict=True):
            self._compare(server, config, policy, sampling)
        if ranks.rank() == 0:
            self.transfer.check_room(sum(p.numel() for p in policy.parameters()) * compute_dtype(policy).itemsize)
        self._settings_by_url = {
            server.url: fixed_settings(config) for server, config in zip(self._servers, configs, strict=True)
        }
        self._max_model_len = min(config["max_model_len"] for config in configs)
        self._names_head = any(config["device"] == "cpu" for config in configs)

    def _config_of(self, server: Server) -> Mapping[str, Any]:
        """Returns the configuration of a server, once it has started."""
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
            # Any other status is a refusal of the empty request, by a server that can generate.
            if error.status == 404:
                raise
        try:
            config: Mapping[str, Any] = server.get(SETTINGS)["vllm_config"]
            model = config["model_config"]
            return {
                "max_model_len": int(model["max_model_len"]),
                "dtype": str(model["dtype"]).removeprefix("torch."),
                "logprobs_mode": str(model["logprobs_mode"]),
                "device": str(config["device_config"]["device"]),
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{server.url}{SETTINGS}: this is no vLLM of a version from 0.30 on") from error

    def _compare(self, server: Server, config: Mapping[str, Any], policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError if a server samples or computes otherwise than `policy` is scored.

        vLLM does not publish the sizes of its model. Another model is noticed when it gets the weights.
        """
        name = f"model.engine.urls: {server.url}"
        limit = config["max_model_len"]
        if limit <= sampling.max_new_tokens:
            raise UsageError(
                f"{name} has max_model_len={limit}: no room for a prompt beside "
                f"sampling.max_new_tokens={sampling.max_new_tokens}; start it with a larger --max-model-len"
            )
        advice = f"Start it with: {self._command(policy)}"
        if policy.longrope_length is not None and limit > policy.longrope_length:
            raise UsageError(
                f"{name} has max_model_len={limit}, for which vLLM takes longrope's other frequencies, "
                f"for short sequences too. {advice}"
            )
        actual = config["dtype"]
        expected = dtype_of(policy)
        if actual != expected:
            raise UsageError(f"{name}: it computes in {actual}, the policy in {expected}. {advice}")
        mode = config["logprobs_mode"]
        if mode != "processed_logprobs":
            raise UsageError(f"{name}: its log-probs are {mode}, those before temperature and filters. {advice}")

    def _command(self, policy: Policy) -> str:
        """Returns the line that starts a server for `policy`."""
        length = policy.longrope_length
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {packaged(policy.path)} --tokens-only --dtype {dtype_of(policy)} "
            "--logprobs-mode processed_logprobs" + (f" --max-model-len {length}" if length else "")
        )

    def sync(self, policy: Policy) -> None:
        """Gives the servers the policy's weights. The first time it proves that they arrive."""
        is_first = self.policy is None
        self._push(policy)
        if is_first:
            reason = fault(self, policy, partial(self._push, policy), len(self._servers))
            if reason:
                raise UsageError(f"model.engine.urls: the weights do not arrive: {reason}. {self.gap_causes}")

    def _push(self, policy: Policy) -> None:
        """Gives the servers the policy's weights, with which running completions continue.

        A server that does not take them is left out until the next weights, or refused if these are the first.
        """
        fleet = self._fleet
        weights = iter(named_weights(policy, self._names_head))
        # Matrices are sent in the type that servers compute in: half the bytes under `bf16-mixed`.
        dtype = compute_dtype(policy)
        sent = (
            (name, weight.to(dtype) if weight.ndim > 1 and weight.is_floating_point() else weight)
            for name, weight in weights
        )
        failed = dict[Server, Exception]()
        problem = ""
        pushed = f"{secrets.token_hex(4)}-{policy.version}"

        def on_rank_0(act: Callable[[list[Server]], dict[Server, Exception]]) -> None:
            """Acts on the servers that have not failed, unless a problem has ended the transfer."""
            nonlocal problem
            if ranks.rank() == 0 and not problem:
                try:
                    failed.update(act([server for server in self._servers if server not in failed]))
                except (RuntimeError, OSError, SafetensorError) as error:
                    problem = str(error)
                if failed and (self.policy is None or len(failed) == len(self._servers)):
                    problem = problem or str(next(iter(failed.values())))

        fleet.hold()
        try:
            # Running requests end: the pause answers them, and all ranks wait for the answers.
            on_rank_0(lambda servers: everywhere(servers, self._pause))
            ranks.gather(None)
            fleet.drain()
            ranks.gather(None)

            on_rank_0(lambda servers: self.transfer.send(servers, sent))
            on_rank_0(lambda servers: everywhere(servers, partial(_resume, version=pushed)))
            # All ranks assemble sharded weights together, so each must read to the end even after a problem.
            for _ in weights:
                pass

            for server, error in failed.items():
                log.warning("%s is left out until the next weights: %s", server.url, error)
            problem, pushed, lost_urls = ranks.gather((problem, pushed, {server.url for server in failed}))[0]
            if problem and self.policy is not None:
                raise RuntimeError(
                    f"model.engine=VLLMServerEngine: the weights were not handed over: {problem}. {GO_ON}"
                )
            if problem:
                raise UsageError(
                    f"model.engine.urls: the weights were not handed over: {problem}. A server must have the model "
                    f"of model.policy.path. Start it with: {self._command(policy)}"
                )
            live = [server for server in self._servers if server.url not in lost_urls]
            fleet.release(live, policy.version, pushed)
        except BaseException:
            fleet.close()
            raise
        super().sync(policy)

    def _pause(self, server: Server) -> None:
        """Ends the completions of a server. A server that was lost must answer, with the settings that it had."""
        if server not in self._fleet.live:
            actual = fixed_settings(self._config_of(Server(server.url, PROBE_SECONDS)))
            expected = self._settings_by_url[server.url]
            if actual != expected:
                raise ServerError(f"{server.url}: started anew with {actual}, before with {expected}")
        server.post("/pause?mode=abort")

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        """As `RolloutEngine.generate`. If a server is lost, others take its requests, with the same random numbers."""
        assert self.policy is not None, "call sync(policy) first"
        setting = ("--max-model-len", "start the servers with a larger one")
        generation = Generation(requests, sampling, key, self.policy, self._max_model_len, setting)
        return self._decode(generation, sampling, self.policy.text_config.vocab_size)

    def _decode(self, generation: Generation, sampling: Sampling, vocabulary: int) -> Completions:
        try:
            yield from self._fleet.generate(generation, sampling, vocabulary)
        except ServerError as error:
            raise RuntimeError(f"model.engine=VLLMServerEngine: {error}. {GO_ON}") from error

    def close(self) -> None:
        """Ends running completions, and the transfer. The servers stay, with the weights that they have."""
        super().close()
        self._fleet.close()
        self.transfer.close()


def fixed_settings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the settings of a server that must not change: type, log-probs, and most tokens."""
    return tuple(str(config[name]) for name in ("dtype", "logprobs_mode", "max_model_len"))


def _resume(server: Server, version: str) -> None:
    """Lets a server sample from its new weights."""
    # The cache holds keys and values of the old weights.
    reply = server.post("/reset_prefix_cache")
    if not isinstance(reply, dict) or not reply.get("success"):
        raise ServerError(f"{server.url}: its prefix cache cannot be emptied: another run uses it")
    server.post("/update_weight_version", {"new_version": version})
    server.post("/resume")
