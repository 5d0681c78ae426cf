"""Seconds a GRPO step takes here and in TRL's GRPOTrainer: the same model, prompts, reward, sizes and machine.

    pip install -e '.[bench]' -c constraints.txt
    python experiments/versus_trl/compare.py

Each side runs in a process of its own, in turns, and is timed from the end of its third step to the end of its last,
with whatever it does between steps. Nothing else should run on the machine meanwhile.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 3
VOCABULARY = 512


def make_model(folder: Path) -> None:
    """A Llama of one million random parameters and a tokenizer of one token a word, w0 to w511."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", padding_side="left")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")


def make_prompts(folder: Path, count: int, length: int) -> None:
    """Random prompts of one length."""
    generator = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(count):
            words = " ".join(f"w{generator.randrange(2, VOCABULARY)}" for _ in range(length))
            file.write(json.dumps({"question": words, "answer": "w7"}) + "\n")


def even_share(text: str) -> float:
    """The reward: the share of even words."""
    numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))


def time_ours(folder: Path, options: argparse.Namespace) -> list[float]:
    """Times at which steps end in grpo_lightning."""
    import lightning as L
    import torch

    from grpo_lightning.engines.sampling import Sampling
    from grpo_lightning.policy.policy import Policy
    from grpo_lightning.rewards.base import Reward
    from grpo_lightning.rewards.results import RewardResult
    from grpo_lightning.tasks.tables import JsonPrompts
    from grpo_lightning.training.data import PromptDataModule
    from grpo_lightning.training.loop import GRPOLoop
    from grpo_lightning.training.module import GRPOModule

    class EvenShare(Reward):
        """The share of even words."""

        def score(self, samples):
            return RewardResult([even_share(sample.text) for sample in samples], ["ok"] * len(samples))

    ends: list[float] = []

    class Clock(L.Callback):
        """Notes when a step ends."""

        def on_train_epoch_end(self, *args):
            ends.append(time.perf_counter())

    module = GRPOModule(
        Policy(str(folder)),
        [EvenShare()],
        sampling=Sampling(max_new_tokens=options.new_tokens),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=WARM_UP + options.steps,
        log_every_n_steps=1,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder / "ours",
        callbacks=[GRPOLoop(group_size=options.group_size, prompts_per_step=options.prompts), Clock()],
    )
    trainer.fit(module, datamodule=PromptDataModule(JsonPrompts(train=str(folder / "prompts.jsonl"))))
    return ends


def time_trl(folder: Path, options: argparse.Namespace) -> list[float]:
    """Times at which steps end in TRL, with its defaults where they do not make it slower on a CPU."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        """Notes when a step ends."""

        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=WARM_UP + options.steps,
        per_device_train_batch_size=options.prompts * options.group_size,
        num_generations=options.group_size,
        max_completion_length=options.new_tokens,
        beta=0.0,
        num_iterations=1,
        learning_rate=1e-6,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").open()]
    GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **kwargs: [even_share(text) for text in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[Clock()],
    ).train()
    return ends


def main() -> None:
    """Runs both sides in turns and prints the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--prompt-length", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=10, help="steps timed, after three to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        ends = {"ours": time_ours, "trl": time_trl}[options.side](options.folder, options)
        timed = [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
        (options.folder / f"{options.side}.json").write_text(json.dumps(timed))
        return

    environment = os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        make_prompts(folder, 4 * options.prompts, options.prompt_length)
        for _ in range(options.rounds):
            for side in seconds:
                command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", str(folder)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                seconds[side] += json.loads((folder / f"{side}.json").read_text())
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    for side, values in seconds.items():
        print(f"{side:>5}: {medians[side]:.3f} s a step (fastest {min(values):.3f}, slowest {max(values):.3f})")
    print(f"ours does {medians['trl'] / medians['ours']:.2f}x the steps of TRL in the same time")


if __name__ == "__main__":
    main()
