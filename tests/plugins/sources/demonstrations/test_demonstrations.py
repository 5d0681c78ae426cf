"""Gold completions as rollouts: against a plain loop, mixed into groups, and in whole runs."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.chats import END, TAGS, TEMPLATES, chat_tokenizer
from helpers.fitting import Gradients, Minibatches, Steps, fit, relative, resumes_exactly, scalars
from helpers.tiny import policy_of, rollouts_of
from torch import Tensor

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.advantages import GroupMean, NoBaseline
from grpo_lightning.maths.filters import DynamicSampling
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped, Reinforce
from grpo_lightning.maths.weightings import SequenceMean, TokenMean
from grpo_lightning.plugins.methods.token_weights.fixed_length import FixedLength
from grpo_lightning.plugins.sources.demonstrations.demonstration_source import Demonstrations
from grpo_lightning.plugins.sources.demonstrations.demonstration_surrogates import CHORD, DEMONSTRATED, EMPHASIS, LUFFY
from grpo_lightning.policy.policy import Policy
from grpo_lightning.tasks.task import Task
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import Question, Sample, UsageError


class Worked(Task):
    """Questions with a worked solution of 1 to 5 characters."""

    def questions(self, split: str) -> list[Question]:
        rows = range(24)
        return [Question(f"{row}ab", "x", f"worked:{row}", {"solution": "7c" * (row % 3) + "d"}) for row in rows]


SFT: dict[str, Any] = {
    "objective": Objective(Reinforce(), weighting=TokenMean()),
    "advantage": NoBaseline(),
}


def sft(folder: Path, callbacks: Any, trainer: Any = None, loop: Any = None, **more: Any) -> Any:
    """Supervised fine-tuning on solution and answer."""
    source = Demonstrations("{solution}={answer}")
    loop = {"group_size": 1, "prompts_per_step": 6, "source": source} | (loop or {})
    return fit(folder, callbacks, loop, trainer, data=TaskData(Worked(), seed=2), **SFT | more)


def logp_of(policy: Policy, sample: Sample) -> Tensor:
    """[R] log-probs of a completion's tokens, by a forward of their own."""
    prompt, completion = sample.prompt.token_ids, sample.token_ids
    logits = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[range(len(completion)), completion]


