"""The servers of a run: calls spread over them by free slots, those that are lost, and new weights on the way."""

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
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.engines.engine import Drawn
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.engines.vllm.http_client import Server, ServerError
from grpo_lightning.plugins.engines.vllm.vllm_requests import Drawing
from grpo_lightning.types import Completion, FinishReason

log = logging.getLogger(__name__)

THREADS = "grpo-vllm"  # how the names of the threads begin that wait for answers
GENERATE = "/inference/v1/generate"
ABORTED = "abort"  # the reason of a completion that a pause has ended
DRAIN_SECONDS = 2.0  # in which an aborted request answers; one that the server has not begun does not

Part = tuple[int, list[int], list[float], str | None]
"""Of an answer: the completion's number in its call, token ids, log-probs, and why it ended."""


class Fleet:
    """Servers with the same weights.

    Args:
        servers: All of them.
        slots: Completions that each draws at once; further ones wait here, for the server that has room first.
    """

    def __init__(self, servers: list[Server], slots: int) -> None:
        self.servers, self.slots = servers, slots
        self.live = [*servers]  # those that have the weights, and have not failed since
        self.version, self.pushed = 0, ""  # `Policy.version` of the weights, and what the servers call them
        self._changed = threading.Condition()
        self._load = Counter[Server]()  # completions that each draws
        self._is_held = self._is_closed = False

    def close(self) -> None:
        """Ends all requests; new ones fail until weights are brought."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with self.hung_up():
            pass

    @contextmanager
    def hung_up(self) -> Iterator[None]:
        """Ends all requests that are under way, and those that begin inside."""
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.hung_up())
            yield

    def hold(self) -> None:
        """Lets no request begin until `release`."""
        self._is_held, self._is_closed = True, False

    def drain(self) -> None:
        """Waits for the requests that a pause has ended. One that the server has not begun is hung up."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._load.total(), DRAIN_SECONDS):
                return
        with self.hung_up(), self._changed:
            self._changed.wait_for(lambda: not self._load.total())

    def release(self, live: list[Server], version: int, pushed: str) -> None:
        """Lets requests begin again: the servers `live` have the weights of `version`, and call them `pushed`."""
        first = ranks.rank() % len(live)  # ranks begin with different servers
        with self._changed:
            self.live = [*live[first:], *live[:first]]
            self.version, self.pushed, self._is_held = version, pushed, False
            self._changed.notify_all()

    @contextmanager
    def seat(self, size: int, prompt: int, homes: dict[int, Server]) -> Iterator[tuple[Server, int]]:
        """Waits for a server with room for `size` completions. Yields it, and the version of the weights, which stay.

        It is the prompt's of `homes`, which has read it, or else the one with most room.
        """

        def free() -> Server | None:
            fits = [one for one in self.live if not self._load[one] or self._load[one] + size <= self.slots]
            home = homes.get(prompt)
            return home if home in fits else min(fits, key=self._load.__getitem__, default=None)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (not self._is_held and free()))
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
        """Raises OtherWeights where a server has other weights than it was given. For use in a seat."""
        weights = server.get("/weight_info")
        found = weights.get("weight_version") if isinstance(weights, dict) else None
        if found != self.pushed:
            raise OtherWeights(
                f"{server.url} has other weights (version {found}, expected {self.pushed}): it was started anew, or "
                "another run uses it"
            )

    def lose(self, server: Server, error: Exception) -> None:
        """Leaves a server out; raises the error if it is the last one."""
        with self._changed:
            if server not in self.live:
                return
            if len(self.live) == 1 or self._is_closed:
                raise error
            self.live.remove(server)
        log.warning("%s is left out until the next weights: %s", server.url, error)
        with server.hung_up():
            pass

    def draw(self, drawing: Drawing, sampling: Sampling, vocabulary: int) -> Drawn:
        """Lets the servers draw, and yields completions as they end. The calls of a lost server go to the others."""
        found: SimpleQueue[list[tuple[int, Completion]] | Exception | None] = SimpleQueue()
        lock, asked = threading.Lock(), set[Server]()
        homes = dict[int, Server]()

        def listen(index: int) -> None:
            size, prompt = len(drawing.calls[index].rows), drawing.prompt_id(index)
            try:
                while index in drawing.open:
                    with self.seat(size, prompt, homes) as (server, version):
                        try:
                            ask(index, server, version)
                        except Exception as error:
                            if not drawing.open:  # too late to leave it out
                                raise
                            with lock:
                                drawing.restart(index)
                            if not self._is_held:  # else it was hung up for new weights
                                self.lose(server, error)
                found.put(None)
            except Exception as error:
                found.put(error)

        def ask(index: int, server: Server, version: int) -> None:
            if server not in asked:
                self.check(server)
                asked.add(server)
            call = drawing.calls[index]
            parameters = call.parameters(sampling, drawing.stops.ids)
            body = {"token_ids": call.token_ids, "sampling_params": parameters, "stream": drawing.streams}
            streamed = closing(server.events(GENERATE, body)) if drawing.streams else None
            with streamed or nullcontext([server.post(GENERATE, body)]) as pieces:
                for piece in pieces:
                    take(index, checked(piece, server, vocabulary, drawing, index), version)
                    if index not in drawing.open:
                        break
                else:
                    raise ServerError(f"{server.url}{GENERATE}: the answer ended early")
            for one in asked & {*self.live} if not drawing.open else ():
                try:
                    self.check(one)
                except OtherWeights:
                    raise
                except ServerError as error:  # it has done its part
                    if not self._is_held:
                        self.lose(one, error)

        def take(index: int, parts: list[Part], version: int) -> None:
            for number, token_ids, logp, reason in parts:
                is_aborted = reason == ABORTED
                with lock:
                    if index not in drawing.open:
                        return
                    ended = drawing.add(index, number, token_ids, logp, None if is_aborted else reason, version)
                    if is_aborted and not ended:
                        pool.submit(listen, drawing.carry_on(index, number))
                found.put(ended)

        pool, num_ended = ThreadPoolExecutor(num_connections(self.slots * len(self.servers)), THREADS), 0
        try:
            for index in range(len(drawing.calls)):
                pool.submit(listen, index)
            while num_ended < len(drawing.calls):
                ended = found.get()
                if isinstance(ended, Exception):
                    raise ended
                num_ended += ended is None
                yield from ended or ()
        except BaseException:
            with lock:
                drawing.open.clear()  # whatever is still drawn is not wanted
            with self.hung_up():
                pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown()


