"""How the policy's weights reach servers that have weights of their own."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from safetensors.torch import save_file
from torch import Tensor

from grpo_lightning.plugins.engines.vllm.http_client import Server, everywhere
from grpo_lightning.types import require

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a folder in memory, where there is one
PART_BYTES = 2**30  # the size of a file; so much memory is needed beside the weights
Weights = Iterable[tuple[str, Tensor]]  # name and whole tensor of each weight, as a checkpoint names them


class SharedFolder:
    """Writes the weights into a folder, from which the servers read them. Works on any machine, also without GPUs.

    vLLM reads them with `reload_weights`. The files are removed as soon as every server has them. Rank 0 alone calls
    this, while the servers are paused. A transfer of another kind is a subclass.

    Args:
        folder: A folder that this process and the servers see under the same name, best one in memory. None makes one
            in /dev/shm, or in the folder for temporary files: for servers on the same machine.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._own: TemporaryDirectory[str] | None = None

    def check_room(self, num_bytes: int) -> None:
        """Raises UsageError where so many bytes of weights find no room on their way."""
        folder = Path(self.folder or MEMORY or gettempdir()).absolute()
        free = shutil.disk_usage(next(path for path in [folder, *folder.parents] if path.exists())).free
        require(
            free >= num_bytes,
            f"model.engine.transfer.folder={self.folder or 'null'}: the weights take {num_bytes / 2**30:.3g} GiB, "
            f"and {folder} has {free / 2**30:.3g} GiB free. Give a folder with more room that the servers see too; "
            "a container has more in /dev/shm with `docker run --shm-size`",
        )

    def send(self, servers: Sequence[Server], weights: Weights) -> dict[Server, Exception]:
        """Gives every server the weights. When it returns they draw from them, but for those that it returns.

        Returns:
            What the servers raised that did not take them.
        """
        if self._own is None:
            if self.folder is not None:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            where = self.folder or MEMORY
            self._own = TemporaryDirectory(prefix="grpo-weights-", dir=where, ignore_cleanup_errors=True)
            # Servers may run as somebody else.
            Path(self._own.name).chmod(0o755)
        files = []
        try:
            for index, part in enumerate(parts(weights, PART_BYTES)):
                files.append(Path(self._own.name, f"model-{index:05}.safetensors"))
                # A copy: tensors of a file may not share memory.
                save_file({name: weight.to("cpu", copy=True).contiguous() for name, weight in part}, files[-1])
            request = {"method": "reload_weights", "kwargs": {"weights_path": self._own.name}}
            return everywhere(servers, lambda server: server.post("/collective_rpc", request))
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes its folder. May be called twice."""
        if self._own is not None:
            self._own.cleanup()
            self._own = None


def parts(weights: Weights, size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights in lists of at most `size` bytes, or of a single one that is larger."""
    part: list[tuple[str, Tensor]] = []
    total = 0
    for name, weight in weights:
        if part and total + weight.nbytes > size:
            yield part
            part, total = [], 0
        part.append((name, weight))
        total += weight.nbytes
    if part:
        yield part
