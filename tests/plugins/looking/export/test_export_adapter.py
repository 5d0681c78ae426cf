"""`grpo export` of a run with an adapter: the adapter alone, or merged into the model."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers.command import arguments, furnish
from helpers.fast import policy_of
from helpers.programs import succeed
from helpers.tiny import read_policy, rollouts_of
from peft import PeftModel
from test_export import LAST, LEARNS, export, weights_in
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning import Fast, LoRA, Policy

IDS = torch.arange(6, 30)[None]
# PEFT asks by a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture(scope="module", params=["lora", "dora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A folder with a run of two steps whose adapter has moved, and whether it is DoRA."""
    dora = request.param == "dora"
    folder = tmp_path_factory.mktemp(request.param)
    furnish(folder)
    adapter = f"{{class_path: LoRA, init_args: {{rank: 4, dora: {str(dora).lower()}}}}}"
    options = ["--trainer.max_epochs=2", *LEARNS, f"--model.policy.adapter={adapter}"]
    succeed({"run": arguments("fit", *options)}, folder)
    return folder, dora


@pytest.fixture
def trained(run: tuple[Path, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """The policy with what its checkpoint has, in a working directory that may be changed."""
    folder, dora = run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # With transformers' own layers, to compare bits.
    policy = read_policy("policy", adapter=LoRA(rank=4, dora=dora), compute=Fast(fused=False))
    policy.model.load_state_dict(weights_in(LAST), strict=False)
    assert float((logp(policy.model) - logp(AutoModelForCausalLM.from_pretrained("policy"))).abs().max()) > 1e-3
    return policy


@torch.no_grad()
def logp(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits.log_softmax(-1)


def test_the_adapter_is_one_that_peft_reads(trained: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert export("run", "--out", "out", "--as", "adapter") == 0
    names = {path.name for path in Path("out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= names
    assert not any(name.startswith("model") for name in names)
    base = AutoModelForCausalLM.from_pretrained("policy")
    assert logp(PeftModel.from_pretrained(base, "out").eval()).equal(logp(trained.model))
    card = Path("out", "README.md").read_text()
    assert yaml.safe_load(card.split("---\n", 2)[1])["library_name"] == "peft"
    trained.save_pretrained("saved")
    base = AutoModelForCausalLM.from_pretrained("policy")
    assert logp(PeftModel.from_pretrained(base, "saved").eval()).equal(logp(trained.model))
    count = sum(value.numel() for value in trained.trained_state_dict().values())
    assert f"{count:,} parameters, float32" in card


def test_merged_it_is_a_model_like_any_other(trained: Policy) -> None:
    assert export("run", "--out", "out") == 0
    assert not Path("out", "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained("out")
    base = AutoModelForCausalLM.from_pretrained("policy")
    assert model.state_dict().keys() == base.state_dict().keys()
    assert torch.allclose(logp(model), logp(trained.model), atol=1e-5)
    policy = read_policy("out")
    rollouts = rollouts_of([5, 3, 7])
    with torch.no_grad():
        assert torch.allclose(policy(rollouts).logp, trained(rollouts).logp, atol=1e-5)
    assert AutoTokenizer.from_pretrained("out").get_vocab() == trained.tokenizer.get_vocab()


def test_mistakes(trained: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path("run", "config.yaml")
    text = config.read_text()
    capsys.readouterr()
    config.write_text(text.replace("rank: 4", "rank: 3"))
    assert export("run", "--out", "out", "--as", "adapter") == 2
    assert "[3, 32] in the model" in capsys.readouterr().err
    config.write_text(text)
    policy_of(seed=1).save_pretrained("policy")
    assert export("run", "--out", "out") == 2
    assert "was trained on other weights" in capsys.readouterr().err
    assert not Path("out").exists()
