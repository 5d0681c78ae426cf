"""Makes a tiny, mediocre policy for demonstrations: a character-level Qwen2 that half knows how to add.

It is trained for a minute on worked sums, of which a share goes wrong at a random digit. So it can do the sums, but
samples right answers only about a third of the time: what GRPO is there to mend.

    python tools/make_tiny_policy.py --out runs/tiny_policy
"""

import argparse
import random
import re
import string
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_lightning.tasks import Arithmetic
from grpo_lightning.types import Question

PAD, EOS = "<pad>", "<eos>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
BATCH = 128
MAX_NEW_TOKENS = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, plus the tags (which decoding keeps), padding and end."""
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *TAGS, *characters])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    backend.add_tokens(TAGS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, padding_side="left", clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """A blank Qwen2 in float32, with heads of 32 and half as many key-value heads as heads."""
    heads = hidden // 32
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def worked_solution(expression: str, slip: random.Random | None) -> str:
    """The written method, column by column: `47+85` -> `<think>7+5=12 4+8+1=13</think><answer>132</answer>`.

    Args:
        expression: Two numbers and `+` or `-`. The smaller is taken from the larger: `7-47` is `-(47-7)`.
        slip: Where given, one digit goes wrong, and what follows is right for that digit.
    """
    left, operator, right = re.match(r"(\d+)([+-])(\d+)", expression).groups()  # type: ignore[union-attr]
    negative = operator == "-" and int(left) < int(right)
    high, low = (right, left) if negative else (left, right)
    width = max(len(high), len(low))
    high, low = high.zfill(width), low.zfill(width)
    slip_at = slip.randrange(width + 1) if slip else None
    steps, digits, carry = [], "", 0
    for column in range(width):
        a, b = int(high[-1 - column]), int(low[-1 - column])
        value = a + b + carry if operator == "+" else a - b - carry
        borrowed = operator == "-" and value < 0
        value += 10 * borrowed
        if column == slip_at:
            assert slip
            value = slip.choice([v for v in range(20 if operator == "+" else 10) if v != value])
        steps.append(f"{a}{operator}{b}{operator + '1' if carry else ''}={value}")
        digits = f"{value % 10}{digits}"
        carry = value // 10 if operator == "+" else int(borrowed)
    answer = str(int(f"{carry}{digits}" if operator == "+" else digits))
    if slip_at == width:
        assert slip
        place = slip.randrange(len(answer))
        wrong = slip.choice([d for d in string.digits if d != answer[place]])
        answer = answer[:place] + wrong + answer[place + 1 :]
    sign = "-" if negative and answer != "0" else ""
    return f"<think>{' '.join(steps)}</think><answer>{sign}{answer}</answer>"


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    steps: int,
    wrong: float,
    learning_rate: float,
    chance: random.Random,
) -> None:
    """Supervised training on fresh solutions of `questions`, right ones and wrong ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.15)
    ids = tokenizer.convert_tokens_to_ids
    for step in range(steps):
        batch = chance.choices(questions, k=BATCH)
        rows, starts = [], []
        for question in batch:
            slip = chance if chance.random() < wrong else None
            solution = worked_solution(question.metadata["expression"], slip)
            prompt = tokenizer(question.text)["input_ids"]
            rows.append(prompt + tokenizer(solution)["input_ids"] + [tokenizer.eos_token_id])
            starts.append(len(prompt))
        length = max(map(len, rows))
        inputs = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
        labels = inputs.clone()
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            labels[i, :start] = -100
            labels[i, len(row) :] = -100
        loss = model(input_ids=inputs, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49: print(step, round(loss.item(), 4), flush=True)


@torch.inference_mode()
def accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question], sample: bool
) -> float:
    """Share of `questions` whose `<answer>` is the gold answer, by greedy decoding or sampled at temperature 1."""
    inputs = tokenizer([question.text for question in questions], padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=sample, max_new_tokens=MAX_NEW_TOKENS)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [f"<answer>{question.answer}</answer>" in text for question, text in zip(questions, texts, strict=True)]
    return sum(right) / len(right)
