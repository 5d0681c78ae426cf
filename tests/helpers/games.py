"""Games of `Guess` that a script plays, explored as a step of a run."""

from grpo_lightning import EnvironmentReward, Exploration, Explorer, Policy, Reward, Sampling, Scorer, ScriptedEngine
from grpo_lightning.plugins.data.conversations.conversations import Conversations
from grpo_lightning.plugins.data.conversations.instances import Limits
from grpo_lightning.types import Prompt, Question, RandomKey
from helpers.fast import policy_of
from helpers.guessing import Guess, thinking
from helpers.loading import load_tool


def player(**overrides: int) -> Policy:
    """A tiny policy with a tokenizer that has tags and line breaks."""
    policy = policy_of(vocab_size=128, **overrides)
    policy.tokenizer = load_tool("make_tiny_policy").make_tokenizer()
    policy.model.config.eos_token_id = policy.model.generation_config.eos_token_id = policy.tokenizer.eos_token_id
    return policy


def explore(policy: Policy, template: str, *rewards: Reward) -> tuple[Explorer, Exploration]:
    """Two games of three samples each, of two turns, or of one that is right at once; `rewards` score them too."""
    policy.tokenizer.chat_template = template
    explorer = Explorer(ScriptedEngine(thinking), Scorer([EnvironmentReward(), *rewards]))
    explorer.sampler = Conversations(Guess(), Limits(max_turns=2), chat=True)
    prompts = [Prompt(7 + row, "guess", [9], Question("guess", answer)) for row, answer in enumerate("15")]
    try:
        return explorer, explorer.explore(policy, prompts, 3, Sampling(max_new_tokens=60), RandomKey(1, 2))
    finally:
        explorer.close()
