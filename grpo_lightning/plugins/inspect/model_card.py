"""The model card of an exported policy: a README.md as model hubs read it."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.plugins.inspect.arms import changes_of, flat
from grpo_lightning.plugins.inspect.judges import measure
from grpo_lightning.plugins.inspect.scalars import read_scalars
from grpo_lightning.policy.pretrained import location

LIBRARIES = ("grpo-lightning", "torch", "transformers", "lightning")
OPTIONS = (
    "data.task.class_path",
    "model.sampling.temperature",
    "model.sampling.max_new_tokens",
    "loop.prompts_per_step",
    "loop.group_size",
    "loop.mu",
    "seed_everything",
)
"""Those that the card names beside the whole configuration."""

USAGE = """\
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file is
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained({folder})
{adapter}question = "..."
{prompt}
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens={special})
output = model.generate(**inputs, {arguments})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the card tells."""

    run: Path
    """The run's folder, with its event files."""
    checkpoint: Path
    config: Mapping[str, Any]
    """The run's config.yaml."""
    num_parameters: int
    dtype: str
    step: int
    """Exploration steps done. What came later is not of these weights."""
    is_adapter: bool = False
    """Whether the folder has an adapter alone, which needs the model it was trained beside."""


def model_card(facts: Facts) -> str:
    """The card in Markdown, with a head in YAML."""
    config, base = facts.config, str(facts.config["model"]["policy"]["path"])
    rewards = [option(reward, "class_path").rpartition(".")[2] for reward in config["model"].get("rewards") or []]
    sections = [
        head(base, facts.is_adapter),
        f"# {plain(facts.run.resolve().name)}",
        f"{code(base)} after {facts.step} exploration steps of GRPO: {facts.num_parameters:,} parameters, "
        f"{facts.dtype}. Rewards: {', '.join(map(code, rewards))}. Checkpoint: {code(facts.checkpoint.name)}.",
        "## Use",
        fenced(usage(config, facts.is_adapter), "python"),
        f"This is an adapter: PEFT must be installed, and {code(base)} is read with it."
        if facts.is_adapter
        else "Temperature and filters of sampling are those of the training, in `generation_config.json`.",
        "## Validation",
        validation(facts),
        "## Training",
        table(("option", "value"), [(name, option(config, name)) for name in OPTIONS]),
        *(f"The options were {plain(change)}." for change in changes_of(facts.run, dict(config))),
        "The whole configuration:",
        fenced(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), "yaml"),
        "## Exported with",
        table(("what", "version"), versions()),
    ]
    return "\n\n".join(sections) + "\n"


def head(base: str, is_adapter: bool = False) -> str:
    """The head that hubs read. It has a `base_model` only where the path may be one of a hub."""
    library = "peft" if is_adapter else "transformers"
    facts: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    facts["tags"] = ["grpo", "grpo-lightning"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        facts["base_model"] = base
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def usage(config: Mapping[str, Any], is_adapter: bool = False) -> str:
    """Python that asks a question as in training."""
    data, sampling = config["data"], config["model"].get("sampling") or {}
    chat, prefix = bool(data.get("chat")), data.get("answer_prefix") or ""
    file, template = data.get("template_file"), data.get("template", "{question}")
    opened = f'open({str(file)!r}, encoding="utf-8").read()' if file else repr(template)
    lines = [f'text = {opened}.replace("{{question}}", question)']
    if chat:
        turns = [{"role": "system", "content": data["system"]}] if data.get("system") else []
        listed = "".join(f"{turn!r}, " for turn in turns)
        lines.append(f'turns = [{listed}{{"role": "user", "content": text}}]')
        lines.append("prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)")
    else:
        lines.append("prompt = text")
    lines += [f"prompt += {prefix!r}"] if prefix else []
    arguments = [f"max_new_tokens={sampling.get('max_new_tokens', 256)}"]
    arguments += [f"stop_strings={sampling['stop']!r}", "tokenizer=tokenizer"] if sampling.get("stop") else []
    return USAGE.format(
        prompt="\n".join(lines),
        special=not chat,
        arguments=", ".join(arguments),
        imports="from peft import PeftModel\n" if is_adapter else "",
        folder=repr(location(str(config["model"]["policy"]["path"]))) if is_adapter else "folder",
        # transformers itself would leave out the norms of DoRA.
        adapter="model = PeftModel.from_pretrained(model, folder)\n" if is_adapter else "",
    )


def validation(facts: Facts) -> str:
    """A table of the first and the last validation up to the checkpoint."""
    rows = []
    for name, curve in read_scalars(facts.run).items():
        values = [value for step, value in curve if step < facts.step]
        if name.startswith("val/") and values:
            rows.append((code(name), f"{values[0]:.4g}", f"{values[-1]:.4g}"))
    if not rows:
        return "The run has not validated, or its event files are elsewhere."
    return f"avg@k and greedy: {code(measure([flat(facts.config)]))}\n\n" + table(("metric", "first", "last"), rows)


def versions() -> list[tuple[str, str]]:
    """Libraries with their versions, and the commit where this package is a git checkout."""
    rows = [(name, version(name)) for name in LIBRARIES]
    commit = commit_of(Path(__file__).parent)
    return [*rows, ("commit of grpo-lightning", commit)] if commit else rows


def commit_of(folder: Path) -> str:
    """The commit of the checkout that tracks `folder`, with `, changed` if files differ; empty if there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else ""

    try:
        if not git("ls-files", "."):  # an installed copy inside some other project's checkout
            return ""
        changed = git("status", "--porcelain", "--untracked-files=no", ":/")
        return git("rev-parse", "HEAD") + (", changed" if changed else "")
    except OSError:  # no git
        return ""


def option(tree: Any, name: str) -> str:
    """The option of a dotted name, as text; `default` where the configuration does not have it."""
    for key in name.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return "default"
        tree = tree[key]
    return str(tree)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; what a cell says cannot end it."""
    cells = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |" for row in cells
    )


def code(text: str) -> str:
    """Text as code inside a line, whatever backquotes it has."""
    fence = "`" * (1 + longest_run(text))
    space = " " if fence != "`" else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"


def fenced(text: str, language: str) -> str:
    """Text as a block of code, whatever backquotes it has."""
    fence = "`" * max(3, 1 + longest_run(text))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def longest_run(text: str) -> int:
    """Length of the longest run of backquotes."""
    return max((len(run) for run in re.findall("`+", text)), default=0)


def plain(text: str) -> str:
    """Text in which Markdown finds nothing to format."""
    return re.sub(r"([^\w\s.-])", r"\\\1", " ".join(text.split()))
