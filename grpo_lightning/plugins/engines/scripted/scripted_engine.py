"""An engine whose completions are written by a function."""

from collections.abc import Callable, Sequence

from grpo_lightning.engines.engine import Completions, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request


class ScriptedEngine(RolloutEngine):
    """Returns completions that a function writes. For tests, and to try rewards without a model that can answer.

    The log-probs of its completions are unknown, and are compared with nothing.

    Args:
        script: Maps a request and the text that it completes to the completion's text. `Request.prompt_id` and
            `Request.sample` tell the prompts and the completions of a group apart.
    """

    reads_images = True

    def __init__(self, script: Callable[[Request, str], str]) -> None:
        self.script = script

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        assert self.policy is not None, "call sync(policy) first"
        tokenizer = self.policy.tokenizer
        stop_id = min(self.policy.stop_ids)
        stops = StopStrings(self.policy, sampling.stop)
        for index, request in enumerate(requests):
            text = self.script(request, str(tokenizer.decode(request.token_ids)))
            token_ids = [*tokenizer.encode(text, add_special_tokens=False), stop_id]
            reason = FinishReason.STOP if len(token_ids) <= sampling.max_new_tokens else FinishReason.LENGTH
            yield index, stops.cut(Completion(token_ids[: sampling.max_new_tokens], None, reason))
