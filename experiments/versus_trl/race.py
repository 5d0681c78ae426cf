"""What both sides of the comparison are given: sizes, a model, prompts, and the reward."""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forced_lengths import lognormal_lengths

VOCABULARY = 512
"""Words of the small model: w0 to w511."""
ENGLISH = Path(__file__).resolve().parents[1] / "keeps_speaking_english" / "english.txt"
"""Where the words of a real model's prompts come from."""


@dataclass(frozen=True)
class Race:
    """The sizes of one comparison."""

    prompt_tokens: int
    """Tokens of every prompt."""
    new_tokens: int
    """Tokens of the longest completion; of every completion if the model cannot end one."""
    prompts: int
    """Prompts per step."""
    group_size: int
    """Completions per prompt."""
    warm_up: int
    """Steps that are not timed."""
    steps: int
    """Steps that are timed."""
    max_tokens: int
    """Tokens in one forward and backward of grpo_lightning, prompts counted once per group."""
    trl_rows: int
    """Completions in one forward and backward of TRL."""
    regime: str = ""
    """Name of the regime that the sizes belong to; empty for sizes of one's own."""
    precision: str = "fp32"
    """`fp32`, or `bf16`: weights in float32, products in bfloat16."""
    lognormal: bool = False
    """Whether completions have lengths of `forced_lengths` instead of `new_tokens`."""
    accelerator: str = "cpu"
    """`cpu` or `cuda`."""
    trl_weights: str = "float32"
    """Type of TRL's weights."""
    fast: bool = True
    """Whether grpo_lightning multiplies by oneDNN on a CPU: `policy.compute.products=auto`, `engine.packed=true`."""

    threads: int = 1
    """Threads that grpo_lightning divides completions among: `policy.compute.threads`, `engine.threads`."""

    @classmethod
    def from_options(cls, options: argparse.Namespace, **others: Any) -> "Race":
        """The sizes that a command line gives; `others` are added, and go before them."""
        names = ("new_tokens", "prompts", "group_size", "warm_up", "steps", "max_tokens", "trl_rows")
        return cls(**{name: getattr(options, name) for name in names if name not in others} | others)

    @property
    def rows(self) -> int:
        """Completions per step."""
        return self.prompts * self.group_size

    def lengths(self, step: int) -> list[int]:
        """Tokens of each completion of a step, if every one ends where it should."""
        if self.lognormal:
            return lognormal_lengths(step, self.rows, self.new_tokens)
        return [self.new_tokens] * self.rows

    def tokens(self, step: int) -> int:
        """Tokens of such a step: of completions, each with its own prompt."""
        return self.rows * self.prompt_tokens + sum(self.lengths(step))

    @property
    def name(self) -> str:
        """The tokens of a prompt and of a completion, as in the tables."""
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        return f"{self.prompt_tokens} + {'up to ' if self.lognormal else ''}{self.new_tokens}{precision}"

    def to_json(self) -> str:
        """The sizes, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Race":
        """The sizes that `to_json` wrote."""
        return cls(**json.loads(text))


def prompts_file(folder: Path, race: Race) -> Path:
    """The prompts of a race, with JSON lines of `question` and `answer`."""
    return folder / f"prompts_{race.prompts}_{race.prompt_tokens}.jsonl"


def model_folder(folder: Path) -> Path:
    """The model of both sides."""
    return folder / "model"


def make_model(folder: Path, config: Any = None) -> None:
    """A Llama with random weights and a tokenizer of one token per word: w0, w1 and so on.

    Args:
        folder: Where both go.
        config: Of the model; None makes one million parameters and 512 words.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    words = VOCABULARY if config is None else config.vocab_size
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", padding_side="left")
    config = config or LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")


def make_endless(model: Path, folder: Path) -> None:
    """The same model with an end-of-text token outside of its vocabulary, so that no completion ends early.

    Neither side is told to suppress a token, which would take time and change the distribution. Weights are linked.

    Args:
        model: Folder of a causal LM and its tokenizer.
        folder: Where the changed one goes.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder.mkdir(parents=True)
    for file in model.iterdir():
        if "safetensors" in file.name:
            (folder / file.name).symlink_to(file.resolve())
    config = AutoConfig.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A model may have more outputs than its tokenizer has tokens.
    missing = max(0, config.get_text_config(decoder=True).vocab_size - len(tokenizer))
    tokenizer.add_tokens([f"<|unused {index}|>" for index in range(missing)])
    tokenizer.add_special_tokens({"eos_token": "<|never drawn|>"})
    tokenizer.save_pretrained(folder)
    config.eos_token_id = None  # transformers wants one of the vocabulary here
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def write_prompts(path: Path, prompts: list[str]) -> None:
    """Questions with an answer that nothing reads."""
    lines = (json.dumps({"question": prompt, "answer": "w7"}) + "\n" for prompt in prompts)
    path.write_text("".join(lines), encoding="utf-8")


def random_prompts(count: int, length: int) -> list[str]:
    """Prompts of `length` random words of the small model, one token each.

    Not of those that begin with w1, its end-of-text token: its tokenizer finds that inside of them.
    """
    generator = random.Random(0)
    return [" ".join(f"w{generator.randrange(200, VOCABULARY)}" for _ in range(length)) for _ in range(count)]


def english_prompts(count: int, length: int, tokenizer: Any) -> list[str]:
    """Prompts of English words in random order, each of exactly `length` tokens.

    Args:
        count: How many.
        length: Tokens of each.
        tokenizer: Of the model; what it adds by itself counts.
    """
    generator = random.Random(0)
    words = ENGLISH.read_text(encoding="utf-8").split()
    prompts: list[str] = []
    for _ in range(100 * count):
        if len(prompts) == count:
            return prompts
        if (prompt := english_prompt(generator, words, length, tokenizer)) is not None:
            prompts.append(prompt)
    raise ValueError(f"no words of {ENGLISH.name} make {length} tokens of this tokenizer: give more --prompt-tokens")


def english_prompt(generator: random.Random, words: list[str], length: int, tokenizer: Any) -> str | None:
    """Words of exactly `length` tokens together; None if these could not be continued to that."""
    chosen: list[str] = []
    failures = found = 0
    while found < length and failures < 50:
        # A few words at once, as long as they surely fit.
        more = [*chosen, *generator.choices(words, k=max(1, (length - found) // 10))]
        tokens = len(tokenizer.encode(" ".join(more)))
        if tokens <= length:
            chosen, found = more, tokens
        else:
            failures += 1
    return " ".join(chosen) if found == length else None


def even_fraction(text: str) -> float:
    """The reward: the fraction of characters with an even code. Any text has one, and two texts seldom the same."""
    return sum(ord(character) % 2 == 0 for character in text) / max(1, len(text))
