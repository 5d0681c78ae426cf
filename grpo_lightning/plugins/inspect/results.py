"""The tables of a report: every metric of every arm, and the differences to the first."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.plugins.inspect.comparison import Metric, Table

HEADS = {"last": "last value", "mean": "mean of the curve"}
"""The columns' heads by statistic; that of a threshold is `reached after`."""

Block = tuple[list[str], list[tuple[str, str, dict[str, int]]]]
"""The heads of a table, and for each of its metrics the name, how far it was counted, and the index of each head's."""


def results(table: Table, metrics: Sequence[Metric]) -> dict[str, Any]:
    """What the page tells of a table: how many differences are tested, how many marked, and the tables."""
    differences = [cell.difference for cells in table.cells.values() for cell in cells]
    tested = [one for one in differences if one is not None and math.isfinite(one.half)]
    every = [[i for i, metric in enumerate(metrics) if metric.is_threshold == are] for are in (False, True)]
    return {
        "tested": len(tested),
        "marked": sum(one.excludes_zero for one in tested),
        "cells": table.cells,
        "blocks": [_block(table, metrics, chosen) for chosen in every if chosen],
    }


def _block(table: Table, metrics: Sequence[Metric], chosen: Sequence[int]) -> Block:
    heads = {index: HEADS.get(metrics[index].statistic, "reached after") for index in chosen}
    rows: dict[str, dict[str, int]] = {}
    for index, head in heads.items():
        metric = metrics[index]
        sign = {">=": f" ≥ {metric.threshold:g}", "<=": f" ≤ {metric.threshold:g}"}.get(metric.statistic, "")
        rows.setdefault(metric.name + sign, {})[head] = index
    ends = {name: table.labels[min(of.values())].rpartition(" ")[2] for name, of in rows.items()}
    thresholds = metrics[chosen[0]].is_threshold
    return list(dict.fromkeys(heads.values())), [
        (name, "" if thresholds else f"up to {ends[name]} ", of) for name, of in rows.items()
    ]
