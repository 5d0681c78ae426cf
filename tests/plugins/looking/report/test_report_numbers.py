"""Every number of a report, computed again by loops from the bytes of the event files and from validations.jsonl."""

import html
import json
import math
import random
import re
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from helpers.curves import write
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from grpo_lightning.command.overview import answer

QUESTIONS = 8
T = {1: 12.7062047362, 2: 4.3026527297, 7: 2.3646242516}
"""Student's t at 97.5 %, from a table."""

VALIDATED = (-1, 1, 3, 5)
# By arm: seeds, steps, does it leave the values of its questions?
ARMS = {"a": ((0, 1, 2), 6, True), "b": ((0, 1, 2), 6, True), "old": ((0, 1, 2), 6, False), "short": ((1,), 5, True)}
METRICS = ("val/avg@8:last", "val/avg@8:mean", "val/avg@8:last2", "reward/mean:last", "reward/mean:mean")
THRESHOLD = 0.55


def make_runs(root: Path) -> None:
    chance = random.Random(7)
    difficulty = [chance.uniform(-0.3, 0.3) for _ in range(QUESTIONS)]
    for number, (arm, (seeds, num_steps, has_questions)) in enumerate(ARMS.items()):
        for seed in seeds:
            curves: dict[str, list[tuple[int, float]]] = {"val/avg@8": [], "reward/mean": [], "rollout/tokens": []}
            lines = []
            for step in VALIDATED[: 1 + num_steps // 2]:
                level = 0.3 + 0.05 * step + 0.03 * number + chance.uniform(-0.05, 0.05)
                right = [round(8 * min(1, max(0, level + hard + chance.uniform(-0.1, 0.1)))) / 8 for hard in difficulty]
                curves["val/avg@8"].append((step, fmean(right)))
                row = {"name": "", "step": step, "grader": "MathVerifier", "questions": "0f", "k": 8}
                lines.append(json.dumps(row | {"values": {"avg@8": right}}) + "\n")
            for step in range(num_steps):
                curves["reward/mean"].append((step, chance.uniform(0, 1)))
                curves["rollout/tokens"].append((step, float(chance.randrange(100, 200))))
            folder = root / arm / str(seed)
            write(folder, curves)
            config = {"seed_everything": seed, "loop": {"mu": number}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
            if has_questions:
                (folder / "validations.jsonl").write_text("".join(lines), encoding="utf-8")


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    (file,) = folder.glob("events.*")
    for data in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(data)
        for value in event.summary.value:
            curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def read_questions(folder: Path) -> dict[int, list[float]]:
    path = folder / "validations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["values"]["avg@8"] for row in rows}


def x_of(curves: dict[str, dict[int, float]], axis: str, step: int) -> float:
    if axis == "step":
        return step + 1
    return sum(tokens for other_step, tokens in curves["rollout/tokens"].items() if other_step <= step)


def weights_of(statistic: str, steps: list[int], x: list[float]) -> dict[int, float]:
    """The statistic as weights of the measured steps."""
    if statistic == "mean" and len(x) > 1:
        weights = dict.fromkeys(steps, 0.0)
        for i in range(len(x) - 1):
            for end in (i, i + 1):
                weights[steps[end]] += (x[i + 1] - x[i]) / 2 / (x[-1] - x[0])
        return weights
    count = {"last2": 2}.get(statistic, 1)
    return dict.fromkeys(steps[-count:], 1 / count) if len(steps) >= count else {}


def text_of(mean: float, half: float | None, sign: str = "") -> str:
    """Two digits of the half, and as many decimals of the mean."""
    if half is None:
        return f"{mean:{sign}.3g}".replace("-", "−")
    decimals = max(0, 1 - int(f"{half:.17e}".split("e")[1]))
    return f"{mean:{sign}.{decimals}f} ± {half:.{decimals}f}".replace("-", "−")


def half_over_seeds(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    variance = sum((value - fmean(values)) ** 2 for value in values) / (len(values) - 1)
    return T[len(values) - 1] * math.sqrt(variance / len(values))


def half_over_questions(values: list[float]) -> float:
    """Wilson's interval with the design effect, as docs/how_to/evaluation.md has it."""
    n = len(values)
    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    rare = values if mean <= 0.5 else [1 - value for value in values]
    telling = sum(rare) ** 2 / sum(value**2 for value in rare)
    answers = n * (telling * mean * (1 - mean) / variance + 2) / (telling + 2)
    z = T[n - 1] ** 2 / answers
    centre = (mean + z / 2) / (1 + z)
    return abs(centre - mean) + math.sqrt(mean * (1 - mean) * z + z * z / 4) / (1 + z)


def components(table: list[list[float]]) -> list[tuple[float, int]]:
    num_seeds, num_questions = len(table), len(table[0])
    mean = fmean(map(fmean, table))
    by_question = [fmean(column) for column in zip(*table, strict=True)]
    seeds = num_questions * sum((fmean(row) - mean) ** 2 for row in table) / (num_seeds - 1)
    questions = num_seeds * sum((value - mean) ** 2 for value in by_question) / (num_questions - 1)
    noise = 0.0
    for row in table:
        for value, of_question in zip(row, by_question, strict=True):
            noise += (value - fmean(row) - of_question + mean) ** 2 / ((num_seeds - 1) * (num_questions - 1))
    size = num_seeds * num_questions
    return [(seeds / size, num_seeds - 1), (max(0, questions - noise) / size, num_questions - 1)]


def half_of(parts: list[tuple[float, int]]) -> float:
    total = sum(variance for variance, _ in parts)
    return sum(variance * T[df] for variance, df in parts) / total * math.sqrt(total)


def counted(number: int) -> str:
    return f"{number} seed" + ("" if number == 1 else "s")


class Recomputed:
    """The cells of a metric along an axis, by arm."""

    def __init__(self, root: Path, metric: str, axis: str) -> None:
        self.name, self.statistic = metric.split(":")
        self.runs = {arm: {seed: root / arm / str(seed) for seed in seeds} for arm, (seeds, _, _) in ARMS.items()}
        self.curves = {folder: read_curves(folder) for by_seed in self.runs.values() for folder in by_seed.values()}
        self.x = {
            folder: {step: x_of(curves, axis, step) for step in curves[self.name]}
            for folder, curves in self.curves.items()
        }
        self.start = max(min(x.values()) for x in self.x.values())
        self.end = min(max(x.values()) for x in self.x.values())

    def weights(self, folder: Path) -> dict[int, float]:
        earliest = self.start if self.statistic == "mean" else -math.inf
        steps = [step for step, x in self.x[folder].items() if earliest <= x <= self.end]
        return weights_of(self.statistic, steps, [self.x[folder][step] for step in steps])

    def value(self, folder: Path) -> float:
        return sum(weight * self.curves[folder][self.name][step] for step, weight in self.weights(folder).items())

    def by_question(self, folder: Path) -> list[float] | None:
        rows = read_questions(folder) if self.name.startswith("val/") else {}
        if not rows:
            return None
        weights = self.weights(folder).items()
        return [sum(weight * rows[step][question] for step, weight in weights) for question in range(QUESTIONS)]

    def arm_cell(self, arm: str) -> tuple[str, str]:
        folders = [*self.runs[arm].values()]
        assert all(self.weights(folder) for folder in folders)
        values = [self.value(folder) for folder in folders]
        steps = sorted({max(self.weights(folder)) + 1 for folder in folders})
        basis = counted(len(values))
        half = half_over_seeds(values)
        if len(values) == 1 and (questions := self.by_question(folders[0])):
            half = half_over_questions(questions)
            basis += f" × {QUESTIONS} questions"
        at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        return text_of(fmean(values), half), f"{basis}, {at}"

    def difference(self, arm: str) -> tuple[float, float | None, str]:
        """Mean, half and basis."""
        seeds = self.runs[arm].keys() & self.runs["a"].keys()
        pairs = [(self.runs[arm][seed], self.runs["a"][seed]) for seed in seeds]
        tables = [[self.by_question(folder) for folder in folders] for folders in zip(*pairs, strict=True)]
        if len(pairs) < 2 or any(row is None for table in tables for row in table):
            differences = [self.value(folder) - self.value(base) for folder, base in pairs]
            return fmean(differences), half_over_seeds(differences), counted(len(pairs))
        table = [[v - b for v, b in zip(row, base, strict=True)] for row, base in zip(*tables, strict=True)]
        half = half_of(components(table))
        unpaired = half_of(components(tables[0]) + components(tables[1]))
        basis = f"{counted(len(pairs))} × {QUESTIONS} questions; unpaired ± {unpaired:.2g}"
        return fmean(map(fmean, table)), half, f"{basis}, {unpaired / half:.1f} times as wide"


def recomputed_threshold(root: Path, arm: str, axis: str) -> tuple[str, str] | None:
    """The text and the basis if some run never reached the threshold; otherwise the mean alone."""
    bounds, num_reached = [], 0
    for seed in ARMS[arm][0]:
        curves = read_curves(root / arm / str(seed))
        reached = [step for step, value in sorted(curves["val/avg@8"].items()) if value >= THRESHOLD]
        bounds.append(x_of(curves, axis, reached[0] if reached else max(curves["val/avg@8"])))
        num_reached += bool(reached)
    if num_reached < len(bounds):
        return f"≥ {fmean(bounds):.3g}", f"{num_reached} of {counted(len(bounds))} reached it"
    half = half_over_seeds(bounds)
    return text_of(fmean(bounds), half or None), counted(len(bounds)) + (", all equal" if half == 0 else "")


def cells_of(page: str) -> list[dict[str, list[tuple[str, str]]]]:
    """Of each metric in the tables of numbers, the texts and bases of its cells by arm."""
    metrics: list[dict[str, list[tuple[str, str]]]] = []
    for body in re.findall(r'<tbody><tr class="metric">.*?</tbody>', page, re.DOTALL):
        rows = {}
        for row in re.findall(r"<tr>.*?</tr>", body, re.DOTALL):
            arm = re.search(r"<bdi>(.*?)</bdi>", row)[1]  # type: ignore[index]
            cells = re.findall(r"<td[^>]*>(.*?)(?:\s*<small>(.*?)</small>)?</td>", row, re.DOTALL)
            texts = [[html.unescape(re.sub(r"<[^>]+>", "", text)).strip() for text in cell] for cell in cells]
            rows[arm] = [(text, basis) for text, basis in texts][1:]
        metrics.append(rows)
    return metrics


@pytest.mark.parametrize("axis", ["step", "tokens"])
def test_every_number_is_what_the_files_say(tmp_path: Path, axis: str) -> None:
    make_runs(tmp_path / "runs")
    out = tmp_path / "report.html"
    threshold = f"val/avg@8>={THRESHOLD}"
    assert (
        answer(["report", str(tmp_path / "runs"), "-o", str(out), "--x", axis, "--metrics", *METRICS, threshold]) == 0
    )
    page = out.read_text(encoding="utf-8")
    validation, reward, reached = cells_of(page)
    num_cells = num_tested = num_marked = 0
    for rows, metrics in ((validation, METRICS[:3]), (reward, METRICS[3:])):
        for column, metric in enumerate(metrics):
            expected = Recomputed(tmp_path / "runs", metric, axis)
            for arm, cells in rows.items():
                assert cells[2 * column] == expected.arm_cell(arm), (metric, arm)
                num_cells += 2
                if arm == "a":
                    assert cells[2 * column + 1] == ("", "")
                    continue
                mean, half, basis = expected.difference(arm)
                assert cells[2 * column + 1] == (text_of(mean, half, "+"), basis), (metric, arm)
                num_tested += half is not None
                num_marked += half is not None and abs(mean) > half
    for arm, cells in reached.items():
        assert cells[0] == recomputed_threshold(tmp_path / "runs", arm, axis)
    assert num_cells == 2 * len(ARMS) * len(METRICS) and len(reached) == len(ARMS)
    # Thresholds that all runs of two arms reach are differences too.
    for cells in reached.values():
        is_tested = "±" in cells[1][0]
        num_tested += is_tested
        num_marked += is_tested and f"<mark>{cells[1][0]}</mark>" in page
    assert f"Of {num_tested} differences" in page and f"<strong>{num_marked}</strong>" in page
    assert page.count("<mark>") == num_marked + 1  # and the word that explains it
    # No number without what it was taken of.
    for rows in (validation, reward, reached):
        assert all(basis for cells in rows.values() for text, basis in cells if text)
