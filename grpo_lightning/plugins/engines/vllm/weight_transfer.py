"""Sends the policy's weights to the servers."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from safetensors.torch import save_file
from torch import Tensor

from grpo_lightning.plugins.engines.http.http_client import Server, everywhere
from grpo_lightning.types import UsageError

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder in memory; None if the system has none."""
FILE_BYTES = 2**30
"""Largest number of bytes of a file. Its tensors are copied to the CPU, as many bytes, before it is written."""
Weights = Iterable[tuple[str, Tensor]]
"""Pairs of a weight's name in a checkpoint and its full tensor."""


class SharedFolder:
    """Writes the weights into a folder, from which the servers read them. It works on any machine, also without GPUs.

    vLLM reads the files with `reload_weights`. They are removed as soon as every server has read them. Only rank 0
    calls the methods, while the servers are paused. Derive from this class for another kind of transfer.

    Args:
        folder: A folder that this process and the servers see under the same name; a folder in memory is fastest. None
            is for servers on the same machine: it makes a folder in /dev/shm, or else among temporary files.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._directory: TemporaryDirectory[str] | None = None

    def check_room(self, num_bytes: int) -> None:
        """Raises UsageError if the folder has no room for `num_bytes` bytes of weights."""
        folder = Path(self.folder or MEMORY or gettempdir()).absolute()
        free = shutil.disk_usage(next(path for path in [folder, *folder.parents] if path.exists())).free
        if free < num_bytes:
            raise UsageError(
                f"model.engine.transfer.folder={self.folder or 'null'}: the weights take {num_bytes / 2**30:.3g} GiB, "
                f"and {folder} has {free / 2**30:.3g} GiB free. "
                "Give a folder with more room that the servers see too; "
                "a container has more in /dev/shm with `docker run --shm-size`"
            )

    def send(self, servers: Sequence[Server], weights: Weights) -> dict[Server, Exception]:
        """Sends the weights to the servers, and waits until each has read them or failed.

        Returns:
            The errors of the servers that failed.
        """
        if self._directory is None:
            if self.folder is not None:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            parent = self.folder or MEMORY
            self._directory = TemporaryDirectory(prefix="grpo-weights-", dir=parent, ignore_cleanup_errors=True)
            # Servers may run as another user.
            Path(self._directory.name).chmod(0o755)
        files = []
        try:
            for index, batch in enumerate(batches(weights, FILE_BYTES)):
                files.append(Path(self._directory.name, f"model-{index:05}.safetensors"))
                # `copy=True`, since safetensors refuses tensors that share memory.
                save_file({name: weight.to("cpu", copy=True).contiguous() for name, weight in batch}, files[-1])
            request = {"method": "reload_weights", "kwargs": {"weights_path": self._directory.name}}
            return everywhere(servers, lambda server: server.post("/collective_rpc", request))
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the temporary folder. May be called twice."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def batches(weights: Weights, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the weights in lists of at most `max_bytes` bytes. A weight that is larger is a list by itself."""
    batch: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, weight in weights:
        if batch and num_bytes + weight.nbytes > max_bytes:
            yield batch
            batch = []
            num_bytes = 0
        batch.append((name, weight))
        num_bytes += weight.nbytes
    if batch:
        yield batch
