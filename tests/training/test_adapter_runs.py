"""Runs with an adapter: what they train, what their checkpoints hold, and how they go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import adapted
from helpers.command import Grpo, refused, table
from helpers.fitting import equal, fit, resumes_exactly, scalars, weights_of
from helpers.tiny import model_of, policy_of

from grpo_lightning import AdapterOff, FrozenCopy, MovingAverage, Objective, StepCheckpoint


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def test_only_the_adapter_is_trained_and_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": adapted(moved=0.0), "objective": Objective(beta=0.1), "optimizer": adamw}
    module = fit(tmp_path, [StepCheckpoint()], **options)
    assert isinstance(module.reference, AdapterOff) and not module.reference.exists
    trained = module.policy.trained_state_dict()
    saved = weights_of(tmp_path)
    assert saved.keys() == {f"policy.{name}" for name in trained} | {"bad_updates", "bad_updates_in_a_row"}
    assert all(saved[f"policy.{name}"].equal(value) for name, value in trained.items())
    weights = {name.replace(".base_layer", ""): value for name, value in module.policy.model.state_dict().items()}
    assert equal({name: value for name, value in weights.items() if "lora" not in name}, model_of("llama").state_dict())
    found = scalars(tmp_path)
    # The sampler draws from the policy with its adapter, and the reference is the model without it.
    assert max(found["policy/logp_gap"].values()) < 1e-5
    assert found["policy/kl_ref"][0] == 0 and found["policy/kl_ref"][2] > 1e-4


@pytest.mark.parametrize("reference", [None, MovingAverage], ids=["off", "average"])
def test_a_run_that_is_cut_goes_on_bit_for_bit(reference: Any, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {
            "policy": adapted(moved=0.0, dora=reference is MovingAverage),
            "objective": Objective(beta=0.1),
            "reference": reference and reference(),
            "old_policy": FrozenCopy(),
            "optimizer": adamw,
            "loop": {"mu": 2, "steps_per_iteration": 2 if reference else None},
        }

    resumes_exactly(tmp_path, options)
    saved = weights_of(tmp_path / "cut")
    assert any(name.startswith("reference.") for name in saved) == (reference is not None)
    assert not any("base_layer" in name or "embed" in name for name in saved)


ONE = ["--model.policy.adapter=LoRA", "--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0.0001"]
MISTAKES = table(
    """
--model.reference=AdapterOff --model.objective.beta=0.1 => model.reference=AdapterOff: | model.policy.adapter
ONE --model.old_policy=AdapterOff => model.old_policy=AdapterOff: | RecordedLogp
ONE --model.objective.beta=0.1 --loop.steps_per_iteration=2 => loop.steps_per_iteration=2: | model.reference=FrozenCopy
ONE --model.policy.adapter.dropout=0.1 => dropout
ONE --model.policy.adapter.target_modules=[q_prj] => target_modules=['q_prj']
""".replace("ONE", " ".join(ONE))
)


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_on_the_command_line(options: list[str], words: list[str], grpo: Grpo) -> None:
    refused(grpo, options, words)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's, which `warns` takes out of their module
def test_a_learning_rate_for_all_weights_is_warned_of(grpo: Grpo, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(UserWarning, match=r"model.optimizer.lr=1e-06 is one for training all weights"):
        grpo.ok("fit", "--model.policy.adapter=LoRA")


def test_a_checkpoint_of_another_kind_of_run_is_refused(grpo: Grpo) -> None:
    grpo.ok("fit", *ONE)
    grpo.ok("fit", "--trainer.default_root_dir=all")
    for run, options, says in (
        ("run", [], "of a run that trained an adapter, and this one trains all weights"),
        ("all", ONE, "of a run that trained all weights, and this one trains an adapter"),
        (
            "run",
            [*ONE, "--model.policy.adapter.rank=3"],
            "lora_A.default.weight is [8, 32] in the checkpoint and [3, 32]",
        ),
    ):
        last = f"--ckpt_path={run}/checkpoints/last.ckpt"
        assert says in grpo.mistake("fit", *options, last, "--trainer.default_root_dir=new", "--trainer.max_epochs=2")
    # Another model of the same shapes: the checkpoint does not have its weights.
    policy_of(seed=1).save_pretrained("policy")
    errors = grpo.mistake("fit", *ONE, "--ckpt_path=last", "--trainer.max_epochs=2")
    assert "its adapter was trained on other weights than those of policy.path=policy" in errors
