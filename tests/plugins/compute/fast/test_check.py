"""What an engine cannot decode it refuses before the run, in a sentence that says what to do."""

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.families import save
from helpers.fast import policy_of

from grpo_lightning import NativeEngine, PlainEngine, Sampling, UsageError
from grpo_lightning.policy.architecture import cache_name

SAMPLING = Sampling(max_new_tokens=4)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(
    ("engine_class", "autocast"), [(NativeEngine, False), (NativeEngine, True), (PlainEngine, False)]
)
def test_a_wrong_cache_is_found_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch, engine_class: type[Any], autocast: bool
) -> None:
    """Under autocast too, which would let an error below the rounding of bfloat16 through."""
    policy = policy_of("gpt2", scale=0.05)
    hidden = type(policy.model.base_model).forward

    @wraps(hidden)
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = hidden(self, *args, **kwargs)
        if kwargs.get(cache_name(self)) is not None and output.last_hidden_state.shape[1] == 1:
            output.last_hidden_state = output.last_hidden_state * 1.05
        return output

    monkeypatch.setattr(type(policy.model.base_model), "forward", wrong)
    refused = pytest.raises(
        UsageError, match=r"cannot decode GPT2LMHeadModel \(its log-probs would be off by .*\): use"
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), refused:
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
