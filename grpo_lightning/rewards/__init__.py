"""Rewards: what a completion is worth."""

from grpo_lightning.rewards.base import Reward, RewardResult, StepScore
from grpo_lightning.rewards.format import FormatReward
from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.math_verifier import MathVerifier
from grpo_lightning.rewards.overlong import OverlongPenalty

__all__ = ["FormatReward", "FunctionReward", "MathVerifier", "OverlongPenalty", "Reward", "RewardResult", "StepScore"]
