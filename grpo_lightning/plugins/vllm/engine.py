"""An engine for large models: vLLM in the process of the training."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.base import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.plugins.fast.kv_memory import GIB
from grpo_lightning.plugins.vllm.guest import Guest
from grpo_lightning.plugins.vllm.requests import Call, Completions, calls_of, check_lengths
from grpo_lightning.policy.named_weights import named_weights
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Completion, RandomKey, Request, UsageError

CPU_CACHE_GIB = 1.0
"""Memory of the key-value cache on a CPU."""

GUEST = Guest(
    # In this process, so that weights are handed over as they are.
    {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
)
"""There is one vLLM per process, whatever the number of engines."""


class VLLMEngine(RolloutEngine):
    """Decodes with vLLM in this process, from weights of its own that are renewed after every update.

    For a GPU, and models from about a billion parameters on: vLLM decodes many long completions faster. It needs the
    extra `vllm`. Under DDP and FSDP each rank has an engine. On a GPU vLLM sleeps while the policy learns, and holds no
    memory then. On a CPU it works too, slower than `NativeEngine`: a test of a run before it goes to a GPU.

    The random numbers of a completion depend on the run's seed, the step, its prompt, its index in the group and its
    first position. They are not those of the other engines.

    Args:
        gpu_memory: Fraction of the GPU's memory that vLLM may take while it is awake, weights and cache together.
        max_cache_gib: Memory for the key-value cache. None takes what `gpu_memory` leaves; on a CPU 1 GiB.
        max_model_len: Longest prompt and completion together, in tokens. None takes what the model allows and the
            cache holds.
        options: Further arguments of `vllm.LLM`, such as `{enforce_eager: true}`.
    """

    gathers_weights = True

    gap_causes = (
        "Likely causes: vLLM computes this architecture in another way, or in another precision; a weight that it did "
        "not take (set VLLM_LOGGING_LEVEL=WARNING to see which); the folder in model.policy.path is of another model"
    )

    def __init__(
        self,
        gpu_memory: float = 0.4,
        max_cache_gib: float | None = None,
        max_model_len: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 < gpu_memory <= 1:
            raise UsageError(f"model.engine.gpu_memory={gpu_memory}: give a fraction above 0, at most 1")
        if max_cache_gib is not None and max_cache_gib <= 0:
            raise UsageError(f"model.engine.max_cache_gib={max_cache_gib}: give more than 0, or null")
        if max_model_len is not None and max_model_len < 2:
            raise UsageError(f"model.engine.max_model_len={max_model_len}: give 2 or more, or null")
        self.gpu_memory = gpu_memory
        self.max_cache_gib = max_cache_gib
        self.max_model_len = max_model_len
        self.options = dict(options or {})
        self._llm: Any = None
        self._has_head = False
        self._device = torch.device("cpu")

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError where there is no vLLM, or no room for `max_new_tokens`."""
        if find_spec("vllm") is None:
            raise UsageError(
                "model.engine=VLLMEngine needs vLLM: pip install 'grpo-lightning[vllm]' (docs/vllm.md has the way for "
                "a CPU), or use model.engine=NativeEngine"
            )
        _refuse_segments(policy.device)
        if self.max_model_len is not None and sampling.max_new_tokens >= self.max_model_len:
            raise UsageError(
                f"model.engine.max_model_len={self.max_model_len}: no room for a prompt beside "
                f"sampling.max_new_tokens={sampling.max_new_tokens}; raise it"
            )

    def wake(self) -> None:
        """Takes the memory for the weights; that of the cache is taken once they are there."""
        if self._sleeps:
            torch.cuda.empty_cache()
            with GUEST.at_home(self._device):
                self._llm.wake_up(["weights"])

    def sync(self, policy: Policy) -> None:
        """Starts vLLM the first time; gives it the policy's weights, one tensor at a time."""
        self._device = policy.device
        try:
            with GUEST.at_home(self._device, **_rank_of(self._device)):
                if self._llm is None:
                    self._start(policy)
                self._llm.collective_rpc(
                    "reload_weights", kwargs={"weights_iterator": named_weights(policy, self._has_head)}
                )
                # It holds keys and values of the weights before.
                self._llm.reset_prefix_cache()
                if self._sleeps:
                    self._llm.wake_up(["kv_cache"])
        except BaseException:
            self.close()
            raise
        super().sync(policy)

    def sleep(self) -> None:
        """Drops weights and cache on a GPU; a CPU keeps them."""
        if self._sleeps:
            with GUEST.at_home(self._device):
                self._llm.sleep(level=2)
            self.version = None

    @property
    def _sleeps(self) -> bool:
        """Whether there is a vLLM that can sleep."""
        return self._llm is not None and self._device.type == "cuda"

    def _start(self, policy: Policy) -> None:
        from vllm import LLM

        _refuse_segments(self._device)
        cuda = self._device.type == "cuda"
        cache = self.max_cache_gib or (None if cuda else CPU_CACHE_GIB)
        settings = {
            "model": policy.path,
            "trust_remote_code": policy.trust_remote_code,
            # Every weight comes with the first sync.
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": str(compute_dtype(policy)).removeprefix("torch."),
            # -1 is the longest that fits.
            "max_model_len": self.max_model_len or -1,
            "seed": 0,
            "gpu_memory_utilization": self.gpu_memory,
            "kv_cache_memory_bytes": None if cache is None else int(cache * GIB),
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": cuda,
            # On a CPU, compiling takes longer than it gains.
            "enforce_eager": not cuda,
            "disable_log_stats": True,
        }
        if ranks.world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"
        try:
            self._llm = LLM(**settings | self.options)
        except Exception as error:
            raise UsageError(
                f"model.engine=VLLMEngine: vLLM does not start with {policy.path} ({first_line(error)}); use "
                "model.engine=NativeEngine, or model.engine.options for other arguments of vllm.LLM"
            ) from error
        # A head that is tied to the embedding may be apart in memory; where vLLM has none, it refuses the name.
        (self._has_head,) = self._llm.apply_model(lambda model: hasattr(model, "lm_head"))

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None and self._llm is not None, "call sync(policy) first"
        limit = self._llm.llm_engine.model_config.max_model_len
        fix = "raise max_model_len, or max_cache_gib if max_model_len is null"
        check_lengths(requests, sampling, limit, "model.engine.max_model_len", fix)
        stops = StopStrings(self.policy, sampling.stop)
        # Completions that are searched for strings end one by one.
        calls = calls_of(requests, sampling, key, together=not stops.strings)
        return self._draw(calls, sampling, Completions(stops))

    @torch.no_grad()
    def _draw(self, calls: Sequence[Call], sampling: Sampling, completions: Completions) -> Drawn:
        """As `generate`; whoever closes it early leaves no request in vLLM."""
        open_calls = {str(index): len(call.rows) for index, call in enumerate(calls)}
        try:
            with self._at_home():
                self._ask(calls, sampling, completions)
            while open_calls:
                with self._at_home():
                    ended = self._step(calls, completions, open_calls)
                yield from ended
        except GeneratorExit:
            with self._at_home():
                self._llm.llm_engine.abort_request([*open_calls])
            raise
        except BaseException:
            # vLLM would go on with the requests that it has at its next call.
            self.close()
            raise

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        with GUEST.at_home(self._device), torch.compiler.set_stance(self._stance):
            yield

    @property
    def _stance(self) -> str:
        """On a CPU vLLM compiles only how it counts likelier tokens: 3 seconds for nothing."""
        return "default" if self._device.type == "cuda" else "force_eager"

    def _ask(self, calls: Sequence[Call], sampling: Sampling, completions: Completions) -> None:
        """Gives vLLM its requests."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        piecewise, engine = bool(completions.stops.strings), self._llm.llm_engine
        for index, call in enumerate(calls):
            params = SamplingParams(
                **call.parameters(sampling, completions.stops.ids),
                flat_logprobs=True,
                skip_clone=True,
                output_kind=RequestOutputKind.DELTA if piecewise else RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), tokens_input(call.token_ids), params)

    def _step(
        self, calls: Sequence[Call], completions: Completions, open_calls: dict[str, int]
    ) -> list[tuple[int, Completion]]:
        """Lets vLLM draw until a completion has ended. Takes it off the `open_calls`."""
        engine, ended = self._llm.llm_engine, list[tuple[int, Completion]]()
        while not ended:
            for output in engine.step():
                index, rows = output.request_id, calls[int(output.request_id)].rows
                for one in output.outputs:
                    logp, reason = one.logprobs.logprobs, one.finish_reason
                    completion = completions.add(rows[one.index], one.token_ids, logp, reason)
                    if completion is None:
                        continue
                    ended += [(row, completion) for row in rows[one.index]]
                    open_calls[index] -= 1
                    if not open_calls[index]:
                        del open_calls[index]
                    if reason is None:
                        engine.abort_request([index])
        return ended

    def close(self) -> None:
        """Ends vLLM. May be called twice."""
        super().close()
        if self._llm is None:
            return
        with GUEST.at_home(self._device), GUEST.leaving():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            # What refers to itself would keep the weights.
            gc.collect()


def _refuse_segments(device: torch.device) -> None:
    """Raises UsageError for a setting of torch's memory with which vLLM cannot sleep."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if device.type == "cuda" and "expandable_segments:True" in os.environ.get(name, ""):
            raise UsageError(
                f"{name}={os.environ[name]}: vLLM cannot give back its memory with expandable_segments:True while the "
                "policy learns. Unset it, or use model.engine=VLLMServerEngine"
            )


def _rank_of(device: torch.device) -> dict[str, str]:
    """What vLLM wants to know of this process: Lightning sets no RANK."""
    return {"RANK": str(ranks.rank()), "LOCAL_RANK": str(device.index or 0)} if ranks.world_size() > 1 else {}
