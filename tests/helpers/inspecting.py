"""Records of steps without a run: of random rollouts, and from pieces of text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning import Inspector, Policy
from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.looking.inspector.inspector_page import write
from grpo_lightning.plugins.looking.inspector.record import (
    FOLDER,
    CompletionRecord,
    GroupRecord,
    StepRecord,
    TokenRecord,
    describe,
    path_of,
)


def terms_of(tokens: TokenRecord, beta: float = 0.0, entropy_bonus: float = 0.0) -> np.ndarray:
    """[T] float64 terms of the objective, 0 if given: over the tokens of an update they sum to `policy/objective`."""
    value = tokens.surrogate.astype(np.float64)
    for factor, part in ((-beta, tokens.kl), (entropy_bonus, tokens.entropy_update)):
        if factor:
            value += factor * part
    return np.where(tokens.weight != 0, np.nan_to_num(tokens.weight * value), 0.0)


def sums_of_terms(record: StepRecord) -> dict[int, float]:
    """The sum of the terms of each update."""
    beta, bonus = record.objective["beta"], record.objective["entropy_bonus"]
    sums: dict[int, float] = {}
    for group in groups_of(record):
        for tokens in [one.tokens for one in group.completions if one.tokens.surrogate is not None]:
            if group.update is not None:
                sums[group.update] = sums.get(group.update, 0.0) + float(terms_of(tokens, beta, bonus).sum())
    return sums


def check_sampler_logp(record: StepRecord) -> None:
    """Asserts that the sampled answers of validation are from the weights by which the record measures them."""
    for tokens in [one.tokens for one in completions_of(record, "validation") if not one.greedy]:
        np.testing.assert_allclose(tokens.sampler_logp, tokens.after_logp, rtol=0, atol=1e-5)


@torch.no_grad()
def logits_of(policy: Policy, group: GroupRecord, completion: CompletionRecord) -> torch.Tensor:
    """[T, V] logits of a forward over this completion alone."""
    prompt = policy.tokenizer.encode(group.prompt)
    assert len(prompt) == group.num_prompt_tokens
    row = torch.tensor([[*prompt, *completion.tokens.ids.tolist()]])
    return policy.logits(policy.hidden(row, use_cache=False))[0, len(prompt) - 1 : -1]


def inspector(**options: Any) -> Inspector:
    """Records every group of every step, unless said otherwise."""
    return Inspector(**{"every_n_steps": 1, "num_groups": 1000} | options)


def groups_of(record: StepRecord, kind: str = "train") -> list[GroupRecord]:
    """The groups of this kind."""
    return [group for group in record.groups if group.kind == kind]


def completions_of(record: StepRecord, kind: str = "train") -> list[CompletionRecord]:
    """The completions of these groups."""
    return [completion for group in groups_of(record, kind) for completion in group.completions]


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


def write_page(folder: Path, *groups: GroupRecord, objective: Objective | None = None, step: int = 10) -> Path:
    """The page of a run with one step of these groups."""
    write(write_records(folder, [step_of([*groups], objective, step)]), folder / "page.html")
    return folder / "page.html"


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