def num_connections(num_completions: int) -> int:
    """Most requests of one rank that wait for answers at once, where servers draw this number of completions.

    A request may be for one completion: so it is with stop strings, and after new weights in the middle of a group. One
    request more waits for a seat. At most half of the files that the process may open are connections.
    """
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if most_files == resource.RLIM_INFINITY else most_files // 2
    return max(1, min(num_completions + 1, most))


class OtherWeights(ServerError):
    """A server draws with weights that the run did not give it."""


def checked(answer: Any, server: Server, vocabulary: int, drawing: Drawing, index: int) -> list[Part]:
    """The completions in an answer to a call; raises ServerError if it is something else."""
    count, found = len(drawing.calls[index].rows), list[Part]()
    try:
        for one in answer["choices"]:
            ids, number, reason = [int(id) for id in one["token_ids"]], int(one["index"]), one["finish_reason"]
            logp = [float(entry["logprob"]) for entry in one["logprobs"]["content"]] if ids else []
            assert len(ids) == len(logp) and all(0 <= id < vocabulary for id in ids)
            assert all(-math.inf < p < 1e-3 for p in logp) and 0 <= number < count
            assert reason in (None, ABORTED, *FinishReason) and (ids or reason in (None, ABORTED))
            found.append((number, ids, logp, reason))
        numbers, reasons = [one[0] for one in found], [one[3] for one in found]
        assert drawing.streams or (sorted(numbers) == [*range(count)] and None not in reasons)
        return found
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise ServerError(f"{server.url}{GENERATE}: the answer makes no sense: {str(answer)[:200]}") from error
