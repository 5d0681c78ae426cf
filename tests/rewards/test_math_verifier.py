"""The math verifier: right answers, wrong answers, tricks and attacks."""

import json
import logging
import math
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_lightning.rewards import MathVerifier
from grpo_lightning.rewards.extraction import extract_answer
from grpo_lightning.rewards.math_verifier import _EQUIVALENCE, canonical, decide, read
from grpo_lightning.rewards.workers import WorkerPool
from grpo_lightning.types import FinishReason, Prompt, Question, Sample

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_cases = pytest.mark.skipif(not (DATA / "math_cases").exists(), reason=f"no {DATA / 'math_cases'}")
needs_gsm8k = pytest.mark.skipif(not (DATA / "gsm8k").exists(), reason=f"no {DATA / 'gsm8k'}")


def sample(gold: str, text: str, prompt: str = "q", finish_reason=FinishReason.STOP) -> Sample:
    return Sample(Prompt(0, prompt, [1], Question("q", gold, "row:1")), text, [1], finish_reason)


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / path).read_text().splitlines()]


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier()
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-3", -3),
        ("+3", 3),
        ("1,234", 1234),
        ("$1,234.00", 1234),
        (r"32,\! 349", 32349),
        ("10{,}000", 10000),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        (r"\frac12", Fraction(1, 2)),
        (r"-\dfrac{1}{72}", Fraction(-1, 72)),
        (r"\frac{1}{-2}", Fraction(-1, 2)),
        (r"\frac{1}{2^{99}}", Fraction(1, 2**99)),
        ("63/400", Fraction(63, 400)),
        ("7 3/4", Fraction(31, 4)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"6.02\times 10^{23}", 602 * 10**21),
        ("6.02e23", 602 * 10**21),
        ("10^{-8}", Fraction(1, 10**8)),
        ("2^{10}", 1024),
        (r"20\%", Fraction(1, 5)),
        ("28 percent", Fraction(28, 100)),
        (r"90^\circ", 90),
        (r"15\mbox{ cm}^2", 15),
        ("540 meters", 540),
        ("x = 24", 24),
        ("(7)", 7),
        ("−5", -5),
        ("½", Fraction(1, 2)),
        ("٣", 3),
        ("5 million", None),
        ("3 or 4", None),
        (r"2 \text{ or } 3", None),
        ("2 x", None),
        ("2 ab", None),
        ("3 sin x", None),
        ("32, 349", None),
        ("1,23", None),
        ("2+1", None),
        (r"37\cdot43", None),
        ("5!", None),
        ("2x = 4", None),
        (r"\frac{5}{0}", None),
        ("0^{-1}", None),
        ("5/0", None),
        ("nan", None),
        ("9^{9^{9}}", None),
        ("9" * 201, None),
        ("1" + ",000" * 2000, None),
    ],
)
def test_exact_numbers(text, value):
    assert read(text).number == value


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("0.5", r"\frac{1}{2}", "equal"),
        (r"\frac{1}{12}", "0.0833333333333333", "equal"),
        (r"\frac{1}{12}", "0.083", "different"),
        ("1234567890", "1234567891", "different"),
        ("0.0000001", "0.0000002", "different"),
        ("10", r"10\%", "different"),
        ("x=1", "y=1", "different"),
        ("11", "x=5+5+1=11", "equal"),
        ("C", r"\textbf{(C)}\ 12", "equal"),
        ("C", "D", "different"),
        (r"\text{Even}", "even", "equal"),
        (r"\text{listen}", r"\text{silent}", "different"),
        ("3:30", "3:30", "equal"),
        ("12:00", "1:00", "different"),
        ("204_5", "204_{6}", "different"),
        ("x", "X", "different"),
        ("5", "{1,5}", "unparseable"),
        ("5", "7" * 700, "too_long"),
        ("5", "7" * 3000, "too_long"),
    ],
)
def test_decided_without_a_worker(gold, answer, verdict):
    assert decide(gold, answer) == verdict


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        ("x^2+2x+1", "(x+1)^2", 1),
        ("x^2+2x+1", "x^3+2x+1", 0),
        (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}", 1),
        (r"3\sqrt{2}", r"3\sqrt2 \text{ cm}", 1),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
        (r"\lambda+1", r"1+\lambda", 1),
        ("(1,3)", r"\{1,3\}", 0),
        ("(3,2)", "(2,3)", 0),
        (r"\{1,2,3\}", "3, 2, 1", 1),
        (r"(-\infty, 3)", "x<3", 1),
        ("[2,5)", r"2 \le x < 5", 1),
        ("(-2,2)", "x^2<4", 0),
        (r"\sqrt{2}", r"x^2=\sqrt{2}", 0),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&3\\2&4\end{bmatrix}", 0),
        ("2t", "2", 0),
        ("8", "5 + 3 = 8", 1),
        ("11", "5 + 5 = 11", 0),
        ("20", "4*5=20 cups", 1),
        ("4", "x^2 = 4", 0),
    ],
)
def test_decided_by_computer_algebra(verifier, gold, answer, value):
    result = verifier([sample(gold, rf"\boxed{{{answer}}}")])
    assert result.value == [value]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1591", r"37\cdot 43"),
        ("1591", r"37 \times 43"),
        ("5", "2+3"),
        ("5050", r"\sum_{k=1}^{100} k"),
        ("3628800", r"\prod_{k=1}^{10} k"),
        (r"\frac{1}{3}", r"\int_0^1 x^2 dx"),
        ("6", r"\gcd(54,24)"),
        ("7", r"\max(3,7)"),
        ("3", r"\lim_{x\to 0}\frac{\sin 3x}{x}"),
        ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\frac{\pi}{2}", r"\int_{-1}^1 \sqrt{1-x^2} dx"),
        ("5", r"\{1,2,3,4,5,6,7,8,9\}"),
        ("5", r"\mathbb{R}"),
        ("5", r"5 \text{ or } 6"),
        ("x=2", "2x = 4"),
        ("x=5", "0=0"),
    ],
)
def test_restating_or_hedging_earns_nothing(verifier, gold, answer):
    result = verifier([sample(gold, rf"\boxed{{{answer}}}")])
    assert result.value == [0.0]
    assert result.status == ["unparseable"] or result.status == ["ok"]


