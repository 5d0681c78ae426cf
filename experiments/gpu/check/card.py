"""Versions, ceilings of the card, the kernel that attention takes, what a new shape costs in it, and if it is right."""

import os
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate

import torch
from common import DEVICE, IS_CUDA, attempt, note, seconds_of, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from varlen_attention import Rows, varlen

from grpo_lightning.plugins.compute.fast.attention import additive, masked

PACKAGES = ("torch", "transformers", "lightning", "trl", "datasets", "peft", "triton", "jsonargparse", "accelerate")
KEY_HEADS, SIZE = 2, 64
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] if IS_CUDA else [SDPBackend.MATH]


def versions() -> None:
    values: dict[str, object] = {"cpus": os.cpu_count(), "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled()}
    for name in PACKAGES:
        with suppress(Exception):
            values[name] = version(name)
    with suppress(Exception):
        values["sdp_order"] = [str(SDPBackend(index)) for index in torch._C._get_sdp_priority_order()]
    if IS_CUDA:
        values |= {
            "gpu": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "free_gib": torch.cuda.mem_get_info()[0] / 2**30,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    note("versions", **values)


def ceilings() -> None:
    count, size = (2**28, 8192) if IS_CUDA else (2**20, 256)
    source = torch.randn(count, device=DEVICE)
    target = torch.empty_like(source)
    note("copy", tb_per_s=8 * count / seconds_of(lambda: target.copy_(source), 10) / 1e12)
    for dtype, tf32 in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
        rate = 2 * size**3 / seconds_of(lambda left=left, right=right: left @ right, 5) / 1e12
        note("product", dtype=str(dtype), tf32=tf32, tflops=rate)
    torch.backends.cuda.matmul.allow_tf32 = False
    small = torch.zeros(8, device=DEVICE)
    launches = seconds_of(lambda: [small.add_(1) for _ in range(2000)])
    note("launch", us_per_kernel=launches / 2000 * 1e6)


def states(rows: int, queries: int, keys: int, grad: bool = False) -> list[Tensor]:
    sizes = (queries, keys, keys)
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": grad}
    return [torch.randn(rows, KEY_HEADS, size, SIZE, **options) for size in sizes]


def mask_of(queries: int, keys: int) -> Tensor:
    return additive(torch.ones(1, 1, queries, keys, dtype=torch.bool, device=DEVICE), torch.bfloat16)


def default_kernels() -> None:
    """Which kernel attention takes by itself, for the package's three kinds of calls."""
    if not IS_CUDA:
        return
    cases = {"decoding, equal prompts": (32, 7, False), "decoding": (32, 7, True), "shared prefix": (8, 700, True)}
    for name, (rows, queries, is_masked) in cases.items():
        mask = mask_of(queries, 300) if is_masked else None
        choice = torch._fused_sdp_choice(*states(rows, queries, 300), attn_mask=mask, dropout_p=0.0, is_causal=False)
        note("default kernel", case=name, takes=str(SDPBackend(choice)))


def new_shapes() -> None:
    """Milliseconds of the first call with a new shape, by kernel, and of the same shape again."""
    kernels = {"cuDNN": [SDPBackend.CUDNN_ATTENTION], "others": OTHERS} if IS_CUDA else {"others": OTHERS}
    torch.backends.cuda.enable_cudnn_sdp(True)
    for kernel, backends in kernels.items():
        for kind, grad in (("decoding", False), ("shared prefix, forward and backward", True)):
            with attempt(f"new shapes: {kernel}, {kind}"), sdpa_kernel(backends):
                first, again = [], []
                for keys in (301, 309, 317, 325):
                    rows, queries = (8, 700) if grad else (256, 7)
                    query, key, value = states(*((rows, queries) if IS_CUDA else (2, 7)), keys, grad)
                    mask = mask_of(query.shape[2], keys)

                    def call(
                        query: Tensor = query, key: Tensor = key, value: Tensor = value, mask: Tensor = mask
                    ) -> None:
                        output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
                        if output.requires_grad:
                            output.sum().backward()

                    first.append(round(1e3 * timed(call), 2))
                    again.append(round(1e3 * timed(call), 2))
                note("new shapes", kernel=kernel, kind=kind, first_ms=first, again_ms=again)
    torch.backends.cuda.enable_cudnn_sdp(False)


def nan_gradient() -> None:
    """Issue 196678 of pytorch: cuDNN's gradient of the queries under a mask, where keys % 128 == 64."""
    length = 704
    torch.backends.cuda.enable_cudnn_sdp(True)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) if IS_CUDA else ():
        with attempt(f"gradient under a mask: {backend}"), sdpa_kernel(backend):
            query, key, value = (0.1 * tensor for tensor in states(1, length, length))
            query = (query - 10).requires_grad_()
            output = scaled_dot_product_attention(
                query, key + 10, value, attn_mask=mask_of(length, length), scale=0.125
            )
            output.sum().backward()
            note("gradient under a mask", kernel=str(backend), is_finite=bool(query.grad.isfinite().all()))
    torch.backends.cuda.enable_cudnn_sdp(False)


def varlen_is_right() -> None:
    """Rows of several lengths in one kernel: aligned to the last key, with few key heads, forward and backward."""
    if not IS_CUDA:
        return
    queries, keys = [5, 17, 9], [5, 40, 9]
    sizes = ((sum(queries), 14), (sum(keys), 2), (sum(keys), 2))
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(count, heads, SIZE, **options) for count, heads in sizes]
    starts = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE) for lengths in (queries, keys)]
    rows = Rows(torch.empty(0), *starts, max(queries), max(keys))
    outputs = []
    for query, key, value in zip(
        *(x.split(n) for x, n in zip(inputs, (queries, keys, keys), strict=True)), strict=True
    ):
        exact = [
            states.float().transpose(0, 1) for states in (query, *(x.repeat_interleave(7, 1) for x in (key, value)))
        ]
        seen = torch.ones(len(query), len(key), dtype=torch.bool, device=DEVICE).tril(len(key) - len(query))
        scores = (exact[0] @ exact[1].mT * SIZE**-0.5).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ exact[2]).transpose(0, 1))
    expected, actual = torch.cat(outputs), varlen(*inputs, rows, None)
    pairs = [(actual, expected)]
    grads = [torch.autograd.grad(output.float().square().sum(), inputs) for output in (actual, expected)]
    pairs += zip(*grads, strict=True)
    errors = [float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs]
    note("varlen is right", relative_errors=errors, is_right=max(errors) < 0.02)


