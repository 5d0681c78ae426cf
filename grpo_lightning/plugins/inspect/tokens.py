"""The tokens of one completion as they are recorded, drawn and given ones in their order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.landscape import curves
from grpo_lightning.plugins.inspect.learned import Learned
from grpo_lightning.plugins.inspect.pieces import decode, pieces_of
from grpo_lightning.plugins.inspect.record import TokenRecord
from grpo_lightning.policy.policy import TokenLogp
from grpo_lightning.types import Prompt, Sample


@dataclass(slots=True)
class Row:
    """One completion of some rollouts, and where its tokens are."""

    rollouts: Rollouts
    """The completion alone."""
    tokens: slice
    """Its drawn tokens among those of all completions."""
    ids: list[int]
    """[T] drawn and given tokens."""
    drawn: np.ndarray
    """[n] int64 indices of the drawn tokens in `ids`."""

    @classmethod
    def all_of(cls, rollouts: Rollouts) -> Iterator["Row"]:
        """Yields the completions, in their order."""
        end = 0
        for index, length in enumerate(rollouts.sizes.lengths.tolist()):
            one, start, end = rollouts.select(torch.tensor([index])), end, end + length
            ids = one.token_ids if one.context_ids is None else torch.cat([one.token_ids, one.context_ids])
            yield cls(one, slice(start, end), ids[one.sizes.order].tolist(), one.sizes.drawn.numpy())

    def number_among(self, rows: Sequence["Row"]) -> int:
        """Which of the completions of its sample it is: the piece of a conversation, 0 without one."""
        own = [row for row in rows if int(row.rollouts.row) == int(self.rollouts.row)]
        return next(number for number, row in enumerate(own) if row is self)

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """The prompt of its group: what all of its conversations begin with."""
        ids = self.rollouts.prompt_token_ids.tolist()
        own = sample.prompt
        return own if len(ids) == len(own.token_ids) else replace(own, token_ids=ids, text=decode(tokenizer, ids))

    def record(self, tokenizer: PreTrainedTokenizerBase, **numbers: Tensor | None) -> TokenRecord:
        """The tokens as they are recorded.

        Args:
            tokenizer: That of the policy.
            **numbers: [n] or [n, K] over the drawn tokens, by the field of `TokenRecord`; None stays None.
        """
        ids, given = self.ids, None
        if len(ids) > len(self.drawn):
            given = np.ones(len(ids), np.int8)
            given[self.drawn] = 0
        arrays = {name: None if values is None else self._spread(values) for name, values in numbers.items()}
        columns = {name: self._spread(values) for name, values in self.rollouts.columns.items()}
        return TokenRecord(np.array(ids, np.int32), pieces_of(tokenizer, ids), given, **arrays, columns=columns)

    def _spread(self, values: Tensor) -> np.ndarray:
        """[T] or [T, K] from [n] or [n, K]: NaN or 0 for given tokens."""
        dtype = {torch.int64: np.int32, torch.int8: np.int8, torch.float16: np.float16}.get(values.dtype, np.float32)
        whole = np.full((len(self.ids), *values.shape[1:]), np.nan if values.is_floating_point() else 0, dtype)
        whole[self.drawn] = values.numpy()
        return whole


@dataclass(slots=True)
class Recorder:
    """Makes the records of completions that a step could learn from.

    Args:
        tokenizer: That of the policy.
        before: The candidates' tokens, measured before the step's updates.
        after: The same, measured after them.
        old_logp: [N] float32 log π_old of the candidates; None where only the updates know it.
        objective: That of the updates.
        learns_from_all: Whether tokens without advantage have a gradient too.
    """

    tokenizer: PreTrainedTokenizerBase
    before: TokenLogp
    after: TokenLogp
    old_logp: Tensor | None
    objective: Objective
    learns_from_all: bool

    def record(self, row: Row, learned: Learned | None) -> TokenRecord:
        """The tokens of one completion.

        Args:
            row: The completion among the candidates.
            learned: What its last update saw; None if it took part in none.
        """
        pick, own = row.tokens, row.rollouts
        numbers: dict[str, Tensor | None] = {
            "sampler_logp": own.sampler_logp,
            "old_logp": None if self.old_logp is None else self.old_logp[pick],
            "after_logp": self.after.logp[pick],
            "advantage": own.advantage,
            "weight": own.weight,
            "entropy_before": self.before.entropy[pick],
            "entropy_after": self.after.entropy[pick],
        }
        for name, scored in (("before", self.before), ("after", self.after)):
            assert scored.top_ids is not None and scored.top_logp is not None
            numbers |= {f"top_{name}_ids": scored.top_ids[pick], f"top_{name}_logp": scored.top_logp[pick]}
        if learned is not None:
            seen = learned.rollouts
            numbers |= {
                "old_logp": seen.old_logp,
                "update_logp": learned.logp,
                "ref_logp": seen.ref_logp,
                "surrogate": learned.surrogate,
                "kl": None if seen.ref_logp is None else learned.kl,
                "correction": learned.correction,
                "push": learned.push,
                "clip": learned.clip,
                "entropy_update": learned.entropy,
                **curves(self.objective, seen, learned.logp, learned.push, self.after.logp[pick]),
            }
            if learned.correction is not None:
                numbers["weight"] = own.weight * learned.correction
        elif not self.learns_from_all and not bool((own.weight * own.advantage).any()):
            # No update looked at it, since it adds nothing.
            none = torch.zeros_like(own.weight)
            numbers |= {"surrogate": none, "push": none, "clip": none.to(torch.int8)}
        return row.record(self.tokenizer, **numbers)
