"""The math verifier: right answers, wrong answers, tricks and attacks."""

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import DATA, needs_gsm8k

from grpo_lightning.plugins.verifier.comparison import compare
from grpo_lightning.plugins.verifier.extraction import extract_answer
from grpo_lightning.plugins.verifier.math_verifier import _COMPARE, MathVerifier, Verdict, decide
from grpo_lightning.plugins.verifier.reading import canonical, number
from grpo_lightning.rewards.base import RewardFailure
from grpo_lightning.sandbox.pool import IDLE, Outcome, WorkerPool
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError


def sample(gold: str, text: str, prompt: str = "q", finish_reason=FinishReason.STOP, question: str = "q") -> Sample:
    return Sample(Prompt(0, prompt, [1], Question(question, gold, "row:1")), text, [1], finish_reason)


def outcome(gold: str, answer: str) -> str:
    """What is decided without a worker."""
    verdict = decide(gold, answer)
    assert isinstance(verdict, Verdict)
    return verdict.outcome


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
        ("1 000 000", 10**6),
        ("⅔", Fraction(2, 3)),
        ("－８", -8),
        (r"\mathbf{\text{16}}", 16),
        (r"\textcolor{red}{16}", 16),
        (r"\text{The total is }16", 16),
        (r"\text{Total} = 16", 16),
        (r"{7 \over 12}", Fraction(7, 12)),
        ("250 €", 250),
        ("1 00", None),
        (r"\text{not: }16", None),
        (r"12\text{-ish}", None),
        ("0.333...", Fraction(1, 3)),
        ("5 million", 5000000),
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
    assert number(text) == value


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("1234567890", "1234567891", "different"),
        ("1,234", "1234", "equal"),
        ("18", "$18", "equal"),
        ("50", "0.5", None),
        ("5", "7" * 3000, "too_long"),
    ],
)
def test_plain_numbers_are_decided_without_a_worker(gold, answer, verdict):
    if verdict is None:
        assert decide(gold, answer, "q") == (gold, answer, "q")
    else:
        assert outcome(gold, answer) == verdict


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("0.5", r"\frac{1}{2}", "equal"),
        (r"\frac{1}{12}", "0.0833333333333333", "equal"),
        (r"\frac{1}{12}", "0.083", "different"),
        ("0.0000001", "0.0000002", "different"),
        ("10", r"10\%", "equal"),
        ("0.5", r"0.5\%", "different"),
        ("50", "0.5", "different"),
        ("10{:}45", "10 : 45", "equal"),
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
        ("5", "7 maybe eleven", "unparseable"),
        ("5", "{1,5}", "unparseable"),
        (r"\frac{", "1", "gold_bad"),
        # Golds that the grammar does not know are compared letter by letter.
        (r"\nabla f = 0", r"\nabla f=0", "equal"),
        (r"\nabla f = 0", r"\nabla f=1", "unparseable"),
    ],
)
def test_outcomes(gold, answer, verdict):
    assert compare(gold, answer) == verdict


KINKS = [r"|{}|", r"\sqrt{{({})^2}}", r"\max({},-({}))", r"\lvert {} \rvert"]


@pytest.mark.parametrize(
    "inner", ["x", "x+3", "x-1000", "x+y", "2x-y", r"\sin x", r"x^3+8", r"\ln x", "a-b", "10-n", "x-0.001"]
)
@pytest.mark.parametrize("kink", KINKS)
def test_a_dropped_absolute_value_is_seen(inner, kink):
    gold = kink.replace("{}", inner).replace("{{", "{").replace("}}", "}")
    for wrong in (inner, f"-({inner})", f"-{gold}"):
        assert compare(gold, wrong) == "different"
    assert compare(gold, f"|{inner}|") == "equal"
    assert compare(inner, gold) == "different"


@pytest.mark.parametrize("shift", ["0.3", "0.05", "0.01"])
def test_a_shifted_floor_is_seen(shift):
    assert compare(r"\lfloor x\rfloor", rf"\lfloor x+{shift}\rfloor") == "different"
    assert compare(rf"\lfloor x+{shift}\rfloor", rf"\lfloor x+{shift}\rfloor+0x") == "equal"


