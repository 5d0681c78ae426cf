"""An independent objective: a padded batch in float64 with a loss mask, written from the papers and by itself."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers.tiny import gradients
from torch import Tensor

from grpo_lightning import Policy, Rollouts, Surrogate, TokenWeighting
from grpo_lightning.command.overview import optional
from grpo_lightning.maths import surrogates, weightings


class Padded:
    """[B, T] rows, padded on the right, and the loss mask.

    Args:
        rows: Token ids of each row, its prompt first.
        drawn: Whether the policy drew each of them.
        group: Index of each row's prompt.
        completion: Index of the completion that each row is a piece of.
        temperature: Of the policy.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[bool]],
        group: Sequence[int],
        completion: Sequence[int],
        temperature: float,
    ) -> None:
        self.group = torch.tensor(group)
        self.completion = torch.tensor(completion)
        self.temperature = temperature
        self.ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        self.mask = torch.zeros(self.ids.shape, dtype=torch.bool)
        for row, (tokens, flags) in enumerate(zip(rows, drawn, strict=True)):
            self.ids[row, : len(tokens)] = torch.tensor(tokens)
            self.mask[row, : len(tokens)] = torch.tensor(flags)

    @property
    def num_completions(self) -> int:
        return len(self.completion.unique())

    def drawn_with(self, index: Tensor, mask: Tensor) -> Tensor:
        """[B] tokens of the mask in all rows that have each row's index."""
        return torch.stack([mask[index == own].sum() for own in index])

    def pad(self, values: Tensor) -> Tensor:
        """[N] float32 -> [B, T] float64."""
        padded = torch.zeros(self.ids.shape, dtype=torch.float64)
        padded[self.mask] = values.double()
        return padded

    def score(self, policy: Policy) -> tuple[Tensor, Tensor]:
        """[B, T] log-prob of each token and entropy of its distribution, with gradient."""
        logits = policy.model(input_ids=self.ids, use_cache=False).logits / self.temperature
        distribution = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], dim=1).log_softmax(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, self.ids[..., None]).squeeze(-1), entropy

    def prefix(self, row: int, position: int) -> tuple[int, ...]:
        return (int(self.group[row]), *self.ids[row, : position + 1].tolist())


def double(policy: Policy) -> Policy:
    twin = copy.deepcopy(policy)
    twin.model.set_attn_implementation("eager")
    return twin.double()


def random_fields(rollouts: Rollouts, policy: Policy, padded: Padded) -> None:
    """π_old and π_ref a little away from π_θ, by functions of the prefix, and advantages that differ by token."""
    with torch.no_grad():
        logp = padded.score(double(policy))[0]
    noise = torch.zeros_like(logp)
    for row, position in padded.mask.nonzero().tolist():
        noise[row, position] = math.sin(sum((i + 1) * token for i, token in enumerate(padded.prefix(row, position))))
    rollouts.old_logp = (logp + 0.4 * noise)[padded.mask].clamp(max=-0.01).float()
    rollouts.ref_logp = (logp + 0.3 * noise.square())[padded.mask].clamp(max=-0.01).float()
    rollouts.advantage = torch.randn(rollouts.num_tokens, generator=torch.Generator().manual_seed(1))
    rollouts.advantage[4] = 0.0


# The surrogates: values [B, T] from log π_θ, log π_old, Â and the loss mask, all [B, T].


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] over the drawn tokens of each row."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def reinforce(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    return advantage * logp


def ppo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    return clip((logp - old).exp(), advantage, 0.2, 0.1)


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    return (logp - old).exp().clamp(max=1.1).detach() * advantage * logp


def sapo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    tau = torch.where(advantage > 0, 1.0, 1.05).double()
    return advantage * torch.sigmoid(tau * ((logp - old).exp() - 1)) * 4 / tau


def gspo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    return clip(mean(logp - old, mask).exp(), advantage, 0.1, 0.05)


