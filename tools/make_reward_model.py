"""Makes a first reward model for demonstrations: the tiny policy with a head that separates right sums from wrong.

It answers training questions with the policy, labels the answers by the verifier, and trains the policy's weights and a
new head on them, as `LearnedReward` does between iterations. The training data is saved beside the weights, in
seed.jsonl: replay begins with it.

    python tools/make_reward_model.py --policy grpo_lightning:tiny_policy --out runs/tiny_reward_model
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.explore import Explorer
from grpo_lightning.plugins.data.arithmetic.arithmetic import Arithmetic
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.plugins.rewards.learned.learned_reward import SEED, LearnedReward
from grpo_lightning.plugins.rewards.learned.pairwise_loss import BinaryCrossEntropy, BradleyTerry, SumOf
from grpo_lightning.plugins.rewards.learned.replay import Replay
from grpo_lightning.plugins.rewards.learned.reward_model_update import RewardUpdate
from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.types import Prompt, RandomKey, Sample, UsageError

GROUP_SIZE = 8
BATCH = 8


def answers(policy: Policy, count: int, max_new_tokens: int, seed: int) -> list[Sample]:
    """`GROUP_SIZE` answers to each of the first `count` training questions of the quickstart."""
    questions = Arithmetic().questions("train")[:count]
    prompts = [
        Prompt(row, question.text, policy.tokenizer.encode(question.text), question)
        for row, question in enumerate(questions)
    ]
    policy.load()
    explorer = Explorer(NativeEngine(), Scorer([MathVerifier()]))
    with torch.no_grad():
        sampling = Sampling(max_new_tokens=max_new_tokens)
        return explorer.sample(policy, prompts, GROUP_SIZE, sampling, RandomKey(seed, 0))


def make(
    out: Path,
    policy: Path = Path("grpo_lightning:tiny_policy"),
    seed: int = 0,
    questions: PositiveInt = 1024,
    num_passes: PositiveInt = 8,
    lr: float = 7e-4,
    max_new_tokens: PositiveInt = 32,
) -> None:
    """Makes a first reward model from the policy's own weights and answers.

    Args:
        out: Folder to save it in.
        policy: Folder of the policy, or `grpo_lightning:tiny_policy`.
        seed: Seed of answers and training.
        questions: Number of training questions, 8 answers each.
        num_passes: Passes over the answers.
        lr: Learning rate.
        max_new_tokens: Most tokens of an answer.
    """
    start = time.perf_counter()
    torch.manual_seed(seed)
    samples = answers(Policy(str(policy)), questions, max_new_tokens, seed)
    verifier = MathVerifier(weight=0)
    reward = LearnedReward(
        str(policy),
        grader=verifier.name,
        update=RewardUpdate(SumOf([BinaryCrossEntropy(), BradleyTerry()]), num_passes, BATCH, lr),
        replay=Replay(seed=seed),
    )
    scorer = Scorer([verifier, reward])
    try:
        scorer.read_questions([sample.prompt.question for sample in samples])
        found = reward.learn(samples, scorer(samples), iteration_ends=True)
    finally:
        scorer.close()
    if "new_before" not in found:
        raise UsageError(f"--questions {questions}: too few to hold some out; give more")
    reward.model.model.save_pretrained(out)
    reward.model.tokenizer.save_pretrained(out)
    groups = [*reward.iterations.history, *reward.iterations.test]
    (out / SEED).write_text("".join(json.dumps(asdict(group)) + "\n" for group in groups), encoding="utf-8")
    print(
        f"{out}: {time.perf_counter() - start:.0f} s; {len(samples)} answers, {found['verified']:.3f} of them right; "
        f"accuracy within held-out prompts {found['new_before']:.3f} -> {found['new_after']:.3f}"
    )


def main(args: list[str] | None = None) -> None:
    """The command line."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    disable_progress_bar()
    try:
        auto_cli(make, args, as_positional=False)
    except UsageError as error:
        sys.exit(f"make_reward_model: {error}")


if __name__ == "__main__":
    main()
