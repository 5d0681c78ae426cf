"""tools/bench_engines.py: a tiny run prints a row per engine, and sizes below 1 are refused."""

import bench_engines as tool


def test_prints_a_row_per_engine(policy_folder, capsys) -> None:
    sizes = ["--prompts", "2", "--group-size", "2", "--prompt-tokens", "5", "--new-tokens", "3", "--rounds", "1"]
    tool.main(["--model", str(policy_folder), "--engines", "native", "plain", "--precision", "fp32", *sizes])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| fp32")]
    assert [row[1] for row in rows] == ["native", "plain"]
    assert rows[0][4] == "1.00"
    assert all(0 < int(row[5].removesuffix(" |")) <= 12 for row in rows)
