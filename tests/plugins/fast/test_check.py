"""What an engine cannot decode it refuses before the run, in a sentence that says what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.families import save
from helpers.fast import policy_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from grpo_lightning import Fast, NativeEngine, PlainEngine, Policy, Sampling, UsageError

SAMPLING = Sampling(max_new_tokens=4)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def load(family: str, folder: Path) -> Policy:
    save(family, str(folder))
    policy = Policy(str(folder), compute=Fast())
    policy.load()
    return policy


@pytest.mark.parametrize(
    ("family", "why"),
    [
        # Wrong numbers before: their attention is their own.
        ("gptj", "its attention cannot be exchanged"),
        ("gpt_neox_japanese", "its attention cannot be exchanged"),
        ("mpt", "its attention cannot be exchanged"),
        # Raw exceptions before.
        ("bloom", "its attention cannot be exchanged"),
        ("doge", "The size of tensor a .*"),
        ("falcon_h1", "its cache is not keys and values alone"),
        ("gpt_oss", "attention with s_aux"),
    ],
)
def test_native_refuses_what_plain_decodes(tmp_path: Path, family: str, why: str) -> None:
    policy = load(family, tmp_path)
    with pytest.raises(UsageError) as refused:
        NativeEngine().check(policy, SAMPLING)
    name = type(policy.model).__name__
    assert refused.match(rf"^model\.engine=NativeEngine cannot decode {name} \({why}\): use model\.engine=PlainEngine$")
    PlainEngine().check(policy, SAMPLING)


@pytest.mark.parametrize("engine_class", [NativeEngine, PlainEngine])
def test_a_wrong_cache_is_found_by_its_numbers(monkeypatch: pytest.MonkeyPatch, engine_class: type[Any]) -> None:
    policy = policy_of("gpt2")
    hidden = type(policy.model.base_model).forward

    def wrong(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = hidden(self, *args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None and output.last_hidden_state.shape[1] == 1:
            output.last_hidden_state = output.last_hidden_state + 0.01
        return output

    monkeypatch.setattr(type(policy.model.base_model), "forward", wrong)
    with pytest.raises(UsageError, match=r"cannot decode GPT2LMHeadModel \(its log-probs would be off by .*\): use"):
        engine_class().check(policy, SAMPLING)


@pytest.mark.parametrize("engine_class", [NativeEngine, PlainEngine])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_check_leaves_everything_as_it_was(shape: str, engine_class: type[Any], autocast: bool) -> None:
    policy = policy_of(shape)
    policy.model.train()
    state, attention = torch.get_rng_state(), policy.model.config._attn_implementation
    weights = {name: value.clone() for name, value in policy.model.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        engine_class().check(policy, SAMPLING)
    assert torch.get_rng_state().equal(state)
    assert policy.model.training
    assert policy.model.config._attn_implementation == attention
    assert all(value.equal(weights[name]) for name, value in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_under_autocast_float32_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # An error below the rounding of bfloat16 is found, which the tolerance for it would let through.
    policy = policy_of("gpt2", scale=0.05)
    hidden = type(policy.model.base_model).forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = hidden(self, *args, **kwargs)
        if output.last_hidden_state.shape[1] == 1:
            output.last_hidden_state = output.last_hidden_state * 1.05
        return output

    monkeypatch.setattr(type(policy.model.base_model), "forward", wrong)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match="off by"):
        NativeEngine().check(policy, SAMPLING)


@pytest.mark.trial
@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_a_refused_model_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Grpo, subcommand: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save("gptj", "policy")
    Path("rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    code, out, err = command(subcommand, "--data.task.predict=rows.jsonl")
    assert code == 2
    assert err.splitlines()[-1] == (
        "grpo: error: model.engine=NativeEngine cannot decode GPTJForCausalLM (its attention cannot be exchanged): "
        "use model.engine=PlainEngine"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "rows.jsonl"]
    assert "Traceback" not in out + err


def test_weights_that_are_shared_out_over_ranks(mesh: DeviceMesh) -> None:
    # FSDP2 over one process: weights are gathered for the check and shared out again.
    policy = policy_of()
    policy.shard(mesh)
    NativeEngine().check(policy, SAMPLING)
    PlainEngine().check(policy, SAMPLING)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
