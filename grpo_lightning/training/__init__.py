"""Training on Lightning: exploration, preparation, the update, evaluation and the loop."""

# Lightning then knows the strategy `fsdp2` by its name.
from grpo_lightning.training import strategy as strategy
