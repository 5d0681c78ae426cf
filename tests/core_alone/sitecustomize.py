"""With this folder on PYTHONPATH there are no plugins, in this process and in those that it starts: `make core`."""

import sys


class NoPlugins:
    """Finds no plugin."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("grpo_lightning.plugins"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoPlugins())
