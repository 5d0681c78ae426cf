"""Measures the KL estimators by summing over every token of small policies: no sampling, so no noise in the numbers.

python docs/figures/measure_kl.py [--write docs/explanation/kl.md]

π_ref is the softmax of 16 normal logits; π_θ and π_old are other logits at a set distance. A token's term is what the
project's own classes give, its gradient with respect to the logits that of autograd. Sums over the tokens, weighted by
the probabilities they are drawn with, give expectation and variance exactly, in float64. Every number in the tables is
the median over 25 such triples of policies. Completions of two tokens, each after its own prefix, show what the sum
over tokens leaves out. `--write` puts the tables between the marks of the file.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from grpo_lightning.maths.kl import K1, K2, K3, KLEstimator, KLPenalty
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped
from grpo_lightning.plugins.methods.penalties.importance_weighted import ImportanceWeighted

VOCABULARY = 16
TRIPLES = 25
VALUES = "size of the bias, standard deviation of one token, both divided by the exact KL"
REGIMES = {
    (0.1, 0.0): "KL 0.1",
    (1.0, 0.0): "KL 1",
    (0.1, 0.1): r"KL 0.1, $\pi_{old}$ off by 0.1",
}
"""KL to the reference and from π_old, and the regime's head in the table."""
OPEN, CLOSE = "<!-- measured -->", "<!-- /measured -->"


@dataclass(frozen=True)
class Policies:
    """Three categorical distributions over the same V tokens, float64."""

    logits: Tensor
    """[V] of π_θ."""
    ref_logp: Tensor
    """[V] log π_ref."""
    old_logp: Tensor
    """[V] log π_old, which the tokens are drawn from."""

    @property
    def logp(self) -> Tensor:
        """[V] log π_θ."""
        return self.logits.log_softmax(0)


Term = Callable[[Tensor, Policies], Tensor]
"""[V] log π_θ with gradient, the policies -> [V] each token's term, to be minimised."""


def in_objective(kl: KLEstimator) -> Term:
    """The term of an estimator in the objective."""
    return lambda logp, policies: kl(logp, policies.ref_logp, policies.old_logp)


def in_reward(logp: Tensor, policies: Policies) -> Tensor:
    """The term of `KLPenalty`: its value at π_old, less the mean, through the ratio; nothing is clipped."""
    kl = KLPenalty().kl(policies.old_logp, policies.ref_logp, policies.old_logp)
    rollouts = Rollouts.from_lists([[0]], [0], [list(range(len(logp)))])
    # Columns are float32 in training. Here they are float64, as all numbers are.
    rollouts.columns["advantage"] = (policies.old_logp.exp() * kl).sum() - kl
    return -Clipped(clip_low=None, clip_high=None)(logp, policies.old_logp, rollouts).value


PLAIN: dict[str, Term] = {"k1": in_objective(K1()), "k2": in_objective(K2()), "k3": in_objective(K3())}
WEIGHTED: dict[str, Term] = {
    "weighted k1": in_objective(ImportanceWeighted(K1())),
    "weighted k2": in_objective(ImportanceWeighted(K2())),
    "weighted k3": in_objective(ImportanceWeighted(K3())),
}
REWARD: dict[str, Term] = {"k1 in the reward": in_reward}


@dataclass(frozen=True)
class Value:
    """An estimator's value for one token, against KL(π_θ ‖ π_ref)."""

    exact: float
    mean: float
    deviation: float
    """Standard deviation over the tokens drawn."""

    @property
    def bias(self) -> float:
        return self.mean - self.exact


@dataclass(frozen=True)
class Gradient:
    """An estimator's gradient for one token, with respect to the logits."""

    reverse: Tensor
    """[V] gradient of KL(π_θ ‖ π_ref)."""
    forward: Tensor
    """[V] gradient of KL(π_ref ‖ π_θ)."""
    mean: Tensor
    """[V] the estimator's, on average."""
    deviation: float
    """Root of the expected squared distance of one token's gradient from the mean."""

    def error(self, to: Tensor) -> float:
        """Distance of the mean from another gradient, by that one's size."""
        return float((self.mean - to).norm() / to.norm())


def divergence(logp: Tensor, other: Tensor) -> Tensor:
    """KL(π ‖ other) by its definition."""
    return (logp.exp() * (logp - other)).sum()


def at_distance(logits: Tensor, direction: Tensor, distance: float) -> Tensor:
    """Logits along `direction` whose policy has KL(new ‖ old) = `distance`, by bisection."""
    low, high = 0.0, 64.0
    old = logits.log_softmax(0)
    for _ in range(100):
        middle = (low + high) / 2
        reached = float(divergence((logits + middle * direction).log_softmax(0), old))
        low, high = (middle, high) if reached < distance else (low, middle)
    return logits + low * direction


def draw(kl_ref: float, kl_old: float, count: int = TRIPLES) -> list[Policies]:
    """`count` triples with KL(π_θ ‖ π_ref) = `kl_ref` and KL(π_old ‖ π_θ) = `kl_old`; the same for the same numbers."""
    generator = torch.Generator().manual_seed(0)
    triples = []
    for _ in range(count):
        ref, away, back = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
        logits = at_distance(ref, away, kl_ref)
        old = at_distance(logits, back, kl_old) if kl_old > 0 else logits
        triples.append(Policies(logits, ref.log_softmax(0), old.log_softmax(0)))
    return triples


def value(term: Term, policies: Policies) -> Value:
    """Expectation and deviation of a term's value, exactly."""
    probability, values = policies.old_logp.exp(), term(policies.logp, policies)
    mean = (probability * values).sum()
    variance = (probability * (values - mean).square()).sum()
    return Value(float(divergence(policies.logp, policies.ref_logp)), float(mean), float(variance.sqrt()))