def test_statuses_and_canonical_answers(verifier):
    result = verifier(
        [
            sample("1/2", r"\boxed{0.5}"),
            sample("1/2", r"\boxed{\frac24}"),
            sample("7", r"\boxed{\frac{2}{4}}"),
            sample("7", "I do not know."),
            sample("7", r"\boxed{" + "x" * 3000 + "}"),
            sample(r"\sqrt{2}", r"\boxed{\frac{2}{\sqrt{2}}}", finish_reason=FinishReason.LENGTH),
            sample("", r"\boxed{7}"),
        ]
    )
    assert result.value[:6] == [1, 1, 0, 0, 0, 1]
    assert math.isnan(result.value[6])
    assert result.status == ["ok", "ok", "ok", "no_answer", "too_long", "ok", "gold_bad"]
    assert result.answer[:4] == ["1/2", "1/2", "1/2", None]
    assert result.answer[5] == canonical(r"\sqrt{2}")


def test_a_think_tag_in_the_prompt_counts(verifier):
    texts = [r"\boxed{7}", r"hm</think> \boxed{7}"]
    assert verifier([sample("7", text, prompt="q <think>\n") for text in texts]).value == [0.0, 1.0]


def test_a_bad_gold_answer_is_named(caplog):
    verifier = MathVerifier()
    with caplog.at_level(logging.WARNING):
        verifier.prepare([Question("q", "7", "a:1"), Question("q", r"\frac{", "a:2"), Question("q", "", "a:3")])
    assert [r.args[2] for r in caplog.records] == ["a:2", "a:3"]
    assert verifier([sample(r"\frac{", r"\boxed{7}")]).status == ["gold_bad"]
    verifier.close()


