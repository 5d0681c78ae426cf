"""The math verifier: right answers, wrong answers, tricks and attacks."""

import json
import logging
import math
import time
from collections import Counter

import pytest
from helpers.paths import DATA, needs_gsm8k

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.plugins.rewards.verifier.math_verifier import _COMPARE, MathVerifier, decide
from grpo_lightning.plugins.rewards.verifier.reading import canonical
from grpo_lightning.plugins.rewards.verifier.value_comparison import compare
from grpo_lightning.rewards.reward import RewardFailure
from grpo_lightning.sandbox.pool import Outcome, WorkerPool
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError


def sample(gold: str, text: str, prompt: str = "q", finish_reason=FinishReason.STOP, question: str = "q") -> Sample:
    return Sample(Prompt(0, prompt, [1], Question(question, gold, "row:1")), text, [1], finish_reason)


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / path).read_text().splitlines()]


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier()
    yield verifier
    verifier.close()


DECIDED_AT_ONCE = [
    ("1234567890", "1234567891", "different"), ("1,234", "1234", "equal"), ("50", "0.5", None),
    ("5", "7" * 3000, "too_long"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "outcome"), DECIDED_AT_ONCE)
def test_plain_numbers_are_decided_without_a_worker(gold, answer, outcome):
    verdict = decide(gold, answer, "q")
    assert verdict == (gold, answer, "q") if outcome is None else verdict.outcome == outcome


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


def test_a_copied_question_has_a_status_of_its_own(verifier):
    result = verifier([sample("x^2+3x+2", r"\boxed{(x+1)(x+2)}", question="Expand $(x+1)(x+2)$.")])
    assert (result.value, result.status) == ([0.0], ["restated"])


SWITCHES = [
    ({"percent": False}, "25", r"25\%"), ({"ordered_lists": True}, "1, 2", "2, 1"),
    ({"finished": False}, r"8\sqrt2", r"\sqrt{50}+\sqrt{18}"),
    ({"convert_units": False}, r"12\text{ inches}", r"1\text{ foot}"),
]  # fmt: skip


@pytest.mark.parametrize(("switch", "gold", "answer"), SWITCHES)
def test_switches(switch, gold, answer):
    (name,) = switch
    question = "How long is it?" if name == "convert_units" else ""
    usual, other = compare(gold, answer, question), compare(gold, answer, question, switch)
    assert {usual, other} == {"equal", "different"}
    (one,) = MathVerifier(**switch, name=name)([sample(gold, rf"\boxed{{{answer}}}", question=question)]).value
    assert one == (other == "equal")


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
        verifier.read_questions(
            [Question("q", "7", "a:1"), Question("q", r"\frac{", "a:2"), Question("q", "1" * 9999, "a:3")]
        )
    assert [r.args[2] for r in caplog.records] == ["a:2", "a:3"]
    assert verifier([sample(r"\frac{", r"\boxed{7}")]).status == ["gold_bad"]
    verifier.close()


def test_a_question_without_a_gold_answer_is_refused_or_not_scored(verifier):
    with pytest.raises(UsageError, match=r"^a:2: no gold answer, as in 2 of 3 questions, and the reward math_verifier"):
        verifier.read_questions([Question("q", "7", "a:1"), Question("q", "", "a:2"), Question("q", " ", "a:3")])
    assert verifier([sample("", r"\boxed{7}")]).status == ["no_gold"]


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
    r"9^{9^{9^{9}}}", "9**9**9**9", r"((((9^9)^9)^9)^9)^9", r"2^{2^x}^{2^x}", r"e^{e^{e^{e^{9}}}}", r"7^{99999999}",
    "1000000000!", "((20!)!)!", r"(999!)^{999}", r"12345678^{999}!", r"\binom{1000000000}{500000000}",
    r"\binom{999!}{99!}", r"\Gamma(999999999)", r"\log_{\log_{\log_2 3} 5} 7^{999}", "(" * 10_000 + "5" + ")" * 10_000,
    "[" * 10_000, r"\{" * 10_000, r"\sqrt{" * 14 + "5" + "}" * 14, r"\sqrt{" * 5_000 + "5" + "}" * 5_000,
    "-" * 600 + "x", r"\pm" * 100 + "1", "(x+y+z+w+1)^{60}", r"(a+b+c+d+e+f+g+h+k+l)^{99}-(a+b)^{99}",
    r"x^5+x+y^7=\sin(xy)", r"\begin{pmatrix}x&y\\z&w\end{pmatrix}^{99}", r"[0,1]\cup" * 60 + "[0,1]",
    "x<1 or " * 60 + "x<2", r"\operatorname{eye}(100000)", r"\sum_{k=1}^{100000000} \frac{1}{k}", "0." + "3" * 190,
    "1e999999999", "10^{999}", r"\frac{0}{0}", "\x00\ud800", "__import__('os').system('touch PWNED_MARKER')",
    "open('PWNED_MARKER','w')", "().__class__.__bases__[0].__subclasses__()",
]  # fmt: skip


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
        "import sys\nfrom grpo_lightning.plugins.rewards.verifier.value_comparison import compare\n"
        "def algebra(gold, answer):\n"
        "    return [compare(gold, answer), sorted({'sympy', 'torch', 'math_verify'} & set(sys.modules))]\n"
    )
    pool = WorkerPool(num_workers=1)
    assert pool.map(f"{script}:algebra", [["x+1", "1.0+x"]])[0].value == ["equal", []]
    pool.close()


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
    for start in range(0, 95, 19):
        step(verifier, [sample(f"{n}x", r"\boxed{x}") for n in range(start, start + 19)])
    step(verifier, [sample(f"{n}y", r"\boxed{slow}") for n in range(5)])  # 5 of 100
    with pytest.raises(
        RewardFailure, match=r"right: .* for 6 of the latest 10\d questions.*max_timeouts=0.05.*`timeout`"
    ):
        step(verifier, [sample("7z", r"\boxed{slow}")])
    with pytest.raises(UsageError, match="max_timeouts=2"):
        MathVerifier(max_timeouts=2)


def test_no_single_question_stops_the_run(monkeypatch):
    slow = {f"slow_{n}" for n in range(64)}
    verifier = MathVerifier(max_timeouts=0.01)
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
    (r"\frac xy+\frac yz+\frac zx=3", r"\frac xy-\frac yz+\frac zx=3"), ("x^6-3x^2+1=0", "x^6+3x^2-1=0"),
    ("(a+b+c+d+e+f)^{40}", "(a+b+c+d+e-f)^{40}"), (r"\sin(\sin(\sin(\sin x)))", r"\sin(\sin(\sin(\cos x)))"),
    (r"\binom{n}{k}", r"\binom{n}{k+1}"),
    (r"\sqrt{x}+\sqrt{y}+\sqrt{z}+\sqrt{w}", r"\sqrt{x}+\sqrt{y}+\sqrt{z}-\sqrt{w}"),
    (r"\lfloor \frac{x}{y}\rfloor", r"\lceil \frac{x}{y}\rceil"),
]  # fmt: skip


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
    assert {decide(gold, gold).outcome for gold in golds} == {"equal"}
    result = verifier([sample(gold, text) for gold, text in zip(golds, solutions, strict=True)])
    assert set(result.value) == {1.0}
    assert set(result.status) == {"ok"}
