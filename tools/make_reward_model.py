"""Makes a first reward model for demonstrations: the tiny policy with a head that separates right sums from wrong.

It answers training questions with the policy, labels the answers by the verifier, and trains the policy's weights and a
new head on them, as `LearnedReward` does between iterations. The training data is saved beside the weights, in
seed.jsonl: replay begins with it.

    python tools/make_reward_model.py --policy runs/tiny_policy --out runs/tiny_reward_model
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.plugins.learned.labelled import write_labelled
from grpo_lightning.plugins.learned.loss import BinaryCrossEntropy, BradleyTerry, SumOf
from grpo_lightning.plugins.learned.reward import SEED, LearnedReward
from grpo_lightning.plugins.verifier.math_verifier import MathVerifier
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.tasks.arithmetic import Arithmetic
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.types import Prompt, Sample, UsageError

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
        return explorer.sample(policy, prompts, GROUP_SIZE, Sampling(max_new_tokens=max_new_tokens), seed, step=0)[1]


def make(
    policy: Path, out: Path, seed: int = 0, questions: int = 1024, num_passes: int = 8, lr: float = 7e-4,
    max_new_tokens: int = 32,
) -> None:  # fmt: skip
    """Makes the reward model, saves it in `out`, and prints one line. The arguments are those of the command."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    samples = answers(Policy(str(policy)), questions, max_new_tokens, seed)
    verifier = MathVerifier(weight=0)
    reward = LearnedReward(
        str(policy),
        labeller=verifier.name,
        loss=SumOf([BinaryCrossEntropy(), BradleyTerry()]),
        num_passes=num_passes,
        batch_size=BATCH,
        lr=lr,
        seed=seed,
    )
    scorer = Scorer([verifier, reward])
    try:
        scorer.read_questions([sample.prompt.question for sample in samples])
        found = reward.learn(samples, scorer(samples), iteration_ends=True)
    finally:
        scorer.close()
    if "new_before" not in found:
        raise UsageError(f"--questions {questions}: too few to hold some out; give more")
    reward.model.save_pretrained(out)
    write_labelled(out / SEED, [*reward.history, *reward.test])
    print(
        f"{out}: {time.perf_counter() - start:.0f} s; {len(samples)} answers, {found['verified']:.3f} of them right; "
        f"accuracy within held-out prompts {found['new_before']:.3f} -> {found['new_after']:.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Makes a first reward model from the policy's own weights and answers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", type=Path, default=Path("runs/tiny_policy"), help="folder of the policy")
    parser.add_argument("--out", type=Path, required=True, help="folder to save it in")
    parser.add_argument("--seed", type=int, default=0, help="of answers and training")
    parser.add_argument(
        "--questions", type=int, default=1024, help=f"number of training questions, {GROUP_SIZE} answers each"
    )
    parser.add_argument("--num-passes", type=int, default=8, help="passes over the answers")
    parser.add_argument("--lr", type=float, default=7e-4, help="learning rate")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="most tokens of an answer")
    options = parser.parse_args(arguments)
    for name in ("questions", "num_passes", "max_new_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    disable_progress_bar()
    try:
        make(**vars(options))
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
