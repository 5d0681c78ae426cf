"""An engine for large models: vLLM in the process of the training."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.engine import Drawn, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.engines.native.kv_memory import GIB
from grpo_lightning.plugins.engines.vllm.guest import Guest
from grpo_lightning.plugins.engines.vllm.named_weights import named_weights
from grpo_lightning.plugins.engines.vllm.vllm_requests import Drawing, dtype_of
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line, location
from grpo_lightning.types import Completion, RandomKey, Request, UsageError, at_least, require

CPU_CACHE_GIB = 1.0

# There is one vLLM per process, whatever the number of engines.
GUEST = Guest(
    # In this process, so that weights are handed over as they are.
    {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
)


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
        require(0 < gpu_memory <= 1, f"model.engine.gpu_memory={gpu_memory}: give a fraction above 0, at most 1")
        has_cache = max_cache_gib is None or max_cache_gib > 0
        require(has_cache, f"model.engine.max_cache_gib={max_cache_gib}: give more than 0, or null")
        at_least("model.engine.max_model_len", max_model_len, 2)
        self.gpu_memory = gpu_memory
        self.max_cache_gib = max_cache_gib
        self.max_model_len = max_model_len
        self.options = dict(options or {})
        self._llm: Any = None
        self._has_head = False
        self._device = torch.device("cpu")

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError where there is no vLLM, or no room for `max_new_tokens`."""
        require(
            find_spec("vllm") is not None,
            "model.engine=VLLMEngine needs vLLM: pip install 'grpo-lightning[vllm]' (docs/vllm.md has the way for "
            "a CPU), or use model.engine=NativeEngine",
        )
        _check_segments(policy.device)
        require(
            self.max_model_len is None or sampling.max_new_tokens < self.max_model_len,
            f"model.engine.max_model_len={self.max_model_len}: no room for a prompt beside "
            f"sampling.max_new_tokens={sampling.max_new_tokens}; raise it",
        )
        if self.max_model_len is None:
            return
        limit = policy.longrope_length
        require(
            limit is None or self.max_model_len <= limit,
            f"model.engine.max_model_len={self.max_model_len}: give at most {limit}; with more vLLM takes longrope's "
            "other frequencies, for short sequences too",
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
        # Lightning sets no RANK.
        rank = {"RANK": str(ranks.rank()), "LOCAL_RANK": str(self._device.index or 0)}
        try:
            with GUEST.at_home(self._device, **(rank if ranks.world_size() > 1 else {})):
                if self._llm is None:
                    self._start(policy)
                weights = named_weights(policy, self._has_head)
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
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
        """True where there is a vLLM that can sleep."""
        return self._llm is not None and self._device.type == "cuda"

    def _start(self, policy: Policy) -> None:
        from vllm import LLM

        _check_segments(self._device)
        cuda = self._device.type == "cuda"
        cache = self.max_cache_gib or (None if cuda else CPU_CACHE_GIB)
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
            "kv_cache_memory_bytes": None if cache is None else int(cache * GIB),
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": cuda,
            "enforce_eager": not cuda,  # on a CPU, compiling takes longer than it gains
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
        assert self.policy is not None and self._llm is not None, "call sync(policy) first"
        limit = self._llm.llm_engine.model_config.max_model_len
        setting = ("model.engine.max_model_len", "raise max_model_len, or max_cache_gib if max_model_len is null")
        return self._draw(Drawing(requests, sampling, key, self.policy, limit, setting), sampling)

    @torch.no_grad()
    def _draw(self, drawing: Drawing, sampling: Sampling) -> Drawn:
        """As `generate`; whoever closes it early leaves no request in vLLM."""
        try:
            with self._at_home():
                self._ask(drawing, sampling)
            while drawing.open:
                with self._at_home():
                    ended = self._step(drawing)
                yield from ended
        except GeneratorExit:
            with self._at_home():
                self._llm.llm_engine.abort_request([str(index) for index in drawing.open])
            raise
        except BaseException:
            # vLLM would go on with the requests that it has at its next call.
            self.close()
            raise

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        # On a CPU vLLM compiles only how it counts likelier tokens: 3 seconds for nothing.
        stance = "default" if self._device.type == "cuda" else "force_eager"
        with GUEST.at_home(self._device), torch.compiler.set_stance(stance):
            yield

    def _ask(self, drawing: Drawing, sampling: Sampling) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        for index, call in enumerate(drawing.calls):
            params = SamplingParams(
                **call.parameters(sampling, drawing.stops.ids),
                flat_logprobs=True,
                skip_clone=True,
                output_kind=RequestOutputKind.DELTA if drawing.streams else RequestOutputKind.FINAL_ONLY,
            )
            self._llm.llm_engine.add_request(str(index), tokens_input(call.token_ids), params)

    def _step(self, drawing: Drawing) -> list[tuple[int, Completion]]:
        """Lets vLLM draw until a completion has ended."""
        engine, ended = self._llm.llm_engine, list[tuple[int, Completion]]()
        while not ended:
            for output in engine.step():
                index, reason = int(output.request_id), None
                for one in output.outputs:
                    reason = one.finish_reason
                    ended += drawing.add(index, one.index, one.token_ids, one.logprobs.logprobs, reason)
                if reason is None and index not in drawing.open:
                    engine.abort_request([output.request_id])
        return ended

    def close(self) -> None:
        super().close()
        if self._llm is not None:
            with GUEST.at_home(self._device), GUEST.leaving():
                self._llm.llm_engine.engine_core.shutdown()
                self._llm = None
                gc.collect()  # what refers to itself would keep the weights


def _check_segments(device: torch.device) -> None:
    """Raises UsageError for a setting of torch's memory with which vLLM cannot sleep."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        require(
            device.type != "cuda" or "expandable_segments:True" not in value,
            f"{name}={value}: vLLM cannot give back its memory with expandable_segments:True while the policy learns. "
            "Unset it, or use model.engine=VLLMServerEngine",
        )
