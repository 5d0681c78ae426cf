"""Options of TRL become options here: every field, and sizes and schedules as TRL's own classes have them."""

import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.plugins.console.porting.from_trl import options_of
from grpo_lightning.plugins.console.porting.trl_rules import RULES, TABLE, Setting, scope_of, translate
from grpo_lightning.types import UsageError

NUM_CONFIGS = 200

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def values_of(settings: dict[str, Setting]) -> dict[str, Any]:
    return {key: setting.value for key, setting in settings.items()}


def plain(value: Any) -> Any:
    """An enumeration's value, as a script writes it."""
    return getattr(value, "value", value)


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl", minversion="1.16")


@pytest.mark.parametrize("part", ["GRPOConfig", "ModelConfig", "GRPOScriptArguments"])
def test_every_field_has_a_rule_with_its_default(part: str, trl: Any) -> None:
    if part == "GRPOScriptArguments":
        from trl.scripts import grpo

        kind = grpo.GRPOScriptArguments
    else:
        kind = getattr(trl, part)
    defaults = {
        field.name: plain(field.default_factory() if callable(field.default_factory) else field.default)
        for field in dataclasses.fields(kind)
    }
    # It is an argument of the trainer too.
    elsewhere = {"model_name_or_path", "reward_funcs"} & defaults.keys()
    rules = TABLE["options"][part]
    assert rules.keys() == defaults.keys() - elsewhere
    assert {name: rule["default"] for name, rule in rules.items()} == {name: defaults[name] for name in rules}


def test_every_rule_translates_or_says_something() -> None:
    assert sum(len(part) for part in TABLE["options"].values()) == len(RULES)
    for name, rule in RULES.items():
        assert {"sets", "within", "says"} & rule.keys(), name
        assert rule.keys() <= {"default", "sets", "how", "within", "if", "says"}, name
        assert rule.get("within", name) in RULES, name
        assert "says" in rule or "if" not in rule, name


def test_formats_name_what_there_is() -> None:
    scope = scope_of({}, 100, 1)
    for rule in (*RULES.values(), *TABLE["refused"]):
        rule.get("says", "").format_map(scope)
        rule.get("how", "").format_map(scope)


