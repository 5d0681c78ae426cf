"""Rewards: what a completion is worth."""

from grpo_lightning.rewards.base import Reward, RewardResult, Run, StepScore
from grpo_lightning.rewards.classifier import SequenceClassifier
from grpo_lightning.rewards.control import LastNumber, RandomReward
from grpo_lightning.rewards.format import FormatReward
from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.gate import Gated
from grpo_lightning.rewards.length import CosineLength, LengthReward
from grpo_lightning.rewards.overlong import OverlongPenalty
from grpo_lightning.rewards.reasoning_gym import ReasoningGymReward
from grpo_lightning.rewards.repetition import RepetitionPenalty
from grpo_lightning.rewards.splitters import ByLine, ByPattern, ByTag, Splitter
from grpo_lightning.rewards.step_models import PrefixModel, TokenModel
from grpo_lightning.rewards.step_verifiers import ArithmeticSteps, StepVerifier
from grpo_lightning.rewards.steps import StepReward
from grpo_lightning.rewards.verifier.math_verifier import MathVerifier

__all__ = [
    "ArithmeticSteps",
    "ByLine",
    "ByPattern",
    "ByTag",
    "CosineLength",
    "FormatReward",
    "FunctionReward",
    "Gated",
    "LastNumber",
    "LengthReward",
    "MathVerifier",
    "OverlongPenalty",
    "PrefixModel",
    "RandomReward",
    "ReasoningGymReward",
    "RepetitionPenalty",
    "Reward",
    "RewardResult",
    "Run",
    "SequenceClassifier",
    "Splitter",
    "StepReward",
    "StepScore",
    "StepVerifier",
    "TokenModel",
]
