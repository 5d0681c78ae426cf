"""Looking at a run: per-token records of what its updates did, its curves, and the pages that show them."""

from grpo_lightning.plugins.looking.inspector.record import read as read