@pytest.mark.parametrize(
    ("question", "gold", "answer", "verdict"),
    [
        (r"Simplify $\sqrt{50}+\sqrt{18}$.", r"8\sqrt2", r"\sqrt{18}+\sqrt{50}", "different"),
        ("Expand $(x+1)(x+2)$.", "x^2+3x+2", "(x+2)(x+1)", "restated"),
        ("Expand $(x+1)(x+2)$.", "x^2+3x+2", "x(x+1)+2(x+1)", "different"),
        ("Factor $x^2+3x+2$.", "(x+1)(x+2)", "x^2+2x+x+2", "different"),
        ("Share 48 sweets among 2 children.", "24", r"\frac{48}{2}", "restated"),
        ("Share 48 sweets among 2 children.", "24", r"\frac{240}{10}", "restated"),
        ("Share 48 sweets among 2 children.", "24", r"\frac{-48}{-2}", "restated"),
        ("5 apples, 8 pears, 7 plums", "20", r"5\frac81\frac71", "different"),
        ("Pay 16, 3 times", "48", r"\frac{16}{3^{-1}}", "different"),
        ("50 per month", "600", r"50\times12", "different"),
        ("5 million of them", "5000000", "5 million", "equal"),
        ("Which is larger, $2^{10}$ or $10^3$?", "1024", "2^{10}", "different"),
        (r"Write 0.375 as a fraction.", r"\frac38", "0.375", "restated"),
        (r"Find $a^2+b^2$.", "45", "a^2+b^2=45", "equal"),
        (r"Find $a$.", "45", "a^2+b^2=45", "different"),
        ("How many widgets are there?", "7", "7 widget", "equal"),
        ("How many are there?", "7", "7 widget", "unparseable"),
    ],
)
def test_the_question_is_known(question, gold, answer, verdict):
    assert compare(gold, answer, question) == verdict


def test_a_copied_question_has_a_status_of_its_own(verifier):
    result = verifier([sample("x^2+3x+2", r"\boxed{(x+1)(x+2)}", question="Expand $(x+1)(x+2)$.")])
    assert (result.value, result.status) == ([0.0], ["restated"])


@pytest.mark.parametrize(
    ("switch", "gold", "answer"),
    [
        ({"percent": False}, "25", r"25\%"),
        ({"degrees": False}, r"\frac{\pi}{2}", r"90^\circ"),
        ({"ordered_lists": True}, "1, 2", "2, 1"),
        ({"finished": False}, r"8\sqrt2", r"\sqrt{50}+\sqrt{18}"),
        ({"convert_units": True}, r"12\text{ inches}", r"1\text{ foot}"),
        ({"tuples_are_intervals": True}, "(1,2)", "[1,2]"),
        ({"decimals": 3}, r"\frac13", "0.3333"),
    ],
)
def test_switches(switch, gold, answer):
    (name,) = switch
    usual, other = compare(gold, answer), compare(gold, answer, "", switch)
    assert {usual, other} == {"equal", "different"}
    (one,) = MathVerifier(**switch, name=name)([sample(gold, rf"\boxed{{{answer}}}")]).value
    assert one == (other == "equal")


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
        (r"(-\infty, 3)", "x<3", 1),
        ("[2,5)", r"2 \le x < 5", 1),
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
    assert result.status[0] in ("unparseable", "ok")


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
    assert result.status == ["ok", "ok", "ok", "no_answer", "too_long", "ok", "no_gold"]
    assert result.answer[:4] == ["1/2", "1/2", "1/2", None]
    assert result.answer[5] == canonical(r"\sqrt{2}")


def test_a_think_tag_in_the_prompt_counts(verifier):
    texts = [r"\boxed{7}", r"hm</think> \boxed{7}"]
    assert verifier([sample("7", text, prompt="q <think>\n") for text in texts]).value == [0.0, 1.0]


def test_a_bad_gold_answer_is_named(caplog):
    verifier = MathVerifier()
    with caplog.at_level(logging.WARNING):
        verifier.read_questions([Question("q", "7", "a:1"), Question("q", r"\frac{", "a:2"), Question("q", "", "a:3")])
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


