"""What the machine does at most, measured: products of matrices, and bytes read and copied per second."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from grpo_lightning.plugins.compute.fast.products import product

DATA_SHEETS = {
    "GB200": (2500e12, 80e12, 8.0e12),
    "B200": (2250e12, 75e12, 8.0e12),
    "H200": (989e12, 67e12, 4.8e12),
    "H100 PCIe": (756e12, 51e12, 2.0e12),
    "H100 NVL": (835e12, 60e12, 3.9e12),
    "H100": (989e12, 67e12, 3.35e12),
    "A100-SXM4-80GB": (312e12, 19.5e12, 2.039e12),
    "A100-SXM4-40GB": (312e12, 19.5e12, 1.555e12),
    "A100": (312e12, 19.5e12, 1.935e12),
    "L40S": (362e12, 91.6e12, 0.864e12),
    "RTX 4090": (165.2e12, 82.6e12, 1.008e12),
}
"""By a part of a GPU's name, the first that fits, from NVIDIA's data sheets.

Operations per second of dense products in bfloat16 and in float32, and bytes per second of its memory."""
SECONDS = 1.0
"""How long each measurement is repeated."""
CACHES = 2**28
"""Bytes that fit into no cache."""


now = time.perf_counter
"""The clock of all measurements here; `time.process_time` where other programs run beside one thread."""


def fastest(work: Callable[[], object], seconds: float = SECONDS, device: str = "cpu") -> float:
    """Seconds that `work` takes at best; it runs twice at least, and then for so many seconds."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    best, begun, times = float("inf"), now(), 0
    while times < 2 or now() - begun < seconds:
        wait()
        started = now()
        work()
        wait()
        best, times = min(best, now() - started), times + 1
    return best


def product_rate(
    rows: int,
    inner: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    seconds: float = SECONDS,
    device: str = "cpu",
) -> float:
    """Operations per second of [rows, inner] @ [inner, columns] with torch's threads; torch or oneDNN, the faster."""
    a = torch.rand(rows, inner, dtype=dtype, device=device)
    b = torch.rand(inner, columns, dtype=dtype, device=device)
    ways: list[Callable[[], object]] = [lambda: a @ b]
    if device == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        ways.append(lambda: product(a, b.t()))
    return 2 * rows * inner * columns / min(fastest(way, seconds / len(ways), device) for way in ways)


def read_rate(size: int = CACHES, seconds: float = SECONDS, device: str = "cpu") -> float:
    """Bytes per second of summing `size` bytes: how fast a working set of this size can be read."""
    numbers = torch.ones(max(1, size // 4), device=device)
    return 4 * len(numbers) / fastest(numbers.sum, seconds, device)


def copy_rate(size: int = CACHES, seconds: float = SECONDS, device: str = "cpu") -> float:
    """Bytes per second, read and written together, of copying `size` bytes."""
    source = torch.ones(max(1, size // 4), device=device)
    target = torch.empty_like(source)
    return 8 * len(source) / fastest(lambda: target.copy_(source), seconds, device)


def update_rate(size: int = CACHES, seconds: float = SECONDS, device: str = "cpu") -> float:
    """Bytes per second, read and written together, of adding `size` bytes to as many in place.

    Faster than copying where a processor reads what it is about to write: here that is read anyway.
    """
    change = torch.ones(max(1, size // 4), device=device)
    target = torch.zeros_like(change)
    return 12 * len(change) / fastest(lambda: target.add_(change), seconds, device)


def thin_rate(
    rows: int,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    seconds: float = SECONDS,
    device: str = "cpu",
) -> float:
    """Bytes of weights per second that torch's products with few rows read, in all matrices in turn.

    Args:
        rows: Completions decoded at once.
        shapes: [out, in] of each weight of the model.
        dtype: Type of the products.
        seconds: How long to repeat it.
        device: Of torch.
    """
    weights = [torch.rand(shape, dtype=dtype, device=device) for shape in shapes]
    inputs = [torch.rand(rows, shape[1], dtype=dtype, device=device) for shape in shapes]

    def decode() -> None:
        for row, weight in zip(inputs, weights, strict=True):
            F.linear(row, weight)

    return sum(weight.nbytes for weight in weights) / fastest(decode, seconds, device)


@dataclass(frozen=True)
class Machine:
    """The rates that bound a step."""

    products: float
    """Operations per second of the fastest product."""
    reading: float
    """Bytes per second, of a working set as large as the one in question."""
    copying: float
    """Bytes per second, read and written together, of what fits into no cache."""
    updating: float
    """The same, where what is written was read before."""

    @classmethod
    def measure(cls, dtype: torch.dtype, working_set: int, seconds: float = SECONDS, device: str = "cpu") -> "Machine":
        """The rates of this machine.

        Args:
            dtype: Type of the products.
            working_set: Bytes that decoding reads per position.
            seconds: Of each measurement.
            device: Of torch.
        """
        size, many = (2048, CACHES) if seconds >= SECONDS else (256, 2**20)
        return cls(
            products=product_rate(size, size, size, dtype, seconds, device),
            reading=read_rate(working_set, seconds, device),
            copying=copy_rate(many, seconds, device),
            updating=update_rate(many, seconds, device),
        )
