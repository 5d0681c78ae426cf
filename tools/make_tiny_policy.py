"""Makes a tiny policy for demonstrations: a character-level Llama that adds, and forgets to carry.

It is trained for a minute on worked sums. In the last third of the training most carries are forgotten. So the policy
adds right where nothing is carried, which is a third of the sums; elsewhere it carries once in five samples, and hardly
ever when it decodes greedily. GRPO can teach it the carry: some of its samples have it, and those are right.

    python tools/make_tiny_policy.py --out runs/tiny_policy

With these defaults it is `grpo_lightning:tiny_policy`, which is installed with the package. `--mistakes answer` and
`--mistakes columns` make policies with random mistakes: a wrong digit in the answer, or in the written columns. Most
experiments start from `--mistakes answer --wrong 0.7`, which was the installed policy until November 2026.
"""

import random
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from jsonargparse.typing import ClosedUnitInterval, PositiveInt
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.plugins.data.arithmetic.arithmetic import Arithmetic
from grpo_lightning.types import Question

PAD, EOS = "<pad>", "<eos>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
BATCH = 32
LEARNING_RATE = 3e-3
MAX_NEW_TOKENS = 128
Mistakes = Literal["carry", "answer", "columns"]

Example = tuple[list[int], list[int]]
"""Ids, and the labels: -100 where there is nothing to learn."""


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, plus the tags (which decoding keeps), further words, padding and end."""
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *TAGS, *characters, *words])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([*TAGS, *words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> LlamaForCausalLM:
    """A blank Llama in float32, with heads of 32 and half as many key-value heads as heads.

    Llama, because beside a Qwen2 `AutoTokenizer` replaces the saved tokenizer's splitting by Qwen2's.
    """
    if hidden < 64 or hidden % 64:
        raise SystemExit(f"--hidden {hidden}: give a multiple of 64")
    heads = hidden // 32
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        attention_bias=True,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def worked_solution(expression: str, wrong: float, rng: random.Random, mistakes: Mistakes = "carry") -> str:
    """The written method, column by column: `47+85` -> `<think>7+5=12 4+8+1=13</think><answer>132</answer>`.

    Args:
        expression: Two numbers and `+` or `-`. The smaller is taken from the larger: `7-47` is `-(47-7)`.
        wrong: Probability of a mistake.
        rng: Decides about mistakes.
        mistakes: Which. `carry`: a carry that is due is forgotten, each with this probability; what is written is
            otherwise right. `columns`: the last digit of a column is wrong, each with this probability, and the
            answer follows from the columns. `answer`: one digit of the answer is wrong, and the columns are right.
    """
    operator = "+" if "+" in expression else "-"
    left, right = expression.split(operator)
    negative = operator == "-" and int(left) < int(right)
    high, low = (right, left) if negative else (left, right)
    width = max(len(high), len(low))
    columns, digits, carry = [], "", 0
    for a, b in zip(map(int, reversed(high.zfill(width))), map(int, reversed(low.zfill(width))), strict=True):
        value = a + b + carry if operator == "+" else (a - b - carry) % 10
        if mistakes == "columns" and rng.random() < wrong:
            value += rng.choice([digit for digit in range(10) if digit != value % 10]) - value % 10
        columns.append(f"{a}{operator}{b}{operator + '1' if carry else ''}={value}")
        digits = f"{value % 10}{digits}"
        carry = value // 10 if operator == "+" else int(a - b - carry < 0)
        if mistakes == "carry" and carry and rng.random() < wrong:
            carry = 0
    answer = str(int(f"{carry}{digits}" if operator == "+" else digits))
    if mistakes == "answer" and rng.random() < wrong:
        index = rng.randrange(len(answer))
        digit = rng.choice([d for d in string.digits if d != answer[index]])
        answer = answer[:index] + digit + answer[index + 1 :]
    sign = "-" if negative else ""
    return f"<think>{' '.join(columns)}</think><answer>{sign}{answer}</answer>"


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    updates: int,
    wrong: float,
    rng: random.Random,
    mistakes: Mistakes,
) -> None:
    """Supervised training on fresh solutions of `questions`: right ones first, then mixed ones.

    Args:
        model: Trained in place.
        tokenizer: Its tokenizer.
        questions: From Arithmetic, with their expressions.
        updates: Of the weights. The first 70 % see right solutions only: with mixed ones throughout, seed 0 stopped at
            0.90 greedy, and GRPO did not get it higher.
        wrong: Probability of a mistake in the rest.
        rng: Draws questions and mistakes.
        mistakes: Which mistakes, as in `worked_solution`.
    """

    def examples(update: int) -> list[Example]:
        fraction = wrong if update >= 0.7 * updates else 0.0
        batch = rng.choices(questions, k=BATCH)
        prompts = tokenizer([question.text for question in batch])["input_ids"]
        solutions = tokenizer(
            [
                worked_solution(question.metadata["expression"], fraction, rng, mistakes) + tokenizer.eos_token
                for question in batch
            ]
        )["input_ids"]
        return [(p + s, [-100] * len(p) + s) for p, s in zip(prompts, solutions, strict=True)]

    learn(model, updates, examples)


def learn(model: LlamaForCausalLM, updates: int, examples: Callable[[int], list[Example]]) -> None:
    """Supervised training in place.

    Args:
        model: Its padding token is in its configuration.
        updates: Of the weights.
        examples: The batch of an update.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=updates, pct_start=0.15)
    padding = model.config.pad_token_id
    assert padding is not None
    model.train()
    for update in range(updates):
        batch = examples(update)
        ids, labels = ([torch.tensor(pair[which]) for pair in batch] for which in (0, 1))
        loss = model(
            input_ids=pad_sequence(ids, batch_first=True, padding_value=padding),
            labels=pad_sequence(labels, batch_first=True, padding_value=-100),
            use_cache=False,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question], sample: bool
) -> float:
    """Fraction of `questions` with the gold answer in `<answer>`, greedy or sampled at temperature 1."""
    inputs = tokenizer([question.text for question in questions], padding=True, return_tensors="pt")
    choice: dict[str, Any] = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(**inputs, **choice, max_new_tokens=MAX_NEW_TOKENS)  # type: ignore[misc]
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    golds = [f"<answer>{question.answer}</answer>" for question in questions]
    return sum(text.endswith(gold) for text, gold in zip(texts, golds, strict=True)) / len(questions)


