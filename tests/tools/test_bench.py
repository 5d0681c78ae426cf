"""tools/bench.py: the pairs take turns, the ratio is the median of the rounds', and a tiny run prints a table."""

from types import SimpleNamespace

import bench
import pytest
import torch

from grpo_lightning.plugins.fast.native import NativeEngine

TINY = ["--prompts", "2", "--group-size", "2", "--prompt-tokens", "5", "--new-tokens", "3", "--rounds", "2"]
SIZES = bench.Sizes(prompts=2, group_size=3, prompt_tokens=5, new_tokens=4)


def test_a_tiny_run_prints_a_row_per_pair(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(TINY)
    head, _, *table = capsys.readouterr().out.splitlines()
    assert head.startswith("2 prompts of 5 tokens x 2 completions of 3; 1.0M parameters") and "2 rounds" in head
    rows = [row.strip("| ").split(" | ") for row in table[2:]]
    assert [rows[0][0], rows[0][1].split()[0], rows[0][2].split()[0]] == ["sampling", "native", "generate"]
    assert ["shared prefix", "rows"] in [[row[1].rsplit(" ", 2)[0], row[2].rsplit(" ", 2)[0]] for row in rows]
    assert all(len(row) == 6 and float(row[3]) > 0 for row in rows)


def test_the_two_ways_take_turns_and_the_ratio_is_the_median_of_the_rounds() -> None:
    order: list[str] = []
    pair = bench.Pair("what", "fast", "plain", lambda: order.append("fast"), lambda: order.append("plain"))
    for _ in range(3):
        pair.run()
    assert order == ["fast", "plain", "plain", "fast", "fast", "plain"]
    pair.seconds, pair.cpu = [(1.0, 2.0), (1.0, 3.0), (2.0, 20.0)], [(1.0, 4.0)] * 3
    assert pair.row() == "| what | fast 1.000 s | plain 3.000 s | 3.00 | 2.00 to 10.00 | 4.00 |"


def test_both_ways_do_the_same_work() -> None:
    policy = bench.new_policy(hidden=64, layers=1)
    drawn = bench.sampling_by(policy, SIZES)()
    generated = bench.generating(policy, SIZES)()
    assert [len(completion.token_ids) for completion in drawn] == [4] * 6  # type: ignore[attr-defined]
    assert generated.shape == (6, 5 + 4)  # type: ignore[attr-defined]
    rollouts = SIZES.rollouts()
    assert policy.shares_prefix
    shared = policy(rollouts).logp
    policy.shares_prefix = False
    torch.testing.assert_close(policy(SIZES.rollouts()).logp, shared)


def test_a_pair_that_this_version_lacks_is_left_out_and_a_switch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(NativeEngine):
        def __init__(self, packed: bool = False) -> None:
            super().__init__()

    policy = bench.new_policy(hidden=64, layers=1)
    monkeypatch.setattr(bench, "NativeEngine", Engine)
    monkeypatch.setattr(bench, "SWITCHES", {"version": "a switch", "no_such_switch": "none"})
    names = [(pair.what, pair.fast_name) for pair in bench.pairs_of(policy, SIZES)]
    assert ("sampling: weights packed for few rows", "packed") in names and ("update: a switch", "version") in names
    assert not any("none" in what or "refilled" in what for what, _ in names)

    seen: list[bool] = []
    switch = SimpleNamespace(on=False)
    bench.switched(switch, "on", True, lambda: seen.append(switch.on))()  # type: ignore[arg-type]
    assert (seen, switch.on) == ([True], False)
