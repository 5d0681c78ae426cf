"""A run without a language model: a policy of a few words learns to add with the real objective, and is recorded."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_lightning.maths.advantages import GroupStd
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.weightings import BatchSize
from grpo_lightning.plugins.inspect.record import NUM_ALTERNATIVES, GroupRecord, TokenRecord
from helpers.inspecting import completion_of, group_of, step_of, token_records, update_columns, write_records

SOLUTIONS = (
    "{a} + {b} .\nFirst the tens : {t} .\nThen the ones : {o} .\nSo the answer is {c} <end>",
    "We add {a} and {b} .\nThat makes {c} .\nThe answer is {c} <end>",
    "{a} + {b} = {c} <end>",
    "Let me think .\nThe tens make {t} , the ones make {o} .\nTogether {c} .\nSo the answer is {c} <end>",
    "I guess the answer is {w} <end>",
    "{a} + {b} = {w} . Wait , the ones make {o} .\nSo the answer is {c} <end>",
)
"""What the policy of words has read: its next word depends on the two before."""


class WordPolicy:
    """A policy of words that depends on the last two words, with a table of logits per question."""

    def __init__(self, a: int, b: int) -> None:
        numbers = {"a": a, "b": b, "c": a + b, "w": a + b + 10, "t": a // 10 * 10 + b // 10 * 10, "o": a % 10 + b % 10}
        texts = [text.format(**numbers).replace("\n", " \n ").split(" ") for text in SOLUTIONS]
        self.answer = str(a + b)
        self.words = sorted({word for text in texts for word in text})
        self.index = {word: index for index, word in enumerate(self.words)}
        size = len(self.words)
        counts = torch.full((size + 1, size + 1, size), 0.002)
        for text in texts:
            path = [size, size, *(self.index[word] for word in text)]
            for one, two, three in zip(path, path[1:], path[2:], strict=False):
                counts[one, two, three] += 1
        self.logits = counts.log().requires_grad_()

    def draw(self, generator: torch.Generator, length: int, greedy: bool = False) -> list[int]:
        """The indices of a completion's words."""
        path = [len(self.words)] * 2
        while len(path) < length + 2:
            chances = self.logits[path[-2], path[-1]].detach().softmax(-1)
            word = int(chances.argmax() if greedy else torch.multinomial(chances, 1, generator=generator))
            path.append(word)
            if self.words[word] == "<end>":
                break
        return path[2:]

    def distributions(self, completions: Sequence[Sequence[int]]) -> Tensor:
        """[N, V] log-probs before each token."""
        start = len(self.words)
        paths = [[start, start, *own] for own in completions]
        before = torch.tensor([pair for path in paths for pair in pairwise(path[:-1])])
        return self.logits[before[:, 0], before[:, 1]].log_softmax(-1)


def drawn_logp(table: Tensor, ids: Tensor) -> Tensor:
    """[N] the log-probs of the drawn tokens."""
    return table.gather(1, ids[:, None]).squeeze(1)


def entropy_of(table: Tensor) -> Tensor:
    """[N]."""
    return -(table.exp() * table).sum(1)


def alternatives(table: Tensor, when: str) -> dict[str, Tensor]:
    """The likeliest tokens, as columns of a record."""
    top = table.detach().topk(NUM_ALTERNATIVES)
    return {f"top_{when}_ids": top.indices, f"top_{when}_logp": top.values}


def is_right(policy: WordPolicy, path: Sequence[int]) -> bool:
    words = [policy.words[index] for index in path]
    return words[-2:] == [policy.answer, "<end>"]


def learn(
    policy: WordPolicy,
    reference: Tensor,
    objective: Objective,
    generator: torch.Generator,
    rate: float,
    updates: int = 2,
) -> tuple[list[TokenRecord], list[list[int]]]:
    """One exploration step with 8 completions of at most 40 words; the tokens' records and the completions."""
    paths = [policy.draw(generator, 40) for _ in range(8)]
    rollouts = Rollouts.from_lists([[0]], [0] * len(paths), paths)
    rewards = torch.tensor([float(is_right(policy, path)) for path in paths])
    rollouts.advantage = rollouts.spread(GroupStd()(rewards, rollouts.group))
    rollouts.weight = objective.token_weight(rollouts, BatchSize(len(paths), 1, rollouts.num_tokens))
    with torch.no_grad():
        before = policy.distributions(paths)
        now, policy.logits.data = policy.logits.data, reference
        rollouts.ref_logp = drawn_logp(policy.distributions(paths), rollouts.token_ids)
        policy.logits.data = now
    rollouts.old_logp = drawn_logp(before, rollouts.token_ids)
    rollouts.add_columns(objective.surrogate.prepare(rollouts))
    columns: dict[str, Tensor] = {}
    for _ in range(updates):
        table = policy.distributions(paths)
        logp, entropy = drawn_logp(table, rollouts.token_ids), entropy_of(table)
        columns = update_columns(objective, logp, entropy.detach(), rollouts)
        value, _ = objective(logp, entropy, rollouts)
        (gradient,) = torch.autograd.grad(value, policy.logits)
        with torch.no_grad():
            policy.logits += rate * gradient
    after = policy.distributions(paths).detach()
    noise = 1e-6 * torch.randn(rollouts.num_tokens, generator=generator)
    columns |= {"sampler_logp": rollouts.old_logp + noise, "after_logp": drawn_logp(after, rollouts.token_ids)}
    columns |= {"entropy_before": entropy_of(before), "entropy_after": entropy_of(after)}
    columns |= alternatives(before, "before") | alternatives(after, "after")
    rollouts.columns.clear()
    return with_pieces(token_records(rollouts, columns), policy), paths


