"""The precisions a policy may be trained in: how far they are from float32, and what must be exact in all of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from helpers.command import Grpo
from helpers.fast import fit
from helpers.fitting import checkpoint_of, relative, scalars
from helpers.tiny import gradients, model_of, read_policy, rollouts_of, tokenizer
from lightning.pytorch.plugins import MixedPrecision
from safetensors.torch import load_file
from torch import Tensor

from grpo_lightning import Fast, FrozenCopy, Objective, PlainEngine, Policy, Rollouts, Sampling, TargetProbability
from grpo_lightning.maths.surrogates import Clipped, Surrogate
from grpo_lightning.plugins.looking.export.export import export
from grpo_lightning.plugins.methods.surrogates.sequence_clipped import SequenceClipped

PRECISIONS = {
    "32-true": ("32-true", "float32"),
    "bf16-mixed": ("bf16-mixed", "float32"),
    "16-mixed": ("16-mixed", "float32"),
    "bfloat16 weights": ("32-true", "bfloat16"),
}
"""The trainer's `precision` and the policy's `dtype`."""

LOGP_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 0.1, "16-mixed": 0.0125, "bfloat16 weights": 0.1}
"""Largest error of a token's log-prob."""
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 0.03, "16-mixed": 0.004, "bfloat16 weights": 0.03}
"""|g - g32| / |g32| over all parameters."""

pytestmark = pytest.mark.filterwarnings("ignore:model.policy.dtype=bfloat16:UserWarning")

Load = Callable[[str, str], Policy]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A policy of a shape and precision from its folder, as a user has it."""
    root = tmp_path_factory.mktemp("policies")

    def policy(shape: str, precision: str) -> Policy:
        folder = root / shape
        if not folder.exists():
            overrides = {"sliding_window": None} if shape == "mistral" else {}
            model_of(shape, scale=0.05, **overrides).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
        return read_policy(folder, dtype=PRECISIONS[precision][1], compute=Fast())

    return policy


def autocast(precision: str) -> AbstractContextManager[object]:
    """What the trainer's precision does around a forward."""
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(PRECISIONS[precision][0])
    return torch.autocast("cpu", mixed) if mixed else nullcontext()


def still(parameters: object) -> torch.optim.Optimizer:
    """An optimizer that learns nothing."""
    return torch.optim.SGD(parameters, lr=0.0)  # type: ignore[arg-type]


def fit_still(folder: Path, policy: Policy, precision: str, loop: dict[str, object], **module: object) -> None:
    name = PRECISIONS[precision][0]
    # Lightning computes in bfloat16 where `precision` says float16 on a CPU.
    given = {"plugins": [MixedPrecision(name, "cpu")]} if name == "16-mixed" else {"precision": name}
    fit(
        folder,
        loop={"prompts_per_step": 8, "group_size": 2, "mu": 2} | loop,
        trainer={"max_epochs": 1} | given,
        optimizer=still,
        policy=policy,
        **module,
    )


@pytest.mark.parametrize(
    ("precision", "shape", "sizes", "surrogate", "options"),
    [
        ("bf16-mixed", "llama", (8, 1), SequenceClipped(), {}),
        ("32-true", "gpt2", (4, 60), Clipped(), {"old_policy": FrozenCopy()}),
        ("16-mixed", "llama", (4, 60), SequenceClipped(), {}),
        ("bf16-mixed", "llama", (4, 60), TargetProbability(), {"sampling": Sampling(12, top_k=20)}),
        ("bf16-mixed", "qwen3", (4, 60), SequenceClipped(), {"old_policy": FrozenCopy(), "engine": PlainEngine()}),
        ("bfloat16 weights", "llama", (4, 60), SequenceClipped(), {"sampling": Sampling(12, temperature=0.6)}),
    ],
)
def test_nothing_learned_leaves_every_ratio_at_one(
    tmp_path: Path,
    load: Load,
    precision: str,
    shape: str,
    sizes: tuple[int, int],
    surrogate: Surrogate,
    options: dict[str, object],
) -> None:
    """No bound is ever crossed, and the reference is at no distance either."""
    loop = {"num_minibatches": sizes[0], "max_tokens": sizes[1]}
    fit_still(tmp_path, load(shape, precision), precision, loop, objective=Objective(surrogate, beta=0.1), **options)
    seen = scalars(tmp_path)
    assert [*seen["policy/ratio_max"]] == [0]  # the largest of a step's updates
    assert set(seen["policy/ratio_max"].values()) == set(seen["policy/ratio_mean"].values()) == {1.0}
    for name in ("kl_old", "clip_low", "clip_high") if isinstance(surrogate, SequenceClipped) else ():
        assert set(seen[f"policy/{name}"].values()) == {0.0}, name
    # With a filter the engine samples from another distribution.
    if "top_k" not in str(options):
        assert set(seen["policy/kl_ref"].values()) == {0.0}
        assert max(seen["policy/logp_gap"].values()) < LOGP_TOLERANCE[precision]


def score(policy: Policy, precision: str, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradient of their sum weighted by the advantage."""
    policy.zero_grad()
    rollouts.temperature = 0.8
    with autocast(precision):
        logp = policy(rollouts).logp
    (logp * rollouts.advantage).sum().backward()
    return logp.detach(), dict(gradients(policy))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_log_probs_and_gradients_are_near_float32(load: Load, shape: str, shares: bool, precision: str) -> None:
    rollouts = rollouts_of([25, 9, 30, 17, 24, 3], [4, 6])
    reference, policy = load(shape, "32-true"), load(shape, precision)
    reference.shares_prefix, policy.compute.shares_prefix = False, shares
    expected, expected_gradient = score(reference, "32-true", rollouts)
    rollouts.layout = None
    actual, gradient = score(policy, precision, rollouts)
    assert actual.dtype == torch.float32
    assert float((actual - expected).abs().max()) < LOGP_TOLERANCE[precision]
    as_float = {name: value.float() for name, value in gradient.items()}
    assert relative(as_float, expected_gradient) < GRADIENT_TOLERANCE[precision]


@pytest.mark.filterwarnings("default:model.policy.dtype=bfloat16:UserWarning")
def test_weights_in_bfloat16_come_with_a_warning(tmp_path: Path, load: Load) -> None:
    with pytest.warns(UserWarning, match=r"lr=1e-06 is rounded away wherever \|weight\| > 0.00026"):
        fit(
            tmp_path,
            trainer={"max_epochs": 1},
            policy=load("llama", "bfloat16 weights"),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        )


def test_a_fit_in_double_precision_and_its_export(grpo: Grpo, tmp_path: Path) -> None:
    double = ["--trainer.precision=64-true", "--model.objective.beta=0.1", "--loop.mu=2", "--inspect.every_n_steps=1"]
    grpo.ok("fit", *double, "--model.optimizer.lr=0.01")
    # The sampler has the policy's weights: the gap of float64 log-probs, which are kept in float32.
    assert max(scalars(tmp_path / "run")["policy/logp_gap"].values()) < 1e-6
    saved = checkpoint_of(tmp_path / "run")["state_dict"]
    export(tmp_path / "run", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float64}
    assert all(torch.equal(tensor, saved[f"policy.model.{name}"]) for name, tensor in weights.items())