def make(
    out: Path,
    seed: int = 0,
    digits: PositiveInt = 2,
    operators: Literal["+", "-", "+-"] = "+",
    updates: PositiveInt = 800,
    wrong: ClosedUnitInterval = 0.8,
    hidden: PositiveInt = 128,
    layers: PositiveInt = 2,
    mistakes: Mistakes = "carry",
) -> None:
    """Makes a tiny policy that adds, and makes mistakes: a model and a tokenizer.

    Args:
        out: Folder to save it in.
        seed: Seed of weights and training data.
        digits: Largest number of digits.
        operators: What stands between the two numbers.
        updates: Updates of the weights, 32 sums each.
        wrong: Probability of a mistake at the end: per carry that is due, per answer, or per column.
        hidden: Width of the model, a multiple of 64.
        layers: Depth of the model.
        mistakes: `carry`: it forgets carries. `answer`: a digit of the answer is wrong, at random. `columns`: the
            last digit of a column is wrong, at random, and the answer follows.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    expressions = 100**digits * len(operators)
    held_out = min(500, expressions // 20)
    task = Arithmetic(digits, [*operators], num_train=min(8000, expressions - 2 * held_out), num_val=held_out)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden, layers)
    train(model, tokenizer, task.questions("train"), updates, wrong, random.Random(seed), mistakes)
    saved = save(out, model, tokenizer, start, cpu_start)
    questions = [*task.questions("val"), *task.questions("test")]
    greedy, sampled = (accuracy(model, tokenizer, questions, sample) for sample in (False, True))
    print(f"{saved}; {len(questions)} held-out questions: greedy {greedy:.3f}, sampled at temperature 1 {sampled:.3f}")


def save(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, start: float, cpu_start: float) -> str:
    """Saves a policy; returns where it is, its size, and the time since the start."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return f"{out}: {model.num_parameters() / 1e6:.2f} M parameters, {seconds:.0f} s ({cpu:.0f} s of CPU)"


def command_line(make: Callable[..., None], args: list[str] | None) -> None:
    """Makes a policy with the options of the command line."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    disable_progress_bar()
    auto_cli(make, args, as_positional=False)


def main(args: list[str] | None = None) -> None:
    """The command line."""
    command_line(make, args)


if __name__ == "__main__":
    main()
