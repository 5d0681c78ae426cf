"""A stand-in for vLLM, with the same names, the same answers and the same bad manners as vLLM 0.30 on a CPU."""

import copy
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.engines.sampling import Sampling, sample_tokens

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Of a tiny policy: vLLM's attention on a CPU wants heads of 32."""


class RequestOutputKind(Enum):
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    n: int
    seed: int | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    flat_logprobs: bool
    detokenize: bool
    skip_clone: bool
    output_kind: RequestOutputKind

    def __post_init__(self) -> None:
        assert self.n == 1 or self.temperature > 0, "n must be 1 when using greedy sampling"
        assert self.logprobs == 0 and self.flat_logprobs and not self.detokenize and self.ignore_eos

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass
class Child:
    """One completion of a request as it grows."""

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator | None
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def output(self, first: int) -> SimpleNamespace:
        return SimpleNamespace(
            index=self.index,
            token_ids=self.token_ids[first:],
            logprobs=SimpleNamespace(logprobs=self.logp[first:]),
            finish_reason=self.finish_reason,
        )


class Engine:
    """`LLM.llm_engine`: requests are worked off step by step."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.model = model
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.engine_core = SimpleNamespace(shutdown=self.shut_down)
        self.requests: dict[str, list[Child]] = {}
        self.cache: dict[tuple[int, ...], Tensor] = {}
        """Logits after each sequence: what a prefix cache would have computed from old weights."""

    def shut_down(self) -> None:
        torch.accelerator.empty_cache()  # raises on a CPU, but for what vLLM puts there
        self.model = None
        if distributed.is_initialized():
            distributed.destroy_process_group()  # whosever it is

    def add_request(self, request_id: str, prompt: Mapping[str, Any], params: SamplingParams) -> str:
        assert prompt["type"] == "token" and request_id not in self.requests
        self.requests[request_id] = [
            Child(request_id, index, prompt["prompt_token_ids"], params, generator_of(params.seed, index))
            for index in range(params.n)
        ]
        return f"{request_id}-internal"

    def abort_request(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[SimpleNamespace]:
        torch.rand(1)  # drawn and not used
        outputs = []
        for request_id, children in list(self.requests.items()):
            for child in (child for child in children if child.finish_reason is None):
                self.draw(child)
                if child.params.output_kind is RequestOutputKind.DELTA:
                    one = child.output(len(child.token_ids) - 1)
                    outputs.append(SimpleNamespace(request_id=request_id, outputs=[one]))
            if all(child.finish_reason for child in children):
                del self.requests[request_id]
                if children[0].params.output_kind is RequestOutputKind.FINAL_ONLY:
                    outputs.append(SimpleNamespace(request_id=request_id, outputs=[c.output(0) for c in children]))
        return outputs

    @torch.no_grad()
    def draw(self, child: Child) -> None:
        assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")
        assert not torch.are_deterministic_algorithms_enabled()  # its top-p has no deterministic form
        ids = [*child.prompt, *child.token_ids]
        key = tuple(ids)
        if key not in self.cache:
            self.cache[key] = self.model(input_ids=torch.tensor([ids])).logits[:, -1]
        logits = self.cache[key]
        uniform = torch.rand(1, generator=child.generator)
        token, logp = sample_tokens(logits, uniform, child.params.sampling)
        child.token_ids.append(int(token))
        child.logp.append(float(logp))
        if int(token) in child.params.stop_token_ids:
            child.finish_reason = "stop"
        elif len(child.token_ids) == child.params.max_tokens or len(ids) + 1 >= self.model_config.max_model_len:
            child.finish_reason = "length"


def model_of(folder: str, dtype: torch.dtype = torch.float32) -> tuple[Any, int]:
    """A model of the config in a folder, and how many positions it has."""
    config = AutoConfig.from_pretrained(folder)
    # On a CPU vLLM holds the head apart from the embedding that it is tied to.
    config.tie_word_embeddings = False
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), config.max_position_embeddings


def copy_into(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads weights by their names."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights:
        if name not in own:
            raise ValueError(f"There is no module or parameter named {name!r}")
        own[name].data.copy_(weight)


class LLM:
    """vLLM's entrance."""

    started: ClassVar[list["LLM"]] = []
    """Every one that was made in the test."""

    def __init__(self, model: str, dtype: str, max_model_len: int, load_format: str, **settings: Any) -> None:
        assert load_format == "dummy" and settings["skip_tokenizer_init"]
        assert settings["logprobs_mode"] == "processed_logprobs" and settings["generation_config"] == "vllm"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.settings = settings
        self.calls: list[str] = []
        self.rank = os.environ.get("RANK")
        behave_badly()
        self.model, longest = model_of(model, getattr(torch, dtype))
        self.llm_engine = Engine(self.model, longest if max_model_len == -1 else max_model_len)
        LLM.started.append(self)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.model)]

    def collective_rpc(self, method: str, kwargs: Mapping[str, Iterable[tuple[str, Tensor]]]) -> list[None]:
        assert method == "reload_weights"
        self.calls.append(method)
        copy_into(self.model, kwargs["weights_iterator"])
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.llm_engine.cache.clear()
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")


def generator_of(seed: int | None, index: int) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed + index)


def behave_badly() -> None:
    """Does to the process what vLLM does to it."""
    os.fstat(sys.stdout.fileno())  # a notebook's has none
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    os.environ["VLLM_DIST_IDENT"] = "stand-in"
    os.environ["LD_PRELOAD"] = "libgomp.so"
    sys.excepthook = lambda *exception: None
    torch.set_num_threads = lambda count: None
    torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *args: None
    if not distributed.is_initialized():
        file = tempfile.mktemp()
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)


def install(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """Puts the stand-in where `import vllm` finds it."""
    monkeypatch.setattr(LLM, "started", [])
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams},
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": copy.copy(ids)}},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return LLM
