"""GRPO without Lightning: DeepSeekMath's Algorithm 1 (arXiv 2402.03300) with this package, on one device.

    python examples/one_step.py grpo_lightning:tiny_policy

The policy is installed with the package. Numbers in comments are the algorithm's lines. `grpo fit` computes the same
gradients (tests/test_examples.py compares them). It adds clipping, minibatches, several devices, checkpoints and logs.
"""

import sys
from collections.abc import Sequence

import torch

import grpo_lightning as grpo

STEPS, PROMPTS, G, MU, MAX_TOKENS = 10, 32, 8, 1, 16384  # MAX_TOKENS: in one forward and backward
SAMPLING = grpo.Sampling(max_new_tokens=32)


def one_step(
    policy: grpo.Policy,
    reference: grpo.PolicySnapshot,
    optimizer: torch.optim.Optimizer,
    scorer: grpo.Scorer,
    prompts: Sequence[grpo.Prompt],
    step: int,
) -> float:
    """Makes one exploration step with its updates. Returns the mean reward."""
    # 7: sample G completions of each prompt. The engine reads the policy's weights; it decodes all requests together.
    engine = grpo.NativeEngine()
    engine.sync(policy)
    requests = grpo.Request.from_prompts(prompts, G)
    completions = engine.complete(requests, SAMPLING, grpo.RandomKey(seed=0, step=step))
    token_ids = [completion.token_ids for completion in completions]
    prompt_of_completion = [index // G for index in range(len(completions))]

    # 8: compute the rewards of the texts, without the stop token.
    samples = []
    for prompt_index, completion in zip(prompt_of_completion, completions, strict=True):
        has_stop = completion.finish_reason is grpo.FinishReason.STOP
        text_ids = completion.token_ids[:-1] if has_stop else completion.token_ids
        text = policy.tokenizer.decode(text_ids, skip_special_tokens=True)
        samples.append(grpo.Sample(prompts[prompt_index], text, completion.token_ids, completion.finish_reason))
    # The total is the weighted sum of all rewards; NaN where one of them failed.
    reward = torch.tensor(scorer(samples).total, dtype=torch.float64)

    # 9: compute the advantage of each completion in its group: (reward - mean) / standard deviation of the group.
    # Each token gets the advantage of its completion. Rollouts are flat vectors over all sampled tokens, one completion
    # after the other, without padding.
    rollouts = grpo.Rollouts.from_lists(
        prompts=[prompt.token_ids for prompt in prompts],
        group=prompt_of_completion,
        completions=token_ids,
        temperature=SAMPLING.temperature,
    )
    rollouts.advantage = rollouts.per_token(grpo.GroupStd()(reward, rollouts.group))

    # The weight of each token in the average is fixed before the passes. Here it is 1 / (B |o_i|).
    objective = grpo.Objective(beta=0.04)
    batch_size = grpo.BatchSize(len(rollouts), len(prompts), rollouts.num_tokens)
    rollouts.weight = objective.token_weight(rollouts, batch_size)

    # Micro-batches go through the model one by one. Their gradients add up to the gradient of the whole batch.
    # Where the model reads a prompt once for all completions of its group, groups stay together.
    micro_batches = rollouts.micro_batches(MAX_TOKENS, by_group=policy.compute.shares_prefix)

    # 6: the old policy is the policy before the updates. The updates need its log-probs, but not its weights.
    # Some references have tensors for a part of the model alone, so each is called with the policy.
    with torch.no_grad():
        for micro_batch in micro_batches:
            micro_batch.old_logp = policy(micro_batch).logp
            micro_batch.ref_logp = reference(policy, micro_batch)

    # 10: for GRPO iteration = 1, ..., mu
    for _ in range(MU):
        # 11: update the policy by maximising the objective, Eq. 3.
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            scored = policy(micro_batch)
            value, _ = objective(scored.logp, scored.entropy, micro_batch)
            (-value).backward()
        optimizer.step()
    return float(reward.nanmean())


def main() -> None:
    """Makes ten steps of one iteration, and prints the mean reward of each."""
    policy = grpo.Policy(sys.argv[1])  # 1: the policy is the initial policy
    policy.load()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, weight_decay=0.0)
    scorer = grpo.Scorer([grpo.MathVerifier(), grpo.FormatReward(weight=0.2)])
    # Rewards learn here on what they run: some load a model, and some punish long completions.
    scorer.setup(grpo.Run(policy.device, policy.tokenizer, SAMPLING.max_new_tokens))
    questions = grpo.Arithmetic().questions("train")
    reference = grpo.FrozenCopy()
    reference.refresh(policy)  # 3: the reference is the policy
    for step in range(STEPS):  # 4: for step = 1, ..., M
        prompts = []  # 5: take a batch of prompts
        for row in range(step * PROMPTS, (step + 1) * PROMPTS):
            question = questions[row]
            token_ids = policy.tokenizer.encode(question.text)
            prompts.append(grpo.Prompt(id=row, text=question.text, token_ids=token_ids, question=question))
        print(f"step {step + 1}: mean reward {one_step(policy, reference, optimizer, scorer, prompts, step):.3f}")
    scorer.close()


if __name__ == "__main__":
    main()
