"""Rewards: what a completion is worth."""

from grpo_lightning.rewards.base import Reward, RewardResult
from grpo_lightning.rewards.format import FormatReward
from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.math_verifier import MathVerifier

__all__ = ["FormatReward", "FunctionReward", "MathVerifier", "Reward", "RewardResult"]
