"""Why updates were not finite: the tokens and rewards behind it."""

import torch

from grpo_lightning.maths.ragged import segments
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.step import Minibatch


@torch.no_grad()
def culprits(policy: Policy, minibatch: Minibatch) -> str:
    """The first token of each pack whose log-prob, advantage or weight is not finite, with prompt and rewards."""
    found = []
    exploration = minibatch.step.exploration
    packs = [pack for pack in minibatch.packs if int(pack.row[0]) >= 0]  # the others are idle
    for pack in packs:
        logp = policy(pack).logp
        bad = ~(logp.isfinite() & pack.advantage.isfinite() & pack.weight.isfinite())
        rows = segments(pack.lengths)
        for token in bad.nonzero().flatten().tolist()[:1]:
            text = policy.tokenizer.decode([int(pack.token_ids[token])])
            found.append(
                f"token {text!r} (logp {float(logp[token])}, advantage {float(pack.advantage[token])}) of "
                + exploration.describe(int(pack.row[rows[token]]))
            )
    return "\n  ".join(found) or (
        "no single token has a log-prob or advantage that is not finite: the gradient overflowed; lower the learning "
        "rate or use precision 32-true"
        + "".join(f". The minibatch's first row: {exploration.describe(int(pack.row[0]))}" for pack in packs[:1])
    )
