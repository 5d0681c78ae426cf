"""A stand-in for `vllm serve` on loopback, with the same endpoints and answers as vLLM 0.30 on a CPU."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file

from helpers.vllm_stand_in import Child, Engine, RequestOutputKind, SamplingParams, copy_into, generator_of, model_of


class StandIn:
    """The server's state: weights, cache, and what it was asked.

    Args:
        model: A folder with config and weights.
        **settings: Entries of vLLM's `model_config` that are other than expected.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.model, longest = model_of(model)
        longest = settings.get("max_model_len", longest)
        self.engine = Engine(self.model, longest)
        self.config: dict[str, Any] = {
            "model_config": {
                "model": model,
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "max_model_len": longest,
                **settings,
            },
            "device_config": {"device": "cpu"},
        }
        self.version = "default"
        self.paused = False
        self.asked: list[str] = []
        """The paths of all requests but those for health."""
        self.prompts: list[list[int]] = []
        self.drawn = 0
        """Tokens drawn by all streams."""
        self.bodies: list[Any] = []
        """What came with requests that change weights."""
        self.refusals: dict[str, tuple[int, Any]] = {}
        """Status and body by path, for a server that fails; status 0 closes the connection without an answer."""
        self.delay = 0.0
        self.seconds_per_token = 0.0
        self.spoils: Callable[[Any], Any] = lambda answer: answer
        """What becomes of an answer with completions."""
        self.lock = threading.Lock()
        self.http: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def get(self, path: str) -> Any:
        if path == "/server_info":
            return {"vllm_config": self.config, "vllm_env": {}, "system_env": {}}
        if path == "/weight_info":
            return {"weight_version": self.version}
        raise KeyError(path)

    def post(self, path: str, body: Any) -> Any:
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/reset_prefix_cache":
            self.engine.cache.clear()
            return {"success": True}
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights" and self.paused
            self.load(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        else:
            raise KeyError(path)
        return {"status": "done"}

    def load(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise RuntimeError(f"Cannot find any model weights with `{folder}`")
        self.bodies.append([file.name for file in files])
        for file in files:
            copy_into(self.model, load_file(file).items())

    def generate(self, body: Any) -> Iterator[Any]:
        """Pieces of the answer; without streaming only the last one counts."""
        while self.paused:  # new requests wait
            time.sleep(0.01)
        kind = RequestOutputKind.DELTA if body["stream"] else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**body["sampling_params"], flat_logprobs=True, skip_clone=True, output_kind=kind)
        prompt = body["token_ids"]
        self.prompts.append(prompt)
        children = [Child("", i, prompt, params, generator_of(params.seed, i)) for i in range(params.n)]
        while any(child.finish_reason is None for child in children):
            for child in children:
                if child.finish_reason is None:
                    time.sleep(self.seconds_per_token)
                    if self.paused:
                        child.finish_reason = "abort"
                        continue
                    with self.lock:
                        self.engine.draw(child)
                    if body["stream"]:
                        self.drawn += 1
                        yield {"choices": [choice(child, len(child.token_ids) - 1)]}
        if not body["stream"]:
            yield {"choices": [choice(child, 0) for child in children]}


def choice(child: Child, first: int) -> dict[str, Any]:
    logps = child.logp[first:]
    content = [{"token": f"token_id:{id}", "logprob": p} for id, p in zip(child.token_ids[first:], logps, strict=True)]
    return {
        "index": child.index,
        "logprobs": {"content": content},
        "finish_reason": child.finish_reason,
        "token_ids": child.token_ids[first:],
    }


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: a connection per request, as the client's."""

    @property
    def stand_in(self) -> StandIn:
        found: StandIn = self.server.stand_in  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:
        self.handle_request(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.handle_request(json.loads(self.rfile.read(length)) if length else None)

    def handle_request(self, body: Any) -> None:
        path, server = urlsplit(self.path).path, self.stand_in
        if path != "/health":
            server.asked.append(path)
        time.sleep(server.delay)
        if path in server.refusals:
            status, answer = server.refusals[path]
            if status:
                self.answer(status, answer)
            return
        try:
            if path == "/inference/v1/generate":
                self.draw(body)
            elif path == "/health":
                self.answer(200, None)
            else:
                self.answer(
                    200, server.get(path) if body is None and self.command == "GET" else server.post(path, body)
                )
        except KeyError:
            self.answer(404, {"detail": "Not Found"})
        except (RuntimeError, ValueError) as error:
            self.answer(500, {"error": {"message": str(error), "code": 500}})

    def draw(self, body: Any) -> None:
        if "token_ids" not in body:
            self.answer(400, {"error": {"message": "Field required", "code": 400}})
            return
        pieces = self.stand_in.generate(body)
        if not body["stream"]:
            self.answer(200, self.stand_in.spoils(list(pieces)[-1]))
            return
        self.send_response(200)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client wants no more

    def answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        if body is not None:
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


class HTTP(ThreadingHTTPServer):
    daemon_threads = True
    # With fewer the kernel resets connections where many come at once.
    request_queue_size = 128

    def handle_error(self, *args: Any) -> None:
        pass  # a client that hung up


@contextmanager
def serving(model: str, **settings: Any) -> Iterator[StandIn]:
    """A server at a port of its own."""
    stand_in = StandIn(model, **settings)
    with torch.no_grad():
        stand_in.http = HTTP(("127.0.0.1", 0), Handler)
        stand_in.http.stand_in = stand_in
        thread = threading.Thread(target=stand_in.http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stand_in
        finally:
            stand_in.http.shutdown()
            thread.join()
            stand_in.http.server_close()
