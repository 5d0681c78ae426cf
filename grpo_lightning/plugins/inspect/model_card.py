"""The model card of an exported policy: a README.md as model hubs read it."""

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.plugins.inspect.markup import filled
from grpo_lightning.plugins.inspect.scalars import read_scalars
from grpo_lightning.policy.pretrained import location

LIBRARIES = ("grpo-lightning", "torch", "transformers", "lightning")


def model_card(
    run: Path, checkpoint: Path, config: Mapping[str, Any], size: str, step: int, is_adapter: bool = False
) -> str:
    """The card in Markdown, with a head in YAML: use, validation, and the whole configuration.

    Validations after `step` are left out.
    """
    base, fence = str(config["model"]["policy"]["path"]), "```"
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    while fence in text:
        fence += "`"
    head: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["grpo", "grpo-lightning"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():  # it may be one of a hub
        head["base_model"] = base
    prompt, arguments = usage(config)
    curves = {name: [y for x, y in curve if x < step] for name, curve in read_scalars(run).items() if "val/" in name}
    adapter_note = f"This is an adapter: PEFT must be installed, and `{base}` is read with it."
    note = adapter_note if is_adapter else "Sampling is that of the training, in `generation_config.json`."
    parts = {
        "head": yaml.safe_dump(head, sort_keys=False),
        "base": base,
        "step": step,
        "size": size,
        "checkpoint": checkpoint.name,
        "note": note,
        "prompt": prompt,
        "special": not config["data"].get("chat"),
        "arguments": arguments,
        "imports": "from peft import PeftModel\n" if is_adapter else "",
        "folder": repr(location(base)) if is_adapter else "folder",
        # transformers itself would leave out the norms of DoRA.
        "adapter": "model = PeftModel.from_pretrained(model, folder)\n" if is_adapter else "",
        "validation": "\n".join(f"| `{name}` | {y[0]:.4g} | {y[-1]:.4g} |" for name, y in curves.items() if y),
        "config": text,
        "fence": fence,
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
    }
    return filled("model_card.md", parts)


def usage(config: Mapping[str, Any]) -> tuple[str, str]:
    """Python that makes a question a prompt as in training, and the arguments of `generate`."""
    data, sampling = config["data"], config["model"].get("sampling") or {}
    file, prefix = data.get("template_file"), data.get("answer_prefix")
    template = f'open({str(file)!r}, encoding="utf-8").read()' if file else repr(data.get("template", "{question}"))
    lines = [f'prompt = {template}.replace("{{question}}", question)']
    if data.get("chat"):
        system = f'{{"role": "system", "content": {data["system"]!r}}}, ' if data.get("system") else ""
        lines.append(f'turns = [{system}{{"role": "user", "content": prompt}}]')
        lines.append("prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)")
    lines += [f"prompt += {prefix!r}"] if prefix else []
    arguments = f"max_new_tokens={sampling.get('max_new_tokens', 256)}"
    stops = f", stop_strings={sampling['stop']!r}, tokenizer=tokenizer" if sampling.get("stop") else ""
    return "\n".join(lines), arguments + stops
