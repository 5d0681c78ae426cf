"""One side of the comparison, in a process of its own: `sides.py SIDE FOLDER SIZES` writes FOLDER/SIDE.json."""

import itertools
import json
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "roofline"))

import machine
from counts import Cost, Model, Sizes, total
from forced_lengths import forcing_engine, marking_policies, stopping
from race import Race, even_fraction, model_folder, prompts_file
from stopwatches import PHASES, Parts, Timer, watch_trl

LEARNING_RATE = 1e-6
METRICS = {"sampling": "explore", "reward": "reward", "log-probs": "logp", "forward and backward": "optimise"}
"""Our own metrics by phase, below `time/`."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Type of the products by precision."""


def run_ours(folder: Path, race: Race, engine: str = "native", prefill: bool = False) -> dict[str, Any]:
    """Steps in grpo_lightning: their ends, phases and arithmetic.

    Args:
        folder: With model and prompts.
        race: The sizes.
        engine: `native` or `vllm`.
        prefill: Whether to time the reading of a step's prompts by itself, after the last step.
    """
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import Callback

    from grpo_lightning.engines.sampling import Sampling
    from grpo_lightning.grpo.loop import GRPOLoop
    from grpo_lightning.grpo.step import Observer
    from grpo_lightning.plugins.compute.fast.fast_compute import Fast
    from grpo_lightning.plugins.data.conversations.prompt_data import PromptDataModule
    from grpo_lightning.plugins.engines.native.native import NativeEngine
    from grpo_lightning.policy.policy import Policy
    from grpo_lightning.rewards.results import RewardResult
    from grpo_lightning.rewards.reward import Reward
    from grpo_lightning.tasks.tables import JsonPrompts
    from grpo_lightning.training.module import GRPOModule

    class EvenFraction(Reward):
        """The fraction of characters with an even code."""

        def score(self, samples):
            return RewardResult([even_fraction(sample.text) for sample in samples], ["ok"] * len(samples))

    fast = race.fast and race.accelerator == "cpu"
    policy = Policy(str(model_folder(folder)), compute=Fast(products="auto" if fast else "torch", threads=race.threads))
    timer = Timer(torch.cuda.synchronize) if race.accelerator == "cuda" else Timer()
    tokens: list[int] = []
    micro_batches: list[int] = []
    updates: list[float] = []

    class Stopwatch(Callback, Observer):
        """Notes when a step ends, what it has learned from, and how long its phases took."""

        def on_train_start(self, trainer, pl_module):
            if race.accelerator == "cpu":
                Parts(policy, timer)

        def updated(self, step):
            samples = step.exploration.samples
            tokens.append(sum(len(one.prompt.token_ids) + len(one.token_ids) for one in samples))
            micro_batches.append(sum(map(len, step.micro_batches)))
            cost, shares = Cost.from_model(policy.model), policy.compute.shares_prefix
            # One pass in one update: each micro-batch was learned from once.
            updates.append(
                sum(
                    cost.of(micro_batch.rollouts, shares)
                    for minibatch in step.micro_batches
                    for micro_batch in minibatch
                )
            )

        def reported(self, metrics):
            for phase, name in METRICS.items():
                timer.add(phase, metrics[f"time/{name}"])

        def on_train_epoch_end(self, *args):
            timer.end()

    def optimizer(parameters):
        return timer.watch(torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True))

    def new_engine():
        if engine == "vllm":
            from grpo_lightning.plugins.engines.vllm.vllm_engine import VLLMEngine

            return VLLMEngine()
        if race.lognormal:
            return forcing_engine(race.lengths, packed=fast, threads=race.threads)
        return NativeEngine(packed=fast, threads=race.threads)

    trainer = L.Trainer(
        accelerator={"cuda": "gpu"}.get(race.accelerator, race.accelerator),
        devices=1,
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[race.precision],
        max_epochs=race.warm_up + race.steps,
        log_every_n_steps=1,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder / "ours",
        callbacks=[
            GRPOLoop(group_size=race.group_size, prompts_per_step=race.prompts, max_tokens=race.max_tokens),
            Stopwatch(),
        ],
    )
    drawing = new_engine()
    module = GRPOModule(
        policy,
        [EvenFraction()],
        sampling=Sampling(max_new_tokens=race.new_tokens),
        optimizer=optimizer,
        engine=drawing,
    )
    with marking_policies() if race.lognormal else nullcontext():
        trainer.fit(module, datamodule=PromptDataModule(JsonPrompts(train=str(prompts_file(folder, race)))))
    cost = Cost.from_model(policy.model)
    timed = slice(race.warm_up, None)
    phases = timer.medians(PHASES, race.warm_up)
    phases["forward and backward"] -= phases["optimizer"]
    sampling = [sampling_operations(cost, race, step) for step in range(len(timer.steps))]
    return {
        "ends": timer.ends,
        "tokens": tokens,
        "phases": phases,
        "parts": timer.medians(("trunk", "head"), race.warm_up),
        "packs": statistics.median(micro_batches[timed]),
        "operations": {
            "sampling": statistics.median(sampling[timed]),
            "forward and backward": statistics.median(updates[timed]),
        },
        "prefill": prefill_seconds(policy, drawing, race, folder) if prefill else 0.0,
        "peak_gpu": torch.cuda.max_memory_allocated() if race.accelerator == "cuda" else 0,
        "products_per_second": product_rate(race),
    }


