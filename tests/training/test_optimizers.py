"""Every optimizer of torch and transformers makes an update or is refused, as is a schedule that ends too early."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.optimization
from helpers.contracts import needs
from helpers.fitting import fit, of_updates
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, OneCycleLR

from grpo_lightning import UsageError
from grpo_lightning.command.overview import optional
from grpo_lightning.training.schedules import check_optimizer

CPU = torch.device("cpu")
WarmupCosine: Any = optional("WarmupCosine")


def module_of(
    optimizer: Callable[..., Any], lr_scheduler: Callable[..., Any] | None = None, num_dims: tuple[int, ...] = (1, 2)
) -> Any:
    """What `check_optimizer` reads of a module whose weights have so many dimensions."""
    weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones((3,) * dims)) for dims in num_dims)
    return SimpleNamespace(policy=weights, optimizer=optimizer, lr_scheduler=lr_scheduler)


def optimizers() -> list[type[torch.optim.Optimizer]]:
    """Every optimizer of torch and of transformers."""
    public = [*vars(torch.optim).values(), *vars(transformers.optimization).values()]
    kinds = {kind for kind in public if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    return sorted(kinds - {torch.optim.Optimizer}, key=lambda kind: f"{kind.__name__} {kind.__module__}")


REFUSED = {
    torch.optim.LBFGS: "model.optimizer=LBFGS: it cannot update by a gradient alone",
    torch.optim.Muon: "model.optimizer: Muon only supports 2D parameters .*Use AdamW, or train model.policy.adapter",
    torch.optim.SparseAdam: "model.optimizer=SparseAdam: .*dense gradients",
    transformers.optimization.LayerWiseDummyOptimizer: "model.optimizer=LayerWiseDummyOptimizer: .*hold the weights",
}


@pytest.mark.parametrize("kind", optimizers(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_optimizer_makes_an_update_or_is_refused(kind: Any) -> None:
    module = module_of(kind)
    if kind in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[kind]):
            check_optimizer(module, 4, CPU)
    else:
        check_optimizer(module, 4, CPU)


def test_matrices_alone_may_be_trained_by_muon() -> None:
    check_optimizer(module_of(torch.optim.Muon, num_dims=(2,)), 4, CPU)
    unloaded = module_of(torch.optim.Muon, num_dims=())
    unloaded.policy.adapter = object()  # whose weights are matrices
    check_optimizer(unloaded, 4, CPU)
    unloaded.policy.adapter = None
    with pytest.raises(UsageError, match="only supports 2D"):
        check_optimizer(unloaded, 4, CPU)


def test_a_trial_leaves_weights_and_random_numbers_alone() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.rand(1)
            random.random()
            super().step(closure)

    def sgd(parameters: Any) -> Noisy:
        return Noisy(parameters, lr=1.0)

    module = module_of(sgd)
    check_optimizer(module, 2, CPU)
    numbers = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert numbers == (torch.rand(1), random.random())
    assert all(weights.eq(1).all() and weights.grad is None for weights in module.policy)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def falls(update: int) -> float:
    return 1.0 if update < 3 else 1 / (update - 3)


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        (lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=3), 3),
        (lambda optimizer: LambdaLR(optimizer, falls), 2),
        (lambda optimizer: LinearLR(optimizer), None),
        pytest.param(lambda optimizer: WarmupCosine(optimizer), None, marks=needs(WarmupCosine)),
        (transformers.optimization.get_cosine_schedule_with_warmup, "not made"),
    ],
    ids=["OneCycleLR", "LambdaLR", "LinearLR", "WarmupCosine", "without its arguments"],
)
def test_a_schedule_is_tried_to_the_last_update(schedule: Callable[..., LRScheduler], last: int | str | None) -> None:
    module = module_of(adamw, schedule)
    if isinstance(last, int):
        check_optimizer(module, last, CPU)
        with pytest.raises(UsageError, match=rf"^model.lr_scheduler=\w+: it ends after update {last} of 4: "):
            check_optimizer(module, 4, CPU)
    elif last is None:
        check_optimizer(module, 4, CPU)
    else:
        with pytest.raises(UsageError, match=r"^model.lr_scheduler: .*num_warmup_steps"):
            check_optimizer(module, 4, CPU)


def test_a_run_has_the_updates_that_a_schedule_is_tried_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loop": {"mu": 2}, "optimizer": adamw}

    def cycle(num_updates: int) -> Callable[[Any], LRScheduler]:
        return lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=num_updates)

    with pytest.raises(UsageError, match="OneCycleLR: it ends after update 5 of 6: "):
        fit(tmp_path / "short", lr_scheduler=cycle(5), **options)
    assert not (tmp_path / "short").exists()
    fit(tmp_path / "long", lr_scheduler=cycle(6), **options)


def test_an_optimizer_that_chooses_its_rate_trains_and_logs_none(tmp_path: Path) -> None:
    module = fit(tmp_path, optimizer=transformers.optimization.Adafactor, trainer={"max_epochs": 2})
    assert module.policy.version == 2
    with pytest.raises(KeyError):
        of_updates(tmp_path, "optim/lr")
