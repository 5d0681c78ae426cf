"""The verifier on answers that are made up, of every kind it claims to know."""

import itertools

import attack_verifier
import pytest

FUZZ = attack_verifier.load_fuzz()


@pytest.mark.parametrize("seed", range(2))
def test_pairs_of_known_verdict(seed):
    wrong, rejected, right = [], [], 0
    for pair in itertools.islice(FUZZ.pairs(1000 + seed), 1000):
        said = attack_verifier.outcome(pair)
        right += pair.right
        if (said == "equal") != pair.right:
            (rejected if pair.right else wrong).append(pair)
    assert wrong == []
    assert len(rejected) <= 0.01 * right, rejected


def test_the_attack_prints_what_it_finds(capsys, monkeypatch):
    assert attack_verifier.main(["--pairs", "200", "--seed", "3"]) == 0
    assert "accepted though wrong: 0" in capsys.readouterr().out
    monkeypatch.setattr(attack_verifier, "outcome", lambda pair: "equal")
    assert attack_verifier.main(["--pairs", "200", "--show", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("accepted though wrong: ") and not lines[0].endswith(" 0")
    assert len(lines[1]) <= len(lines[2])
    assert lines[3] == "rejected though right: 0"