def gspo_token(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    ratio = mean(logp - old, mask).exp().detach() * (logp - logp.detach()).exp()
    return clip(ratio, advantage, 0.1, 0.05)


def gmpo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    good, bad = (mean(d, mask).exp() for d in ((logp - old).clamp(max=0.2), (logp - old).clamp(min=-0.2)))
    return torch.where(advantage > 0, good, bad) * advantage


def vespo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    w = (mean(logp.detach() - old, mask) * mask.sum(1, keepdim=True)).exp()
    phi = torch.where(advantage >= 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())
    return phi * advantage * logp


def dppo(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    new, before = logp.detach().exp().double(), old.exp()
    kl = before * (before / new).log() + (1 - before) * ((1 - before) / (1 - new)).log()
    far = (kl > 1e-4) & (advantage * (new - before) > 0)
    return torch.where(far, 0.0, new / before * advantage * logp)


def off_policy(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    away = mean(old - logp.detach(), mask)
    return torch.where((away > 0.05) & (advantage < 0), 0.0, clip((logp - old).exp(), advantage, 0.2, 0.2))


def targets(logp: Tensor, old: Tensor, advantage: Tensor, padded: Padded, mask: Tensor) -> Tensor:
    net: dict[tuple[int, ...], float] = defaultdict(float)
    probability: dict[tuple[int, ...], float] = {}
    for row, position in mask.nonzero().tolist():
        path = padded.prefix(row, position)
        net[path] += float(advantage[row, position])
        probability[path] = math.exp(float(old[row, position]))
    net = {path: 0.0 if abs(value) < 1e-6 else value for path, value in net.items()}  # bar rounding
    target = {path: p ** (0.97 if net[path] > 0 else 1.03 if net[path] < 0 else 1) for path, p in probability.items()}
    tried: dict[tuple[int, ...], float] = defaultdict(float)
    for path, p in target.items():
        tried[path[:-1]] += p
    values = torch.zeros_like(logp)
    for row, position in mask.nonzero().tolist():
        path = padded.prefix(row, position)
        bound = math.log(target[path] / max(1, tried[path[:-1]]))
        own = logp[row, position]
        held = (net[path] >= 0 and float(own.detach()) >= bound) or (net[path] <= 0 and float(own.detach()) <= bound)
        values[row, position] = advantage[row, position] * (bound if held else own)
    return values


Loop = Callable[[Tensor, Tensor, Tensor, Padded, Tensor], Tensor]
SURROGATES: dict[type[Surrogate], tuple[Surrogate, Loop]] = {
    surrogates.Reinforce: (surrogates.Reinforce(), reinforce),
    surrogates.Clipped: (surrogates.Clipped(0.2, 0.1), ppo),
}
OF_PLUGINS: dict[str, tuple[Loop, tuple[Any, ...]]] = {
    "CISPO": (cispo, (None, 0.1)),
    "SequenceClipped": (gspo, (0.1, 0.05)),
    "SequenceClippedToken": (gspo_token, (0.1, 0.05)),
    "SAPO": (sapo, ()),
    "OffPolicyMask": (off_policy, (None, 0.05)),
    "TargetProbability": (targets, (0.97, 1.03)),
    "GMPO": (gmpo, (0.2,)),
    "VESPO": (vespo, ()),
    "DPPO": (dppo, ("kl", 1e-4, 1e-4)),
}
"""Loop and arguments of the surrogates of plugins, by their name."""
for name, (loop, arguments) in OF_PLUGINS.items():
    if kind := optional(name):
        SURROGATES[kind] = kind(*arguments), loop


Weight = Callable[[Padded, Tensor], Tensor]
"""[B] weight per token of each row, from the loss mask."""


def each(padded: Padded) -> Tensor:
    """[B] ones."""
    return torch.ones(len(padded.group))


WEIGHTINGS: dict[type[TokenWeighting], tuple[TokenWeighting, Weight]] = {
    weightings.SequenceMean: (
        weightings.SequenceMean(),
        lambda padded, mask: 1 / (padded.num_completions * padded.drawn_with(padded.completion, mask)),
    ),
    weightings.TokenMean: (weightings.TokenMean(), lambda padded, mask: each(padded) / mask.sum()),
    weightings.Unweighted: (weightings.Unweighted(), lambda padded, mask: each(padded)),
}


def per_group(padded: Padded, mask: Tensor) -> Tensor:
    """[B] of the mean over groups of the mean over a group's tokens."""
    return 1 / (len(padded.group.unique()) * padded.drawn_with(padded.group, mask))


if FixedLength := optional("FixedLength"):
    WEIGHTINGS[FixedLength] = FixedLength(9), lambda padded, mask: each(padded) / (9 * padded.num_completions)
if GroupTokenMean := optional("GroupTokenMean"):
    WEIGHTINGS[GroupTokenMean] = GroupTokenMean(), per_group


def reference(
    policy: Policy,
    rollouts: Rollouts,
    padded: Padded,
    loop: Loop,
    weight: Weight,
    beta: float,
    bonus: float,
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """[N] log π_θ, J and its gradient, in float64."""
    twin = double(policy)
    twin.zero_grad()
    mask = padded.mask
    logp, entropy = padded.score(twin)
    old, ref, advantage = (padded.pad(v) for v in (rollouts.old_logp, rollouts.ref_logp, rollouts.advantage))
    kl = (ref - logp).exp() - (ref - logp) - 1
    value = loop(logp, old, advantage, padded, mask) - beta * kl + bonus * entropy
    objective = torch.where(mask, weight(padded, mask).double()[:, None] * value, 0.0).sum()
    objective.backward()
    return logp[padded.mask].detach(), float(objective.detach()), dict(gradients(twin))
