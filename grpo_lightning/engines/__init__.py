"""Rollout engines: prompts in, groups of completions with their log-probs out."""

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.scripted import ScriptedEngine
from grpo_lightning.engines.transformers import TransformersEngine

__all__ = ["NativeEngine", "RolloutEngine", "Sampling", "ScriptedEngine", "TransformersEngine"]