def distance(gradient: Any, policy: Policy, objective: Tensor) -> float:
    """The relative distance between a run's gradient and the gradient of the objective of a plain loop."""
    (-objective).backward()
    expected = {f"policy.{name}": p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return relative(gradient, expected)


@pytest.mark.parametrize("max_tokens", [0, 30])
def test_supervised_fine_tuning_is_a_plain_loop(tmp_path: Path, max_tokens: int) -> None:
    gradients, steps = Gradients(), Steps()
    sft(tmp_path, [gradients, steps], {"max_epochs": 1}, {"max_tokens": max_tokens})
    samples = steps.explorations[0].samples
    policy = policy_of(scale=0.05)
    for sample in samples:
        text = sample.prompt.question.metadata["solution"] + "=x"
        assert sample.token_ids == [*policy.tokenizer.encode(text, add_special_tokens=False), 5]  # <end>
    objective = torch.cat([logp_of(policy, sample) for sample in samples]).mean()
    assert distance(gradients.updates[0], policy, objective) < 1e-6
    assert scalars(tmp_path)["policy/objective"][0] == pytest.approx(objective.item(), rel=1e-6)


def mixed(folder: Path, surrogate: Any, source: Demonstrations, **options: Any) -> tuple[Any, Any, Any]:
    """One step of four groups of four completions; its gradient, its minibatch and its exploration."""
    gradients, batches, steps = Gradients(), Minibatches(), Steps()
    objective = Objective(surrogate, weighting=options.pop("weighting", SequenceMean()))
    data = TaskData(Worked(), seed=2)
    loop = {"source": source} | options.pop("loop", {})
    fit(folder, [gradients, batches, steps], loop, {"max_epochs": 1}, data=data, objective=objective, **options)
    return gradients.updates[0], batches.seen[0], steps.explorations[0]


@pytest.mark.parametrize("phi", [False, True])
def test_a_chord_batch_is_that_of_a_plain_loop(tmp_path: Path, phi: bool) -> None:
    source = Demonstrations("{solution}", fraction=0.25, reward=None, mu=0.3, mu_last=0.3)
    gradient, _, exploration = mixed(tmp_path, CHORD(phi=phi), source, advantage=GroupMean())
    policy, total = policy_of(scale=0.05), exploration.scores.total
    objective = torch.zeros(())
    # On policy the ratio is 1: its gradient is that of the log-probability.
    for row, sample in enumerate(exploration.samples):
        logp = logp_of(policy, sample)
        if row % 4 == 3:  # a demonstration, with a share of 0.3 for all four
            p = logp.detach().exp()
            objective = objective + 0.3 / 4 * ((p * (1 - p) if phi else 1) * logp).mean()
            assert math.isnan(total[row])
        else:
            rewards = total[row // 4 * 4 : row // 4 * 4 + 3]
            objective = objective + 0.7 / 12 * (total[row] - sum(rewards) / 3) * logp.mean()
    assert distance(gradient, policy, objective) < 1e-6
    assert scalars(tmp_path)["rollout/mu"] == {0: pytest.approx(0.3)}


def test_a_luffy_batch_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    source = Demonstrations("{solution}", fraction=0.25)
    gradient, _, exploration = mixed(tmp_path, LUFFY(), source, weighting=FixedLength(12), advantage=GroupMean())
    policy, total = policy_of(scale=0.05), exploration.scores.total
    objective = torch.zeros(())
    for row, sample in enumerate(exploration.samples):
        advantage = total[row] - sum(total[row // 4 * 4 : row // 4 * 4 + 4]) / 4
        logp = logp_of(policy, sample)
        shaped = logp.exp() / (logp.exp() + 0.1) if row % 4 == 3 else logp
        objective = objective + (shaped * advantage).sum() / (16 * 12)
    assert {*total[3::4]} == {1.0}
    assert distance(gradient, policy, objective) < 1e-6


def test_minibatches_and_rounds_have_whole_groups(tmp_path: Path) -> None:
    loop = {"num_minibatches": 2, "mu": 2, "dynamic_sampling": DynamicSampling(max_rounds=2), "max_tokens": 40}
    _, minibatch, exploration = mixed(tmp_path, LUFFY(), Demonstrations("{solution}", fraction=0.5), loop=loop)
    assert len(exploration.rollouts) == 16
    shown = exploration.rollouts.columns[DEMONSTRATED]
    starts = [int(start) for start in exploration.rollouts.lengths.cumsum(0) - exploration.rollouts.lengths]
    assert [float(shown[start]) for start in starts] == [0.0, 0.0, 1.0, 1.0] * 4
    assert all(DEMONSTRATED in micro_batch.rollouts.columns for micro_batch in minibatch.micro_batches)
    seen = scalars(tmp_path)
    assert seen["reward/digits/demonstration"][0] == seen["rollout/demonstrations"][0] == 0.5
    # No reward judges a demonstration, so what decides what is right is of those drawn alone.
    scored = [value for value in exploration.scores.results["digits"].value if not math.isnan(value)]
    assert seen["reward/digits/mean"][0] == pytest.approx(sum(scored) / len(scored))


def test_without_demonstrations_both_are_the_surrogate_that_they_hold() -> None:
    rollouts = Rollouts.from_lists([[6, 7]], [0, 0], [[8, 9], [10, 3]])
    rollouts.advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    logp, old_logp = torch.tensor([-0.1, -2.0, -0.5, -1.0]), torch.tensor([-0.6, -1.0, -1.5, -1.0])
    expected = Clipped()(logp, old_logp, rollouts).value
    for surrogate in (LUFFY(), CHORD()):
        assert torch.equal(surrogate(logp, old_logp, rollouts).value, expected)


@pytest.mark.parametrize(
    ("bound", "advantage", "ratio", "clip_high"),
    [("clipped_high", 1.0, 1.9, 0.2), ("clipped_low", -1.0, 0.1, 0.2), ("unreachable", 1.0, 1.0, 1.5)],
)
def test_no_bound_counts_tokens_of_demonstrations(bound: str, advantage: float, ratio: float, clip_high: float) -> None:
    rollouts, old_logp = rollouts_of([2, 2]), torch.full((4,), 0.5).log()
    rollouts.advantage = torch.full((4,), advantage)
    rollouts.add_columns({DEMONSTRATED: torch.tensor([0.0, 0.0, 1.0, 1.0]), EMPHASIS: torch.ones(4)})
    result = LUFFY(Clipped(0.2, clip_high))(old_logp + math.log(ratio), old_logp, rollouts)
    assert getattr(result, bound).tolist() == [True, True, False, False]


def test_mu_follows_a_half_cosine() -> None:
    source = Demonstrations(fraction=0.5, mu=0.9, mu_last=0.1, mu_steps=4)
    expected = [0.9, 0.5 + 0.4 * math.sqrt(0.5), 0.5, 0.5 - 0.4 * math.sqrt(0.5), 0.1, 0.1]
    assert [source.mu_at(step) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_resumes_exactly(tmp_path: Path, fraction: float) -> None:
    def options() -> dict[str, Any]:
        source = Demonstrations("{solution}", fraction, mu=None if fraction == 1 else 0.8, mu_steps=4)
        loop = {"source": source, "group_size": 1 if fraction == 1 else 4}
        learning = SFT if fraction == 1 else {"objective": Objective(CHORD(), beta=0.05)}
        return {"loop": loop, "data": TaskData(Worked(), seed=2)} | learning

    resumes_exactly(tmp_path, options, steps=4, cut=2)


def test_an_answer_prefix_is_given_and_a_stop_string_ends(tmp_path: Path) -> None:
    steps = Steps()
    source = Demonstrations("ab{solution}z")
    loop = {"group_size": 1, "source": source}
    data = TaskData(Worked(), answer_prefix="ab")
    fit(tmp_path, [steps], loop, {"max_epochs": 1}, data=data, sampling=Sampling(stop=["z"], max_new_tokens=12), **SFT)
    for sample in steps.explorations[0].samples:
        assert sample.text == sample.prompt.question.metadata["solution"] + "z" and sample.stop_string == "z"
        assert policy_of().tokenizer.decode(sample.token_ids) == sample.text


MISTAKES: list[tuple[dict[str, Any], int, str]] = [
    ({"completion": "{proof}"}, 1, r"worked:\d+ has no column 'proof'; there are answer, solution"),
    ({"completion": "{solution}" * 4}, 1, r"worked:10: the gold completion has 13 tokens, over"),
    ({}, 4, "all would be the same; set loop.group_size=1"),
    ({"fraction": 0.3}, 4, "give a multiple of 1 / group_size, such as 0.25"),
    ({"mu": 0.5}, 1, "with fraction=1 there is nothing to weigh"),
    ({"fraction": 0}, 1, "fraction=0: give more than 0"),
]


@pytest.mark.parametrize(("options", "group_size", "message"), MISTAKES)
def test_mistakes(tmp_path: Path, options: dict[str, Any], group_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sft(tmp_path, [], loop={"source": Demonstrations(**options), "group_size": group_size})


@pytest.mark.parametrize(
    ("name", "template", "chat", "end"),
    [
        ("gemma_3", None, True, "<end_of_turn>"),
        ("gemma_3", None, False, "<eos>"),
        ("gemma_3", TAGS, True, "<eos>"),
        ("llama_3", None, True, "<|eot_id|>"),
    ],
)
def test_a_completion_ends_as_the_template_ends_a_turn(name: str, template: str | None, chat: bool, end: str) -> None:
    tokenizer = chat_tokenizer(name)
    tokenizer.chat_template = template or tokenizer.chat_template
    # `eos_token` is another one, as in Gemma 3 and Llama 3.
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    turn_end = [] if template else [tokenizer.convert_tokens_to_ids(END[TEMPLATES[name][1]])]
    policy = SimpleNamespace(stop_ids=frozenset([tokenizer.eos_token_id, *turn_end]), tokenizer=tokenizer)
    source: Any = Demonstrations()
    source.inputs = SimpleNamespace(policy=policy, data=SimpleNamespace(chat=chat))
    assert tokenizer.convert_ids_to_tokens(source._end_token()) == end
