"""An engine for large models: vLLM in the process of the training."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.guest import Guest
from grpo_lightning.engines.kv_memory import GIB
from grpo_lightning.engines.native import groups_of
from grpo_lightning.engines.philox import philox
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.policy.named_weights import named_weights
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError

CHECK_EVERY = 8
"""Tokens of a completion between two searches for stop strings."""

STRIDE = 2**10
"""Seeds per group: vLLM gives completion i of a request the request's seed + i."""

CPU_CACHE_GIB = 1.0
"""Memory of the key-value cache on a CPU."""

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

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

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        key: RandomKey,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """As `RolloutEngine.generate`."""
        assert self.policy is not None and self._llm is not None, "call sync(policy) first"
        self._check_lengths(requests, sampling)
        stops = StopStrings(self.policy, sampling.stop)
        # Completions that are searched for strings end one by one.
        calls = calls_of(requests, sampling, key, together=not stops.strings)
        completions = _Completions(len(requests), stops, progress or (lambda ended: None))
        try:
            with GUEST.at_home(self._device), torch.compiler.set_stance(self._stance):
                self._run(calls, sampling, completions)
        except BaseException:
            # vLLM would go on with the requests that it has at its next call.
            self.close()
            raise
        return completions.all

    @property
    def _stance(self) -> str:
        """On a CPU vLLM compiles only how it counts likelier tokens: 3 seconds for nothing."""
        return "default" if self._device.type == "cuda" else "force_eager"

    def _check_lengths(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Raises UsageError where vLLM would end completions before `max_new_tokens`."""
        longest = max(len(request.token_ids) for request in requests) + sampling.max_new_tokens
        limit = self._llm.llm_engine.model_config.max_model_len
        if longest > limit:
            raise UsageError(
                f"model.engine.max_model_len={limit}: a prompt with sampling.max_new_tokens={sampling.max_new_tokens} "
                f"has {longest} tokens; raise max_model_len, or max_cache_gib if max_model_len is null, or lower "
                "sampling.max_new_tokens"
            )

    def _run(self, calls: Sequence["Call"], sampling: Sampling, completions: "_Completions") -> None:
        """Lets vLLM draw until every completion has ended."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        piecewise, engine = bool(completions.stops.strings), self._llm.llm_engine
        for index, call in enumerate(calls):
            params = SamplingParams(
                n=len(call.rows),
                seed=call.seed,
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                # The policy's stop tokens, and no other.
                stop_token_ids=sorted(completions.stops.ids),
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,
                output_kind=RequestOutputKind.DELTA if piecewise else RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), tokens_input(call.token_ids), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                rows = calls[int(output.request_id)].rows
                for one in output.outputs:
                    if completions.add(rows[one.index], one.token_ids, one.logprobs.logprobs, one.finish_reason):
                        engine.abort_request([output.request_id])

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


@dataclass(slots=True)
class Call:
    """One request to vLLM. It stands for a group's requests, or for one."""

    token_ids: list[int]
    seed: int | None
    rows: list[list[int]]
    """For each of the request's completions the indices of the requests that it is for."""


def calls_of(requests: Sequence[Request], sampling: Sampling, key: RandomKey, together: bool) -> list[Call]:
    """The requests to vLLM. Greedy decoding draws once per prompt.

    Args:
        requests: What to complete.
        sampling: The distribution to draw from.
        key: Seed of the run and exploration step.
        together: Whether a group may be one request.
    """
    if sampling.greedy:
        return [Call(requests[group[0]].token_ids, None, [list(group)]) for group in groups_of(requests)]
    calls: list[Call] = []
    for row, (request, seed) in enumerate(zip(requests, seeds_of(requests, key), strict=True)):
        last = calls[-1] if calls and together else None
        if (
            last
            and last.seed is not None
            and seed == last.seed + len(last.rows)
            and last.token_ids == request.token_ids
        ):
            last.rows.append([row])
        else:
            calls.append(Call(request.token_ids, seed, [[row]]))
    return calls


def seeds_of(requests: Sequence[Request], key: RandomKey) -> list[int]:
    """A seed below 2^60 per request; those of a group follow one another.

    Of a seed a CPU's generator takes 32 bits: there two prompts in four million share their seeds.
    """
    ids = torch.tensor([(r.position, r.sample // STRIDE, r.prompt_id) for r in requests])
    position, block, prompt = ids.unbind(1)
    mask = 0xFFFFFFFF
    counter = (position, block, prompt & mask, (prompt >> 32) & mask)
    high, low, *_ = philox(counter, (key.seed & mask, key.step & mask))
    groups = ((high & 0x3FFFF) * 2**32 + low).tolist()
    return [group * STRIDE + r.sample % STRIDE for group, r in zip(groups, requests, strict=True)]


def _rank_of(device: torch.device) -> dict[str, str]:
    """What vLLM wants to know of this process: Lightning sets no RANK."""
    return {"RANK": str(ranks.rank()), "LOCAL_RANK": str(device.index or 0)} if ranks.world_size() > 1 else {}


@dataclass
class _Completions:
    """Completions as they grow; stop strings end them."""

    count: int
    stops: StopStrings
    progress: Progress
    found: dict[int, Completion] = field(default_factory=dict)
    drawn: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def add(self, rows: Sequence[int], token_ids: Sequence[int], logp: Sequence[float], reason: str | None) -> bool:
        """Adds tokens to the completion of the requests `rows`. Returns whether they end it and vLLM does not know.

        Args:
            rows: Indices of requests.
            token_ids: The new tokens.
            logp: Their log-probs.
            reason: Why vLLM ended it; None where it goes on.
        """
        ids, logps = self.drawn.setdefault(rows[0], ([], []))
        before = len(ids)
        ids += token_ids
        logps += logp
        if reason is None and not self._ends(ids, before):
            return False
        if reason not in (None, *REASONS):
            raise RuntimeError(f"vLLM ended a completion because of {reason!r}")
        ended = FinishReason.LENGTH if reason is None else REASONS[reason]
        completion = self.stops.cut(Completion(ids, logps, ended))
        for row in rows:
            self.found[row] = completion
        del self.drawn[rows[0]]
        self.progress(len(rows))
        return reason is None

    def _ends(self, ids: list[int], before: int) -> bool:
        """Whether a stop string is in the text; looked for every `CHECK_EVERY` tokens."""
        seen = before // CHECK_EVERY * CHECK_EVERY
        return len(ids) // CHECK_EVERY > before // CHECK_EVERY and self.stops.first_end(ids, seen) is not None

    @property
    def all(self) -> list[Completion]:
        """The completion of each request, in their order."""
        return [self.found[row] for row in range(self.count)]
