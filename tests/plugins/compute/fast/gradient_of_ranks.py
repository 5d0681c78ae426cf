"""The runs that test_invariance compares; as a script, `gradient_of_ranks.py FOLDER` does them on two ranks.

Gradients of every objective, each with its own advantage, KL, masks and bonus, taken at a policy that stands still and
an old policy far from it; runs that learn, whose ranks must decide alike; and conversations of unequal lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from helpers import two_ranks
from helpers.fast import fit, policy_of
from helpers.fitting import Another, Digits, Gradients, scalars
from helpers.guessing import Guess
from torch import Tensor

from grpo_lightning import GRPOModule, KLAbove, Limits, Minibatch, Objective, Policy, Reward, Rollouts, Sampling, ranks
from grpo_lightning.maths.advantages import AdvantageEstimator, GroupMean, GroupStd
from grpo_lightning.maths.entropy import FixedEntropy, NoEntropy
from grpo_lightning.maths.filters import DynamicSampling, TokenMask, Truncated
from grpo_lightning.maths.kl import K2, K3, KLEstimator, KLPenalty
from grpo_lightning.maths.surrogates import Clipped, Reinforce, Surrogate
from grpo_lightning.maths.weightings import (
    SequenceMean,
    TokenMean,
    TokenWeighting,
    Unweighted,
)
from grpo_lightning.plugins.data.conversations.conversation_reward import EnvironmentReward
from grpo_lightning.plugins.data.conversations.prompt_data import PromptDataModule
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.plugins.engines.scripted.scripted_engine import ScriptedEngine
from grpo_lightning.plugins.methods.advantages.batch_std import BatchStd
from grpo_lightning.plugins.methods.advantages.leave_one_out import LeaveOneOut
from grpo_lightning.plugins.methods.advantages.per_reward_std import PerRewardStd
from grpo_lightning.plugins.methods.penalties.importance_weighted import ImportanceWeighted
from grpo_lightning.plugins.methods.process_supervision.process_supervision import ProcessSupervision
from grpo_lightning.plugins.methods.surrogates.cispo import CISPO
from grpo_lightning.plugins.methods.surrogates.dppo import DPPO
from grpo_lightning.plugins.methods.surrogates.gmpo import GMPO
from grpo_lightning.plugins.methods.surrogates.gspo_token import SequenceClippedToken
from grpo_lightning.plugins.methods.surrogates.off_policy_mask import OffPolicyMask
from grpo_lightning.plugins.methods.surrogates.sapo import SAPO
from grpo_lightning.plugins.methods.surrogates.sequence_clipped import SequenceClipped
from grpo_lightning.plugins.methods.surrogates.target_probability import TargetProbability
from grpo_lightning.plugins.methods.surrogates.vespo import VESPO
from grpo_lightning.plugins.methods.token_weights.fixed_length import FixedLength
from grpo_lightning.plugins.methods.token_weights.group_token_mean import GroupTokenMean
from grpo_lightning.plugins.methods.token_weights.top_entropy import TopEntropy
from grpo_lightning.plugins.methods.token_weights.truncated_ratio import TruncatedRatio
from grpo_lightning.plugins.sources.stale.stale_source import StaleSource
from grpo_lightning.policy.snapshots import MovingAverage, PolicySnapshot, Proximal
from grpo_lightning.rewards.results import RewardResult, Segment
from grpo_lightning.types import Completion, Sample

# Bounds that both sides of the `Elsewhere` ratios cross.
SURROGATES: list[Surrogate] = [
    Reinforce(),
    Clipped(),
    Clipped(0.1, 0.28, dual_clip=1.25),
    SequenceClipped(0.02, 0.02),
    SequenceClippedToken(0.02, 0.02),
    CISPO(0.1, 0.2),
    SAPO(),
    GMPO(0.2),
    OffPolicyMask(Clipped(), 0.02),
    TargetProbability(0.98, 1.02),
    VESPO(),
    DPPO("tv", 0.02, 0.02),
]
WEIGHTINGS: list[TokenWeighting] = [SequenceMean(), TokenMean(), FixedLength(12), GroupTokenMean(), Unweighted()]


PRECISIONS = [
    ("32-true", torch.float32, False),
    ("32-true", torch.float32, True),
    ("bf16-mixed", torch.float32, True),
    ("32-true", torch.bfloat16, False),
]
"""The trainer's, the weights', and whether prefixes are shared. The first is what the others are compared with."""


@dataclass
class Case:
    """What one exploration step is learned with."""

    objective: Objective
    advantage: AdvantageEstimator


def cases() -> list[Case]:
    """A case of every surrogate; what else there is takes turns, in cycles of different lengths."""
    advantages = [GroupStd(), BatchStd(), PerRewardStd(), ProcessSupervision(), GroupMean(), LeaveOneOut()]
    estimators: list[KLEstimator] = [K3(), ImportanceWeighted(), K2()]
    masks: list[list[TokenMask]] = [[], [Truncated()], [], [TopEntropy(0.4)]]
    found = []
    for number, surrogate in enumerate(SURROGATES):
        objective = Objective(
            surrogate,
            estimators[number % 3],
            beta=0.1 if number % 2 else 0.0,
            weighting=WEIGHTINGS[number % 5],
            masks=masks[number // 2 % 4],
            entropy=FixedEntropy(0.05) if number % 7 == 3 else NoEntropy(),
            reward_kl=KLPenalty() if number % 9 == 4 else None,
        )
        found.append(Case(objective, advantages[number % 6]))
    return found


class TakeTurns(L.Callback):
    """One case a step. Stands before the loop."""

    def __init__(self) -> None:
        self.cases = cases()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        case = self.cases[trainer.current_epoch]
        assert isinstance(pl_module, GRPOModule)
        pl_module.objective, pl_module.advantage = case.objective, case.advantage


class Elsewhere(PolicySnapshot):
    """An old policy whose ratios are far from 1, but no token's is within 1e-4 of a bound of SURROGATES."""

    def refresh(self, policy: Policy) -> None:
        """Nothing to keep."""

    def forward(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        assert rollouts.sampler_logp is not None
        return rollouts.sampler_logp + 0.3 * torch.sin(7.0 * rollouts.token_ids)


class Vowels(Reward):
    """Scores every third token's step, and the whole by its first character; few whole groups differ in it."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        steps = [
            [Segment(end, float(ids[end] % 3)) for end in {*range(2, len(ids), 3), len(ids) - 1}]
            for ids in ([*sample.token_ids] for sample in samples)
        ]
        values = [float(sample.text[:1] in tuple("aeiouAEIOU")) for sample in samples]
        return RewardResult(
            values, ["ok"] * len(samples), segments=[sorted(s, key=lambda step: step.end) for s in steps]
        )


@dataclass
class Groups(L.Callback):
    """The prompts each step learns from, over all ranks."""

    steps: list[list[int]] = field(default_factory=list)

    def on_train_batch_start(self, *args: Any) -> None:
        batch, batch_idx = args[2:4]
        assert isinstance(batch, Minibatch)
        if batch_idx == 0:
            exploration = batch.step.exploration
            samples, rows = exploration.samples, exploration.rollouts.sample_index.tolist()
            mine = {samples[row].prompt.id for row in rows}
            self.steps.append(sorted(place for places in ranks.gather(mine) for place in places))


LETTERS = list("abcdefghijklmnopqrstuvwxyz")
"""End a turn. One that has none of them in two tokens is cut off, and ends its conversation: some are short."""
SOMETIMES = (
    "{% for m in messages %}{{ '§' if m.role == 'assistant' and not loop.last and m.content[:1] in 'abcdefgh0123' }}"
    "{{ m.content }}{% endfor %}"
)
"""Rewrites turns with some beginnings: the policy has no token for the mark."""


class Counting(NativeEngine):
    """Counts the turns that it was asked for."""

    turns = 0

    def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        self.turns += 1
        return super().generate(*args, **kwargs)


def conversations(folder: Path, parts: bool, **trainer: Any) -> dict[str, Any]:
    """The gradients of every update of some steps of a game, what was logged, and the turns that each rank drew."""
    seen, policy, engine = Gradients(), policy_of(scale=0.05), Counting()
    policy.tokenizer.chat_template = SOMETIMES
    fit(
        folder,
        [seen],
        loop={"max_tokens": 60 if parts else 0, "num_minibatches": 2, "group_size": 3},
        trainer={"max_epochs": 2} | trainer,
        data=PromptDataModule(Guess(), chat=True, limits=Limits(max_turns=6)),
        rewards=[EnvironmentReward(), Vowels(weight=0.5)],
        sampling=Sampling(max_new_tokens=2, stop=LETTERS),
        policy=policy,
        engine=engine,
        objective=Objective(SequenceClipped(), beta=0.1),
        advantage=ProcessSupervision(),
        old_policy=Elsewhere(),
        reference=Another(),
    )
    return {"gradients": seen.updates, "turns": ranks.gather(engine.turns), "logged": scalars(folder)}


def runs(folder: Path, parts: bool, **trainer: Any) -> dict[str, Any]:
    """What the runs found: the gradient of every update, by run, and the groups that dynamic sampling chose."""
    found: dict[str, Any] = {}
    max_tokens = 30 if parts else 0  # micro-batches of one or two rows; the ranks have different numbers

    def run(
        name: str,
        callbacks: Sequence[L.Callback],
        steps: int,
        loop: dict[str, Any],
        precision: str = "32-true",
        **options: Any,
    ) -> None:
        seen = Gradients()
        fit(
            folder / name,
            [seen, *callbacks],
            loop={"max_tokens": max_tokens, "num_minibatches": 2} | loop,
            trainer={"max_epochs": steps, "precision": precision} | trainer,
            **options,
        )
        found[name] = seen.updates if name[:5] != "still" else {"gradients": seen.updates[:2]}

    run(
        "objectives",
        [TakeTurns()],
        len(SURROGATES),
        {},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        rewards=[Digits(), Vowels(weight=0.5)],
        objective=Objective(beta=0.1),
        old_policy=Elsewhere(),
        reference=Another(),
    )
    run("learning", [], 2, {"steps_per_iteration": 1}, objective=Objective(beta=0.1), reference=MovingAverage())
    if trainer.get("strategy") != "fsdp2":  # what the ranks decide does not depend on the shards
        groups = Groups()
        run("sampling", [groups], 3, {"dynamic_sampling": DynamicSampling(max_rounds=3)}, rewards=[Vowels()])
        found["groups"] = groups.steps
        run("stop", [], 2, {"mu": 4, "stop": KLAbove(0.09)})
        corrected = Objective(correction=TruncatedRatio(1.02))
        run("stale", [], 3, {"source": StaleSource(2)}, objective=corrected, old_policy=Proximal())
    for precision, dtype, shares in PRECISIONS:
        policy = policy_of(scale=0.05)
        for parameter in policy.parameters():  # not the rotary frequencies
            parameter.data = parameter.data.to(dtype)
        policy.compute.shares_prefix = shares
        name = f"still {precision} {dtype} {shares}"
        run(
            name,
            [],
            1,
            {"mu": 2, "num_minibatches": 2},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            objective=Objective(SequenceClipped()),
            engine=ScriptedEngine(lambda request, text: "7a3b9c"[: 1 + (request.sample + request.prompt_id) % 6]),
            precision=precision,
            policy=policy,
        )
        found[name]["ratios"] = scalars(folder / name).get("policy/ratio_max")  # of rank 0 alone
    found["conversations"] = conversations(folder / "conversations", parts, **trainer)
    return found


def in_every_way(folder: Path) -> dict[str, dict[str, Any]]:
    """What the runs find in whole minibatches, in parts, and on two ranks with ddp and fsdp2."""
    return two_ranks.in_every_way(__file__, folder, runs)


if __name__ == "__main__":
    two_ranks.as_program(runs)
