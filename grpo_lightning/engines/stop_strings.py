"""Strings that end a completion, found in its text whatever tokens spell them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import BROKEN, Completion, FinishReason, UsageError


class StopStrings:
    """Ends completions where their text contains one of some strings: `Sampling.stop`.

    A completion ends with the first token after which the text of its drawn tokens contains a stop string. Texts are
    decoded without special tokens, as rewards see them; the prompt does not count. A stop string that is a special
    token ends the completion at that token, as the policy's own stop tokens do.
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
        # Characters for the longest string but for its last, and 8 before it, of which the first may come out wrong.
        self._context = max(map(len, self.strings), default=1) - 1 + 8
        # Then a string may be there after one token and gone after the next, without a trace.
        self._rewrites = bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))

    def find(self, text: str) -> str:
        """The stop string in `text` that ends first; empty if there is none."""
        found = [string for string in self.strings if string in text]
        return min(found, key=lambda string: text.index(string) + len(string), default="")

    def first_end(self, token_ids: list[int], seen: int = 0) -> int | None:
        """The number of tokens with which the text first contains a stop string; None if it does not.

        The first `seen` tokens are known to contain none: so looking now and then takes linear time.
        """
        if not self.strings or seen >= len(token_ids):
            return None
        start = self._start(token_ids, seen)
        text = self._decode(token_ids[start:])
        if not (self._rewrites or BROKEN in text or self.find(text)):
            return None
        for end in range(seen + 1, len(token_ids) + 1):
            # The first is quick, the second exact.
            if self.find(self._decode(token_ids[start:end])) and self.find(self._decode(token_ids[:end])):
                return end
        return None

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes a stop string, or to a stop token; itself if it has neither."""
        ids, logp = completion.token_ids, completion.logp
        if completion.stop_string:
            return completion
        stop = next((index for index, token in enumerate(ids) if token in self.ids), len(ids))
        looks = (self.first_end(ids[: min(seen + 64, stop)], seen) for seen in range(0, stop, 64))
        end = next(filter(None, looks), None)
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

    def ended(self, token_ids: list[int], logp: list[float], seen: int, longest: int) -> Completion | None:
        """The completion of these tokens, if one after the first `seen` ends it or it is the `longest`; else None."""
        end = next((index + 1 for index in range(seen, len(token_ids)) if token_ids[index] in self.ids), None)
        if end is None and len(token_ids) < longest and self.first_end(token_ids, seen) is None:
            return None
        return self.cut(Completion(token_ids[:end], logp[:end], FinishReason.STOP if end else FinishReason.LENGTH))

    def _start(self, token_ids: list[int], seen: int) -> int:
        """The index of a token from which on the text before `seen` is long enough, and begins with a character."""
        size = self._context
        while size < seen:
            text = self._decode(token_ids[seen - size : seen])
            if len(text) >= self._context and not text.startswith(BROKEN):
                return seen - size
            # A character has up to 4 bytes, each perhaps a token; some tokens have no text.
            size += 1 if size < self._context + 3 else size
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def text_of(completion: Completion, tokenizer: Any) -> str:
    """The text of a completion as rewards see it: to the end of its stop string, without special tokens."""
    text, stop = str(tokenizer.decode(completion.written, skip_special_tokens=True)), completion.stop_string
    return text[: text.index(stop) + len(stop)] if stop else text
