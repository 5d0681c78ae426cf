"""One word per thing: words that mean something else here, or nothing, do not occur in what a user or a reader sees."""

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT

THINGS = (
    "token|nat|sample|row|line|step|run|update|segment|position|completion|prompt|pack|rank|reward|second|layer|"
    "question|group|pass|minibatch|iteration|process|device|worker|answer|call"
)
COUNTED = (
    "once|twice|one|times|number|weight|status|mean|nats?|bytes?|bits?|entropy|value|cost|seconds?|ms|MiB|GiB|"
    "completions?|prompts?|tokens?|updates?|rows?|samples?|passes|fresh|figure|point|metric|line"
)
NEVER = {
    r"micro-?batch(es)?": "pack",
    r"(optimizer|optimiser|optimisation|gradient) steps?": "update",
    r"(decoding|decode) steps?": "position",
    r"(reasoning|solution) steps?": "segment",
    r"epochs?": "step (of Lightning's epochs) or pass",
    r"episodes?": "step, completion or run",
    r"places?": "index (in a list), position (in a sequence)",
    r"(the|a|an|its|this|same|equal|largest|smallest|whole|\d) shares?|shares? of": "fraction",
    r"mend(s|ed|ing)?": "fix",
    r"said": "logged, printed, reported",
    r"ours|theirs": "expected, actual",
    rf"({COUNTED}) an? ({THINGS})": "per",
    r"logprobs?": "logp, log-prob",
    r"rollouts? steps?": "step",
}
"""A regular expression, and what to write."""

OWN = {
    r"(in|into|in the|takes?|took|taking) places?( of)?": "English: to happen; instead of",
    r"(max|min|current|every_n|n|on_train|on_validation|fit|save_on_train)_epochs?(_\w+)?": "a name of Lightning's",
    r"Lightning(\.|'s)? epochs?|the epoch early|`epoch`|\"epoch\"": "Lightning's epochs, where it is about Lightning",
    r"epoch(?=\})": "a name of Lightning's",
    r"one\.logprobs\.logprobs|\"logprobs?\"": "a name of vLLM's",
}
"""What may stay, and why."""

SEEN = ["grpo_lightning/**/*.py", "grpo_lightning/*.pyi", "tools/*.py", "examples/*.py", "configs/**/*.yaml"]
SEEN += ["docs/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
FILES = sorted({path for pattern in SEEN for path in ROOT.glob(pattern)})


def findings(text: str) -> list[str]:
    """`line: words -> instead` for each word that should not be there."""
    text = re.sub("|".join(rf"(?<![\w-])({own})(?![\w-])" for own in OWN), lambda own: " " * len(own[0]), text)
    found = []
    for pattern, instead in NEVER.items():
        for match in re.finditer(rf"(?<![\w@-]){pattern_of(pattern)}(?![\w-])", text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{line}: {' '.join(match[0].split())} -> {instead}")
    return found


def pattern_of(pattern: str) -> str:
    """With a space for any white space, so that words are found across lines."""
    return f"({pattern})".replace(" ", r"\s+(?:[#>*-]\s+)?")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_of_the_project(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("own", OWN)
def test_an_exception_is_needed(own: str) -> None:
    texts = (path.read_text(encoding="utf-8") for path in FILES)
    assert any(re.search(rf"(?<![\w-])({own})(?![\w-])", text) for text in texts)


def test_words_are_found() -> None:
    text = """The share of
    tokens; 3 nats a token, said once.
    # in place of; the last place
    max_epochs; a second epoch"""
    assert findings(text) == [
        "4: epoch -> step (of Lightning's epochs) or pass",
        "3: place -> index (in a list), position (in a sequence)",
        "1: The share -> fraction",
        "2: said -> logged, printed, reported",
        "2: nats a token -> per",
    ]
