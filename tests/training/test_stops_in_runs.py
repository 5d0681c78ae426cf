"""Stop strings through the explorer and a whole run: texts end with the string, and tokens with its last one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.all_tokenizers import STABLE
from helpers.fitting import Digits, KeepsSamples, fit, scalars
from helpers.tiny import model_of, policy_of, prompts_of

from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.scripted import ScriptedEngine
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.plugins.process.reward import ProcessReward
from grpo_lightning.plugins.process.scorers import ArithmeticSegments
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.sandbox.pool import Outcome
from grpo_lightning.training.explorer import Exploration, Explorer
from grpo_lightning.types import FinishReason

ENGINES = {"native": NativeEngine, "plain": PlainEngine}


def explore(engine: Any, policy: Policy, stop: Sequence[str] = (), count: int = 4) -> Exploration:
    explorer = Explorer(engine, Scorer([Digits()]))
    sampling = Sampling(max_new_tokens=30, stop=list(stop))
    return explorer.explore(policy, prompts_of([3, 5, 1]), count, sampling, seed=1, step=0)


def cut(text: str, stop: Sequence[str]) -> str:
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


@pytest.mark.parametrize("kind", STABLE)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_text_that_rewards_see_is_the_unstopped_one_cut_after_the_string(engine: str, kind: str) -> None:
    policy = Policy.from_model(model_of("llama", scale=0.05), STABLE[kind](random.Random(1)))
    whole = explore(ENGINES[engine](), policy)
    pieces = [piece for sample in whole.samples for piece in sample.text.split("\ufffd") if len(piece) > 3]
    ended = 0
    for seed in range(3):
        rng = random.Random(seed)
        stop = [piece[1 : 1 + rng.randint(1, 6)] for piece in rng.choices(pieces, k=2)]
        found = explore(ENGINES[engine](), policy, stop)
        for long, short in zip(whole.samples, found.samples, strict=True):
            assert short.text == cut(long.text, stop)
            has_string = any(string in long.text for string in stop)
            assert short.finish_reason is (FinishReason.STOP if has_string else long.finish_reason)
            assert short.text.endswith(short.stop_string) and bool(short.stop_string) is has_string
            assert short.token_ids == long.token_ids[: len(short.token_ids)]
            ended += has_string
        # What is learned from: the tokens up to the one that completes the string, and their log-probs.
        assert found.rollouts.lengths.tolist() == [len(sample.token_ids) for sample in found.samples]
        assert found.rollouts.truncated.tolist() == [sample.truncated for sample in found.samples]
        with torch.no_grad():
            assert float((policy(found.rollouts).logp - found.rollouts.sampler_logp).abs().max()) < 1e-5
    assert ended > 6


def test_a_stop_token_that_is_text_is_left_out_and_not_searched() -> None:
    """`a` ends completions as a stop token; a stop string with it in can only be there before."""
    policy = policy_of(eos_token_id=[10, 3, 5])
    spell = policy.tokenizer
    assert spell.decode([10]) == "4"
    whole = explore(NativeEngine(), policy, count=16)
    assert any(sample.token_ids[-1] == 10 and len(sample.token_ids) > 1 for sample in whole.samples)
    found = explore(NativeEngine(), policy, ["4"], count=16)
    assert [sample.token_ids for sample in found.samples] == [sample.token_ids for sample in whole.samples]
    assert [sample.text for sample in found.samples] == [sample.text for sample in whole.samples]


def test_segments_of_a_completion_that_a_string_ended(tmp_path: Path) -> None:
    policy = policy_of()
    policy.save_pretrained(tmp_path)
    engine = ScriptedEngine(lambda request, text: "ab7cd")
    (sample,) = explore(engine, policy, ["7c"], count=1).samples[:1]
    assert (sample.text, len(sample.token_ids)) == ("ab7c", 4)
    found = ProcessReward(ArithmeticSegments(), str(tmp_path), splitter=Halves())([sample])
    assert found.status == ["ok"]
    assert [segment.end for segment in found.segments[0]] == [1, 3]


class Halves:
    """Cuts after two characters."""

    def __call__(self, texts: Sequence[str]) -> Any:
        return [Outcome("ok", [2, len(text)]) for text in texts]

    def close(self) -> None: ...


def test_a_fit_learns_from_what_the_strings_leave(tmp_path: Path) -> None:
    stop = ["1", "ab", "c", "Z", "7", "e", "K"]
    rewards = {name: KeepsSamples() for name in ("whole", "stopped")}
    for name, strings in (("whole", []), ("stopped", stop)):
        fit(tmp_path / name, sampling=Sampling(max_new_tokens=12, stop=strings), rewards=[rewards[name]])
    first, step = rewards["whole"].samples[:16], rewards["stopped"].samples[:16]
    assert [sample.text for sample in step] == [cut(sample.text, stop) for sample in first]
    assert sum(bool(sample.stop_string) for sample in step) > 5
    found = scalars(tmp_path / "stopped")
    assert max(found["policy/logp_gap"].values()) < 1e-5
    lengths = [len(sample.token_ids) for sample in step]
    assert found["rollout/length_mean"][0] == pytest.approx(sum(lengths) / len(lengths))
    truncated = sum(sample.truncated for sample in step) / len(lengths)
    assert found["rollout/truncated"][0] == pytest.approx(truncated)
    assert truncated < scalars(tmp_path / "whole")["rollout/truncated"][0]
