"""Makes a tiny policy that half knows how to write one-line programs, and the questions with their tests.

A question is `times 47:`, its program `def f(x): return x*47` in a fence. In the end of the training most
programs have a wrong digit or operator: GRPO with `CodeReward` is there to fix that.

    python tools/make_code_policy.py --out runs/code_policy

With these defaults it is the policy of `examples/code`; the questions are in the folder above the policy there.
"""

import json
import random
import time
from pathlib import Path

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveInt
from make_tiny_policy import BATCH, Example, command_line, learn, make_model, make_tokenizer, save

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
Step = tuple[str, int]
"""A word and a number: what a function does with its argument."""


def asked(step: Step) -> str:
    """The question."""
    return "{} {}:".format(*step)


def program(step: Step) -> str:
    """The expression that does it."""
    return f"x{SIGNS[step[0]]}{step[1]}"


def answer(expression: str) -> str:
    """A completion."""
    return f"```\ndef f(x): return {expression}\n```"


def slipped(expression: str, rng: random.Random) -> str:
    """An expression with another digit or sign."""
    index = rng.choice([index for index, character in enumerate(expression) if character != "x"])
    kind = "0123456789" if expression[index].isdigit() else "+-*"
    return expression[:index] + rng.choice([one for one in kind if one != expression[index]]) + expression[index + 1 :]


def question(step: Step) -> dict[str, object]:
    """A row of the data."""
    value = {x: eval(program(step), {"x": x}) for x in (1, 3, -7)}  # our own expression
    return {
        "question": asked(step),
        "answer": answer(program(step)),
        "tests": [f"assert f({x}) == {result}" for x, result in value.items()],
    }


def make(
    out: Path,
    seed: int = 0,
    updates: PositiveInt = 500,
    wrong: ClosedUnitInterval = 0.7,
    hidden: PositiveInt = 64,
    layers: PositiveInt = 2,
) -> None:
    """Makes a tiny policy that writes programs, with `train.jsonl` and `val.jsonl` beside it.

    Args:
        out: Folder to save it in.
        seed: Seed of weights and training data.
        updates: Updates of the weights, 32 programs each.
        wrong: Fraction of wrong programs in the last 30 % of them.
        hidden: Width of the model, a multiple of 64.
        layers: Depth of the model.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    every = [(word, number) for word in SIGNS for number in range(10, 100)]
    rng.shuffle(every)
    held_out, known = every[:32], every[32:]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden, layers)

    def example(careless: bool) -> Example:
        step = rng.choice(known)
        expression = program(step)
        if careless and rng.random() < wrong:
            expression = slipped(expression, rng)
        given, drawn = (tokenizer.encode(text) for text in (asked(step), answer(expression)))
        return [*given, *drawn, tokenizer.eos_token_id], [*[-100] * len(given), *drawn, tokenizer.eos_token_id]

    learn(model, updates, lambda update: [example(update >= 0.7 * updates) for _ in range(BATCH)])
    saved = save(out, model, tokenizer, start, cpu_start)
    for name, rows in (("train", known), ("val", held_out)):
        lines = [json.dumps(question(step)) for step in rows]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(saved)


def main(args: list[str] | None = None) -> None:
    """The command line."""
    command_line(make, args)


if __name__ == "__main__":
    main()
