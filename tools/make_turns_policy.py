"""Makes a tiny policy that knows the form of a conversation and little else: a character-level Llama.

`calculator`: it calls the tool `Calculator` in one answer of two, often with a wrong digit, and copies what it reads,
often with a wrong digit. It has seen no sum that it could learn to add from: without the tool its answers are random
numbers. `guess`: it plays `GuessNumber`. Every second guess is any number, the others are any number that the answers
allow.

    python tools/make_turns_policy.py --task calculator --out examples/calculator/policy
    python tools/make_turns_policy.py --task guess --out examples/guess_number/policy
"""

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jsonargparse.typing import PositiveInt
from make_tiny_policy import BATCH, EOS, Example, command_line, learn, make_model, make_tokenizer, save
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from calculator import value_of
from guess_number import GuessNumber

from grpo_lightning.plugins.data.arithmetic.arithmetic import Arithmetic
from grpo_lightning.types import Question

Task = Literal["calculator", "guess"]
Part = tuple[str, bool]
"""Text, and whether the policy writes it."""

WORDS = ["<tool>", "</tool>", "higher", "lower"]
"""A token each."""
DIGITS, NUM_QUESTIONS = 5, 8000
SIZES: dict[Task, dict[str, int]] = {
    "calculator": {"hidden": 128, "layers": 2, "updates": 800},
    "guess": {"hidden": 64, "layers": 2, "updates": 600},
}


def calculation(question: Question, careless: bool, rng: random.Random) -> list[Part]:
    """A conversation with the calculator.

    Args:
        question: From Arithmetic, with its expression.
        careless: Whether to leave out the call in half of the conversations, to write a wrong digit into three of ten
            expressions and answers, and no operator into one of ten.
        rng: Decides.
    """
    asked: str = question.metadata["expression"]
    given = asked
    if careless:
        if rng.random() < 0.5:
            return [(question.text, False), (answer_of(str(rng.randrange(2 * 10**DIGITS))), True)]
        luck = rng.random()
        given = slipped(asked, rng) if luck < 0.3 else asked.replace("+", " ") if luck < 0.4 else asked
    try:
        told = str(value_of(given))
        answer = slipped(told, rng) if careless and rng.random() < 0.3 else told
    except ValueError as error:
        told, answer = str({"error": str(error)}), str(rng.randrange(2 * 10**DIGITS))
    return [
        (question.text, False),
        (f"<tool>{given}</tool>", True),
        (f"{EOS}\n{told}\n", False),
        (answer_of(answer), True),
    ]


def answer_of(number: str) -> str:
    """The last turn."""
    return f"<answer>{number}</answer>{EOS}"


def slipped(text: str, rng: random.Random) -> str:
    """The text with another digit instead of one of its own."""
    index = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([digit for digit in "0123456789" if digit != text[index]])
    return text[:index] + digit + text[index + 1 :]


def guesses(game: GuessNumber, question: Question, careless: bool, rng: random.Random) -> list[Part]:
    """A game.

    Args:
        game: The environment.
        question: Of the game.
        careless: Whether every second guess forgets the answers. The others are any number that they allow.
        rng: Decides.
    """
    told = game.reset(question)[0]["content"]
    parts = [(told, False)]
    while True:
        forgets = careless and rng.random() < 0.5
        written = str(rng.randint(1, game.highest) if forgets else rng.randint(game.low, game.high))
        parts.append((written + EOS, True))
        turn = game.step({"role": "assistant", "content": written})
        if turn.done:
            return parts
        told = turn.messages[0]["content"]
        parts.append((f"\n{told}\n", False))


def example(parts: Sequence[Part], tokenizer: PreTrainedTokenizerFast) -> Example:
    """The ids of a conversation, with what the policy writes as labels."""
    ids: list[int] = []
    labels: list[int] = []
    for text, own in parts:
        written = tokenizer.encode(text)
        ids += written
        labels += written if own else [-100] * len(written)
    return ids, labels


def make(
    out: Path, task: Task, seed: int = 0, updates: int = 0, hidden: int = 0, layers: int = 0, highest: PositiveInt = 7
) -> None:
    """Makes a tiny policy that knows the form of a conversation: a model and a tokenizer.

    Args:
        out: Folder to save it in.
        task: What it talks to.
        seed: Seed of weights and training data.
        updates: Updates of the weights, 32 conversations each; 0: the task's.
        hidden: Width of the model, a multiple of 64; 0: the task's.
        layers: Depth of the model; 0: the task's.
        highest: The numbers to guess are 1 to this.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    sizes = {"updates": updates, "hidden": hidden, "layers": layers}
    sizes = {key: value or SIZES[task][key] for key, value in sizes.items()}
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = make_tokenizer(WORDS)
    model = make_model(tokenizer, sizes["hidden"], sizes["layers"])
    game = GuessNumber(highest)
    questions = (Arithmetic(DIGITS, num_train=NUM_QUESTIONS) if task == "calculator" else game).questions("train")

    def talk(update: int) -> list[Part]:
        question = rng.choice(questions)
        careless = update >= 0.7 * sizes["updates"]
        return guesses(game, question, careless, rng) if task == "guess" else calculation(question, careless, rng)

    learn(model, sizes["updates"], lambda update: [example(talk(update), tokenizer) for _ in range(BATCH)])
    print(save(out, model, tokenizer, start, cpu_start))


def main(args: list[str] | None = None) -> None:
    """The command line."""
    command_line(make, args)


if __name__ == "__main__":
    main()
