"""One side of the comparison, in a process of its own: `sides.py ours|trl FOLDER SIZES` writes FOLDER/<side>.json."""

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from race import Race, even_fraction, model_folder, prompts_file

LEARNING_RATE = 1e-6


def run_ours(folder: Path, race: Race) -> dict[str, Any]:
    """Steps in grpo_lightning: their ends, phases and arithmetic."""
    import lightning as L
    import torch

    from grpo_lightning.engines.sampling import Sampling
    from grpo_lightning.policy.policy import Policy
    from grpo_lightning.rewards.base import Reward
    from grpo_lightning.rewards.results import RewardResult
    from grpo_lightning.tasks.tables import JsonPrompts
    from grpo_lightning.training.data import PromptDataModule
    from grpo_lightning.training.loop import GRPOLoop, follow
    from grpo_lightning.training.module import GRPOModule
    from grpo_lightning.training.observer import Observer
    from grpo_lightning.training.throughput import Cost, Work

    class EvenFraction(Reward):
        """The fraction of characters with an even code."""

        def score(self, samples):
            return RewardResult([even_fraction(sample.text) for sample in samples], ["ok"] * len(samples))

    policy = Policy(str(model_folder(folder)))
    ends: list[float] = []
    tokens: list[int] = []
    phases: list[dict[str, float]] = []
    updates: list[float] = []
    optimizing: list[float] = []

    class Stopwatch(L.Callback, Observer):
        """Notes when a step ends, what it has learned from, and how long its phases took."""

        def on_fit_start(self, trainer, pl_module):
            follow(trainer, self)

        def updated(self, step):
            samples = step.exploration.samples
            tokens.append(sum(len(one.prompt.token_ids) + len(one.token_ids) for one in samples))
            updates.append(Work.of_updates(step.packs, len(step.passes.updates), policy, peak=1.0).operations)

        def reported(self, metrics):
            phases.append({name: metrics[f"time/{name}"] for name in ("explore", "reward", "logp", "optimise")})

        def on_train_epoch_end(self, *args):
            ends.append(time.perf_counter())

    def optimizer(parameters):
        adamw = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        adamw.register_step_pre_hook(lambda *args: optimizing.append(-time.perf_counter()))
        adamw.register_step_post_hook(lambda *args: optimizing.append(time.perf_counter() + optimizing.pop()))
        return adamw

    trainer = L.Trainer(
        accelerator="cpu",
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
    module = GRPOModule(
        policy, [EvenFraction()], sampling=Sampling(max_new_tokens=race.new_tokens), optimizer=optimizer
    )
    trainer.fit(module, datamodule=PromptDataModule(JsonPrompts(train=str(prompts_file(folder, race)))))
    cost = Cost.from_policy(policy)
    timed = slice(race.warm_up, None)
    middle = {name: statistics.median(phase[name] for phase in phases[timed]) for name in phases[0]}
    optimizer_seconds = statistics.median(optimizing[timed])
    return {
        "ends": ends,
        "tokens": tokens,
        "phases": {
            "sampling": middle["explore"],
            "reward": middle["reward"],
            "log-probs": middle["logp"],
            "forward and backward": middle["optimise"] - optimizer_seconds,
            "optimizer": optimizer_seconds,
        },
        "operations": {
            "sampling": sampling_operations(cost, race) if cost else 0.0,
            "forward and backward": statistics.median(updates[timed]),
        },
        "products_per_second": product_rate(),
    }


def sampling_operations(cost: Any, race: Race) -> float:
    """Floating-point operations of drawing a step's completions: forwards alone, each prompt once per group.

    Args:
        cost: `Cost` of the policy, which counts forward and backward: three times the forward.
        race: The sizes; every completion has its full length.
    """
    prompt, drawn = race.prompt_tokens, race.new_tokens
    # The last token drawn is not passed; the first is drawn from the prompt's logits, which the group shares.
    passed = range(drawn - 1)
    tokens = race.prompts * prompt + race.rows * len(passed)
    heads = race.prompts + race.rows * len(passed)
    pairs = race.prompts * prompt**2 + race.rows * sum(prompt + index + 1 for index in passed)
    return (cost.token * tokens + cost.drawn * heads + cost.pair * pairs) / 3


def product_rate(size: int = 2048, seconds: float = 2.0) -> float:
    """Floating-point operations per second of the fastest product of two float32 matrices, with torch's threads.

    Args:
        size: Rows and columns.
        seconds: How long to repeat it.
    """
    import torch

    a, b, out = (torch.rand(size, size) for _ in range(3))
    begun, fastest = time.perf_counter(), float("inf")
    while time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest


def run_trl(folder: Path, race: Race) -> dict[str, Any]:
    """Steps in TRL: their ends. It has its defaults where they do not make it slower on a CPU."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    seen: list[int] = [0]

    class Stopwatch(TrainerCallback):
        """Notes when a step ends, and the tokens that it had."""

        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())
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
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in prompts_file(folder, race).open(encoding="utf-8")]
    GRPOTrainer(
        model=str(model_folder(folder)),
        reward_funcs=lambda completions, **kwargs: [even_fraction(text) for text in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[Stopwatch()],
    ).train()
    return {"ends": ends, "tokens": [after - before for before, after in itertools.pairwise(seen)]}


def main() -> None:
    """Runs a side and writes what it measured."""
    side, folder, race = sys.argv[1], Path(sys.argv[2]), Race.from_json(sys.argv[3])
    found = {"ours": run_ours, "trl": run_trl}[side](folder, race)
    import torch

    ends = found.pop("ends")
    found["seconds"] = [b - a for a, b in itertools.pairwise(ends[race.warm_up - 1 :])]
    (folder / f"{side}.json").write_text(json.dumps(found | {"threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
