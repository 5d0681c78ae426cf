"""`grpo report --table`: the tables as Markdown, LaTeX and CSV, through the command line."""

import csv
import io
import re
from pathlib import Path

import pytest
import yaml
from helpers.curves import scalars, write

from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.looking.report.report_formats import MOST_CELLS, formatted
from grpo_lightning.plugins.looking.report.report_tables import ReportTable, TableCell, TableRow

HOSTILE = (
    r"a_b & 50% #1 $x$ {y} \z ~^ [u] *v* <w> |t| `s` " + "\u03b2=\u00bd \u2265 \u4f60\u597d \u00e9\U0001f600\u2212"
)
"""Characters that Markdown or LaTeX read as syntax, and some that pdflatex cannot set."""


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    """Two arms with three seeds, the second first in the alphabet: last values 0.5, 0.6, 0.7 and 0.8, 0.9, 1.1."""
    for seed in range(3):
        for name, mu, last in (("plain", 1, 0.5 + 0.1 * seed), ("dapo", 2, [0.8, 0.9, 1.1][seed])):
            run = tmp_path / name / str(seed)
            write(run, scalars([0.1, last], name="val/avg@8"))
            config = {"seed_everything": seed, "loop": {"mu": mu}}
            (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints on standard output."""
    assert answer(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_table_is_all_that_is_printed(
    arms: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(arms)
    text = printed(capsys, "plain", "dapo", "--metrics", "val/avg@8:last", "--table", "md")
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert head == ["metric", "arm", "seeds", "last value", "vs. plain"] and {*"".join(rule)} == {"-", ":"}
    # The arms stand in the order of the command line, the first is the base.
    assert [row[1:3] for row in rows] == [["plain", "3"], ["dapo", "3"]]
    # 0.5, 0.6, 0.7: 0.6 ± 4.3027 * 0.1 / √3. The differences are 0.3, 0.3, 0.4, whose interval excludes 0.
    assert rows[0][3].startswith("0.60 ± 0.25") and rows[0][4] == ""
    assert re.match(r"\*\*\+0\.33 ± 0\.14\*\*", rows[1][4])
    assert not (arms / "report.html").exists()


def test_the_base_is_chosen_by_name(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A shell's glob would be in the alphabet's order.
    text = printed(capsys, *sorted(arms.iterdir()), "--base", "plain", "--metrics", "val/avg@8:last", "--table", "md")
    assert "vs. plain" in text and text.index("| plain |") < text.index("| dapo |")
    assert answer(["report", str(arms), "--base", "grpo"]) == 2
    message = "--base grpo: there is no such configuration. Give one of dapo, plain"
    assert f"grpo: error: {message}\n" in capsys.readouterr().err


def test_csv_has_every_number_unrounded(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--base", "plain", "--metrics", "val/avg@8:last", "val/avg@8>=0.75", "--table", "csv"]
    rows = [*csv.DictReader(io.StringIO(printed(capsys, arms, *options)), strict=True)]
    row_by_key = {(row["arm"], row["statistic"]): row for row in rows}
    value = row_by_key["dapo", "last value"]
    assert float(value["value"]) == pytest.approx((0.8 + 0.9 + 1.1) / 3, rel=1e-6)
    # s² = (0.0178 + 0.0011 + 0.0278) / 2, t = 4.3027.
    assert float(value["half_width"]) == pytest.approx(4.302653 * (0.0466667 / 2 / 3) ** 0.5, rel=1e-4)
    assert (value["metric"], value["seeds"], value["n"], value["marked"]) == ("val/avg@8", "3", "3", "0")
    difference = row_by_key["dapo", "last value vs. plain"]
    assert float(difference["value"]) == pytest.approx(1 / 3, rel=1e-6) and difference["marked"] == "1"
    assert row_by_key["dapo", "reached after"]["value"] == "2.0"
    # No seed of the other arm got there in two steps: the number is the bound that the text has.
    never = row_by_key["plain", "reached after"]
    assert (never["text"], never["value"], never["half_width"], never["n"]) == ("≥ 2", "2.0", "nan", "0")
    assert ("plain", "last value vs. plain") not in row_by_key


def test_the_other_axes_have_tables_too(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, arms, "--x", "step", "tokens", "--metrics", "val/avg@8:last", "--table", "md")
    assert "exploration steps)" in text and "sampled tokens)" in text


SYMBOLS = yaml.safe_load((Path(formatted.__code__.co_filename).with_name("latex.yaml")).read_text(encoding="utf-8"))


def check_line(line: str) -> None:
    """Fails where LaTeX would stop: braces and math that do not close, and characters that it reads as syntax."""
    plain = re.sub(r"\\([a-zA-Z]+|[{}$&%#_|\\])", "", line)
    assert not re.search(r"[%#~\\]", plain) and plain.count("$") % 2 == 0, line
    depth = [plain[:index].count("{") - plain[:index].count("}") for index in range(len(plain) + 1)]
    assert min(depth) == depth[-1] == 0, line
    outside_math = plain.split("$")[::2]
    assert not re.search("[_^]", "".join(outside_math)), line
    assert all(c.isascii() or c in SYMBOLS["letters"] for c in line), line


def check_latex(text: str) -> list[list[list[str]]]:
    """Reads the tables of a document as LaTeX would, and returns their cells; fails where LaTeX would stop.

    It knows braces, math, the environment `tabular` with its columns, `multicolumn`, and the commands that are used.
    """
    commands = set(re.findall(r"\\([a-zA-Z]+|.)", text, re.DOTALL))
    known = {"begin", "end", "providecommand", "hline", "toprule", "midrule", "bottomrule", "multicolumn", "\\"}
    known |= {"textit", "textbf", "textbackslash", "textasciitilde", "textasciicircum", "textasciigrave", "ldots"}
    known |= {"footnotesize", "par"}
    known |= set(re.findall(r"\\([a-zA-Z]+)\$", " ".join(SYMBOLS["commands"].values()))) | {*"{}$&%#_|"}
    assert commands <= known, commands - known
    tables = []
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lrc]+)\}\n(.*?)\\end\{tabular\}\n", text, re.DOTALL):
        rows = []
        for line in body.splitlines():
            if line in (r"\toprule", r"\midrule", r"\bottomrule"):
                continue
            assert line.endswith(r" \\") and not line.startswith(("[", "*")), line
            row = line.removesuffix(r" \\")
            check_line(row)
            cells = re.split(r"(?<!\\)&", row)
            spanned = re.match(r"\\multicolumn\{(\d+)\}", row)
            assert len(columns) == (int(spanned[1]) if spanned else len(cells)), row
            rows.append([cell.strip() for cell in cells])
        tables.append(rows)
    for notes in re.findall(r"^\{\\footnotesize.*", text, re.MULTILINE):
        check_line(notes)
    assert text.count(r"\begin") == text.count(r"\end") == len(tables) > 0
    return tables


def test_latex_is_well_formed(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, arms, "--base", "plain", "--metrics", "val/avg@8:last", "--table", "tex")
    (table,) = check_latex(text)
    head, metric, base, compared = table
    assert head == ["", "seeds", "last value", "vs. plain"] and metric[0].startswith(r"\multicolumn{4}")
    assert base[:2] == ["plain", "3"] and base[2].startswith(r"0.60 $\pm$ 0.25")
    assert compared[3] == r"\textbf{+0.33 $\pm$ 0.14}$^{b}$"
    assert r"{\footnotesize $^{a}$ 3 seeds, step 2. $^{b}$ 3 seeds.\par}" in text


def table_of(num_columns: int, arms: list[str], mark: bool = False) -> ReportTable:
    """A table with a metric and a row per arm."""
    cells = tuple(TableCell(f"-{index} ± 1", is_marked=mark) for index in range(num_columns))
    rows = [TableRow(HOSTILE, "up to 3 steps", arm, index, 3, cells) for index, arm in enumerate(arms)]
    return ReportTable(tuple(f"head {index}" for index in range(num_columns)), tuple(rows))


def test_latex_escapes_what_it_would_read() -> None:
    (table,) = check_latex(formatted([table_of(2, ["[one]", HOSTILE, "*"], mark=True)], "tex"))
    assert table[2][0] == "{[}one{]}" and table[2][2] == r"\textbf{$-$0 $\pm$ 1}"
    assert r"a\_b \& 50\% \#1 \$x\$ \{y\} \textbackslash{}z" in table[3][0].replace("\n", "")
    assert r"$\beta$=U+00BD $\geq$ U+4F60U+597D éU+1F600$-$" in table[3][0]


def test_a_wide_table_of_latex_is_split() -> None:
    tables = check_latex(formatted([table_of(10, ["a", "b"])], "tex"))
    assert [len(rows[0]) for rows in tables] == [2 + MOST_CELLS, 2 + 10 - MOST_CELLS]
    assert [head for rows in tables for head in rows[0][2:]] == [f"head {index}" for index in range(10)]
    assert [rows[2][0] for rows in tables] == ["a", "a"]


def test_markdown_escapes_what_it_would_read() -> None:
    rows = formatted([table_of(1, [HOSTILE + "\nnext"])], "md").splitlines()
    assert len(rows) == 3
    cells = re.split(r"(?<!\\)\|", rows[2])
    assert len(cells) == 6 and cells[4] == " \N{MINUS SIGN}0 ± 1 "
    assert re.sub(r"\\(.)", r"\1", cells[2]).strip() == HOSTILE + " next"
