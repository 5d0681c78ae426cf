"""The first line of every public class ends with a full stop: it makes sense without the lines after it."""

import inspect

import grpo_lightning


def test_every_class_has_a_first_line() -> None:
    public = (getattr(grpo_lightning, name) for name in grpo_lightning.__all__)
    lines = {one.__name__: str(inspect.getdoc(one)).split("\n") for one in public if inspect.isclass(one)}
    assert [name for name, (first, *rest) in lines.items() if not first.endswith(".") or "".join(rest[:1])] == []
