"""Strings that end a completion, found in its text whatever tokens spell them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from operator import itemgetter

from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import BROKEN, Completion, FinishReason, UsageError

MARGIN = 8
"""Characters more than a stop string has, to decode the end of a text by itself: its first ones may come out wrong."""

CHUNK = 64
"""Tokens searched at once where all are there."""


class StopStrings:
    """Ends completions where their text contains one of some strings: `Sampling.stop`.

    A completion ends with the first token after which the text of its drawn tokens contains a stop string. Texts are
    decoded without special tokens, as rewards see them; the prompt does not count. A stop string that is a special
    token ends the completion at that token, as the policy's own stop tokens do.

    Args:
        policy: For its tokenizer and its stop tokens.
        strings: The stop strings, none of them empty.

    Raises:
        UsageError: A string contains a special token and more: no text does.
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
            for token in filter(None, special):
                if token in string:
                    raise UsageError(
                        f"sampling.stop: {string!r} contains the special token {token!r}, which texts leave out: "
                        f"give {token!r} alone to end completions at that token"
                    )
        # Enough for the longest string, but for its last character, and for what comes out wrong before it.
        self._context = max(map(len, self.strings), default=1) - 1 + MARGIN
        # Then a string may be there after one token and gone after the next, without a trace.
        self._rewrites = bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))

    def find(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string in `text` ends, and which it is; None if there is none."""
        ends = [(index + len(string), string) for string in self.strings if (index := text.find(string)) >= 0]
        return min(ends, default=None, key=itemgetter(0))

    def _may_contain(self, text: str) -> bool:
        """Whether the beginning of some tokens may contain a stop string, where `text` is that of all."""
        return self._rewrites or BROKEN in text or self.find(text) is not None

    def first_end(self, token_ids: list[int], seen: int = 0) -> int | None:
        """The number of tokens with which the text first contains a stop string; None if it does not.

        Only the end of the text is decoded, so that looking now and then takes time linear in the length.

        Args:
            token_ids: The drawn tokens, without a stop token.
            seen: Tokens at the beginning that are known to contain no stop string.
        """
        if not self.strings or seen >= len(token_ids):
            return None
        start = self._start(token_ids, seen)
        text = self._decode(token_ids[start:])
        if not self._may_contain(text):
            return None
        for end in range(seen + 1, len(token_ids) + 1):
            # The first is quick, the second exact.
            if self.find(self._decode(token_ids[start:end])) and self.find(self._decode(token_ids[:end])):
                return end
        return None

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes a stop string, or to a stop token; itself if it has neither."""
        if completion.stop_string:
            return completion
        ids = completion.token_ids
        stop = next((index for index, token in enumerate(ids) if token in self.ids), len(ids))
        if end := self._search(ids[:stop]):
            found = self.find(self._decode(ids[:end]))
            assert found is not None
            return _first(completion, end, found[1])
        return completion if stop >= len(ids) - 1 else _first(completion, stop + 1, "")

    def ended(self, token_ids: list[int], logp: list[float], seen: int, longest: int) -> Completion | None:
        """The completion of these tokens, if one after the first `seen` ends it or it is the `longest`; else None."""
        end = next((index + 1 for index in range(seen, len(token_ids)) if token_ids[index] in self.ids), None)
        if end is None and len(token_ids) < longest and self.first_end(token_ids, seen) is None:
            return None
        return self.cut(Completion(token_ids[:end], logp[:end], FinishReason.STOP if end else FinishReason.LENGTH))

    def _search(self, token_ids: list[int]) -> int | None:
        """As `first_end`, of a whole completion. One that has no stop string is decoded once."""
        if not self.strings or not self._may_contain(self._decode(token_ids)):
            return None
        ends = (self.first_end(token_ids[: seen + CHUNK], seen) for seen in range(0, len(token_ids), CHUNK))
        return next(filter(None, ends), None)

    def _start(self, token_ids: list[int], seen: int) -> int:
        """The index of a token from which on the text before `seen` is long enough, and begins with a character."""
        for num_tokens in self._sizes():
            start = seen - num_tokens
            if start <= 0:
                break
            text = self._decode(token_ids[start:seen])
            if len(text) >= self._context and not text.startswith(BROKEN):
                return start
        return 0

    def _sizes(self) -> Iterator[int]:
        """Numbers of tokens to try: a character has up to 4 bytes, each perhaps a token; some tokens have no text."""
        return chain(range(self._context, self._context + 4), (self._context << doubled for doubled in count(1)))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def text_up_to(text: str, stop_string: str) -> str:
    """The text to the end of the first `stop_string`; all of it where that is empty."""
    return text[: text.index(stop_string) + len(stop_string)] if stop_string else text


def _first(completion: Completion, length: int, stop_string: str) -> Completion:
    """The first tokens of a completion that ends there by itself."""
    return replace(
        completion,
        token_ids=completion.token_ids[:length],
        logp=None if completion.logp is None else completion.logp[:length],
        finish_reason=FinishReason.STOP,
        stop_string=stop_string,
    )
