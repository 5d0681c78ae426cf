import math

import pytest
import torch
from torch import Tensor

from grpo_lightning.engines.sampling import Sampling, fixed_point_cumsum, sample_tokens

LARGEST = 1 - 2.0**-24
"""The largest uniform number: Philox gives 24 bits. The largest float below 1 is the same."""


def grid(n: int) -> Tensor:
    """The middles of n equal parts of [0, 1)."""
    return (torch.arange(n, dtype=torch.float64) + 0.5).div(n).float()


def shares_of(logits: Tensor, sampling: Sampling, n: int = 20_000) -> Tensor:
    """[V] how often each token is drawn over the grid, as shares."""
    tokens, _ = sample_tokens(logits.expand(n, -1), grid(n), sampling)
    return tokens.bincount(minlength=len(logits)) / n


def kept(probabilities: list[float], sampling: Sampling) -> set[int]:
    """The tokens that may be drawn, by the three filters' definitions; top_p is of what the others leave."""
    tokens = set(range(len(probabilities)))
    if sampling.top_k:
        order = sorted(tokens, key=lambda token: -probabilities[token])
        tokens &= set(order[: sampling.top_k])
    if sampling.min_p:
        tokens &= {token for token in tokens if probabilities[token] >= sampling.min_p * max(probabilities)}
    if sampling.top_p < 1:
        mass, nucleus = sum(probabilities[token] for token in tokens), set()
        for token in sorted(tokens, key=lambda token: -probabilities[token]):
            if sum(probabilities[other] for other in nucleus) / mass >= sampling.top_p:
                break
            nucleus.add(token)
        tokens = nucleus
    return tokens


def softmax(logits: Tensor, temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits.tolist()]
    return [weight / sum(weights) for weight in weights]


LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.4, -4.0, 1.1, 0.0, -30.0])
FILTERS = {
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": 99},
    "top_p": {"top_p": 0.75},
    "top_p tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.15},
    "min_p 1": {"min_p": 1.0},
    "all three": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_frequencies_are_the_softmax_of_the_logits_over_the_temperature(temperature):
    # Over a uniform grid the shares are those of the distribution to 1/n.
    shares = shares_of(LOGITS, Sampling(temperature=temperature))
    assert shares.tolist() == pytest.approx(softmax(LOGITS, temperature), abs=1e-4)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_filters_keep_and_renormalise_what_their_definitions_say(name, temperature):
    sampling = Sampling(temperature=temperature, **FILTERS[name])
    probabilities = softmax(LOGITS, temperature)
    tokens = kept(probabilities, sampling)
    total = sum(probabilities[token] for token in tokens)
    expected = [p / total if token in tokens else 0 for token, p in enumerate(probabilities)]
    assert shares_of(LOGITS, sampling).tolist() == pytest.approx(expected, abs=1e-4)
    token, logp = sample_tokens(LOGITS.expand(1000, -1), grid(1000), sampling)
    for t, value in zip(token.tolist(), logp.tolist(), strict=True):
        assert value == pytest.approx(math.log(expected[t]), abs=1e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_a_filtered_token_is_never_drawn_even_by_the_largest_number(name):
    # Many rows of many tokens, so that the cumulated float32 probabilities end on either side of 1.
    logits = 3 * torch.randn(2000, 300, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(**FILTERS[name])
    for uniform in (0.0, 0.5, LARGEST):
        _, logp = sample_tokens(logits, torch.full((2000,), uniform), sampling)
        # What is noted is the log-prob under the filtered distribution: -inf for a filtered token.
        assert logp.isfinite().all()


def test_the_largest_number_stays_below_every_total():
    totals = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # all of [1, 2)
    assert totals[0] == 1 and bool((LARGEST * totals < totals).all())


def test_top_k_keeps_all_of_equally_likely_tokens():
    shares = shares_of(torch.tensor([1.0, 3.0, 1.0, 0.0]), Sampling(top_k=2))
    total = 2 * math.e + math.e**3
    assert shares.tolist() == pytest.approx([math.e / total, math.e**3 / total, math.e / total, 0], abs=1e-4)


@pytest.mark.parametrize("uniform", [0.0, LARGEST])
def test_tokens_of_no_probability_at_the_ends_are_never_drawn(uniform):
    logits = torch.tensor([-torch.inf, -1e9, 0.0, 1.0, -1e9, -torch.inf])
    token, logp = sample_tokens(logits.expand(3, -1), torch.full((3,), uniform), Sampling())
    assert token.tolist() == [2 if uniform == 0 else 3] * 3
    assert logp.isfinite().all()


def test_greedy_takes_the_likeliest_token_with_its_plain_log_prob():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 1.0, 1.0]])
    token, logp = sample_tokens(logits, torch.tensor([0.99, 0.99]), Sampling(temperature=0.0))
    assert token.tolist() == [1, 0]
    expected = [2 - math.log(1 + math.e + math.e**2), 5 - math.log(math.e**5 + 2 * math.e)]
    assert logp.tolist() == pytest.approx(expected, abs=1e-6)


def test_unfiltered_means_that_every_token_can_be_drawn():
    assert Sampling(temperature=0.7).unfiltered
    for filtered in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}):
        assert not Sampling(**filtered).unfiltered


def test_fixed_point_sums_are_exact_and_never_dip():
    probability = (5 * torch.randn(50, 3000, generator=torch.Generator().manual_seed(0))).softmax(-1)
    probability[:, 100:200] = 0
    sums = fixed_point_cumsum(probability)
    torch.testing.assert_close(sums, probability.double().cumsum(-1), atol=3000 * 2.0**-40, rtol=0)
    steps = sums.diff(dim=-1)
    assert (steps >= 0).all()
    assert (steps[:, 99:199] == 0).all()
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    assert fixed_point_cumsum(probability[:, order])[:, -1].equal(sums[:, -1])
