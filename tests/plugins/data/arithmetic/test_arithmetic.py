import pytest

from grpo_lightning.plugins.data.arithmetic.arithmetic import Arithmetic, in_words, shuffled
from grpo_lightning.tasks.task import Split

SPLITS: tuple[Split, ...] = ("train", "val", "test")


def texts(task: Arithmetic, split: Split) -> list[str]:
    return [question.text for question in task.questions(split)]


def test_first_rows_are_these():
    first = Arithmetic().questions("train")[0]
    assert (first.text, first.answer, first.source) == ("46+93=", "139", "arithmetic train:1")
    assert first.metadata == {"expression": "46+93"}
    assert texts(Arithmetic(), "train")[:3] == ["46+93=", "52+43=", "87+61="]
    assert texts(Arithmetic(), "val")[:3] == ["68+88=", "62+4=", "87+42="]
    assert texts(Arithmetic(seed=1), "val")[:3] != texts(Arithmetic(), "val")[:3]


def test_splits_are_disjoint_and_exhaust_the_expressions():
    task = Arithmetic(max_digits=1, operators=["+", "-"], num_train=180, num_val=10)
    rows = [text for split in SPLITS for text in texts(task, split)]
    assert len(rows) == len(set(rows)) == 200 == task.num_expressions
    assert set(rows) == {f"{a}{o}{b}=" for a in range(10) for b in range(10) for o in "+-"}


def test_in_a_sentence_or_in_words_the_same_sums_are_asked():
    sums = {"operators": ["+", "-", "*"], "num_terms": 3}
    digits, sentences, words = (Arithmetic(**sums, **more) for more in ({}, {"sentence": True}, {"words": True}))
    for split in SPLITS:
        for plain, spaced, spoken in zip(*(task.questions(split) for task in (digits, sentences, words)), strict=True):
            assert plain.answer == spaced.answer == spoken.answer
            assert plain.metadata == spaced.metadata == spoken.metadata
            assert spaced.text.removeprefix("What is ").replace(" ", "").replace("?", "=") == plain.text
    assert texts(Arithmetic(sentence=True), "val")[:2] == ["What is 68 + 88?", "What is 62 + 4?"]
    assert texts(Arithmetic(words=True), "train")[0] == "What is forty-six plus ninety-three?"
    assert texts(digits, "train")[0] == "46-14*4="
    assert texts(words, "train")[0] == "What is forty-six minus fourteen times four?"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (215, "two hundred fifteen"),
        (1_000, "one thousand"),
        (20_041, "twenty thousand forty-one"),
        (999_999_999, "nine hundred ninety-nine million nine hundred ninety-nine thousand nine hundred ninety-nine"),
    ],
)
def test_a_number_in_words(number: int, words: str):
    assert in_words(number) == words


def test_held_out_rows_do_not_depend_on_num_train():
    few, many = Arithmetic(num_train=10, num_val=30), Arithmetic(num_train=5000, num_val=30)
    assert [len(many.questions(split)) for split in SPLITS] == [5000, 30, 30]
    for split in ("val", "test"):
        assert texts(few, split) == texts(many, split)
    assert texts(few, "train") == texts(many, "train")[:10]
    assert texts(few, "predict") == texts(few, "test")


@pytest.mark.parametrize(("operators", "terms"), [(["+"], 2), (["-"], 3), (["+", "-", "*"], 4)])
def test_answers_are_pythons(operators: list[str], terms: int):
    for question in Arithmetic(operators=operators, num_terms=terms, num_train=2000).questions("train"):
        assert question.answer == str(eval(question.metadata["expression"]))
        assert question.text == question.metadata["expression"] + "="


def test_shuffled_is_a_permutation_whose_prefix_is_stable():
    assert sorted(shuffled(1000, 1000, seed=3)) == list(range(1000))
    assert shuffled(1000, 10, seed=3) == shuffled(1000, 1000, seed=3)[:10]
    assert max(shuffled(10**40, 100, seed=0)) > 9 * 10**39
