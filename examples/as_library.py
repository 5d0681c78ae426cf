"""A GRPO run without the command line: what `grpo fit --config configs/quickstart.yaml` does, in Python.

    python examples/as_library.py grpo_lightning:tiny_policy

The policy is installed with the package. The arguments are the keys of the configuration.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

import grpo_lightning as grpo


def train(path: str, folder: Path, steps: int = 60, prompts: int = 32, questions: int = 256) -> dict[str, float]:
    """Trains the policy at `path` and saves it as a Hugging Face folder. Returns the metrics of the last validation."""
    module = grpo.GRPOModule(
        policy=grpo.Policy(path, compute=grpo.Fast()),
        rewards=[grpo.MathVerifier(), grpo.FormatReward(weight=0.2)],
        engine=grpo.NativeEngine(),
        sampling=grpo.Sampling(max_new_tokens=32),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.0),
    )
    data = grpo.PromptDataModule(grpo.Arithmetic(), val_limit=questions)
    loop = grpo.GRPOLoop(group_size=8, prompts_per_step=prompts)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=steps,  # exploration steps
        check_val_every_n_epoch=min(10, steps),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=TensorBoardLogger(folder, name="", version=""),  # in the folder itself, as grpo fit does
        callbacks=[loop, grpo.StepCheckpoint(), grpo.StepLines()],
        plugins=[grpo.AtomicCheckpointIO()],
    )
    trainer.fit(module, datamodule=data)
    module.policy.save_pretrained(folder / "policy")
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}


if __name__ == "__main__":
    print(train(sys.argv[1], Path("runs/as_library")))
