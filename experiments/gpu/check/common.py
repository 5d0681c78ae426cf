"""What the stages share: a policy of Qwen2.5-0.5B's shape with random weights, clocks, and a file of results."""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from helpers.tiny import tokenizer  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from grpo_lightning import Fast, Policy  # noqa: E402

IS_CUDA = os.environ.get("TRY", "cuda") == "cuda"
DEVICE = "cuda" if IS_CUDA else "cpu"
STARTED = time.perf_counter()


def note(name: str, **values: Any) -> None:
    """Prints a result, and adds it to the file of results."""
    line = json.dumps({"name": name, **values}, default=str)
    print(line, flush=True)
    with open(os.environ.get("RESULTS", os.devnull), "a") as file:
        file.write(line + "\n")


def seconds_of(function: Callable[[], Any], times: int = 3, warm_up: int = 1) -> float:
    """Median seconds of a call, until the device has done its work."""
    for _ in range(warm_up):
        function()
    return statistics.median(timed(function) for _ in range(times))


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    wait()
    begun = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begun


def wait() -> None:
    """Waits until the device has done its work."""
    if IS_CUDA:
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Most memory held on the GPU so far."""
    return torch.cuda.max_memory_allocated() / 2**30 if IS_CUDA else 0


@contextmanager
def attempt(name: str) -> Iterator[None]:
    """A part that fails is noted, and the others go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        note(name, failed=f"{type(error).__name__}: {first_line}"[:300])
        if IS_CUDA:
            torch.cuda.empty_cache()


def mixed(cache: bool = False) -> torch.autocast:
    """`bf16-mixed` as Lightning opens it: without a cache of casts."""
    return torch.autocast(DEVICE, torch.bfloat16, cache_enabled=cache)


def prefer_cudnn() -> None:
    """Restores what torch 2.11 and later do by themselves on Hopper."""
    torch.backends.cuda.enable_cudnn_sdp(True)


def qwen_policy() -> Policy:
    """A policy of Qwen2.5-0.5B's shape; on a CPU of a small one."""
    large = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    small = {"vocab_size": 512, "hidden_size": 112, "intermediate_size": 96, "num_hidden_layers": 2}
    config = Qwen2Config(
        **(large if IS_CUDA else small),
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config)
    model.tie_weights()
    compute = Fast()
    compute.prepare(model)
    policy = Policy.from_model(model, tokenizer(), compute=compute)
    note(
        "model",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=str(policy.device),
        shares_prefix=compute.shares_prefix,
        attention=model.config._attn_implementation,
    )
    return policy


def note_profile(name: str, function: Callable[[], Any], per: int = 1) -> None:
    """Notes kernels and their milliseconds, divided by `per`, and prints the largest."""
    from torch.profiler import ProfilerActivity, profile

    function()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if IS_CUDA else [])]
    with profile(activities=activities) as profiled:
        function()
        wait()
    events = profiled.key_averages()
    kernels = sum(event.count for event in events if str(event.device_type).endswith("CUDA"))
    note(name, kernels=kernels / per, gpu_ms=sum(event.self_device_time_total for event in events) / 1e3 / per)
    order = "self_cuda_time_total" if IS_CUDA else "self_cpu_time_total"
    print(events.table(sort_by=order, row_limit=25, max_name_column_width=60))