def gradient(term: Term, policies: Policies) -> Gradient:
    """Expectation and deviation of a term's gradient, exactly, beside those of the two divergences."""
    probability = policies.old_logp.exp()
    each = jacobian(lambda logits: term(logits.log_softmax(0), policies), policies.logits)
    mean = probability @ each
    variance = probability @ (each - mean).square().sum(1)
    return Gradient(
        reverse=jacobian(lambda logits: divergence(logits.log_softmax(0), policies.ref_logp), policies.logits),
        forward=jacobian(lambda logits: divergence(policies.ref_logp, logits.log_softmax(0)), policies.logits),
        mean=mean,
        deviation=float(variance.sqrt()),
    )


def number(x: float) -> str:
    """Two significant digits; what is below 1e-10 is rounding."""
    return "0" if abs(x) < 1e-10 else f"{x:.2g}" if abs(x) < 100 else f"{x:.0f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *("| " + " | ".join(r) + " |" for r in rows)]
    return "\n".join(lines)


def value_table(terms: dict[str, Term], columns: dict[str, list[Policies]]) -> str:
    """A row per term, a column per distance: size of the bias and standard deviation, by the exact KL."""
    rows = []
    for name, term in terms.items():
        cells = [name]
        for triples in columns.values():
            found = [value(term, policies) for policies in triples]
            bias = median(abs(one.bias) / one.exact for one in found)
            cells.append(f"{number(bias)}, {number(median(one.deviation / one.exact for one in found))}")
        rows.append(cells)
    return table(["", *columns], rows)


def gradient_table(terms: dict[str, Term]) -> str:
    """A row per term: in each regime the error against the reverse KL's and the noise; then the forward KL's error."""
    rows = []
    for name, term in terms.items():
        gradients = [[gradient(term, policies) for policies in draw(*regime)] for regime in REGIMES]
        cells = [name]
        for found in gradients:
            noise = median(one.deviation / float(one.reverse.norm()) for one in found)
            cells.append(f"{number(median(one.error(one.reverse) for one in found))}, {number(noise)}")
        cells.append(number(median(one.error(one.forward) for one in gradients[0])))
        rows.append(cells)
    return table(["", *REGIMES.values(), "error against the forward KL's, KL 0.1"], rows)


def two_token_gradients(generator: torch.Generator) -> dict[str, Gradient]:
    """Gradients for completions of two tokens, on policy, by the logits of the first and, after each, of the second.

    The exact one is that of the KL of whole completions; the deviation is not measured.
    """
    size = 8
    ref, away = torch.randn(2, 1 + size, size, generator=generator, dtype=torch.float64)
    logits = (ref + away / 2).requires_grad_()
    first, second = torch.cartesian_prod(torch.arange(size), torch.arange(size)).T

    def tokens(of: Tensor) -> Tensor:
        """[V², 2] log-probs of both tokens of every completion."""
        logp = of.log_softmax(-1)
        return torch.stack([logp[0, first], logp[1 + first, second]], dim=1)

    logp, ref_logp = tokens(logits), tokens(ref)
    old_logp = logp.detach()
    probability = old_logp.sum(1).exp()
    reward = KLPenalty().kl(old_logp, ref_logp, old_logp).sum(1, keepdim=True)
    losses = {
        "KL": (logp.sum(1).exp() * (logp - ref_logp).sum(1)).sum(),
        **{
            name: (probability * kl(logp, ref_logp, old_logp).sum(1)).sum()
            for name, kl in (("k2", K2()), ("k3", K3()), ("weighted k3", ImportanceWeighted(K3())))
        },
        "k1 in the reward": (probability * (reward * logp).sum(1)).sum(),
    }
    exact, *others = (torch.autograd.grad(loss, logits, retain_graph=True)[0].flatten() for loss in losses.values())
    return {name: Gradient(exact, exact, mean, 0.0) for name, mean in zip(list(losses)[1:], others, strict=True)}


def two_token_table() -> str:
    """The error of each term's mean gradient against that of the KL of whole completions."""
    generator = torch.Generator().manual_seed(0)
    triples = [two_token_gradients(generator) for _ in range(TRIPLES)]
    names = [*triples[0]]
    errors = [number(median(found[name].error(found[name].reverse) for found in triples)) for name in names]
    return table(["", *names], [["error", *errors]])


def measure() -> str:
    """All tables, each under its title."""
    near = {f"KL {kl:g}": draw(kl, 0) for kl in (0.001, 0.01, 0.1, 1)}
    off = {rf"$\pi_{{old}}$ off by {kl:g}": draw(0.1, kl) for kl in (0, 0.01, 0.1)}
    parts = {
        f"Value on policy: {VALUES}": value_table(PLAIN, near),
        f"Value off policy, KL 0.1: {VALUES}": value_table(PLAIN | WEIGHTED, off),
        "Gradient: error against the reverse KL's, and noise": gradient_table(PLAIN | WEIGHTED | REWARD),
        "Gradient for completions of two tokens, on policy: error against the gradient of their KL": two_token_table(),
    }
    return "\n\n".join(f"**{title}**\n\n{rows}" for title, rows in parts.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures the KL estimators exactly on small policies.")
    parser.add_argument("--write", type=Path, help=f"a file with the lines {OPEN} and {CLOSE}")
    options = parser.parse_args(arguments)
    tables = measure()
    if options.write is None:
        print(tables)
        return
    text = options.write.read_text(encoding="utf-8")
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        sys.exit(f"{options.write}: it needs the lines {OPEN} and {CLOSE}, once each")
    before, after = text.split(OPEN)[0], text.split(CLOSE)[1]
    options.write.write_text(f"{before}{OPEN}\n\n{tables}\n\n{CLOSE}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
