"""Self-distillation: the policy, told more than it was asked, teaches itself."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import PolicySnapshot, RecordedLogp
from grpo_lightning.types import Sample, UsageError, require


class SelfTeacher(PolicySnapshot):
    """The policy given another prompt, such as one with the solution or with feedback: the teacher of its own answers.

    Knowing what its prompt adds, it judges each token that was drawn for the question alone (SDPO, arXiv 2601.20802;
    OPSD, arXiv 2601.18734). Derive from it and replace `question` to write the prompt in Python. Its forwards exceed
    `loop.max_tokens` by what the prompt adds.

    Args:
        prompt: What stands in place of the question, in the same template or chat. `{question}`, `{answer}`,
            `{completion}` and `{column}` of the data are filled in.
        snapshot: Which weights teach. None is the policy as it is at the moment; a `FrozenCopy` stays the first one.
    """

    def __init__(
        self,
        prompt: str = "{question}\n\nThe answer is {answer}. Show how to get there.\n",
        snapshot: PolicySnapshot | None = None,
    ) -> None:
        super().__init__()
        self.prompt, self.snapshot = prompt, snapshot or RecordedLogp()
        self.prompts: list[list[int]] = []  # the token ids of the prompt of each sample of the step

    def question(self, sample: Sample) -> str:
        """What the teacher is asked about a completion."""
        asked = sample.prompt.question
        known = asked.metadata | {"question": asked.text, "answer": asked.answer, "completion": sample.text}

        def value(match: re.Match[str]) -> str:
            require(match[1] in known, f"model.reference.prompt: {match[0]} is none of {', '.join(known)}")
            lacks = match[1] == "answer" and not asked.answer
            require(not lacks, f"{asked.source}: no gold answer for the {match[0]} of model.reference.prompt")
            return str(known[match[1]])

        return re.sub(r"\{(\w+)\}", value, self.prompt)

    def check(self, policy: Policy) -> None:
        self.snapshot.check(policy)

    def refresh(self, policy: Policy) -> None:
        self.snapshot.refresh(policy)

    def begin(self, policy: Policy, samples: Sequence[Sample]) -> None:
        self.prompts = [self._token_ids(policy, sample) for sample in samples]
        limit = policy.context_length
        for own, sample in zip(self.prompts, samples, strict=True):
            if limit is not None and len(own) + len(sample.token_ids) > limit:
                source = sample.prompt.question.source
                problem = f"with {len(sample.token_ids)} tokens of a completion it exceeds the context of {limit}"
                raise UsageError(f"model.reference.prompt: for {source} it has {len(own)} tokens, and {problem}")

    def _token_ids(self, policy: Policy, sample: Sample) -> list[int]:
        """The prompt with another question in it."""
        prompt, encode = sample.prompt, policy.tokenizer.encode
        asked = prompt.question.text.strip()  # chat templates strip it
        stands = f"{prompt.question.source}: its question must stand in its prompt once, as it is, to be replaced"
        require(bool(asked) and prompt.text.count(asked) == 1, stands)
        before, _, after = prompt.text.partition(asked)
        special = encode(prompt.text, add_special_tokens=False) != prompt.token_ids
        return list(encode(before + self.question(sample).strip() + after, add_special_tokens=special))

    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        return self.snapshot.scored(policy, self.seen(rollouts), read)

    def seen(self, rollouts: Rollouts) -> Rollouts:
        """The same completions after the other prompts, each prompt once."""
        rows = rollouts.row.tolist()
        if len({*rows}) < len(rows):
            raise UsageError("model.reference=SelfTeacher: it reads no conversation whose history is rewritten")
        index: dict[tuple[int, ...], int] = {}
        of_row = [index.setdefault(tuple(self.prompts[row] if row >= 0 else [0]), len(index)) for row in rows]
        ids, lengths, group = (one.to(rollouts.row.device) for one in (*ragged.flat([*index]), torch.tensor(of_row)))
        asked: dict[str, Any] = {"prompt_token_ids": ids, "prompt_lengths": lengths, "group": group, "sizes": None}
        return replace(rollouts, **asked)
