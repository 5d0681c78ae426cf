"""The servers of a run: spreads calls by free slots, leaves lost servers out, and holds calls for new weights."""

import logging
import math
import resource
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

from grpo_lightning import ranks
from grpo_lightning.engines.engine import Completions
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.engines.http.http_client import Server, ServerError
from grpo_lightning.plugins.engines.vllm.vllm_requests import Generation
from grpo_lightning.types import Completion, FinishReason

log = logging.getLogger(__name__)

THREADS = "grpo-vllm"
"""Beginning of the names of the threads that wait for answers."""
GENERATE = "/inference/v1/generate"
ABORTED = "abort"
"""Finish reason of a completion that a pause has ended."""
DRAIN_SECONDS = 2.0
"""Time in which an aborted request answers. A request that the server has not begun does not answer."""


class Chunk(NamedTuple):
    """New tokens of a completion, in an answer to a call."""

    number: int
    """Index of the completion in its call."""
    token_ids: list[int]
    """The new tokens."""
    logp: list[float]
    """The log-prob of each."""
    reason: str | None
    """Why the completion ended; None if it goes on."""


class Fleet:
    """Servers with the same weights.

    Args:
        servers: All servers.
        slots: Completions that a server samples at once. Further completions wait here for the first free server.
    """

    def __init__(self, servers: list[Server], slots: int) -> None:
        self.servers = servers
        self.slots = slots
        self.live = [*servers]
        """Servers that have the weights, and have not failed since."""
        self.version = 0
        """`Policy.version` of the weights."""
        self.pushed = ""
        """The servers' name for the weights."""
        self.is_held = False
        """True while no request may begin."""
        self._is_closed = False
        self._changed = threading.Condition()
        self._load = Counter[Server]()
        """Completions that each server samples now."""

    def close(self) -> None:
        """Ends all requests. New requests fail until the servers get weights."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with self.hung_up():
            pass

    @contextmanager
    def hung_up(self) -> Iterator[None]:
        """A context that ends all running requests, and all requests that begin inside."""
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.hung_up())
            yield

    def hold(self) -> None:
        """Lets no request begin until `release`."""
        self.is_held = True
        self._is_closed = False

    def drain(self) -> None:
        """Waits for the requests that a pause has ended. Requests that a server has not begun are hung up."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._load.total(), DRAIN_SECONDS):
                return
        with self.hung_up(), self._changed:
            self._changed.wait_for(lambda: not self._load.total())

    def release(self, live: list[Server], version: int, pushed: str) -> None:
        """Lets requests begin again: the servers `live` have the weights of `version`, and call them `pushed`."""
        # Ranks begin with different servers.
        start = ranks.rank() % len(live)
        with self._changed:
            self.live = [*live[start:], *live[:start]]
            self.version = version
            self.pushed = pushed
            self.is_held = False
            self._changed.notify_all()

    @contextmanager
    def seat(self, size: int, prompt: int, homes: dict[int, Server]) -> Iterator[tuple[Server, int]]:
        """Waits for a server with room for `size` completions. Yields it, and the version of its weights.

        The weights stay as they are inside. The server is the prompt's in `homes`, which has read the prompt, or else
        the server with most room, which becomes the prompt's.
        """

        def free() -> Server | None:
            fits = [server for server in self.live if self._load[server] + size <= max(self.slots, size)]
            home = homes.get(prompt)
            return home if home in fits else min(fits, key=self._load.__getitem__, default=None)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (not self.is_held and free()))
            server = free()
            if self._is_closed or server is None:
                raise ServerError("the engine was closed")
            homes[prompt] = server
            self._load[server] += size
        try:
            yield server, self.version
        finally:
            with self._changed:
                self._load[server] -= size
                self._changed.notify_all()

    def check(self, server: Server) -> None:
        """Raises OtherWeights if a server has other weights than the run's. Call it in a seat."""
        weights = server.get("/weight_info")
        actual = weights.get("weight_version") if isinstance(weights, dict) else None
        if actual != self.pushed:
            raise OtherWeights(
                f"{server.url} has other weights (version {actual}, expected {self.pushed}): it was started anew, or "
                "another run uses it"
            )

    def lose(self, server: Server, error: Exception) -> None:
        """Leaves a server out until it gets weights; raises the error if it is the last server."""
        with self._changed:
            if server not in self.live:
                return
            if len(self.live) == 1 or self._is_closed:
                raise error
            self.live.remove(server)
        log.warning("%s is left out until the next weights: %s", server.url, error)
        with server.hung_up():
            pass

    def generate(self, generation: Generation, sampling: Sampling, vocabulary: int) -> Completions:
        """Lets the servers sample, and yields completions as they end. If a server is lost, others take its calls."""
        yield from _Answers(self, generation, sampling, vocabulary).completions()