def prefill_seconds(policy: Any, engine: Any, race: Race, folder: Path, times: int = 3) -> float:
    """Seconds of sampling one token per completion of a step: reading the prompts, and one draw.

    Args:
        policy: What reads.
        engine: What samples.
        race: The sizes.
        folder: With the prompts.
        times: How often; the middle one counts.
    """
    import torch

    from grpo_lightning.engines.sampling import Sampling
    from grpo_lightning.types import RandomKey, Request

    lines = prompts_file(folder, race).read_text(encoding="utf-8").splitlines()[: race.prompts]
    prompts = [policy.tokenizer(json.loads(line)["question"])["input_ids"] for line in lines]
    requests = [
        Request(ids, index, sample, 0) for index, ids in enumerate(prompts) for sample in range(race.group_size)
    ]
    seconds = []
    with torch.autocast(race.accelerator, torch.bfloat16, enabled=race.precision == "bf16"):
        engine.wake()
        engine.sync(policy)
        for _ in range(times):
            started = time.perf_counter()
            engine.complete(requests, Sampling(max_new_tokens=1), RandomKey(0, 0))
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def sampling_operations(cost: Any, race: Race, step: int = 0) -> float:
    """Floating-point operations of drawing a step's completions: forwards alone, each prompt once per group.

    Args:
        cost: `Cost` of the policy, which counts forward and backward: three times the forward.
        race: The sizes.
        step: Number of the step, which decides about lengths that were drawn.
    """
    sizes = Sizes(race.prompt_tokens, race.group_size, tuple(race.lengths(step)))
    model = Model(cost=cost, parameters=0, weights=0, cache=0, vocabulary=0)
    return (model.prefill(sizes) + total(model.decoding(sizes))).operations


def product_rate(race: Race, seconds: float = 2.0) -> float:
    """Floating-point operations per second of the fastest product of two matrices, with torch's threads.

    Args:
        race: Device and precision.
        seconds: How long to repeat the product.
    """
    import torch

    # A CPU without instructions for bfloat16 takes a minute for a product of 2048 x 2048.
    size = 256 if race.accelerator == "cpu" and race.precision == "bf16" else 2048
    dtype = getattr(torch, DTYPES[race.precision])
    return machine.product_rate(size, size, size, dtype, seconds, race.accelerator)


def run_trl(folder: Path, race: Race, vllm: bool = False) -> dict[str, Any]:
    """Steps in TRL: their ends and phases. It has its defaults where they do not make it slower.

    Args:
        folder: With model and prompts.
        race: The sizes.
        vllm: Whether vLLM draws the completions, in the same process.
    """
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    # As on the other side: with cuDNN's attention each new shape of a decoded position would cost a plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    timer = Timer(torch.cuda.synchronize) if race.accelerator == "cuda" else Timer()
    seen: list[int] = [0]

    class Stopwatch(TrainerCallback):
        """Notes when a step ends, and the tokens that it had."""

        def on_step_end(self, args, state, control, **kwargs):
            timer.end()
            seen.append(int(state.num_input_tokens_seen))

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=race.warm_up + race.steps,
        per_device_train_batch_size=race.trl_rows,
        # One generation per step, whatever the rows in one forward and backward: TRL's default.
        gradient_accumulation_steps=race.rows // race.trl_rows,
        num_generations=race.group_size,
        max_completion_length=race.new_tokens,
        beta=0.0,
        num_iterations=1,
        learning_rate=LEARNING_RATE,
        bf16=race.precision == "bf16",
        model_init_kwargs={"dtype": race.trl_weights},
        use_vllm=vllm,
        vllm_mode="colocate",
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=race.accelerator == "cpu",
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in prompts_file(folder, race).open(encoding="utf-8")]
    trainer = GRPOTrainer(
        model=str(model_folder(folder)),
        reward_funcs=lambda completions, **kwargs: [even_fraction(text) for text in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[Stopwatch()],
    )
    if race.lognormal:
        stopping(trainer, race.lengths)
    watch_trl(trainer, timer)
    trainer.train()
    return {
        "ends": timer.ends,
        "tokens": [after - before for before, after in itertools.pairwise(seen)],
        "phases": timer.medians(PHASES, race.warm_up),
        "peak_gpu": torch.cuda.max_memory_allocated() if race.accelerator == "cuda" else 0,
    }


RUNS = {
    "ours": run_ours,
    "trl": run_trl,
    "ours-vllm": partial(run_ours, engine="vllm"),
    "trl-vllm": partial(run_trl, vllm=True),
}
"""By the name of the side."""


def main() -> None:
    """Runs a side and writes what it measured."""
    side, folder, race = sys.argv[1], Path(sys.argv[2]), Race.from_json(sys.argv[3])
    if "--cpu" in sys.argv[4:]:
        # Before anything is imported that keeps the clock: every phase is then in processor seconds.
        time.perf_counter = time.process_time
    options = {"prefill": True} if "--prefill" in sys.argv[4:] else {}
    found = RUNS[side](folder, race, **options)
    import torch

    ends = found.pop("ends")
    found["seconds"] = [b - a for a, b in itertools.pairwise(ends[race.warm_up - 1 :])]
    (folder / f"{side}.json").write_text(json.dumps(found | {"threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
