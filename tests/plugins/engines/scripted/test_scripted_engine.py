"""The completions of a scripted engine are its function's texts."""

from helpers.drawing import PROMPTS, draw
from helpers.tiny import policy_of, tokenizer

from grpo_lightning import ScriptedEngine
from grpo_lightning.types import FinishReason, Request


def test_completions_are_the_texts_of_the_function() -> None:
    policy = policy_of()
    engine = ScriptedEngine(lambda request, text: f"{request.prompt_id}x{text[0]}{request.sample}")
    completions = draw(engine, policy, Request.from_prompts(PROMPTS[:2], 3))
    texts = [tokenizer().decode(c.token_ids, skip_special_tokens=True) for c in completions]
    first, second = (prompt.text[0] for prompt in PROMPTS[:2])
    assert texts == [f"10x{first}{sample}" for sample in range(3)] + [f"20x{second}{sample}" for sample in range(3)]
    assert all(c.token_ids[-1] == 3 and c.finish_reason is FinishReason.STOP for c in completions)
    assert all(c.logp is None for c in completions)
    assert not engine.shares_weights
