"""How the policy's weights reach servers that have weights of their own."""

import shutil
import socket
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_lightning.engines.vllm_http import Server, everywhere
from grpo_lightning.types import UsageError

Weights = Iterable[tuple[str, Tensor]]
"""Name and whole tensor of each weight, as a checkpoint names them."""


class WeightTransfer(ABC):
    """Brings weights to the servers of `VLLMServerEngine`, while these are paused. Rank 0 alone calls it."""

    options: ClassVar[str] = ""
    """What `vllm serve` must be started with for it."""

    def check(self, server: Server, config: Mapping[str, Any]) -> None:
        """Raises UsageError where the server was not started for it.

        Args:
            server: The server.
            config: Its configuration, as vLLM tells it.
        """

    @abstractmethod
    def send(self, servers: Sequence[Server], weights: Weights) -> None:
        """Gives every server the weights. When it returns they draw from them.

        Raises:
            ServerError: A server does not take them.
        """

    def close(self) -> None:
        """Frees what it holds. May be called twice."""


class SharedFolder(WeightTransfer):
    """Writes the weights into a folder, from which the servers read them. Works on any machine, also without GPUs.

    vLLM reads them with `reload_weights`. The files are removed as soon as every server has them.

    Args:
        folder: A folder that this process and the servers see under the same name, best one in memory. None makes one
            in /dev/shm, or in the folder for temporary files: for servers on the same machine.
        part_gib: Size of a file. So much memory is needed beside the weights.
    """

    def __init__(self, folder: str | None = None, part_gib: float = 1.0) -> None:
        if part_gib <= 0:
            raise UsageError(f"model.engine.transfer.part_gib={part_gib}: give more than 0")
        self.folder = folder
        self.part_gib = part_gib
        self._own: str | None = None

    def send(self, servers: Sequence[Server], weights: Weights) -> None:
        """As `WeightTransfer.send`."""
        if self._own is None:
            if self.folder is not None:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            self._own = tempfile.mkdtemp(prefix="grpo-weights-", dir=self.folder or _memory())
            # Servers may run as somebody else.
            Path(self._own).chmod(0o755)
            # Also after an error.
            self._remove = weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        files = []
        try:
            for index, part in enumerate(parts(weights, int(self.part_gib * 2**30))):
                files.append(Path(self._own, f"model-{index:05}.safetensors"))
                # A copy: tensors of a file may not share memory.
                save_file({name: weight.to("cpu", copy=True).contiguous() for name, weight in part}, files[-1])
            request = {"method": "reload_weights", "kwargs": {"weights_path": self._own}}
            everywhere(servers, lambda server: server.post("/collective_rpc", request))
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes its folder."""
        if self._own is not None:
            self._remove()
            self._own = None


class NCCL(WeightTransfer):
    """Broadcasts the weights from this GPU to those of the servers. **It has never been run**: that needs two GPUs.

    It speaks vLLM's own protocol for it, and needs the extra `vllm` here, too. A server that dies during a broadcast
    leaves this process waiting until NCCL's own timeout.

    Args:
        address: Name or address of this machine, as the servers reach it. None takes the name it has itself.
        port: A free port of this machine. 0 takes any.
        part_gib: Weights that are announced together.
    """

    options = """ --weight-transfer-config '{"backend": "nccl"}'"""

    def __init__(self, address: str | None = None, port: int = 0, part_gib: float = 1.0) -> None:
        if part_gib <= 0:
            raise UsageError(f"model.engine.transfer.part_gib={part_gib}: give more than 0")
        self.address = address
        self.port = port
        self.part_gib = part_gib
        self._group: Any = None

    def check(self, server: Server, config: Mapping[str, Any]) -> None:
        """As `WeightTransfer.check`."""
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if not torch.cuda.is_available():
            raise UsageError("model.engine.transfer=NCCL needs a GPU; use model.engine.transfer=SharedFolder")
        if backend != "nccl":
            raise UsageError(f"model.engine.transfer=NCCL: start {server.url} with{self.options}")

    def send(self, servers: Sequence[Server], weights: Weights) -> None:
        """As `WeightTransfer.send`."""
        with ThreadPoolExecutor(1) as pool:
            if self._group is None:
                self._meet(servers, pool)
            everywhere(servers, lambda server: server.post("/start_weight_update"))
            for part in parts(weights, int(self.part_gib * 2**30)):
                # The servers' answers come when they have all of it.
                answers = pool.submit(everywhere, servers, _Announcement(part))
                for _, weight in part:
                    self._group.broadcast(weight.contiguous(), src=0, stream=torch.cuda.current_stream())
                answers.result()
            everywhere(servers, lambda server: server.post("/finish_weight_update", {}))

    def _meet(self, servers: Sequence[Server], pool: ThreadPoolExecutor) -> None:
        """Makes a group of this process, as rank 0, and all of the servers' workers."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        sizes = [int(server.get("/get_world_size")["world_size"]) for server in servers]
        first_ranks = dict(zip(servers, accumulate(sizes, initial=1), strict=False))
        group = {
            "master_address": self.address or socket.gethostname(),
            "master_port": self.port or free_port(),
            "world_size": 1 + sum(sizes),
        }

        def invite(server: Server) -> None:
            info = {**group, "rank_offset": first_ranks[server], "packed": False}
            server.post("/init_weight_transfer_engine", {"init_info": info})

        answers = pool.submit(everywhere, servers, invite)
        self._group = trainer_init(group)
        answers.result()

    def close(self) -> None:
        """Leaves the group."""
        self._group = None


class _Announcement:
    """Tells a server which weights come."""

    def __init__(self, part: Sequence[tuple[str, Tensor]]) -> None:
        self.info = {
            "names": [name for name, _ in part],
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in part],
            "shapes": [list(weight.shape) for _, weight in part],
        }

    def __call__(self, server: Server) -> None:
        server.post("/update_weights", {"update_info": self.info})


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


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _memory() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
