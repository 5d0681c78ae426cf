"""The first line of a run: how many questions its data has, and how many validation questions are in training too."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.tasks.question_digest import digest_of_image
from grpo_lightning.types import Question

MAX_COMPARED = 200_000
"""Questions of a split up to which they are compared: an endless task must not be read to its end."""


def data_line(data: Any) -> str:
    """Returns `train 160 questions (84 distinct), val 40, 37 of them in train`, with every named validation."""
    train_questions = data.questions.get("train", [])
    train_keys = keys_of(train_questions)
    phrases = [f"train {len(train_questions)} questions"]
    if train_keys:
        phrases[0] += f" ({len({*train_keys})} distinct)"
    phrases += without_answers(train_questions)
    held_out = {"val": data.questions.get("val", [])}
    for name, benchmark in data.validations.items():
        held_out[name] = benchmark.data.questions.get(benchmark.split, [])
    for name, questions in held_out.items():
        if not len(questions):
            continue
        phrases.append(f"{name} {len(questions)}")
        keys = keys_of(questions)
        if train_keys and keys:
            distinct_keys = {*train_keys}
            phrases.append(f"{sum(key in distinct_keys for key in keys)} of them in train")
        phrases += without_answers(questions)
    return ", ".join(phrases)


def keys_of(questions: Sequence[Question]) -> list[Hashable]:
    """Returns a key of each question, equal for equal questions; nothing where there are too many."""
    if len(questions) > MAX_COMPARED:
        return []
    return [(question.text.strip(), str(question.history), *map(image_key, question.images)) for question in questions]


def image_key(image: Any) -> str:
    """Returns the path of an image, or a digest of what it holds."""
    return str(image) if isinstance(image, str | Path) else digest_of_image(image)


def without_answers(questions: Sequence[Question]) -> list[str]:
    """Returns a phrase with the number of questions without a gold answer, if there are any."""
    if len(questions) > MAX_COMPARED:
        return []
    count = sum(not question.answer.strip() for question in questions)
    return [f"{count} without a gold answer (data.task.answer)"] if count else []
