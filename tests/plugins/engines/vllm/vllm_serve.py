"""A real `vllm serve` on loopback."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.paths import environment

from grpo_lightning.plugins.engines.http.http_client import Server, ServerError

OPTIONS = ["--tokens-only", "--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enforce-eager"]
OPTIONS += ["--host", "127.0.0.1", "--kv-cache-memory-bytes", str(2**26)]


@contextmanager
def serving(model: str, log: Path) -> Iterator[str]:
    """Its address. It takes half a minute to start."""
    with socket.create_server(("", 0)) as found:
        port = found.getsockname()[1]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    # On a CPU vLLM compiles only how it counts likelier tokens.
    settings |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    # What `vllm serve MODEL` runs. The command itself fails in the CPU build, which looks for a package called vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += OPTIONS
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(**settings), cwd=log.parent)
        try:
            yield started(Server(f"http://127.0.0.1:{port}", 60), process, log)
        finally:
            process.terminate()
            process.wait(60)


def started(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Waits until it answers."""
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            server.get("/health")
            return server.url
        except ServerError:
            time.sleep(0.2)
