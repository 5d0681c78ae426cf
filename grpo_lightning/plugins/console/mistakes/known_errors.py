"""The sentences about mistakes in options: the names that there are, and the nearest name."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from grpo_lightning.training.checks import REPLACED_BY

MAX_NAMES = 20
"""Names that a message lists; of more names it lists the nearest."""

BY_CLASS = "a class is given as {class_path: NAME, init_args: {KEY: VALUE}}"

ELSEWHERE = {
    "ckpt_path": "resume_from_checkpoint",
    "checkpoint.every_n_steps": "save_steps | save_freq",
    "completions.every_n_steps": "log_completions",
    "data.task": "dataset_name train_dataset | train_files",
    "loop.dynamic_sampling": "| filter_groups",
    "loop.group_size": "num_generations | n",
    "loop.max_tokens, of one forward and backward": "| ppo_micro_batch_size_per_gpu",
    "loop.mu": "num_iterations | ppo_epochs",
    "loop.num_minibatches times gradient_accumulation_steps": "steps_per_generation",
    "loop.prompts_per_step, over all devices": "| train_batch_size",
    "loop.prompts_per_step divided by loop.num_minibatches": "| ppo_mini_batch_size",
    "loop.prompts_per_step x loop.group_size": "generation_batch_size",
    "loop.prompts_per_step x loop.group_size / (devices x steps_per_generation)": "per_device_train_batch_size",
    "loop.prompts_per_step x loop.group_size / (devices x per_device_train_batch_size x loop.num_minibatches)": (
        "gradient_accumulation_steps"
    ),
    "loop.steps_per_iteration": "ref_model_sync_steps",
    "model.advantage": "scale_rewards multi_objective_aggregation | adv_estimator norm_adv_by_std_in_grpo",
    "model.engine VLLMEngine": "use_vllm vllm_mode",
    "model.engine.gpu_memory of VLLMEngine": "vllm_gpu_memory_utilization | gpu_memory_utilization",
    "model.guard.grad_clip": "max_grad_norm",
    "model.lr_scheduler TransformersSchedule": "lr_scheduler_type | lr_scheduler_type",
    "model.lr_scheduler.options of TransformersSchedule": "lr_scheduler_kwargs",
    "model.lr_scheduler.warmup of TransformersSchedule": "warmup_ratio warmup_steps | lr_warmup_steps_ratio",
    "model.objective.beta": "| kl_coef kl_loss_coef use_kl_loss",
    "model.objective.correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode | rollout_is",
    "model.objective.entropy FixedEntropy": "entropy_coef | entropy_coeff",
    "model.objective.entropy AdaptiveEntropy": "use_adaptive_entropy entropy_target |",
    "model.objective.kl": "use_bias_correction_kl | kl_loss_type",
    "model.objective.masks [TopEntropy]": "top_entropy_quantile",
    "model.objective.masks [Truncated]": "mask_truncated_completions",
    "model.objective.surrogate": "importance_sampling_level | loss_mode",
    "model.objective.surrogate.clip_high": "epsilon_high | clip_ratio_high",
    "model.objective.surrogate.clip_low": "| clip_ratio_low",
    "model.objective.surrogate.clip_low and clip_high": "epsilon | clip_ratio",
    "model.objective.surrogate.dual_clip": "delta | clip_ratio_c",
    "model.objective.weighting TokenMean, SequenceMean or FixedLength": "loss_type | loss_agg_mode",
    "model.optimizer.lr": "learning_rate",
    "model.policy.adapter LoRA": "use_peft lora_r peft_config | lora_rank",
    "model.policy.path": "model_name_or_path",
    "model.reference with loop.steps_per_iteration": "sync_ref_model ref_model_mixup_alpha",
    "model.objective.reward_kl": "| use_kl_in_reward",
    "model.rewards": "reward_funcs",
    "model.rewards.weight, of each": "reward_weights",
    "model.sampling.max_new_tokens": "max_completion_length | max_response_length response_length",
    "trainer.check_val_every_n_epoch": "eval_steps | test_freq",
    "trainer.default_root_dir": "output_dir | default_local_dir",
    "trainer.logger WandbLogger": "report_to",
    "trainer.max_epochs, exploration steps": "| total_training_steps",
    "trainer.max_epochs x loop.prompts_per_step / questions": "num_train_epochs | total_epochs",
    "trainer.precision bf16-mixed": "bf16",
    "trainer.precision 16-mixed": "fp16",
}
"""Options here, and their names in TRL | in verl."""


MEANT = {
    **dict.fromkeys(("fp16", "float16", "half", "16-true"), "16-mixed"),
    **dict.fromkeys(("bfloat16", "bf16-true"), "bf16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float", "full"), "32-true"),
    **dict.fromkeys(("cosine_with_warmup", "warmup"), "WarmupCosine"),
    **dict.fromkeys(("linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt"), "TransformersSchedule"),
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"), "TransformersSchedule"),
}
"""Names of values in other programs, and their names here."""


def instead(flag: str, names: Sequence[str]) -> str:
    """Returns a hint for a key that is no option: the option of a name of TRL's, of the same last name, or alike.

    Args:
        flag: The key, perhaps with dashes.
        names: The keys of all options.
    """
    key = flag.removeprefix("--")
    if replaced := REPLACED_BY.get(key.rpartition(".")[2]):
        return f" Use {replaced[1]}"
    dashes = flag.removesuffix(key)
    head, dot, tail = key.partition(".")
    sections = list(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))
    namesakes = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    if not namesakes:
        if hint := elsewhere(key):
            return hint
        if dot and head not in sections and (section := nearest(head, sections)):
            return f" Did you mean {dashes}{section[0]}.{tail}?"
    if close := namesakes or nearest(key, names if dot else [*sections, *names]):
        return f" Did you mean {dashes}{close[0]}?"
    return f" The sections are {', '.join(sections)}; --help lists their options"


def elsewhere(key: str) -> str:
    """Returns ` TRL's NAME is KEY` where a key ends in a name of TRL's or verl's; else nothing."""
    name = key.rpartition(".")[2]
    for option, names in ELSEWHERE.items():
        for library, library_names in zip(("TRL", "verl"), names.split("|"), strict=False):
            if name in library_names.split():
                return f" {library}'s {name} is {option}"
    return ""


def no_such_argument(key: str, owner: str, names: Sequence[str]) -> str:
    """Returns the sentence about a key that is no argument of a class.

    Args:
        key: The key.
        owner: Name of the class.
        names: The arguments that it has.
    """
    if key in ("init_arg", "init_args", "class", "class_paths", "args", "name", "type"):
        return f": {owner} has no such option; {BY_CLASS}"
    listed = f" There {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else " It has none"
    hint = f"{elsewhere(key)}." if elsewhere(key) else did_you_mean(key, names)
    return f": {owner} has no such option.{hint}{listed}"


def among(names: Iterable[str], name: str) -> str:
    """Returns the names that there are, and the name nearest to `name`."""
    names = sorted({*names})
    if not names:
        return ""
    listed = names if len(names) <= MAX_NAMES else nearest(name, names, 8, 0.0)
    beginning = "There is" if len(names) == 1 else "There are" if listed == names else "Among others there are"
    return f"{did_you_mean(name, names)} {beginning} {', '.join(listed)}"


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Returns ` Did you mean NAME?` with the nearest of `names`; empty if none is near."""
    return "".join(f" Did you mean {close}?" for close in nearest(name, names))


def nearest(name: str, names: Sequence[str], number: int = 1, cutoff: float = 0.5) -> list[str]:
    """Returns the names nearest to `name`, in any case. Names that begin with it are nearest.

    Args:
        name: The name that was written.
        names: The names that there are.
        number: Names to return at most.
        cutoff: Likeness from which a name is near, 0 to 1.
    """
    if not name:
        return list(names)[:number] if not cutoff else []
    lower_name = name.lower()
    if MEANT.get(lower_name) in names:
        return [MEANT[lower_name]]
    name_by_lower = {candidate.lower(): candidate for candidate in reversed(names)}
    beginnings = [candidate for candidate in names if candidate.lower().startswith(lower_name) and len(name) > 2]
    close = [name_by_lower[lower] for lower in get_close_matches(lower_name, name_by_lower, number, cutoff)]
    return list(dict.fromkeys([*beginnings, *close]))[:number]


def one_line(text: str, length: int = 200) -> str:
    """Returns the text without line breaks, cut to `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 4]} ..."