def options_at(rng: random.Random) -> tuple[dict[str, Any], int, int]:
    """Options that TRL takes, the number of processes and the number of questions."""
    group_size = rng.choice([2, 4, 8, 16])
    world = rng.choice([1, 1, 1, 2, 4])
    accumulation = rng.choice([1, 1, 2, 4, 8])
    options: dict[str, Any] = {
        "num_generations": group_size,
        "per_device_train_batch_size": rng.choice([1, 2, 4, 8, 16, 32]),
        "gradient_accumulation_steps": accumulation,
        "num_iterations": rng.choice([1, 1, 1, 2, 3]),
        "learning_rate": rng.choice([1e-6, 5e-6, 1e-5]),
        "lr_scheduler_type": rng.choice(["linear", "cosine", "constant_with_warmup", "constant", "polynomial"]),
        "warmup_steps": rng.choice([0, 0.1, 0.03, 3]),
        "loss_type": rng.choice(["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]),
        "beta": rng.choice([0.0, 0.04]),
        "epsilon_high": rng.choice([None, 0.28]),
        "scale_rewards": rng.choice([True, False, "group", "batch", "none"]),
        "bf16": rng.choice([None, True, False]),
    }
    batch = options["per_device_train_batch_size"] * world
    match rng.choice(["default", "steps", "batch"]):
        case "steps":
            options["steps_per_generation"] = accumulation * rng.choice([1, 1, 2, 4])
        case "batch":
            options["generation_batch_size"] = batch * accumulation * rng.choice([1, 2])
    if rng.random() < 0.5:
        options["max_steps"] = rng.randrange(1, 200)
    else:
        options["num_train_epochs"] = rng.choice([1, 2, 0.5, 3.0])
    return options, world, rng.randrange(50, 2000)


def updates_of_trl(trl: Any, args: Any, num_questions: int, world: int) -> int:
    """The updates of a run, by the sampler of TRL and the arithmetic of transformers' trainer."""
    from transformers import Trainer
    from trl.trainer.utils import RepeatSampler

    sampler = RepeatSampler(
        range(num_questions),
        mini_repeat_count=args.num_generations,
        batch_size=args.generation_batch_size // args.num_generations,
        repeat_count=args.num_iterations * args.steps_per_generation,
    )
    size = args.per_device_train_batch_size * world * args.steps_per_generation
    loader = torch.utils.data.DataLoader(range(num_questions), sampler=sampler, batch_size=size)
    itself = SimpleNamespace(
        get_total_train_batch_size=lambda args: 1, get_sp_size=lambda: 1, num_examples=lambda loader: 1
    )
    return Trainer.set_initial_training_values(itself, args, loader)[-1]


def rates_of_trl(args: Any, num_updates: int) -> list[float]:
    """The learning rate of each update."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    warmup = args.get_warmup_steps(num_updates)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_updates, args.lr_scheduler_kwargs)
    rates = []
    for _ in range(num_updates):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def rates_here(values: dict[str, Any], num_updates: int) -> list[float]:
    """The learning rate of each update, by the class that the configuration names."""
    from grpo_lightning import TransformersSchedule

    rate = values["model.optimizer.init_args.lr"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule = TransformersSchedule(optimizer, **values["model.lr_scheduler"]["init_args"])
    schedule.spread(num_updates)
    return [rate * schedule.factor(update) for update in range(num_updates)]


def test_sizes_and_schedules_are_those_of_trl(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    num_valid = num_whole = 0
    while num_valid < NUM_CONFIGS:
        options, world, num_questions = options_at(rng)
        monkeypatch.setattr(trl.GRPOConfig, "world_size", property(lambda args, world=world: world))
        try:
            args = trl.GRPOConfig("unused", report_to="none", use_cpu=True, **options)
        except ValueError:
            with pytest.raises(UsageError):
                translate(options, num_questions, world)
            continue
        num_valid += 1
        settings, remarks = translate(options, num_questions, world)
        values = values_of(settings)
        assert values["loop.group_size"] == args.num_generations
        assert values["loop.mu"] == args.num_iterations
        assert values["trainer.precision"] == ("bf16-mixed" if args.bf16 else "32-true")

        # Generations that one update takes together are one step here.
        accumulation, per_generation = args.gradient_accumulation_steps, args.steps_per_generation
        is_joined = args.num_iterations == 1 and accumulation % per_generation == 0
        num_prompts = args.generation_batch_size // args.num_generations
        num_prompts *= accumulation // per_generation if is_joined else 1
        assert values["loop.prompts_per_step"] == num_prompts
        minibatches = values["loop.num_minibatches"]
        assert num_prompts % (minibatches * values["trainer.devices"]) == 0

        # Where groups stay whole, the updates are the same.
        expected = per_generation / accumulation
        if is_joined:
            expected = 1
        if expected == int(expected) and num_prompts % expected == 0:
            assert minibatches == expected
        else:
            assert any(remark.startswith("gradient_accumulation_steps=") for remark in remarks)
        if minibatches != expected or num_questions < num_prompts:
            continue
        num_updates = updates_of_trl(trl, args, num_questions, world)
        per_step = minibatches * args.num_iterations
        assert values["trainer.max_epochs"] == math.ceil(num_updates / per_step)
        if num_updates % per_step == 0:
            num_whole += 1
            assert rates_here(values, num_updates) == pytest.approx(rates_of_trl(args, num_updates), rel=1e-12)
    assert num_whole > NUM_CONFIGS // 2


def test_json_of_a_config_says_the_same(trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.GRPOConfig, "world_size", property(lambda args: 4))
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 6, "gradient_accumulation_steps": 2}
    options |= {"max_steps": 60, "loss_type": "dr_grpo"}
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, **options)
    (tmp_path / "args.json").write_text(args.to_json_string())
    read, remarks = options_of(tmp_path / "args.json")
    assert remarks == []
    from_json, remarks = translate(read)
    expected, _ = translate(options | {"output_dir": str(tmp_path), "use_cpu": True}, world=4)
    assert values_of(from_json) == values_of(expected)
    # 4 x 4 x 6 / 8 = 12 prompts; 6 / 2 = 3 updates of 4 prompts, one for each process.
    assert [from_json[f"loop.{key}"].value for key in ("prompts_per_step", "num_minibatches")] == [12, 3]
    assert [remark.partition("=")[0] for remark in remarks if "=" in remark.split()[0]] == []


def objective_of(**options: Any) -> dict[str, Any]:
    values = values_of(translate({"max_steps": 1, **options})[0])
    return {key.removeprefix("model.objective."): value for key, value in values.items() if "model.objective" in key}


def made(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path} | ({"init_args": arguments} if arguments else {})


LOSSES = {
    "grpo": (made("Clipped", clip_low=0.2, clip_high=0.28), made("SequenceMean"), "sampled"),
    "dapo": (made("Clipped", clip_low=0.2, clip_high=0.28), made("TokenMean"), "kept"),
    "bnpo": (made("Clipped", clip_low=0.2, clip_high=0.28), made("TokenMean"), "kept"),
    "dr_grpo": (made("Clipped", clip_low=0.2, clip_high=0.28), made("FixedLength", length=99), "sampled"),
    "luspo": (made("Clipped", clip_low=0.2, clip_high=0.28), made("FixedLength", length=1), "sampled"),
    "sapo": (made("SAPO", tau_good=1.0, tau_bad=1.05), made("SequenceMean"), "sampled"),
    "vespo": (made("VESPO", k_good=2.0, lambda_good=3.0, k_bad=3.0, lambda_bad=2.0), made("TokenMean"), "kept"),
}
"""What gradients are compared with in tests/test_trl.py."""


@pytest.mark.parametrize("loss_type", LOSSES)
def test_losses_are_those_whose_gradients_are_compared(loss_type: str) -> None:
    objective = objective_of(
        loss_type=loss_type, epsilon_high=0.28, max_completion_length=99, mask_truncated_completions=True
    )
    surrogate, weighting, denominator = LOSSES[loss_type]
    assert objective == {
        "surrogate": surrogate,
        "weighting": weighting,
        "denominator": denominator,
        "masks": [made("Truncated")],
        "beta": 0.0,
    }


def test_parts_of_the_objective() -> None:
    assert objective_of(loss_type="cispo", epsilon_high=5.0)["surrogate"] == made("CISPO", clip_low=None, clip_high=4.0)
    gspo = objective_of(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, loss_type="grpo")
    assert gspo["surrogate"] == made("SequenceClipped", clip_low=3e-4, clip_high=4e-4)
    two_sided = objective_of(delta=1.3, off_policy_mask_threshold=0.5)["surrogate"]
    inner = made("Clipped", clip_low=0.2, clip_high=0.2, dual_clip=1.3)
    assert two_sided == made("OffPolicyMask", surrogate=inner, threshold=0.5)
    assert "kl" not in objective_of()
    assert objective_of(beta=0.1)["kl"] == made("ImportanceWeighted")
    assert objective_of(beta=0.1, use_bias_correction_kl=False)["kl"] == made("K3")
    assert objective_of(top_entropy_quantile=0.2)["masks"] == [made("TopEntropy", fraction=0.2)]
    assert objective_of(entropy_coef=0.1)["entropy"] == made("FixedEntropy", coefficient=0.1)
    assert objective_of(use_vllm=True)["correction"] == made("SequenceMask", low=0.0, high=3.0)
    truncate = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    assert objective_of(use_vllm=True, **truncate)["correction"] == made("TruncatedRatio", cap=2.0)
    assert "correction" not in objective_of(use_vllm=True, vllm_importance_sampling_correction=False)


def test_steps_are_counted_in_exploration_steps() -> None:
    options = {"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_iterations": 2}
    options |= {"max_steps": 80, "save_steps": 16, "save_total_limit": 3, "eval_strategy": "steps", "eval_steps": 24}
    options |= {"sync_ref_model": True, "ref_model_sync_steps": 64, "beta": 0.1, "log_completions": True}
    values = values_of(translate(options)[0])
    # 8 / 2 = 4 updates per pass, 2 passes: 8 updates per step.
    expected = {
        "loop.num_minibatches": 4,
        "loop.mu": 2,
        "trainer.max_epochs": 10,
        "checkpoint.every_n_steps": 2,
        "checkpoint.keep": 2,
        "trainer.check_val_every_n_epoch": 3,
        "loop.steps_per_iteration": 8,
        "completions.every_n_steps": 1,
        "model.reference": made("MovingAverage", alpha=0.6),
    }
    assert {key: values[key] for key in expected} == expected


def test_an_update_of_two_generations_is_a_larger_step() -> None:
    settings, _ = translate({"steps_per_generation": 2, "gradient_accumulation_steps": 4, "max_steps": 7})
    assert [settings[f"loop.{key}"].value for key in ("prompts_per_step", "num_minibatches")] == [4, 1]
    assert settings["trainer.max_epochs"].value == 7
    assert settings["loop.prompts_per_step"].comment.endswith(
        "per_device_train_batch_size 8 x world 1 x steps_per_generation 2 / num_generations 8 = 2, x 2 generations per "
        "update"
    )


COMMON = {
    "vllm_importance_sampling_mode": "token_mask",
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "beta": 0.04,
    "use_vllm": True,
    "mask_truncated_completions": True,
    "loss_type": "dr_grpo",
    "scale_rewards": False,
    "epsilon_high": 0.28,
    "importance_sampling_level": "sequence",
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "reward_weights": [2.0],
    "sync_ref_model": True,
    "off_policy_mask_threshold": 0.5,
    "multi_objective_aggregation": "normalize_then_sum",
    "use_liger_kernel": True,
    "log_completions": True,
    "deepspeed": "zero3.json",
    "use_peft": True,
    "max_completion_length": 1024,
    "num_iterations": 2,
    "resume_from_checkpoint": "checkpoint-500",
    "push_to_hub": True,
}
"""Options that users ask about most."""


@pytest.mark.parametrize("name", COMMON)
def test_a_common_option_is_translated_or_named(name: str) -> None:
    base = {"reward_funcs": ["mine.score"], "max_steps": 8}
    base |= {"use_vllm": True} if "vllm_" in name else {"beta": 0.04} if name == "sync_ref_model" else {}
    before, old_remarks = translate(base)
    after, remarks = translate(base | {name: COMMON[name]})
    assert values_of(after) != values_of(before) or any(name in text for text in {*remarks} - {*old_remarks})


REFUSED = {
    "num_generations=3": {"num_generations": 3},
    "give 2 or more": {"num_generations": 1},
    "give a multiple": {"generation_batch_size": 12},
    "give one of the two": {"generation_batch_size": 16, "steps_per_generation": 4},
    "give 1 or more of each": {"gradient_accumulation_steps": 0},
    "loss_type=ppo": {"loss_type": "ppo"},
    "scale_rewards=all": {"scale_rewards": "all"},
    "bf16=True and fp16=True": {"bf16": True, "fp16": True},
    "no reference to refresh": {"sync_ref_model": True},
    "does not take this either": {"per_device_train_batch_size": "8"},
    "a weight for each reward function": {"reward_weights": [1.0, 2.0], "reward_funcs": ["mine.score"]},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_trl_refuses_is_one_sentence(words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        translate(REFUSED[words])
    assert words in str(refusal.value)


def test_options_of_other_versions_are_named() -> None:
    _, remarks = translate({"max_prompt_length": 128, "frobnicate": 1, "max_steps": 1})
    assert any(remark.startswith("frobnicate: TRL 1.16 has no such option") for remark in remarks)
    assert any("data.skip_long" in remark for remark in remarks)
    ratio, _ = translate({"warmup_ratio": 0.1, "max_steps": 1})
    assert ratio["model.lr_scheduler"].value["init_args"]["warmup"] == 0.1


def test_text_of_a_number_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-5\nmax_steps: 3\n")
    options, _ = options_of(tmp_path / "run.yaml")
    assert options["learning_rate"] == 1e-5


def test_table_is_plain_data() -> None:
    assert json.loads(json.dumps(TABLE)) == TABLE
