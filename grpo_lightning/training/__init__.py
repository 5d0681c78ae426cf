"""Training on PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

import grpo_lightning

# Its file is read when the strategy is asked for: it needs this folder itself.
StrategyRegistry.register(
    "fsdp2",
    lambda **options: grpo_lightning.FSDP2Strategy(**options),
    description="Weights sharded over all devices (FSDP2)",
)
