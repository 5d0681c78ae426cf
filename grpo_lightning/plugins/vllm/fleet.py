"""The servers of a run: calls spread over them by free slots, those that are lost, and new weights on the way."""

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from queue import SimpleQueue
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.engines.base import Drawn
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.vllm.http import Server, ServerError
from grpo_lightning.plugins.vllm.requests import Drawing
from grpo_lightning.types import Completion, FinishReason

log = logging.getLogger(__name__)

CONNECTIONS = 512  # requests of one rank that wait for answers at once
THREADS = "grpo-vllm"  # how the names of the threads begin that wait for answers
GENERATE = "/inference/v1/generate"
ABORTED = "abort"  # the reason of a completion that a pause has ended
DRAIN_SECONDS = 2.0  # in which an aborted request answers; one that the server has not begun does not


class Fleet:
    """Servers with the same weights.

    Args:
        servers: All of them.
        slots: Completions that each draws at once; further ones wait here, for the server that has room first.
    """

    def __init__(self, servers: list[Server], slots: int) -> None:
        self.servers, self.slots = servers, slots
        self.live = [*servers]
        """Those that have the weights, and have not failed since."""
        self.version = 0
        """`Policy.version` of the weights."""
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_held = self._is_closed = False

    def close(self) -> None:
        """Ends all requests; new ones fail until weights are brought."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._hang_up()

    def _hang_up(self) -> None:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.hung_up())

    def hold(self) -> None:
        """Lets no request begin until `release`."""
        self._is_held, self._is_closed = True, False

    def drain(self) -> None:
        """Waits for the requests that a pause has ended. One that the server has not begun is hung up."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._under_way, DRAIN_SECONDS):
                return
        self._hang_up()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def release(self, live: list[Server], version: int) -> None:
        """Lets requests begin again, with weights of `version`, which the servers `live` have."""
        with self._changed:
            self.live, self.version, self._is_held = live, version, False
            self._changed.notify_all()

    @contextmanager
    def request(self) -> Iterator[int]:
        """A context in which the weights stay, as far as this process is concerned; yields their version."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._is_held)
            if self._is_closed:
                raise ServerError("the engine was closed")
            self._under_way += 1
            version = self.version
        try:
            yield version
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

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
        answers: SimpleQueue[tuple[int, Server, int, Any]] = SimpleQueue()
        waiting, load, homes_of = deque(range(len(drawing.calls))), Counter[Server](), dict[int, Server]()

        def listen(index: int, server: Server) -> None:
            version = -1
            try:
                with self.request() as version:
                    call = drawing.calls[index]
                    parameters = call.parameters(sampling, drawing.stops.ids)
                    body = {"token_ids": call.token_ids, "sampling_params": parameters, "stream": drawing.streams}
                    if index not in drawing.open:
                        return
                    if not drawing.streams:
                        answers.put((index, server, version, server.post(GENERATE, body)))
                    else:
                        with closing(server.events(GENERATE, body)) as pieces:
                            for piece in pieces:
                                answers.put((index, server, version, piece))
                                if index not in drawing.open:
                                    break
            except Exception as error:
                answers.put((index, server, version, error))
            answers.put((index, server, version, None))

        def send() -> None:
            while waiting:
                first = ranks.rank() % len(self.live)  # ranks begin with different servers
                free = min([*self.live[first:], *self.live[:first]], key=load.__getitem__)
                size, prompt = len(drawing.calls[waiting[0]].rows), drawing.prompt_id(waiting[0])
                # A group stays on one server, which reads its prompt once.
                homes = [one for one in (homes_of.get(prompt), free) if one in self.live]
                fits = [one for one in homes if not load[one] or load[one] + size <= self.slots]
                if not fits:
                    return
                server = homes_of[prompt] = fits[0]
                load[server] += size
                pool.submit(listen, waiting.popleft(), server)

        pool, is_done = ThreadPoolExecutor(CONNECTIONS, THREADS), False
        try:
            send()
            while drawing.open:
                index, server, version, answer = answers.get()
                ended: list[tuple[int, Completion]] = []
                if answer is None:
                    load[server] -= len(drawing.calls[index].rows)
                    if index in drawing.open:  # in vain
                        drawing.restart(index)
                        waiting.appendleft(index)
                    send()
                elif index in drawing.open:
                    try:
                        if isinstance(answer, Exception):
                            raise answer
                        for one in checked(answer, server, vocabulary, drawing, index):
                            reason = None if one["reason"] == ABORTED else one["reason"]
                            number, found = one["number"], (one["token_ids"], one["logp"], reason, version)
                            done = drawing.add(index, number, *found)
                            if one["reason"] == ABORTED and not done:
                                waiting.appendleft(drawing.carry_on(index, number))
                            ended += done
                    except Exception as error:
                        if self._is_closed:
                            raise
                        # One that was hung up for new weights is asked again.
                        if version == self.version and not self._is_held:
                            self.lose(server, error)
                yield from ended
            is_done = True
        finally:
            # Whatever is still drawn is not wanted.
            drawing.open.clear()
            with ExitStack() as stack:
                for server in () if is_done else self.servers:
                    stack.enter_context(server.hung_up())
                pool.shutdown(cancel_futures=True)


def checked(answer: Any, server: Server, vocabulary: int, drawing: Drawing, index: int) -> list[dict[str, Any]]:
    """The completions in an answer to a call: number, token_ids, logp and reason of each.

    Raises:
        ServerError: It is something else.
    """
    count = len(drawing.calls[index].rows)
    try:
        found = []
        for one in answer["choices"]:
            logp = [float(entry["logprob"]) for entry in one["logprobs"]["content"]] if one["token_ids"] else []
            ids, reason = [int(id) for id in one["token_ids"]], one["finish_reason"]
            assert len(ids) == len(logp) and all(0 <= id < vocabulary for id in ids)
            assert all(-math.inf < p < 1e-3 for p in logp)
            assert reason in (None, ABORTED, *FinishReason) and (ids or reason in (None, ABORTED))
            found.append({"number": int(one["index"]), "token_ids": ids, "logp": logp, "reason": reason})
        numbers = [one["number"] for one in found]
        assert all(0 <= number < count for number in numbers)
        assert drawing.streams or (sorted(numbers) == [*range(count)] and None not in [one["reason"] for one in found])
        return found
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise ServerError(f"{server.url}{GENERATE}: the answer makes no sense: {str(answer)[:200]}") from error