HOSTILE = [
    r"9^{9^{9^{9}}}",
    "9**9**9**9",
    r"((((9^9)^9)^9)^9)^9",
    r"2^{2^x}^{2^x}",
    r"e^{e^{e^{e^{9}}}}",
    r"7^{99999999}",
    "1000000000!",
    "((20!)!)!",
    r"(999!)^{999}",
    r"12345678^{999}!",
    r"\binom{1000000000}{500000000}",
    r"\binom{999!}{99!}",
    r"\Gamma(999999999)",
    r"\log_{\log_{\log_2 3} 5} 7^{999}",
    "(" * 10_000 + "5" + ")" * 10_000,
    "[" * 10_000,
    r"\{" * 10_000,
    r"\sqrt{" * 14 + "5" + "}" * 14,
    r"\sqrt{" * 5_000 + "5" + "}" * 5_000,
    "-" * 600 + "x",
    r"\pm" * 100 + "1",
    "(x+y+z+w+1)^{60}",
    r"(a+b+c+d+e+f+g+h+k+l)^{99}-(a+b)^{99}",
    r"x^5+x+y^7=\sin(xy)",
    r"\begin{pmatrix}x&y\\z&w\end{pmatrix}^{99}",
    r"[0,1]\cup" * 60 + "[0,1]",
    "x<1 or " * 60 + "x<2",
    r"\operatorname{eye}(100000)",
    r"\sum_{k=1}^{100000000} \frac{1}{k}",
    "0." + "3" * 190,
    "1e999999999",
    "10^{999}",
    r"\frac{0}{0}",
    "\x00\ud800",
    "__import__('os').system('touch PWNED_MARKER')",
    "open('PWNED_MARKER','w')",
    "().__class__.__bases__[0].__subclasses__()",
]


@pytest.mark.parametrize("gold", ["5", r"\sqrt{2}", "x+y=1"])
def test_hostile_answers_are_bounded_and_wrong(verifier, tmp_path, monkeypatch, gold):
    monkeypatch.chdir(tmp_path)
    verifier.read_questions([Question("q", gold), Question("q", "x^2+2x+1")])
    for answer in HOSTILE:
        start = time.monotonic()
        assert verifier([sample(gold, rf"\boxed{{{answer}}}")]).value == [0.0], answer
        assert time.monotonic() - start < 2.5, answer
        assert verifier([sample("x^2+2x+1", r"\boxed{(x+1)^2}")]).value == [1.0]
    assert list(tmp_path.iterdir()) == []


def test_hostile_answers_past_the_guards_execute_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = WorkerPool(num_workers=2, timeout=0.75, memory_limit_mb=256, cpu_seconds=0.5)
    past = (HOSTILE[0], r"\operatorname{eye}(10000)", r"\operatorname{zeros}(100000,100000)", *HOSTILE[-3:])
    outcomes = pool.map(_COMPARE, [["x+1", answer] for answer in past])
    assert all(outcome.value != "equal" for outcome in outcomes)
    assert list(tmp_path.iterdir()) == []
    pool.close()


def test_a_worker_needs_no_computer_algebra(tmp_path):
    script = tmp_path / "tries.py"
    script.write_text(
        "import sys\nfrom grpo_lightning.plugins.verifier.comparison import compare\n"
        "def algebra(gold, answer):\n"
        "    return [compare(gold, answer), sorted({'sympy', 'torch', 'math_verify'} & set(sys.modules))]\n"
    )
    pool = WorkerPool(num_workers=1)
    assert pool.map(f"{script}:algebra", [["x+1", "1.0+x"]])[0].value == ["equal", []]
    pool.close()


def process_of(worker: Any) -> int:
    """The process that works: the child of the one that cleans up after it."""
    file = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
    return int(file.read_text()) if file.exists() else worker.process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
