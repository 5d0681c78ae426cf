"""What a run says first of its data: how many questions it has, and how many of the validation stand in training."""

from collections.abc import Hashable, Sequence
from typing import Any

from grpo_lightning.types import Question

MOST = 200_000  # questions of a split up to which they are compared: an endless task must not be read to its end


def data_line(data: Any) -> str:
    """`train 160 questions (84 distinct), val 40, 37 of them in train`, with each validation of a name of its own."""
    train_questions = data.questions.get("train", [])
    train_keys = keys_of(train_questions)
    phrases = [f"train {len(train_questions)} questions"]
    if train_keys:
        phrases[0] += f" ({len({*train_keys})} distinct)"
    phrases += without_answers(train_questions)
    held_out = {"val": data.questions.get("val", [])}
    held_out |= {name: one.data.questions.get(one.split, []) for name, one in data.validations.items()}
    for name, questions in held_out.items():
        if not len(questions):
            continue
        phrases.append(f"{name} {len(questions)}")
        keys = keys_of(questions)
        if train_keys and keys:
            known = {*train_keys}
            phrases.append(f"{sum(key in known for key in keys)} of them in train")
        phrases += without_answers(questions)
    return ", ".join(phrases)


def keys_of(questions: Sequence[Question]) -> list[Hashable]:
    """What makes each question another one; nothing where there are too many."""
    if len(questions) > MOST:
        return []
    return [(question.text.strip(), str(question.history)) for question in questions]


def without_answers(questions: Sequence[Question]) -> list[str]:
    """How many questions have no gold answer, in a phrase, if any."""
    if len(questions) > MOST:
        return []
    count = sum(not question.answer.strip() for question in questions)
    return [f"{count} without a gold answer"] if count else []
