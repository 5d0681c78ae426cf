"""Training on Lightning: exploration, preparation, the update, evaluation and the loop."""

from grpo_lightning.training.strategy import FSDP2Strategy as FSDP2Strategy  # registers the name `fsdp2`
