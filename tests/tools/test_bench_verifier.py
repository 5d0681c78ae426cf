import pytest
from helpers.loading import load_tool

tool = load_tool("bench_verifier")


@pytest.mark.parametrize("repeats", [True, False])
def test_the_pairs_are_always_the_same_and_half_right(repeats):
    pairs = list(tool.samples(1000, repeats))
    again = list(tool.samples(1000, repeats))
    assert [(pair.answer, pair.text) for pair in pairs] == [(pair.answer, pair.text) for pair in again]
    share = len({(pair.answer, pair.text.splitlines()[-1].rpartition("So the")[2]) for pair in pairs}) / len(pairs)
    assert 0.45 < share < 0.55 if repeats else share > 0.99
    seconds, values = tool.timed([pairs[:400]])
    assert len(seconds) == 1
    assert 0.48 < sum(values) / 400 < 0.52


def test_the_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_verifier.py", "--pairs", "16"])
    tool.main()
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| groups of 8", "math-verify"], ["| groups of 8", "MathVerifier"],
        ["| no repeats", "math-verify"], ["| no repeats", "MathVerifier"],
    ]  # fmt: skip
    assert all(len(row.split(" | ")) == len(header.split(" | ")) for row in rows)
