"""Where prompts come from."""

from grpo_lightning.tasks.arithmetic import Arithmetic
from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.tasks.reasoning_gym import ReasoningGym
from grpo_lightning.tasks.tables import HubPrompts, JsonPrompts

__all__ = ["Arithmetic", "HubPrompts", "JsonPrompts", "ReasoningGym", "Split", "Task"]
