"""Records of steps without a run: of random rollouts, and from pieces of text."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.landscape import curves
from grpo_lightning.plugins.inspect.record import (
    FOLDER,
    CompletionRecord,
    GroupRecord,
    StepRecord,
    TokenRecord,
    describe,
    path_of,
)
from helpers.tiny import rollouts_of


def token_records(rollouts: Rollouts, columns: dict[str, Tensor]) -> list[TokenRecord]:
    """The records of the completions of `rollouts`, with [N] and [N, K] `columns` by the names of their fields."""
    starts = np.cumsum([0, *rollouts.lengths.tolist()])
    given = [] if rollouts.context_ids is None else rollouts.context_ids.split(rollouts.context_lengths.tolist())
    records = []
    for row, (first, last) in enumerate(pairwise(starts)):
        drawn = np.arange(last - first) if rollouts.position is None else rollouts.position[first:last].numpy()
        length = len(drawn) + (len(given[row]) if given else 0)
        own = np.zeros(length, dtype=bool)
        own[drawn] = True
        ids = np.zeros(length, dtype=np.int32)
        ids[own] = rollouts.token_ids[first:last]
        if given:
            ids[~own] = given[row]

        def whole(name: str, values: Tensor, own: Any = own, first: int = first, last: int = last) -> np.ndarray:
            integer = name == "clip" or name.endswith("_ids")
            array = np.full((len(own), *values.shape[1:]), 0 if integer else np.nan, np.int32 if integer else "f4")
            array[own] = values[first:last].detach()
            return array.astype(np.int8) if name == "clip" else array

        records.append(
            TokenRecord(
                ids=ids,
                pieces=[f"{id} " for id in ids],
                given=(~own).astype(np.int8) if given else None,
                **{name: whole(name, values) for name, values in columns.items()},
                columns={name: whole(name, values) for name, values in rollouts.columns.items()},
            )
        )
    return records


def update_columns(objective: Objective, logp: Tensor, entropy: Tensor, rollouts: Rollouts) -> dict[str, Tensor]:
    """What an update with this objective has of each token: [N] by the names of the fields of `TokenRecord`."""
    logp = logp.detach().requires_grad_()
    old = logp.detach() if rollouts.old_logp is None else rollouts.old_logp
    surrogate = objective.surrogate(logp, old, rollouts)
    value, _ = objective(logp, entropy, rollouts)
    columns = {
        "old_logp": old,
        "update_logp": logp,
        "advantage": rollouts.advantage,
        "weight": rollouts.weight,
        "surrogate": surrogate.value,
        "push": torch.autograd.grad(value, logp, retain_graph=True)[0],
        "clip": surrogate.clipped_high.int() - surrogate.clipped_low.int(),
        "entropy_update": entropy,
    }
    if rollouts.ref_logp is not None:
        columns |= {"ref_logp": rollouts.ref_logp, "kl": objective.kl(logp, rollouts.ref_logp, old)}
    parts = (part.detach().split(rollouts.lengths.tolist()) for part in (logp, columns["push"]))
    alone = [
        curves(objective, rollouts.select(torch.tensor([row])), own, push, own)
        for row, (own, push) in enumerate(zip(*parts, strict=True))
    ]
    return columns | {
        name: torch.cat([one[name] for one in alone]) for name, one in alone[0].items() if one is not None
    }


def random_record(objective: Objective, seed: int = 0, given: float = 0.0) -> tuple[StepRecord, Rollouts]:
    """A step of random rollouts in which half of the tokens are near π_old, and what the objective makes of them."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = rollouts_of([5, 1, 9, 3, 7, 4], prompt_lengths=[3, 4], seed=seed, given=given)
    assert rollouts.old_logp is not None
    rollouts.add_columns(objective.surrogate.prepare(rollouts))
    noise = torch.randn(rollouts.num_tokens, generator=generator)
    size = torch.where(torch.rand(rollouts.num_tokens, generator=generator) < 0.5, 0.05, 1.0)
    logp = (rollouts.old_logp + size * noise).clamp(max=-1e-3)
    entropy = torch.rand(rollouts.num_tokens, generator=generator)
    columns = update_columns(objective, logp, entropy, rollouts)
    columns |= {"after_logp": (logp + 0.1 * noise).clamp(max=-1e-3)}
    return step_of([group_of(token_records(rollouts, columns))], objective), rollouts


def group_of(tokens: Sequence[TokenRecord], **more: Any) -> GroupRecord:
    """A group of completions that are right and wrong by turns; `more` sets its fields."""
    completions = [completion_of(record, right=index % 2 == 0) for index, record in enumerate(tokens)]
    fields: dict[str, Any] = {
        "kind": "train",
        "roles": ["mixed"],
        "prompt_id": 7,
        "question": "What is 2 + 3?",
        "gold": "5",
        "source": "train.jsonl:7",
        "prompt": "Q: What is 2 + 3?\nA:",
        "num_prompt_tokens": 9,
        "mean": 0.5,
        "std": 0.5,
        "update": 3,
        "completions": completions,
        "vocabulary": {},
    }
    return GroupRecord(**fields | more)


def completion_of(tokens: TokenRecord, right: bool | None = True, **more: Any) -> CompletionRecord:
    """A completion; `more` sets its fields."""
    fields: dict[str, Any] = {
        "text": "".join(tokens.pieces),
        "finish_reason": "stop",
        "reward": float(bool(right)),
        "right": right,
        "scores": {"math_verifier": float(bool(right))},
        "statuses": {"math_verifier": "ok"},
        "answer": "5" if right else "4",
        "segments": {},
        "tokens": tokens,
    }
    return CompletionRecord(**fields | more)


def plain_tokens(pieces: Sequence[str], seed: int = 0) -> TokenRecord:
    """Tokens with these pieces and a random change of their log-probs."""
    rng = np.random.default_rng(seed)
    old = np.log(rng.uniform(0.01, 0.99, len(pieces)))
    return TokenRecord(
        ids=np.arange(len(pieces), dtype=np.int32),
        pieces=list(pieces),
        old_logp=old.astype("f4"),
        after_logp=(old + rng.normal(0, 0.2, len(pieces))).astype("f4"),
    )


def step_of(groups: list[GroupRecord], objective: Objective | None = None, step: int = 10) -> StepRecord:
    """A step of these groups."""
    return StepRecord(step, describe(objective or Objective()), 1.0, ["math_verifier"], "math_verifier", groups)


def write_records(
    folder: Path, records: Sequence[StepRecord], curves: dict[str, Sequence[float]] | None = None
) -> Path:
    """A run's folder with these records, and with curves that have a value per step."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for record in records:
        path_of(folder, record.step).write_text("\n".join(record.lines()) + "\n", encoding="utf-8")
    if curves:
        with SummaryWriter(str(folder)) as writer:
            for name, values in curves.items():
                for step, value in enumerate(values):
                    writer.add_scalar(name, value, step)
    return folder
