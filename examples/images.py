"""Pictures of nine squares, and how many of them are red: a policy has to look, for the question is always the same."""

import random
from collections.abc import Sequence

from PIL import Image

from grpo_lightning import Question, Task
from grpo_lightning.tasks.task import Split

SIDE = 3
"""Squares beside and above each other."""
PIXELS = 8
"""Pixels of a square beside and above each other."""
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220), "white": (240, 240, 240)}


class RedSquares(Task):
    """Asks `How many red?` about pictures of squares, in which every number from 0 to 9 is as likely as the others.

    Args:
        num_train: Pictures to train on.
        num_val: Pictures held out.
        seed: Seed of the pictures.
        exchanged: Show with each question the picture of the next one, to see that answers come from the picture.
    """

    grader = "MathVerifier"

    def __init__(self, num_train: int = 4000, num_val: int = 256, seed: int = 0, exchanged: bool = False) -> None:
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.exchanged = exchanged

    def questions(self, split: Split) -> Sequence[Question]:
        rng = random.Random(f"{self.seed} {split}")
        num_questions = self.num_train if split == "train" else self.num_val
        questions = [question_of(squares(rng), rng, f"{split}:{row}") for row in range(1, num_questions + 1)]
        if self.exchanged:
            pictures = [question.images for question in questions]
            for question, images in zip(questions, pictures[1:] + pictures[:1], strict=True):
                question.images = images
        return questions


def squares(rng: random.Random) -> list[str]:
    """The colours of the squares, row by row."""
    num_red = rng.randint(0, SIDE**2)
    others = [name for name in COLOURS if name != "red"]
    colours = ["red"] * num_red + rng.choices(others, k=SIDE**2 - num_red)
    rng.shuffle(colours)
    return colours


def question_of(colours: Sequence[str], rng: random.Random, source: str) -> Question:
    """The question about a picture, in which no two squares of a colour are quite the same."""
    small = Image.new("RGB", (SIDE, SIDE))
    for index, name in enumerate(colours):
        noisy = tuple(value + rng.randint(-15, 15) for value in COLOURS[name])
        small.putpixel((index % SIDE, index // SIDE), noisy)
    picture = small.resize((SIDE * PIXELS, SIDE * PIXELS), Image.Resampling.NEAREST)
    return Question("How many red?", str(colours.count("red")), source, {"colours": list(colours)}, images=(picture,))