class _Answers:
    """Waits for the answers to the calls of a `Generation`, in a thread per call.

    Args:
        fleet: The servers.
        generation: The calls, and the completions as they grow.
        sampling: The distribution to sample from.
        vocabulary: Number of tokens that the model has.
    """

    def __init__(self, fleet: Fleet, generation: Generation, sampling: Sampling, vocabulary: int) -> None:
        self._fleet = fleet
        self._generation = generation
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._results: SimpleQueue[list[tuple[int, Completion]] | Exception | None] = SimpleQueue()
        """Completions that have ended, None for each call that has ended, or an error that ends all."""
        self._lock = threading.Lock()
        self._checked = set[Server]()
        """Servers that had the run's weights when their first call began."""
        self._homes = dict[int, Server]()
        """The server that has read a prompt, by prompt id."""
        self._pool = ThreadPoolExecutor(num_connections(fleet.slots * len(fleet.servers)), THREADS)

    def completions(self) -> Completions:
        """Begins all calls, and yields completions as they end."""
        calls = self._generation.calls
        num_ended = 0
        try:
            for index in range(len(calls)):
                self._pool.submit(self._finish, index)
            # New weights add calls: one for each completion that goes on.
            while num_ended < len(calls):
                result = self._results.get()
                if isinstance(result, Exception):
                    raise result
                num_ended += result is None
                yield from result or ()
        except BaseException:
            # No further completion is wanted.
            with self._lock:
                self._generation.open.clear()
            with self._fleet.hung_up():
                self._pool.shutdown(cancel_futures=True)
            raise
        self._pool.shutdown()

    def _finish(self, index: int) -> None:
        """Makes a call until all of its completions have ended. If its server is lost, another server goes on."""
        generation = self._generation
        size = len(generation.calls[index].rows)
        try:
            while index in generation.open:
                with self._fleet.seat(size, generation.prompt_id(index), self._homes) as (server, version):
                    try:
                        self._call(index, server, version)
                    except Exception as error:
                        # Every call has ended: it is too late to leave the server out.
                        if not generation.open:
                            raise
                        with self._lock:
                            generation.restart(index)
                        # While requests are held, it was hung up for new weights.
                        if not self._fleet.is_held:
                            self._fleet.lose(server, error)
            self._results.put(None)
        except Exception as error:
            self._results.put(error)

    def _call(self, index: int, server: Server, version: int) -> None:
        """Makes a call to a server, and adds its answer to the completions."""
        generation = self._generation
        if server not in self._checked:
            self._fleet.check(server)
            self._checked.add(server)

        call = generation.calls[index]
        parameters = call.parameters(self._sampling, generation.stops.ids)
        body = {"token_ids": call.token_ids, "sampling_params": parameters, "stream": generation.streams}
        stream = closing(server.events(GENERATE, body)) if generation.streams else None
        with stream or nullcontext([server.post(GENERATE, body)]) as answers:
            for answer in answers:
                self._add(index, chunks_of(answer, server, self._vocabulary, generation, index), version)
                if index not in generation.open:
                    break
            else:
                raise ServerError(f"{server.url}{GENERATE}: the answer ended early")

        # The last call looks whether any server has got other weights meanwhile.
        for used in self._checked & {*self._fleet.live} if not generation.open else ():
            try:
                self._fleet.check(used)
            except OtherWeights:
                raise
            except ServerError as error:
                # It has answered all of its calls.
                if not self._fleet.is_held:
                    self._fleet.lose(used, error)

    def _add(self, index: int, chunks: list[Chunk], version: int) -> None:
        """Adds chunks to their completions. A completion that a pause has ended continues in a new call."""
        for chunk in chunks:
            is_aborted = chunk.reason == ABORTED
            with self._lock:
                if index not in self._generation.open:
                    return
                reason = None if is_aborted else chunk.reason
                completions = self._generation.add(index, chunk.number, chunk.token_ids, chunk.logp, reason, version)
                if is_aborted and not completions:
                    self._pool.submit(self._finish, self._generation.carry_on(index, chunk.number))
            self._results.put(completions)


def num_connections(num_completions: int) -> int:
    """Returns the most requests of a rank that wait for answers at once, if servers sample `num_completions` at once.

    A request may be for a single completion: with stop strings, and after new weights in the middle of a group. One
    request more waits for a seat. Connections take at most half of the files that the process may open.
    """
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = sys.maxsize if max_files == resource.RLIM_INFINITY else max_files // 2
    return max(1, min(num_completions + 1, max_connections))


class OtherWeights(ServerError):
    """A server samples with weights that are not the run's."""


def chunks_of(answer: Any, server: Server, vocabulary: int, generation: Generation, index: int) -> list[Chunk]:
    """Returns the chunks in an answer to a call; raises ServerError if the answer makes no sense."""
    count = len(generation.calls[index].rows)
    chunks = list[Chunk]()
    try:
        for choice in answer["choices"]:
            ids = [int(id) for id in choice["token_ids"]]
            number = int(choice["index"])
            reason = choice["finish_reason"]
            logp = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]] if ids else []
            assert len(ids) == len(logp) and all(0 <= id < vocabulary for id in ids)
            assert all(-math.inf < p < 1e-3 for p in logp) and 0 <= number < count
            assert reason in (None, ABORTED, *FinishReason) and (ids or reason in (None, ABORTED))
            chunks.append(Chunk(number, ids, logp, reason))
        is_complete = sorted(chunk.number for chunk in chunks) == [*range(count)]
        assert generation.streams or (is_complete and all(chunk.reason is not None for chunk in chunks))
        return chunks
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise ServerError(f"{server.url}{GENERATE}: the answer makes no sense: {str(answer)[:200]}") from error
