"""`grpo export`: a run's policy as a folder for transformers and vLLM."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(args: Sequence[str] | None = None) -> int:
    """Exports and prints the folder; returns the exit code, 1 for a full disk."""
    parser = argparse.ArgumentParser(
        "grpo export",
        description="Writes the policy of a run as a folder that transformers and vLLM read without this package: "
        "weights, tokenizer, generation config and a model card. Its log-probs are those of the run, bit for bit; "
        "where an adapter is merged into the weights, they differ by rounding.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run's folder, its trainer.default_root_dir")
    add("-o", "--out", type=Path, required=True, help="the folder to make")
    add("--ckpt_path", type=Path, help="the checkpoint; checkpoints/last.ckpt of the run by default")
    kinds = "a whole model, with an adapter merged into it; or the adapter alone, for PEFT"
    add("--as", dest="kind", choices=("model", "adapter"), default="model", help=kinds)
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="type of the weights; that of the checkpoint by default")
    options = parser.parse_args(args)
    # These modules import torch, which --help need not wait for.
    from transformers.utils.logging import disable_progress_bar

    from grpo_lightning.disk import DiskFailure
    from grpo_lightning.plugins.looking.export.export import export

    disable_progress_bar()
    try:
        export(options.run, options.out, options.ckpt_path, options.dtype, options.kind)
    except DiskFailure as error:
        print(f"grpo: error: {error}", file=sys.stderr)
        return 1
    model = "read it with AutoModelForCausalLM.from_pretrained, or serve it with `vllm serve`"
    adapter = "an adapter; read it with PeftModel.from_pretrained(base, folder) of PEFT"
    print(f"{options.out}: {adapter if options.kind == 'adapter' else model}")
    return 0
