"""LabelledGroup completions: outcome, balance, files."""

import json
from pathlib import Path

import pytest
from helpers.learning import group

from grpo_lightning.plugins.learned.iterations import split
from grpo_lightning.plugins.learned.labelled import LabelledGroup, read_labelled, write_labelled
from grpo_lightning.types import UsageError


def test_at_most_so_many_of_each_label_stay():
    balanced = group("q", 1, 1, 0, 1, 0, 0, 1).balanced(2)
    assert balanced.completions == ["q0", "q1", "q2", "q4"]
    assert balanced.labels == [1, 1, 0, 0]
    assert group("q", 0, 0, 0, 1).balanced(2).labels == [0, 0, 1]


def test_rows_of_a_file(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "chosen": "good", "rejected": "bad"}\n'
        '{"prompt": "b", "completions": ["x", "y", "z"], "labels": [1, 0, 0.5], "ended": [true, true, false]}\n'
    )
    first, second = read_labelled(path)
    assert first == LabelledGroup("a", ["good", "bad"], [True, True], [1.0, 0.0])
    assert second == LabelledGroup("b", ["x", "y", "z"], [True, True, False], [1.0, 0.0, 0.5])
    write_labelled(tmp_path / "again.jsonl", [first, second])
    assert read_labelled(tmp_path / "again.jsonl") == [first, second]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"prompt": "a", "chosen": "good"}', "'completions'"),
        ('{"prompt": "a", "completions": ["x"], "labels": [2]}', "from 0 to 1"),
        ('{"prompt": "a", "completions": [], "labels": []}', "0 completions"),
        ('{"prompt": "a", "completions": ["x"], "labels": [1, 0]}', "2 labels"),
        ('{"prompt": 3, "chosen": "good", "rejected": "bad"}', "must be text"),
        ("[]", "AttributeError"),
        ("{", "not JSON"),
        ('{"prompt": "a", "chosen": "\\ud83d", "rejected": "bad"}', "surrogates not allowed"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, says: str):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "chosen": "good", "rejected": "bad"}\n' + row + "\n")
    with pytest.raises(UsageError, match=r"rows.jsonl:2") as caught:
        read_labelled(path)
    assert says in str(caught.value)


def test_a_line_ends_at_a_line_break_alone(tmp_path: Path):
    path, texts = tmp_path / "rows.jsonl", ["a\u2028b", "a\x85b", "c"]
    rows = [json.dumps({"prompt": "q", "chosen": text, "rejected": ""}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(rows), encoding="utf-8")
    assert [group.completions[0] for group in read_labelled(path)] == texts


def test_the_held_out_prompts_are_the_same_in_every_iteration():
    groups = [group(f"prompt {number}", 1, 0) for number in range(2000)]
    new, held_out = split(groups, 0.1)
    assert abs(len(held_out) - 200) < 40
    again, held_out_again = split(groups[1000:] + groups[:50], 0.1)
    assert {g.prompt for g in held_out_again} == {g.prompt for g in held_out} & {
        g.prompt for g in [*again, *held_out_again]
    }
    assert not {g.prompt for g in new} & {g.prompt for g in held_out}