def decoding_kernels() -> None:
    """Attention of one position: slab and mask, against flash with `seqused_k`, which needs no mask and no slice."""
    if not IS_CUDA:
        return
    rows, heads, columns = 256, 14, 464
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    query = torch.randn(rows, heads, SIZE, **options)
    key, value = (torch.randn(rows, columns, KEY_HEADS, SIZE, **options) for _ in range(2))
    used = torch.randint(150, columns, (rows,), device=DEVICE, dtype=torch.int32)
    starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
    slabs = [states.transpose(1, 2).contiguous() for states in (key, value)]
    mask = additive((torch.arange(columns, device=DEVICE) < used[:, None])[:, None, None], torch.bfloat16)

    def flash() -> Tensor:
        flat = key.flatten(0, 1), value.flatten(0, 1), starts, starts * columns, 1, columns, 0.0, False, False
        return torch.ops.aten._flash_attention_forward(query, *flat, seqused_k=used)[0]

    def slab() -> Tensor:
        return masked(query[:, :, None], *slabs, mask)[:, :, 0]

    gap = float((flash().float() - slab().float()).norm() / slab().float().norm())
    ms = {
        name: 1e3 * seconds_of(lambda kernel=kernel: [kernel() for _ in range(24)], 5)
        for name, kernel in (("flash", flash), ("slab", slab))
    }
    note("decoding kernels of 24 layers", relative_error=gap, **ms)


for part in (versions, ceilings, default_kernels, new_shapes, nan_gradient, varlen_is_right, decoding_kernels):
    with attempt(part.__name__):
        part()
