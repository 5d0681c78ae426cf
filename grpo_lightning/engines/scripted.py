"""An engine that says what it is told to: for tests, and for looking at rewards without a model."""

from collections.abc import Callable, Sequence

import torch

from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.types import Completion, FinishReason, Prompt

Script = Callable[[Prompt, int], str]
"""From a prompt and the sample's place in its group to the completion's text."""


class ScriptedEngine(RolloutEngine):
    """Completions from a function. Their log-probs are unknown (noted as 0) and are never compared with the policy's.

    Args:
        script: From a prompt and the sample's place in its group to the completion's text.
    """

    def __init__(self, script: Script) -> None:
        self.script = script

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        step: int = 0,
        progress: Progress | None = None,
    ) -> list[Completion]:
        assert self.policy is not None, "call sync(policy) first"
        stop = min(self.policy.stop_ids)
        completions = []
        for prompt in prompts:
            for place in range(group_size):
                text = self.script(prompt, place)
                token_ids = [*self.policy.tokenizer.encode(text, add_special_tokens=False), stop]
                reason = FinishReason.STOP if len(token_ids) <= sampling.max_new_tokens else FinishReason.LENGTH
                token_ids = token_ids[: sampling.max_new_tokens]
                completions.append(Completion(token_ids, [0.0] * len(token_ids), reason))
        if progress:
            progress(len(completions))
        return completions