def test_a_pair_is_compared_once(verifier, monkeypatch):
    asked = []
    original = WorkerPool.map

    def spy(self, function, tasks):
        asked.extend(tasks)
        return original(self, function, tasks)

    monkeypatch.setattr(WorkerPool, "map", spy)
    group = [sample(r"\sqrt{7}+1", rf"\boxed{{1+\sqrt{{{n}}}}}") for n in (7, 7, 8, 7)]
    assert verifier(group).value == verifier(group).value == [1, 1, 0, 1]
    assert len(asked) == 3  # gold with itself, and two distinct answers


def test_works_in_a_thread(verifier):
    values = []
    thread = threading.Thread(target=lambda: values.extend(verifier([sample("x+y", r"\boxed{y+x}")]).value))
    thread.start()
    thread.join()
    assert values == [1.0]


HOSTILE = [
    r"9^{9^{9^{9}}}",
    "9**9**9**9",
    "(" * 10_000 + "5" + ")" * 10_000,
    "[" * 10_000,
    r"\{" * 10_000,
    r"\sqrt{" * 14 + "5" + "}" * 14,
    "1000000000!",
    "((20!)!)!",
    r"\binom{1000000000}{500000000}",
    r"7^{99999999}",
    "(x+y+z+w+1)^{60}",
    r"\operatorname{eye}(100000)",
    "__import__('os').system('touch PWNED_MARKER')",
    "open('PWNED_MARKER','w')",
    "().__class__.__bases__[0].__subclasses__()",
]


@pytest.mark.parametrize("gold", ["5", r"\sqrt{2}"])
@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_are_bounded_and_wrong(verifier, tmp_path, monkeypatch, gold, answer):
    monkeypatch.chdir(tmp_path)
    verifier._check_golds([gold])
    start = time.monotonic()
    assert verifier([sample(gold, rf"\boxed{{{answer}}}")]).value == [0.0]
    assert time.monotonic() - start < 10
    assert list(tmp_path.iterdir()) == []


def test_hostile_answers_past_the_guards_execute_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = WorkerPool(workers=2, timeout=0.5, memory_limit_mb=256)
    outcomes = pool.map(_EQUIVALENCE, [["5", answer] for answer in (HOSTILE[0], HOSTILE[2], *HOSTILE[-4:])])
    assert all(outcome.value != "equal" for outcome in outcomes)
    assert list(tmp_path.iterdir()) == []
    pool.close()


@needs_cases
def test_public_cases(verifier):
    cases = [r for r in rows("math_cases/cases.jsonl") if not r["hostile"] and not r["ambiguous"]]
    verifier.prepare([Question("q", case["gold"], case["id"]) for case in cases])
    values = verifier([sample(case["gold"], case["completion"]) for case in cases]).value
    wrong = [case for case, value in zip(cases, values, strict=True) if (value == 1.0) != case["expected"]]
    assert [case["id"] for case in wrong if not case["expected"]] == []
    assert 1 - len(wrong) / len(cases) >= 0.97, [case["id"] for case in wrong]


@needs_cases
def test_public_hostile_cases(verifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [r for r in rows("math_cases/cases.jsonl") if r["hostile"]]
    verifier.prepare([Question("q", case["gold"], case["id"]) for case in cases])
    for case in cases:
        start = time.monotonic()
        (value,) = verifier([sample(case["gold"], case["completion"])]).value
        assert value == float(case["expected"]), case["id"]
        assert time.monotonic() - start < 2.5
    assert list(tmp_path.iterdir()) == []


@needs_gsm8k
def test_all_of_gsm8k(verifier):
    solutions = [row["answer"] for name in ("train", "test") for row in rows(f"gsm8k/{name}.jsonl")]
    assert len(solutions) == 7473 + 1319
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert [extract_answer(solution) for solution in solutions] == golds
    assert all(decide(gold, gold) == "equal" for gold in golds)
    result = verifier([sample(gold, text) for gold, text in zip(golds, solutions, strict=True)])
    assert set(result.value) == {1.0}
    assert set(result.status) == {"ok"}
