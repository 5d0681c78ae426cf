"""Self-distillation: the policy with a more informative prompt teaches itself."""

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
from grpo_lightning.types import Sample, UsageError


class SelfTeacher(PolicySnapshot):
    """Takes the policy with another prompt as the reference, for example a prompt with the solution or with feedback.

    With the information in its prompt, it scores each token that was sampled for the question alone (SDPO,
    arXiv 2601.20802; OPSD, arXiv 2601.18734). Derive from it and replace `question` to write the prompt in Python. Its
    forwards exceed `loop.max_tokens` by the tokens that the prompt adds.

    Args:
        prompt: The text in place of the question, in the same template or chat. `{question}`, `{answer}`,
            `{completion}` and `{column}` of the data are filled in.
        snapshot: The weights that teach. None takes the current policy; a `FrozenCopy` keeps the initial policy.
    """

    def __init__(
        self,
        prompt: str = "{question}\n\nThe answer is {answer}. Show how to get there.\n",
        snapshot: PolicySnapshot | None = None,
    ) -> None:
        super().__init__()
        self.prompt = prompt
        self.snapshot = snapshot or RecordedLogp()
        self.prompts: list[list[int]] = []
        """The token ids of the teacher's prompt for each sample of the step."""

    def question(self, sample: Sample) -> str:
        """Returns the question of the teacher's prompt for a completion."""
        question = sample.prompt.question
        values = {"question": question.text, "answer": question.answer, "completion": sample.text}
        value_by_name = question.metadata | values

        def value(match: re.Match[str]) -> str:
            if match[1] not in value_by_name:
                raise UsageError(f"model.reference.prompt: {match[0]} is none of {', '.join(value_by_name)}")
            if match[1] == "answer" and not question.answer:
                raise UsageError(f"{question.source}: no gold answer for the {match[0]} of model.reference.prompt")
            return str(value_by_name[match[1]])

        return re.sub(r"\{(\w+)\}", value, self.prompt)

    def check(self, policy: Policy) -> None:
        self.snapshot.check(policy)

    def refresh(self, policy: Policy) -> None:
        self.snapshot.refresh(policy)

    def begin(self, policy: Policy, samples: Sequence[Sample]) -> None:
        if any(sample.prompt.images for sample in samples):
            raise UsageError("model.reference=SelfTeacher: it reads no images; use Teacher, or prompts of text")
        self.prompts = [self._token_ids(policy, sample) for sample in samples]
        limit = policy.context_length
        for prompt_ids, sample in zip(self.prompts, samples, strict=True):
            if limit is not None and len(prompt_ids) + len(sample.token_ids) > limit:
                raise UsageError(
                    f"model.reference.prompt: for {sample.prompt.question.source} it has {len(prompt_ids)} tokens, and "
                    f"with {len(sample.token_ids)} tokens of a completion it exceeds the context of {limit}"
                )

    def _token_ids(self, policy: Policy, sample: Sample) -> list[int]:
        """Returns the token ids of a sample's prompt with the teacher's question in place of its own."""
        prompt = sample.prompt
        encode = policy.tokenizer.encode
        # Chat templates strip the question.
        question = prompt.question.text.strip()
        if not question or prompt.text.count(question) != 1:
            raise UsageError(
                f"{prompt.question.source}: its question must stand in its prompt once, as it is, to be replaced"
            )
        text = prompt.text.replace(question, self.question(sample).strip())
        adds_special_tokens = encode(prompt.text, add_special_tokens=False) != prompt.token_ids
        return list(encode(text, add_special_tokens=adds_special_tokens))

    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        return self.snapshot.scored(policy, self.with_prompts(rollouts), read)

    def with_prompts(self, rollouts: Rollouts) -> Rollouts:
        """Returns the same completions after the teacher's prompts, each prompt once."""
        rows = rollouts.sample_index.tolist()
        if len({*rows}) < len(rows):
            raise UsageError("model.reference=SelfTeacher: it reads no conversation whose history is rewritten")
        index_by_prompt: dict[tuple[int, ...], int] = {}
        group = [
            index_by_prompt.setdefault(tuple(self.prompts[row] if row >= 0 else [0]), len(index_by_prompt))
            for row in rows
        ]
        token_ids, lengths = ragged.flat([*index_by_prompt])
        device = rollouts.sample_index.device
        return replace(
            rollouts,
            prompt_token_ids=token_ids.to(device),
            prompt_lengths=lengths.to(device),
            group=torch.tensor(group).to(device),
            sizes=None,  # type: ignore[arg-type]
        )
