"""Gradients and names against TRL, where it is installed: `pip install -e '.[bench]'`."""

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fitting import relative
from helpers.paths import ROOT
from helpers.tiny import gradients, policy_of, prompts_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from grpo_lightning import (
    CISPO,
    GMPO,
    SAPO,
    VESPO,
    Clipped,
    FixedEntropy,
    FixedLength,
    FullVocabulary,
    ImportanceWeighted,
    Objective,
    OffPolicyMask,
    Policy,
    Reinforce,
    Rollouts,
    SequenceClipped,
    SequenceMean,
    Teacher,
    TokenMean,
    Truncated,
    TruncatedRatio,
    pad,
)
from grpo_lightning.maths.weightings import BatchSize

trl = pytest.importorskip("trl", minversion="1.16")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

LENGTHS, GROUP = [4, 9, 1, 6, 2, 5, 3, 7], [0, 0, 0, 0, 1, 1, 1, 1]
LIMIT = 9

CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "grpo": (Objective(Clipped(0.2, 0.28), weighting=SequenceMean()), {}),
    "grpo, two-sided": (Objective(Clipped(0.2, 0.28, dual_clip=1.3)), {"delta": 1.3}),
    "dr_grpo": (Objective(Clipped(0.2, 0.28), weighting=FixedLength(LIMIT)), {"loss_type": "dr_grpo"}),
    "dapo": (Objective(Clipped(0.2, 0.28), weighting=TokenMean()), {"loss_type": "dapo"}),
    "dapo without truncated completions": (
        Objective(Clipped(0.2, 0.28), weighting=TokenMean(), masks=[Truncated()], denominator="kept"),
        {"loss_type": "dapo", "mask_truncated_completions": True},
    ),
    "grpo without truncated completions": (
        Objective(Clipped(0.2, 0.28), masks=[Truncated()]),
        {"mask_truncated_completions": True},
    ),
    "bnpo": (Objective(Clipped(0.2, 0.28), weighting=TokenMean()), {"loss_type": "bnpo"}),
    "cispo": (Objective(CISPO(None, 0.1), weighting=TokenMean()), {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": (Objective(SAPO(1.0, 1.05)), {"loss_type": "sapo"}),
    "gspo": (
        Objective(SequenceClipped(0.02, 0.03)),
        {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "luspo": (
        Objective(SequenceClipped(0.02, 0.03), weighting=FixedLength(1)),
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "vespo": (Objective(VESPO(), weighting=TokenMean()), {"loss_type": "vespo"}),
    "gmpo": (Objective(GMPO(0.1)), {"epsilon": 0.1, "epsilon_high": 0.1}),
    "off-policy mask": (Objective(OffPolicyMask(Clipped(0.2, 0.28), 0.05)), {"off_policy_mask_threshold": 0.05}),
    "k3": (Objective(Clipped(0.2, 0.28), beta=0.3), {"beta": 0.3, "use_bias_correction_kl": False}),
    "bias-corrected KL": (Objective(Clipped(0.2, 0.28), ImportanceWeighted(), beta=0.3), {"beta": 0.3}),
    "entropy": (
        Objective(Clipped(0.2, 0.28), weighting=TokenMean(), entropy=FixedEntropy(0.1)),
        {"loss_type": "dapo", "entropy_coef": 0.1},
    ),
    "truncated importance sampling": (
        Objective(Clipped(0.2, 0.28), correction=TruncatedRatio(1.1)),
        {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.1},
    ),
}


def explored(policy: Policy) -> Rollouts:
    """Two groups of four, π_old and π_ref near π_θ, the sampler near π_old; every third completion is truncated."""
    generator = torch.Generator().manual_seed(1)
    completions = [torch.randint(6, 64, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts = [prompt.token_ids for prompt in prompts_of([3, 5])]
    rollouts = Rollouts.from_lists(prompts, GROUP, completions)
    with torch.no_grad():
        logp = policy(rollouts).logp
    for name in ("old_logp", "ref_logp"):
        rollouts.add_columns({name: (logp + 0.4 * torch.randn(len(logp), generator=generator)).clamp(max=0)})
    assert rollouts.old_logp is not None
    rollouts.sampler_logp = rollouts.old_logp + 0.1 * torch.randn(len(logp), generator=generator)
    rollouts.advantage = rollouts.per_token(torch.tensor([1.0, -1.0, 0.5, -0.5, 1.5, -0.5, -1.0, 0.0]))
    rollouts.truncated = torch.arange(8) % 3 == 1
    return rollouts


def own_gradient(
    policy: Policy, objective: Objective, rollouts: Rollouts, teacher: Teacher | None = None
) -> tuple[float, dict[str, Tensor]]:
    policy.zero_grad()
    batch = BatchSize.of_all_ranks(rollouts, objective.counted(rollouts), LIMIT)
    rollouts = rollouts.with_columns({"weight": objective.token_weight(rollouts, batch)})
    scored = policy(rollouts, entropy_gradient=True, read=objective.kl.reading(teacher, policy, rollouts))
    prepared = rollouts.with_columns(objective.prepare(rollouts))
    value, _ = objective(scored.logp, scored.entropy, prepared, scored.read)
    value.backward()
    return float(value.detach()), dict(gradients(policy))


def score(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, None]:
    """Log-probs and entropies as TRL's forward gives them, [B, T], from a plain forward for each completion."""
    rollouts = inputs["rollouts"]
    distribution = torch.cat(states(model, rollouts, "logits")).log_softmax(-1)
    logp = distribution.gather(1, rollouts.token_ids[:, None]).squeeze(1)
    entropy = -(distribution.exp() * distribution).sum(1)
    return pad(logp, rollouts.lengths), pad(entropy, rollouts.lengths), None


def states(model: Any, rollouts: Rollouts, name: str) -> list[Tensor]:
    """What a plain forward of a model over each completion gives at the positions that predict its tokens."""
    prompts = rollouts.prompt_token_ids.split(rollouts.prompt_lengths.tolist())
    return [
        getattr(model(input_ids=torch.cat([prompts[group], ids])[None], use_cache=False), name)[
            0, len(prompts[group]) - 1 : -1
        ]
        for group, ids in zip(GROUP, rollouts.token_ids.split(LENGTHS), strict=True)
    ]


def trl_gradient(policy: Policy, name: str, settings: dict[str, Any], rollouts: Rollouts) -> tuple[float, Any]:
    """The loss of TRL's trainer and its gradient; the trainer's method is called, with what it reads of a trainer."""
    from trl import GRPOConfig

    trainer: Any = trl.GRPOTrainer
    if name == "gmpo":
        from trl.experimental.gmpo import GMPOTrainer as trainer  # noqa: N813
    given = {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28, "max_completion_length": LIMIT} | settings
    use_vllm = given.pop("use_vllm", False)
    args = GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, num_generations=4, **given)
    same = {key: getattr(args, key) for key in ("loss_type", "beta", "top_entropy_quantile", "entropy_coef")}
    same |= {key: getattr(args, key) for key in ("importance_sampling_level", "off_policy_mask_threshold")}
    accelerator = SimpleNamespace(
        gather=lambda values: values, reduce=lambda values, reduction: values, num_processes=1, sync_gradients=True
    )
    itself = SimpleNamespace(
        **same,
        args=SimpleNamespace(**{**vars(args), "steps_per_generation": 1}),
        accelerator=accelerator,
        model=policy.model.train(),
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_vllm=use_vllm,
        vllm_importance_sampling_correction=use_vllm,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda model, *rest, **more: score(model, inputs),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
    )
    assert rollouts.old_logp is not None and rollouts.ref_logp is not None and rollouts.sampler_logp is not None
    mask = pad(torch.ones(rollouts.num_tokens), rollouts.lengths)
    if args.mask_truncated_completions:
        mask = mask * ~rollouts.truncated[:, None]
    prompt = torch.zeros(8, 1, dtype=torch.int64)
    inputs = {
        "rollouts": rollouts,
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": pad(rollouts.token_ids, rollouts.lengths),
        "completion_mask": mask,
        "advantages": torch.stack([own[0] for own in rollouts.advantage.split(LENGTHS)]),
        "old_per_token_logps": pad(rollouts.old_logp, rollouts.lengths),
        "ref_per_token_logps": pad(rollouts.ref_logp, rollouts.lengths),
        "num_items_in_batch": mask.sum(),
    }
    if use_vllm:
        ratio = (rollouts.old_logp - rollouts.sampler_logp).exp()
        inputs["importance_sampling_ratio"] = pad(ratio.clamp(max=1.1), rollouts.lengths)
    policy.zero_grad()
    loss = trainer._compute_loss(itself, policy.model, inputs)
    loss.backward()
    return float(loss.detach()), dict(gradients(policy))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_trl(name: str) -> None:
    objective, settings = CASES[name]
    policy = policy_of(scale=0.1)
    rollouts = explored(policy)
    value, gradient = own_gradient(policy, objective, rollouts)
    loss, expected = trl_gradient(policy, name, settings, rollouts)
    assert max(float(one.abs().max()) for one in expected.values()) > 1e-3
    negated = {key: -one for key, one in expected.items()}
    assert relative(gradient, negated) < 1e-5
    if name not in ("entropy", "gmpo"):
        assert value == pytest.approx(-loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("divergence", "beta"),
    [("reverse", 1.0), ("forward", 0.0), ("jensen_shannon", 0.5), ("jensen_shannon", 0.9)],
)
def test_gradients_of_distillation_are_those_of_trl(divergence: Any, beta: float, tmp_path: Path) -> None:
    """TRL's `beta` is 1 for the reverse KL, 0 for the forward one, else the teacher's weight in the mixture."""
    policy_of("qwen2", seed=2, scale=0.1, hidden_size=64).save_pretrained(tmp_path)
    policy, teacher = policy_of(scale=0.1), Teacher(str(tmp_path))
    teacher.refresh(policy)
    rollouts = explored(policy)
    rollouts.temperature = 0.8
    rollouts.advantage = torch.zeros(rollouts.num_tokens)
    mixture = beta if 0 < beta < 1 else 0.5
    kl = FullVocabulary(divergence, mixture=mixture)
    value, gradient = own_gradient(policy, Objective(Reinforce(), kl, 1.0, TokenMean()), rollouts, teacher)
    itself = SimpleNamespace(
        beta=beta,
        temperature=0.8,
        teacher_model=teacher.policy.model,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        _forward_redirection=lambda wrapper, model, method, *args, **more: method(*args, **more),
        _get_last_hidden_state=lambda model, *args, **more: pad_sequence(
            states(model.model, rollouts, "last_hidden_state"), batch_first=True
        ),
    )
    mask = pad(torch.ones(rollouts.num_tokens), rollouts.lengths)
    prompt = torch.zeros(8, 1, dtype=torch.int64)
    inputs = {"completion_ids": mask.long(), "completion_mask": mask, "prompt_ids": prompt, "prompt_mask": prompt + 1}
    policy.zero_grad()
    loss, *_ = trl.DistillationTrainer._compute_loss(itself, policy.model, inputs, mask.sum())
    loss.backward()
    expected = {key: -one for key, one in gradients(policy)}
    assert max(float(one.abs().max()) for one in expected.values()) > 1e-3
    assert relative(gradient, expected) < 1e-5
    assert value == pytest.approx(-float(loss.detach()), rel=1e-5)


def test_a_bound_that_never_holds_would_prove_nothing() -> None:
    policy = policy_of(scale=0.1)
    rollouts = explored(policy)
    grpo, two_sided, unbounded = (
        own_gradient(policy, objective, rollouts)[1]
        for objective in (CASES["grpo"][0], CASES["grpo, two-sided"][0], Objective(Clipped(None, None)))
    )
    assert relative(grpo, two_sided) > 1e-2 and relative(two_sided, unbounded) > 1e-2


def names_in_docs() -> set[str]:
    """The settings and classes in TRL's columns of the pages that have them."""
    found: set[str] = set()
    column = None
    pages = [ROOT / "docs" / name for name in ("reference/methods.md", "how_to/port.md")]
    for line in "\n\n".join(page.read_text(encoding="utf-8") for page in pages).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if "TRL" in cells:
            column = cells.index("TRL")
        elif column and len(cells) > column:
            found |= {name for code in re.findall(r"`([^`]*)`", cells[column]) for name in re.findall(r"^\w+", code)}
        elif not line.startswith("|"):
            column = None
    return found


def test_the_names_in_the_documentation_are_those_of_trl() -> None:
    import trl.rewards
    from trl import GRPOConfig, RLOOConfig

    names = names_in_docs()
    assert len(names) > 20
    fields = {*GRPOConfig.__dataclass_fields__, *RLOOConfig.__dataclass_fields__}
    fields |= {folder.name for folder in (Path(trl.__path__[0]) / "experimental").iterdir()}
    assert {one for one in names - fields if not hasattr(trl, one) and not hasattr(trl.rewards, one)} == set()
    # What the rows say of defaults.
    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True
    assert GRPOConfig.__dataclass_fields__["vllm_importance_sampling_mode"].default == "sequence_mask"
