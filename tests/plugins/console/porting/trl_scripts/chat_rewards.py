"""Rewards of conversational_script.py: completions are lists of messages."""


def right(completions, answer, **kwargs):
    """1 for a completion that holds the answer."""
    return [float(str(gold) in completion[0]["content"]) for completion, gold in zip(completions, answer, strict=True)]


async def short(prompts, completions, completion_ids, **kwargs):
    """1 for no token, and less for more."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [1 / (1 + len(ids)) for ids in completion_ids]
