"""An engine for large models: vLLM in the process of the training."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.engine import Completions, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.engines.native.kv_memory import GIB
from grpo_lightning.plugins.engines.vllm.guest import Guest
from grpo_lightning.plugins.engines.vllm.named_weights import named_weights
from grpo_lightning.plugins.engines.vllm.vllm_requests import Generation, dtype_of
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line, location
from grpo_lightning.types import Completion, RandomKey, Request, UsageError, at_least

CPU_CACHE_GIB = 1.0
"""Memory for the key-value cache on a CPU if `max_cache_gib` is None."""

GUEST = Guest(
    # In this process, so that weights are handed over without a copy.
    {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
)
"""vLLM, of which there is one per process, with any number of engines."""


class VLLMEngine(RolloutEngine):
    """Decodes with vLLM in this process, with a copy of the weights that is renewed after every update.

    Use it on a GPU, with models of about a billion parameters or more: vLLM decodes many long completions faster. It
    needs the extra `vllm`. Under DDP and FSDP each rank has an engine. On a GPU vLLM sleeps while the policy learns,
    and holds no memory then. On a CPU it is slower than `NativeEngine`, and serves to test a run before it goes to a
    GPU.

    The random numbers of a completion depend on the run's seed, the step, its prompt, its index in the group and its
    first position. They differ from the random numbers of the other engines.

    Args:
        gpu_memory: Fraction of the GPU's memory that vLLM may take while it is awake, weights and cache together.
        max_cache_gib: Memory for the key-value cache. None takes the memory that `gpu_memory` leaves; on a CPU 1 GiB.
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
        at_least("model.engine.max_model_len", max_model_len, 2)
        self.gpu_memory = gpu_memory
        self.max_cache_gib = max_cache_gib
        self.max_model_len = max_model_len
        self.options = dict(options or {})
        self._llm: Any = None
        self._has_head = False
        self._device = torch.device("cpu")

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError if vLLM is not installed, or has no room for `max_new_tokens`."""
        if find_spec("vllm") is None:
            raise UsageError(
                "model.engine=VLLMEngine needs vLLM: pip install 'grpo-lightning[vllm]' "
                "(docs/how_to/vllm.md has the way for a CPU), or use model.engine=NativeEngine"
            )
        _check_segments(policy.device)
        if self.max_model_len is None:
            return
        if self.max_model_len <= sampling.max_new_tokens:
            raise UsageError(
                f"model.engine.max_model_len={self.max_model_len}: no room for a prompt beside "
                f"sampling.max_new_tokens={sampling.max_new_tokens}; raise it"
            )
        limit = policy.longrope_length
        if limit is not None and self.max_model_len > limit:
            raise UsageError(
                f"model.engine.max_model_len={self.max_model_len}: give at most {limit}; "
                "with more vLLM takes longrope's other frequencies, for short sequences too"
            )

    def wake(self) -> None:
        """Takes memory for the weights. `sync` takes the memory for the cache, after the weights have come."""
        if self._sleeps:
            torch.cuda.empty_cache()
            with GUEST.at_home(self._device):
                self._llm.wake_up(["weights"])

    def sync(self, policy: Policy) -> None:
        """Gives vLLM the policy's weights, one tensor at a time. Starts vLLM the first time."""
        self._device = policy.device
        # Lightning sets no RANK.
        rank = {"RANK": str(ranks.rank()), "LOCAL_RANK": str(self._device.index or 0)}
        try:
            with GUEST.at_home(self._device, **(rank if ranks.world_size() > 1 else {})):
                if self._llm is None:
                    self._start(policy)
                weights = named_weights(policy, self._has_head)
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                # The cache holds keys and values of the old weights.
                self._llm.reset_prefix_cache()
                if self._sleeps:
                    self._llm.wake_up(["kv_cache"])
        except BaseException:
            self.close()
            raise
        super().sync(policy)

    def sleep(self) -> None:
        """Drops weights and cache on a GPU. A CPU keeps them."""
        if self._sleeps:
            with GUEST.at_home(self._device):
                self._llm.sleep(level=2)
            self.version = None

    @property
    def _sleeps(self) -> bool:
        """True if vLLM runs, and can sleep."""
        return self._llm is not None and self._device.type == "cuda"

    def _start(self, policy: Policy) -> None:
        from vllm import LLM

        _check_segments(self._device)
        is_cuda = self._device.type == "cuda"
        cache_gib = self.max_cache_gib or (None if is_cuda else CPU_CACHE_GIB)
        settings = {
            "model": location(policy.path),
            "trust_remote_code": policy.trust_remote_code,
            "load_format": "dummy",  # every weight comes with the first sync
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": dtype_of(policy),
            "max_model_len": self.max_model_len or policy.longrope_length or -1,  # -1 is the longest that fits
            "seed": 0,
            "gpu_memory_utilization": self.gpu_memory,
            "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * GIB),
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": is_cuda,
            "enforce_eager": not is_cuda,  # on a CPU, compiling takes longer than it gains
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
        # vLLM may have a tied head as a tensor beside the embedding. If it has no head, it refuses the name.
        (self._has_head,) = self._llm.apply_model(lambda model: hasattr(model, "lm_head"))

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        assert self.policy is not None and self._llm is not None, "call sync(policy) first"
        limit = self._llm.llm_engine.model_config.max_model_len
        setting = ("model.engine.max_model_len", "raise max_model_len, or max_cache_gib if max_model_len is null")
        return self._decode(Generation(requests, sampling, key, self.policy, limit, setting), sampling)

    @torch.no_grad()
    def _decode(self, generation: Generation, sampling: Sampling) -> Completions:
        """Yields completions as they end. If it is closed early, no request stays in vLLM."""
        try:
            with self._at_home():
                self._add_requests(generation, sampling)
            while generation.open:
                with self._at_home():
                    completions = self._step(generation)
                yield from completions
        except GeneratorExit:
            with self._at_home():
                self._llm.llm_engine.abort_request([str(index) for index in generation.open])
            raise
        except BaseException:
            # At its next call vLLM would continue the requests that it still has.
            self.close()
            raise

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        # On a CPU vLLM compiles only the count of likelier tokens, which takes 3 seconds and gains nothing.
        stance = "default" if self._device.type == "cuda" else "force_eager"
        with GUEST.at_home(self._device), torch.compiler.set_stance(stance):
            yield

    def _add_requests(self, generation: Generation, sampling: Sampling) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        for index, call in enumerate(generation.calls):
            params = SamplingParams(
                **call.parameters(sampling, generation.stops.ids),
                flat_logprobs=True,
                skip_clone=True,
                output_kind=RequestOutputKind.DELTA if generation.streams else RequestOutputKind.FINAL_ONLY,
            )
            self._llm.llm_engine.add_request(str(index), tokens_input(call.token_ids), params)

    def _step(self, generation: Generation) -> list[tuple[int, Completion]]:
        """Lets vLLM sample until a completion has ended."""
        engine = self._llm.llm_engine
        completions = list[tuple[int, Completion]]()
        while not completions:
            for output in engine.step():
                index = int(output.request_id)
                reason = None
                for piece in output.outputs:
                    reason = piece.finish_reason
                    completions += generation.add(index, piece.index, piece.token_ids, piece.logprobs.logprobs, reason)
                # A stop string has ended the request, which vLLM does not know.
                if reason is None and index not in generation.open:
                    engine.abort_request([output.request_id])
        return completions

    def close(self) -> None:
        super().close()
        if self._llm is not None:
            with GUEST.at_home(self._device), GUEST.leaving():
                self._llm.llm_engine.engine_core.shutdown()
                self._llm = None
                gc.collect()  # reference cycles would keep the weights


def _check_segments(device: torch.device) -> None:
    """Raises UsageError for a setting of torch's memory with which vLLM cannot sleep."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if device.type == "cuda" and "expandable_segments:True" in value:
            raise UsageError(
                f"{name}={value}: vLLM cannot give back its memory with expandable_segments:True "
                "while the policy learns. Unset it, or use model.engine=VLLMServerEngine"
            )