def test_a_worker_has_less_than_a_gibibyte(verifier):
    assert verifier([sample("x+y", r"\boxed{y + x}")]).value == [1.0]
    ready = [worker for worker in verifier._pool._running if worker.job == IDLE]
    assert ready
    for worker in ready:
        limits = Path(f"/proc/{process_of(worker)}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
        assert int(line.split()[3]) < 2**30


def test_a_worker_killed_in_the_middle_of_a_batch_costs_nothing():
    verifier = MathVerifier()
    verifier.read_questions([])
    pairs = [(rf"\sqrt{{{n}}}+{n}x", rf"\boxed{{{n}x+\sqrt{{{n + k}}}}}") for n in range(2, 62) for k in (0, 1)]
    stop, killed = threading.Event(), {}  # jobs and the processes that were on them

    def kill():
        while not stop.is_set() and len(killed) < 3:
            for worker in list(verifier._pool._running):
                if worker.job >= 0 and not any(abs(worker.job - job) < 4 for job in killed):  # it gets one more rng
                    killed[worker.job] = process_of(worker)
                    os.kill(killed[worker.job], signal.SIGKILL)
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    result = verifier([sample(*pair) for pair in pairs])
    stop.set()
    killer.join()
    pids = [worker.process.pid for worker in verifier._pool._running]
    verifier.close()
    assert killed
    assert set(result.status) == {"ok"}
    assert result.value == [1.0, 0.0] * 60
    assert not [pid for pid in (*killed.values(), *pids) if Path(f"/proc/{pid}").exists()]


def stub(verifier: MathVerifier, slow: set[str], monkeypatch) -> list[list]:
    """Answers "equal" or, for some answers, "timeout"; what was asked is in the list."""
    asked: list[list] = []

    def answer(function, tasks):
        asked.extend(tasks)
        return [Outcome("timeout") if task[1] in slow else Outcome("ok", "equal") for task in tasks]

    monkeypatch.setattr(verifier._pool, "map", answer)
    return asked


def step(verifier: MathVerifier, samples: list[Sample]) -> list[str]:
    """The statuses of a step, which is checked at its end."""
    statuses = verifier(samples).status
    verifier.stop_if_broken(Counter(statuses))
    return statuses


def test_timeouts_of_many_questions_stop_the_run(monkeypatch):
    verifier = MathVerifier(max_timeouts=0.05, name="right")
    stub(verifier, {"slow"}, monkeypatch)
    for first in range(0, 95, 19):
        step(verifier, [sample(f"{n}x", r"\boxed{x}") for n in range(first, first + 19)])
    step(verifier, [sample(f"{n}y", r"\boxed{slow}") for n in range(5)])  # 5 of 100
    with pytest.raises(
        RewardFailure, match=r"right: .* for 6 of the latest 10\d questions.*max_timeouts=0.05.*`timeout`"
    ):
        step(verifier, [sample("7z", r"\boxed{slow}")])
    with pytest.raises(UsageError, match="max_timeouts=2"):
        MathVerifier(max_timeouts=2)


def test_no_single_question_stops_the_run(monkeypatch):
    slow = {f"slow_{n}" for n in range(64)}
    verifier = MathVerifier(max_timeouts=0.0 + 0.01)
    asked = stub(verifier, slow, monkeypatch)
    others = [sample(f"{n}x", r"\boxed{x}") for n in range(100)]
    for first in range(0, 64, 16):
        group = [sample("x+1", rf"\boxed{{slow_{first + n}}}") for n in range(16)]
        assert step(verifier, group + others).count("timeout") == 16
    assert sum(task[1] in slow for task in asked) == 64


def test_a_timeout_is_remembered(monkeypatch):
    verifier = MathVerifier()
    asked = stub(verifier, {"slow"}, monkeypatch)
    for _ in range(3):
        assert verifier([sample("x+1", r"\boxed{slow}")] * 4).status == ["timeout"] * 4
    assert sum(task[1] == "slow" for task in asked) == 1


SLOW_ONCE = [
    (r"x\cos\theta+y\sin\theta=p", r"x\sin\theta+y\cos\theta=p"),
    (r"\frac xy+\frac yz+\frac zx=3", r"\frac xy-\frac yz+\frac zx=3"),
    ("x^6-3x^2+1=0", "x^6+3x^2-1=0"),
    ("(a+b+c+d+e+f)^{40}", "(a+b+c+d+e-f)^{40}"),
    (r"\sin(\sin(\sin(\sin x)))", r"\sin(\sin(\sin(\cos x)))"),
    (r"\binom{n}{k}", r"\binom{n}{k+1}"),
    (r"\sqrt{x}+\sqrt{y}+\sqrt{z}+\sqrt{w}", r"\sqrt{x}+\sqrt{y}+\sqrt{z}-\sqrt{w}"),
    (r"\lfloor \frac{x}{y}\rfloor", r"\lceil \frac{x}{y}\rceil"),
]


@pytest.mark.parametrize(("gold", "answer"), SLOW_ONCE)
def test_nothing_takes_a_second(gold, answer):
    start = time.process_time()
    assert compare(gold, answer) == "different"
    assert compare(gold, gold) == "equal"
    assert time.process_time() - start < 1


@needs_gsm8k
def test_all_of_gsm8k(verifier):
    solutions = [row["answer"] for name in ("train", "test") for row in rows(f"gsm8k/{name}.jsonl")]
    assert len(solutions) == 7473 + 1319
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert [extract_answer(solution) for solution in solutions] == golds
    assert {outcome(gold, gold) for gold in golds} == {"equal"}
    result = verifier([sample(gold, text) for gold, text in zip(golds, solutions, strict=True)])
    assert set(result.value) == {1.0}
    assert set(result.status) == {"ok"}
