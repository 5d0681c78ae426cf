"""Stop strings, which end a completion where its text contains them, however its tokens spell them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import BROKEN, Completion, FinishReason, UsageError


class StopStrings:
    """Ends completions where their text contains a stop string (`Sampling.stop`).

    A completion ends with the first token after which the text of its sampled tokens contains a stop string. Texts are
    decoded without special tokens, as rewards see them; the prompt does not count. A stop string that is a special
    token ends the completion at that token, as the policy's own stop tokens do.

    Args:
        policy: Its tokenizer decodes, and its stop tokens end completions too.
        strings: The stop strings. One that contains a special token, and more than it, is a UsageError.
    """

    def __init__(self, policy: Policy, strings: Sequence[str]) -> None:
        self.tokenizer = policy.tokenizer
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {str(token): id for id, token in added.items() if token.special}
        self.ids = policy.stop_ids | {special[string] for string in strings if string in special}
        """Every token that ends a completion."""
        self.strings = tuple(dict.fromkeys(string for string in strings if string not in special))
        """The stop strings that texts are searched for."""
        for string in self.strings:
            if token := next((token for token in special if token and token in string), ""):
                raise UsageError(
                    f"sampling.stop: {string!r} contains the special token {token!r}, which texts leave out: "
                    f"give {token!r} alone to end completions at that token"
                )
        # All characters of the longest string but the last, and 8 before it, since the first may be decoded wrong.
        self._context = max(map(len, self.strings), default=1) - 1 + 8
        # Such a tokenizer may write a string after one token, and rewrite it after the next.
        self._rewrites = bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))

    def find(self, text: str) -> str:
        """Returns the stop string in `text` that ends first; empty if there is none."""
        strings = [string for string in self.strings if string in text]
        return min(strings, key=lambda string: text.index(string) + len(string), default="")

    def first_end(self, token_ids: list[int], num_checked: int = 0) -> int | None:
        """Returns the number of tokens after which the text first contains a stop string; None if it does not.

        The first `num_checked` tokens are known to contain none. So repeated checks take linear time together.
        """
        if not self.strings or num_checked >= len(token_ids):
            return None
        start = self._start(token_ids, num_checked)
        text = self._decode(token_ids[start:])
        if not (self._rewrites or BROKEN in text or self.find(text)):
            return None
        for end in range(num_checked + 1, len(token_ids) + 1):
            # The first check is quick, the second exact.
            if self.find(self._decode(token_ids[start:end])) and self.find(self._decode(token_ids[:end])):
                return end
        return None

    def cut(self, completion: Completion) -> Completion:
        """Cuts a completion after the token that completes a stop string, or after a stop token, if it has either."""
        ids, logp = completion.token_ids, completion.logp
        if completion.stop_string:
            return completion
        stop = next((index for index, token in enumerate(ids) if token in self.ids), len(ids))
        ends = (self.first_end(ids[: min(start + 64, stop)], start) for start in range(0, stop, 64))
        end = next(filter(None, ends), None)
        if end is None and stop >= len(ids) - 1:
            return completion
        string = self.find(self._decode(ids[:end])) if end else ""
        end = end or stop + 1
        return replace(
            completion,
            token_ids=ids[:end],
            logp=logp and logp[:end],
            finish_reason=FinishReason.STOP,
            stop_string=string,
        )

    def ended(
        self, token_ids: list[int], logp: list[float], num_checked: int, max_new_tokens: int
    ) -> Completion | None:
        """Returns the completion of these tokens if it has ended; else None.

        It ends with a token after the first `num_checked`, or because it has `max_new_tokens`.
        """
        end = next((index + 1 for index in range(num_checked, len(token_ids)) if token_ids[index] in self.ids), None)
        if end is None and len(token_ids) < max_new_tokens and self.first_end(token_ids, num_checked) is None:
            return None
        return self.cut(Completion(token_ids[:end], logp[:end], FinishReason.STOP if end else FinishReason.LENGTH))

    def _start(self, token_ids: list[int], end: int) -> int:
        """Returns the index of a token from which the text up to `end` is long enough, and begins with a character."""
        size = self._context
        while size < end:
            text = self._decode(token_ids[end - size : end])
            if len(text) >= self._context and not text.startswith(BROKEN):
                return end - size
            # A character has up to 4 bytes, each perhaps a token; some tokens have no text.
            size += 1 if size < self._context + 3 else size
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def text_of(completion: Completion, tokenizer: Any) -> str:
    """Returns the text of a completion as rewards see it: to the end of its stop string, without special tokens."""
    text = str(tokenizer.decode(completion.written, skip_special_tokens=True))
    stop = completion.stop_string
    return text[: text.index(stop) + len(stop)] if stop else text
