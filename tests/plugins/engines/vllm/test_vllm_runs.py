"""Whole runs with VLLMEngine: on a stand-in for vLLM, and with `-m vllm` on vLLM itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import vllm_stand_in
from helpers.command import LETTERS, Grpo, arguments
from helpers.fast import fit, policy_of
from helpers.fitting import scalars
from helpers.programs import programs
from helpers.tiny import read_policy
from torch import Tensor

from grpo_lightning import Policy, UsageError, VLLMEngine
from grpo_lightning.plugins.engines.vllm import vllm_engine as module
from grpo_lightning.plugins.engines.vllm.named_weights import named_weights

ENGINE = ["--model.engine=VLLMEngine", "--model.engine.max_cache_gib=0.06"]
OPTIONS = [
    *ENGINE,
    LETTERS,
    "--model.sampling.max_new_tokens=6",
    "--model.validation.samples=1",
    "--model.optimizer=torch.optim.AdamW",
    "--model.optimizer.lr=0.003",
    "--loop.group_size=4",
    "--loop.prompts_per_step=4",
    "--trainer.max_epochs=2",
    "--data.val_limit=2",
]


@pytest.fixture
def policy_folder(tmp_path: Path) -> Path:
    """A tiny policy with a tied head; what `grpo` leaves at this name is replaced."""
    policy_of("qwen2", scale=0.05, tie_word_embeddings=True, **vllm_stand_in.SIZES).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def found_in(folder: Path | str) -> dict[str, dict[int, float]]:
    """A run's scalars but for the gap, which is rounding alone."""
    found = scalars(folder)
    gaps = found.pop("policy/logp_gap")
    assert max(gaps.values()) < 1e-4
    return found


def test_a_run_and_its_exact_resume(vllm: str, grpo: Grpo, policy_folder: Path) -> None:
    options = [*OPTIONS, f"--model.policy.path={policy_folder}"]
    for more in (["whole"], ["half", "--trainer.max_epochs=1"], ["half", "--ckpt_path=last"]):
        grpo.ok("fit", *options, f"--trainer.default_root_dir={more[0]}", *more[1:])
    whole, resumed = (read_weights(folder) for folder in ("whole", "half"))
    assert whole.keys() == resumed.keys()
    assert [name for name, weight in whole.items() if not weight.equal(resumed[name])] == []
    assert found_in("whole")["reward/mean"] == found_in("half")["reward/mean"]


def read_weights(folder: str) -> dict[str, Tensor]:
    (file,) = Path(folder).rglob("last.ckpt")
    weights: dict[str, Tensor] = torch.load(file, weights_only=False)["state_dict"]
    return weights


def test_weights_that_do_not_arrive_end_the_run_with_likely_causes(
    engine: VLLMEngine, tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_head(policy: Policy, tied_head: bool) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, weight) for name, weight in named_weights(policy, tied_head) if name != "lm_head.weight")

    monkeypatch.setattr(module, "named_weights", without_head)
    with pytest.raises(
        UsageError, match=r"VLLMEngine: the sampler's .* differ by .* nats on average.* Likely causes: vLLM comp"
    ):
        fit(tmp_path / "run", engine=engine, policy=read_policy(policy_folder))


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_the_end_of_a_run_ends_vllm(engine: VLLMEngine, tmp_path: Path, policy_folder: Path) -> None:
    fit(tmp_path / "run", engine=engine, policy=read_policy(policy_folder), trainer={"max_epochs": 1})
    assert engine._llm is None
    assert not torch.distributed.is_initialized()


@pytest.mark.vllm
@pytest.mark.parametrize("vllm", ["vllm"], indirect=True)
def test_two_ranks_learn_as_one_and_validate_unequal_numbers_of_prompts(
    vllm: str, grpo: Grpo, policy_folder: Path, tmp_path: Path
) -> None:
    # Seven questions: one rank has four of them, the other three.
    options = [f"--model.policy.path={policy_folder}", "--data.val_limit=7"]
    grpo.ok("fit", *OPTIONS, *options, "--trainer.default_root_dir=one")
    expected = found_in("one")
    more = [*options, "--trainer.devices=2", "--trainer.strategy=fsdp2", "--trainer.default_root_dir=two"]
    with programs({"two": arguments("fit", *OPTIONS, *more)}, tmp_path, anew=True) as started:
        assert started["two"].wait() == 0, started["two"].errors[-3000:]
    found = found_in(tmp_path / "two")
    for name in ("reward/mean", "policy/entropy", "val/avg@1"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