def with_pieces(records: list[TokenRecord], policy: WordPolicy) -> list[TokenRecord]:
    for record in records:
        words = [policy.words[id] for id in record.ids]
        record.pieces = [
            word if index == 0 or "\n" in (word, words[index - 1]) else f" {word}" for index, word in enumerate(words)
        ]
    return records


def follow(policy: WordPolicy, generator: torch.Generator) -> tuple[list[TokenRecord], list[list[int]]]:
    """Greedy and three sampled completions, which nothing is learned from."""
    paths = [policy.draw(generator, 40, greedy=sample == 0) for sample in range(4)]
    rollouts = Rollouts.from_lists([[0]], [0] * len(paths), paths)
    table = policy.distributions(paths).detach()
    logp = drawn_logp(table, rollouts.token_ids)
    columns = {"old_logp": logp, "after_logp": logp, "entropy_before": entropy_of(table)} | alternatives(
        table, "before"
    )
    return with_pieces(token_records(rollouts, columns), policy), paths


def word_run(
    folder: Path, seed: int = 0, num_steps: int = 30, objective: Objective | None = None, rate: float = 6.0
) -> Path:
    """A run's folder: policies of words that learn to add, a record every fifth step, and curves."""
    objective = objective or Objective(beta=0.04)
    generator = torch.Generator().manual_seed(seed)
    sums = [(47, 38), (12, 30), (65, 27), (19, 84), (33, 58)]
    policies = [WordPolicy(*one) for one in sums]
    references = [policy.logits.detach().clone() for policy in policies]
    records, rewards, lengths, entropies, kls = [], [], [], [], []
    for step in range(1, num_steps + 1):
        groups = []
        for index, (policy, reference, (a, b)) in enumerate(zip(policies, references, sums, strict=True)):
            train = index < len(sums) - 1
            tokens, paths = learn(policy, reference, objective, generator, rate) if train else follow(policy, generator)
            groups.append(word_group(policy, tokens, paths, f"What is {a} + {b}?", index, train, 1))
        own = [one.tokens for group in groups[:-1] for one in group.completions]
        rewards += [np.mean([group.mean for group in groups[:-1]])]
        lengths += [np.mean([len(tokens) for tokens in own])]
        entropies += [np.mean(np.concatenate([tokens.entropy_update for tokens in own]))]
        kls += [np.mean(np.concatenate([tokens.kl for tokens in own]))]
        if step % 5 == 0:
            records.append(step_of(groups, objective, step))
    curves = {"reward/mean": rewards, "rollout/length_mean": lengths, "policy/entropy": entropies, "policy/kl_ref": kls}
    return write_records(folder, records, curves | {"val/avg@4": rewards})


def word_group(
    policy: WordPolicy,
    tokens: list[TokenRecord],
    paths: list[list[int]],
    question: str,
    index: int,
    train: bool,
    update: int,
) -> GroupRecord:
    """The group of a question."""
    completions = []
    for number, (record, path) in enumerate(zip(tokens, paths, strict=True)):
        cut = policy.words[path[-1]] != "<end>"
        right = is_right(policy, path)
        more: dict[str, Any] = {
            "answer": None if cut or len(path) < 2 else policy.words[path[-2]],
            "greedy": not train and number == 0,
        }
        if cut:
            more |= {"finish_reason": "length", "statuses": {"math_verifier": "no_answer"}}
        completions.append(completion_of(record, right, **more))
    rewards = [float(one.reward or 0) for one in completions]
    return group_of(
        tokens,
        kind="train" if train else "validation",
        roles=[["mixed"], ["moved"], ["worst"], ["best"], ["followed"]][index],
        prompt_id=index,
        question=question,
        gold=policy.answer,
        source=f"words:{index}",
        prompt=f"<user>\n{question}\n<assistant>\n",
        mean=float(np.mean(rewards)),
        std=float(np.std(rewards)),
        update=update if train else None,
        completions=completions,
        vocabulary=dict(enumerate(policy.words)),
    )
