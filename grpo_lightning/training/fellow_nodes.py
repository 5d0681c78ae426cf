"""Nodes fail together: what ends one of them ends all within a minute, and every node prints which one and why.

The ranks of torch meet in a store on the machine of rank 0. Every rank writes there that it lives, and one that fails
writes why. So a node is missed even where its connections stay open: it hangs, or its machine has no power.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import PrefixStore, Store, TCPStore

BEAT = 2.0
"""Seconds between two signs of life."""
LOST = 30.0
"""Seconds without a sign of life after which a rank counts as lost."""
HURRY = 10.0
"""The same where torch has already reported a lost connection."""
ANSWER = timedelta(seconds=10)
"""The longest that the store may take to answer."""

WORDS, HASTE = "words", "haste"
"""Keys in the store: why the run ends; that torch has reported a lost connection."""
LEFT = "left"
"""The last sign of life of a rank that ends by itself."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of all nodes meet, and which of them this process is."""

    address: str
    port: int
    rank: int
    world_size: int
    node: int
    serves: bool
    """Whether this process holds the store; under torchrun its agent does."""
    start: str = "0"
    """Which start of the job this is; one store may serve several."""

    @classmethod
    def from_environment(cls) -> "Meeting | None":
        """That of torchrun or srun; None on a single node, or if another program has started the ranks."""
        cluster = cluster_environment()
        if cluster is None:
            return None
        rank, agent = cluster.global_rank(), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            cluster.main_address,
            cluster.main_port,
            rank,
            cluster.world_size(),
            cluster.node_rank(),
            rank == 0 and not agent,
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def store(self) -> Store:
        """A connection of its own to the store. It waits for the store to be there, `ANSWER` at most."""
        store = TCPStore(
            self.address,
            self.port,
            is_master=self.serves,
            timeout=ANSWER,
            wait_for_workers=False,
            multi_tenant=self.serves,  # torch's own process group then meets in this one
        )
        return PrefixStore(f"grpo/{self.start}", store)


def cluster_environment() -> ClusterEnvironment | None:
    """What Lightning knows of the program that started the ranks, if they are on several nodes."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment() if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1 else None
    steps = {"SLURM_NTASKS", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"}
    if steps <= os.environ.keys() and int(os.environ.get("SLURM_NNODES", 1)) > 1 and SLURMEnvironment.detect():
        with contextlib.suppress(RuntimeError):  # what Lightning refuses, it refuses in its own words
            return SLURMEnvironment()
    return None


class FellowNodes:
    """This process among those of all nodes.

    Args:
        meeting: Where they meet.
        end: Called, in a thread of its own, with the reason and the exit code if the run ends elsewhere.
    """

    def __init__(self, meeting: Meeting, end: Callable[[str, int], Any]) -> None:
        self.meeting = meeting
        self._end = end
        self._store: Store | None = None
        self._here = threading.Event()
        self._over = threading.Event()
        self._beats = 0
        self._haste = False
        self._heard: dict[int, tuple[str, int]] = {}
        """By rank: its last sign of life, and the beats since it came."""
        self._watch = threading.Thread(target=self._look, name="fellow-nodes", daemon=True)
        self._watch.start()

    @property
    def me(self) -> str:
        """This node, for messages."""
        return f"node {self.meeting.node} ({socket.gethostname()})"

    @property
    def patience(self) -> float:
        """Seconds until a rank whose connection is lost has been found."""
        return HURRY + 3 * BEAT

    def tell(self, text: str, code: int) -> None:
        """Tells the other nodes why this one fails, unless another one was first."""
        reason = text.strip().splitlines()[-1].removeprefix("grpo: ").removeprefix("error: ") if text.strip() else ""
        self._tell(f"grpo: error: {self.me} failed: {reason or f'exit code {code}'}", code)

    def _tell(self, text: str, code: int) -> None:
        if self._here.wait(ANSWER.total_seconds()) and self._store is not None:
            words = json.dumps({"node": self.meeting.node, "text": text, "code": code})
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._store.compare_set(WORDS, "", words)

    def haste(self) -> None:
        """Lets all look sooner: torch has reported a lost connection."""
        self._haste = True
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(HASTE, "1")

    def close(self) -> None:
        """Says goodbye. The rank that holds the store waits until the others have heard why, or have gone too."""
        if self._over.is_set():
            return
        self._over.set()
        if threading.current_thread() is not self._watch:
            self._watch.join(BEAT)
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            self._live(self._store, LEFT)
            end = monotonic() + 3 * BEAT
            while self.meeting.serves and monotonic() < end and self._somebody_stays(self._store):
                sleep(BEAT / 10)

    def _somebody_stays(self, store: Store) -> bool:
        others = (rank for rank in range(1, self.meeting.world_size))
        signs = (self._sign(store, rank) for rank in others)
        return any(sign is not None and not sign.startswith(LEFT) for sign in signs)

    def _live(self, store: Store, sign: str) -> None:
        store.set(str(self.meeting.rank), f"{sign} {self.me}, rank {self.meeting.rank}")

    def _sign(self, store: Store, rank: int) -> str | None:
        """The last sign of life of a rank, if there was one."""
        return store.get(str(rank)).decode() if store.check([str(rank)]) else None

    def _look(self) -> None:
        """The thread: beats and listens until the run is over."""
        while self._store is None and not self._over.is_set():
            try:
                self._store = self.meeting.store()
            except RuntimeError:  # not there yet
                self._over.wait(BEAT / 2)
        self._here.set()
        while self._store is not None and not self._over.is_set():
            try:
                found = self._exchange(self._store)
            except RuntimeError as error:
                found = self._store_lost(error)
            if found is not None and not self._over.is_set():
                self._end(*found)
                return
            self._over.wait(BEAT)

    def _exchange(self, store: Store) -> tuple[str, int] | None:
        """One beat: the reason and the exit code if the run is to end."""
        self._beats += 1
        self._live(store, str(self._beats))
        if store.check([WORDS]):
            words = json.loads(store.get(WORDS))
            if words["node"] != self.meeting.node:  # those of this node have their own way
                return str(words["text"]), int(words["code"])
        # Rank 0 watches all, and all watch rank 0: so the store is asked as often as there are ranks.
        watched = range(1, self.meeting.world_size) if self.meeting.rank == 0 else [0]
        patience = HURRY if self._haste or store.check([HASTE]) else LOST
        for rank in watched:
            sign = self._sign(store, rank)
            before, silent = self._heard.get(rank, ("", 0))
            if sign is None or sign.startswith(LEFT) or sign != before:
                self._heard[rank] = (sign or "", 0)
                continue
            self._heard[rank] = (before, silent + 1)
            if silent * BEAT >= patience:
                # Counted in beats of its own: a machine that was suspended has missed nothing.
                who = sign.partition(" ")[2]
                text = (
                    f"grpo: error: {who}: no sign of life for {silent * BEAT:.0f} s. It was killed, or its machine or "
                    "the network is down; continue with --ckpt_path last"
                )
                self._tell(text, 1)
                return text, 1
        return None

    def _store_lost(self, error: RuntimeError) -> tuple[str, int] | None:
        if self._heard.get(0, ("", 0))[0].startswith(LEFT):  # rank 0 has ended well
            self._over.set()
            return None
        where = f"node 0 ({self.meeting.address})"
        reason = str(error).strip().splitlines()[0]
        return f"grpo: error: {where} is gone, and the run with it ({reason}); continue with --ckpt_path last", 1
