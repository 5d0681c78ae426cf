"""Serves what `openenv import` has made of an environment of verifiers or ORS, for many conversations at once.

`python examples/serve_imported.py NAME`, from the folder that holds the package NAME. The server that OpenEnv 0.10
writes has one session. It loads an environment of verifiers in a thread, where verifiers cannot be loaded.
"""

import argparse
import sys
from importlib import import_module
from typing import Any

import uvicorn
from openenv.core.env_server import Environment
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the name that `openenv import` was given")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=1024, help="the most conversations at once")
    options = parser.parse_args()
    sys.path.insert(0, "")
    module = import_module(f"{options.name}.server.{options.name}_environment")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Environment)]
    (imported,) = [kind for kind in kinds if kind is not Environment]
    shared: dict[str, Any] = {"SUPPORTS_CONCURRENT_SESSIONS": True}
    if hasattr(module, "_load_environment"):  # of verifiers: its rubric keeps no state, so all sessions share it
        loaded = module._load_environment()
        shared |= {"_env": lambda self: loaded}
    environment = type(imported.__name__, (imported,), shared)
    sessions = {"env_name": options.name, "max_concurrent_envs": options.sessions}
    app = create_app(environment, CallToolAction, CallToolObservation, **sessions)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
