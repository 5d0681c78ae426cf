"""Decoding that shares a group's prompt draws what the plain engine draws."""

import pytest
import torch
from helpers.drawing import draw, tokens
from helpers.tiny import SHAPES, forced_logp, policy_of, requests_of
from torch import Tensor

from grpo_lightning import NativeEngine, PlainEngine, RandomKey
from grpo_lightning.plugins.engines.native import shared_prompts
from grpo_lightning.plugins.engines.native.shared_prompts import SharedPrompts, is_worth


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sharing is worth it from the first byte; here stand the rows of each of its calls."""
    found: list[int] = []
    attend = SharedPrompts.attend

    def counted(shared: SharedPrompts, layer: int, query: Tensor, *others: object) -> Tensor:
        found.append(len(query))
        return attend(shared, layer, query, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_prompts, "SAVED_BYTES", 1)
    monkeypatch.setattr(SharedPrompts, "attend", counted)
    return found


@pytest.mark.parametrize("lengths", [[20, 17, 24, 17, 9], [16, 16, 16]], ids=["ragged", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tokens_are_those_of_the_plain_engine(calls: list[int], shape: str, lengths: list[int]) -> None:
    policy, requests = policy_of(shape), requests_of(lengths, 4)
    expected, actual = (
        draw(engine, policy, requests, 16, RandomKey(1, 2)) for engine in (PlainEngine(), NativeEngine(check_every=2))
    )
    assert tokens(actual) == tokens(expected)
    # The trial has four rows; of these completions some end on the way.
    assert max(calls) == len(requests) and {*calls} - {4, len(requests)}
    for request, completion in zip(requests, actual, strict=True):
        logp = forced_logp(policy.model, request.token_ids, completion.token_ids)
        assert completion.logp == pytest.approx(logp.tolist(), abs=1e-5)


def test_a_model_with_windows_keeps_copies(calls: list[int]) -> None:
    policy, requests = policy_of("mistral", sliding_window=8), requests_of([20, 18], 3)
    assert tokens(draw(NativeEngine(), policy, requests, 16)) == tokens(draw(PlainEngine(), policy, requests, 16))
    assert calls == []


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)], ids=str)
def test_attention_to_prompt_and_own_keys_is_attention_to_both(dtype: torch.dtype, within: float) -> None:
    # Scores far apart: one of the two may weigh nothing.
    torch.manual_seed(0)
    prompt, lengths = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([6, 4, 1])
    query = (4 * torch.randn(6, 4, 1, 8)).to(dtype)
    states = [torch.randn(3, 2, 6, 8).to(dtype) for _ in range(2)]
    keys, values = (torch.randn(6, 2, 5, 8).to(dtype) for _ in range(2))
    for rows in (torch.arange(6), torch.tensor([0, 2, 4]), torch.tensor([5])):
        shared = SharedPrompts([states], lengths, prompt)
        shared.keep(rows)
        assert len(shared.layers[0][0]) == len({*prompt[rows].tolist()})
        found = shared.attend(0, query[rows], keys[rows], values[rows], 0.6)
        for index, row in enumerate(rows.tolist()):
            for head in range(4):
                of, end = (int(prompt[row]), head // 2), int(lengths[prompt[row]])
                key = torch.cat([states[0][of][:end], keys[row, head // 2]]).double()
                value = torch.cat([states[1][of][:end], values[row, head // 2]]).double()
                expected = (key @ query[row, head, 0].double() * 0.6).softmax(-1) @ value
                assert torch.allclose(found[index, head, 0].double(), expected, atol=within)


def test_short_prompts_and_gpus_keep_copies() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert is_worth(64, 64, 2**25, cpu) and not is_worth(63, 64, 2**25, cpu)
    assert not is_worth(64, 64, 2**25 - 1, cpu) and not is_worth(64, 64, 2**30, cuda)
