"""What the check for a first GPU tries before it enters the package, on a CPU."""

import importlib
import sys
from typing import Any

import pytest
import torch
from helpers.fast import policy_of
from helpers.paths import ROOT
from helpers.tiny import rollouts_of
from torch import Tensor

from grpo_lightning import NativeEngine, RandomKey, Request, Sampling


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the check, by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "gpu" / "check"))
    yield importlib.import_module
    for name in ("static_decoding", "varlen_attention"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["float32", "bfloat16"])
def test_static_decoding_draws_the_engines_tokens(is_mixed: bool, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, engine, new = policy_of("llama"), NativeEngine(), 13
    monkeypatch.setattr(type(policy), "stop_ids", frozenset())  # it draws past the end of a completion
    prompts = [[5 + row] * length for row, length in enumerate((4, 1, 9, 4))]
    requests = [Request(prompt, index, sample) for index, prompt in enumerate(prompts) for sample in range(3)]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed, cache_enabled=False), torch.no_grad():
        engine.sync(policy)
        expected = engine.complete(requests, Sampling(max_new_tokens=new), RandomKey())
        decoder = module("static_decoding").StaticDecoder(engine, requests, new, RandomKey())
        decoder.prepare(capture=False)
        token_ids, logps = decoder.decode()
    assert all(len(one.token_ids) == new for one in expected)
    # In 16 bits attention over further columns rounds otherwise, which may move a draw over a boundary.
    is_same = torch.tensor([one.token_ids for one in expected]) == token_ids
    assert float(is_same.all(1).float().mean()) >= (0.8 if is_mixed else 1)
    gap = (logps - torch.tensor([one.logp for one in expected])).abs()
    is_same_so_far = is_same.int().cumprod(1).bool()
    assert float(gap[is_same_so_far].max()) < (0.05 if is_mixed else 1e-5)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, rows: Any, scaling: float | None) -> Tensor:
    """What `varlen_attn` computes, a row after the other."""
    outputs = []
    bounds = [starts.tolist() for starts in (rows.query_starts, rows.key_starts)]
    for start, end, first, last in zip(*(b for one in bounds for b in (one[:-1], one[1:])), strict=True):
        states = [query[start:end], key[first:last], value[first:last]]
        q, k, v = (each.transpose(0, 1) for each in states)
        seen = torch.ones(end - start, last - first, dtype=torch.bool).tril(last - first - (end - start))
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=seen, scale=scaling, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)


def test_varlen_rows_are_those_of_a_shared_prefix(module: Any) -> None:
    policy = policy_of("llama").train()
    rollouts = rollouts_of([20, 1, 5, 30, 7], prompt_lengths=[9, 5], group=[0, 0, 0, 1, 1])
    varlen = module("varlen_attention")
    rows = varlen.Rows.from_rollouts(rollouts, "cpu")
    results = []
    for context in (torch.enable_grad(), varlen.varlen_attention(rows, row_by_row)):
        with context:
            logp = policy(rollouts).logp
        results.append([logp.detach(), *torch.autograd.grad(logp.sum(), list(policy.parameters()))])
    assert policy.compute.shares_prefix
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
