"""Training on PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

import grpo_lightning

# A function, which imports the class only when it is used: the file of the class imports this folder.
StrategyRegistry.register(
    "fsdp2",
    lambda **options: grpo_lightning.FSDP2Strategy(**options),
    description="Weights sharded over all devices (FSDP2)",
)
