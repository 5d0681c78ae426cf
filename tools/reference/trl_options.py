"""The page of TRL's options, from the rules by which `grpo from-trl` translates them."""

from typing import Any

from grpo_lightning.plugins.console.porting.trl_rules import RULES, TABLE

TITLES = {
    "GRPOConfig": ("Options of GRPOConfig", "The arguments of `GRPOConfig`, and the keys of `trl grpo`'s YAML."),
    "GRPOTrainer": (
        "Arguments of GRPOTrainer",
        "`conversational` is what the command sees in the file of questions, `env` a key of `trl grpo`'s YAML.",
    ),
    "GRPOScriptArguments": ("Data and rewards of trl grpo", "Keys of `trl grpo`'s YAML."),
    "ModelConfig": (
        "Model of trl grpo",
        "Keys of `trl grpo`'s YAML. The options of a `LoraConfig` are read by these names.",
    ),
    "former": ("Options of other versions", "TRL {version} does not have them any more."),
}
"""The heading of each part, and the sentence below it, in the order of the page."""


def page() -> str:
    """Returns the page."""
    version = TABLE["version"]
    lines = [
        f"# Every option of TRL {version}",
        "",
        f"What `grpo from-trl` makes of each option ([how to port a run](../how_to/port.md)), and the defaults of TRL "
        f"{version}. Values are expressions of TRL's options; `world` is the number of processes, `rows` the number of "
        "training questions. A key whose value is `None` is left out.",
        "",
        "## Numbers from several options { #derived }",
        "",
        "They are computed in this order, and the tables below name them.",
        "",
        "| name | value |",
        "|---|---|",
        *(f"| `{name}` | {code(expression)} |" for name, expression in TABLE["derived"].items()),
        "",
    ]
    for part, (title, text) in TITLES.items():
        lines += [f"## {title}", "", text.format(version=version), "", "| TRL | default | here |", "|---|---|---|"]
        lines += [row(name, rule) for name, rule in TABLE["options"][part].items()]
        lines += [""]
    lines += ["## What TRL refuses", "", "| if | message |", "|---|---|"]
    lines += [f"| {code(refusal['if'])} | {cell(refusal['says'])} |" for refusal in TABLE["refused"]]
    return "\n".join([*lines, ""])


def row(name: str, rule: dict[str, Any]) -> str:
    """Returns the row of an option."""
    texts = [f"`{key}`: {code(expression)}" for key, expression in rule.get("sets", {}).items()]
    if "within" in rule:
        texts += [f"with [`{rule['within']}`](#{rule['within']})"]
    if "says" in rule and rule.get("if") is not False:
        condition = f"if {code(rule['if'])}: " if "if" in rule else ""
        texts += [f"{condition}{cell(rule['says'])}"]
    elif "says" in rule:
        texts += [f"nothing to do: {cell(rule['says'])}"]
    anchor = f'<a id="{name}"></a>' if any(other.get("within") == name for other in RULES.values()) else ""
    return f"| {anchor}`{name}` | `{rule['default']!r}` | {'<br>'.join(texts)} |"


def code(expression: Any) -> str:
    """Returns an expression as code that can stand in a cell."""
    return f"`{cell(str(expression))}`"


def cell(text: str) -> str:
    """Returns a text that can stand in a cell: in one line, with the bars escaped."""
    return " ".join(text.replace("{{", "{").replace("}}", "}").split()).replace("|", "\\|")
