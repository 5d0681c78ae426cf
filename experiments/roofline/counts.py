"""Operations and bytes of one GRPO step, from the model's configuration and the step's sizes alone.

Operations: 2 per weight and token in a forward, 6 in a forward and backward, attention with all pairs of tokens. Bytes
are what must come out of memory at least once: a weight per forward, a row's keys and values per position. What a
kernel reads twice, or writes in between, is not in it.
So a limit is what no implementation passes, as long as it computes the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.engines.native.kv_memory import cache_bytes_per_token

FLOAT32 = 4
ADAMW = 7 * FLOAT32
"""Bytes per parameter: AdamW reads weight, gradient and two moments, and writes weight and moments."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of a token in forward and backward; those of a forward alone are a third.

    Source: PaLM (arXiv 2204.02311), appendix B: 6N + 12LHQT per token. N is here without the input embedding, which
    multiplies nothing, and the head counts only where log-probs are taken.
    """

    token: float
    """Of the transformer below the head, attention aside."""
    drawn: float
    """Of the head."""
    pair: float
    """Of attention: per token, and per token of its sequence."""

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "Cost":
        """The cost for a model, also on the meta device.

        Raises:
            ValueError: It is a mixture of experts, of whose weights a token uses a part.
        """
        config = model.config.get_text_config(decoder=True)
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ValueError(f"{type(model).__name__} is a mixture of experts: what a token uses of it is not known")
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tables = {*head.parameters(), *embedding.parameters()}
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            token=6.0 * sum(one.numel() for one in model.parameters() if one not in tables),
            sampled=6.0 * sum(map(torch.numel, head.parameters())),
            pair=12.0 * config.num_hidden_layers * config.num_attention_heads * size,
        )

    def of(self, micro_batch: Rollouts, shares_prefix: bool) -> float:
        """Operations of one forward and backward over a micro-batch."""
        sizes = micro_batch.sizes
        prompts = sizes.prompt_lengths if shares_prefix else sizes.prompt_lengths[sizes.group]
        completions = sizes.completion_lengths
        tokens = int(prompts.sum() + completions.sum())
        pairs = int(prompts.square().sum() + (completions * sizes.sequence_lengths).sum())
        return self.token * tokens + self.drawn * micro_batch.num_tokens + self.pair * pairs


@dataclass(frozen=True)
class Demand:
    """What a phase, or one position of it, asks of the machine."""

    operations: float = 0.0
    """Floating-point."""
    bytes: float = 0.0
    """Read from memory or written to it."""

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.operations + other.operations, self.bytes + other.bytes)

    def seconds(self, operations: float, bandwidth: float) -> float:
        """The least time it can take where so many operations and bytes pass per second."""
        return max(self.operations / operations, self.bytes / bandwidth)


def total(demands: Sequence[Demand]) -> Demand:
    """All of them."""
    return sum(demands, Demand())


@dataclass(frozen=True)
class Sizes:
    """One step: its prompts, all of one length, and its completions."""

    prompt_tokens: int
    group_size: int
    lengths: tuple[int, ...]
    """Tokens of each completion, group by group."""

    @classmethod
    def even(cls, prompts: int, group_size: int, prompt_tokens: int, new_tokens: int) -> "Sizes":
        """Completions of one length."""
        return cls(prompt_tokens, group_size, (new_tokens,) * (prompts * group_size))

    @property
    def prompts(self) -> int:
        """Groups."""
        return len(self.lengths) // self.group_size

    @property
    def drawn(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths)

    def tokens(self, shared: bool = True) -> int:
        """Tokens that a pass over the step reads, each prompt once per group or once per completion."""
        return self.drawn + self.prompt_tokens * (self.prompts if shared else len(self.lengths))

    def pairs(self, shared: bool = True) -> int:
        """Pairs of tokens in attention, as `Cost.of` counts them."""
        prompts = self.prompts if shared else len(self.lengths)
        return prompts * self.prompt_tokens**2 + sum(n * (self.prompt_tokens + n) for n in self.lengths)


@dataclass(frozen=True)
class Model:
    """What of a model decides how much a step asks for."""

    cost: Cost
    parameters: int
    """Tied ones once."""
    weights: int
    """Those that decoding multiplies: all but an embedding that only looks up."""
    cache: int
    """Numbers in the key-value cache per token."""
    vocabulary: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "Model":
        """A model that is never made: its tensors have shapes alone. A mixture of experts is refused."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        cost = Cost.from_model(model)
        text = config.get_text_config(decoder=True)
        return cls(
            cost=cost,
            parameters=sum(map(torch.numel, model.parameters())),
            weights=round((cost.token + cost.sampled) / 6),
            cache=cache_bytes_per_token(config, torch.float32) // FLOAT32,
            vocabulary=text.vocab_size,
        )

    def prefill(self, sizes: Sizes, width: int = FLOAT32, shared: bool = True) -> Demand:
        """Reading the prompts; the head sees their last token alone.

        Args:
            sizes: Of the step.
            width: Bytes of a number, in weights and cache.
            shared: Each prompt once per group, else once per completion.
        """
        prompts = sizes.prompts if shared else len(sizes.lengths)
        tokens = prompts * sizes.prompt_tokens
        pairs = prompts * sizes.prompt_tokens**2
        operations = (self.cost.token * tokens + self.cost.sampled * prompts + self.cost.pair * pairs) / 3
        return Demand(operations, width * (self.weights + self.cache * tokens) + FLOAT32 * self.vocabulary * prompts)

    def decoding(self, sizes: Sizes, width: int = FLOAT32, shared: bool = True) -> list[Demand]:
        """One per position: drawn tokens are passed, a position at a time, in the rows that go on.

        The first token of a row is drawn from its prompt's logits, and the last is not passed.

        Args:
            sizes: Of the step.
            width: Bytes of a number, in weights and cache.
            shared: A group's prompt has one copy in the cache, which is read once per position, else each row has one.
        """
        demands = []
        for passed in range(max(sizes.lengths) - 1):
            going = [row for row, length in enumerate(sizes.lengths) if length > passed + 1]
            groups = len({row // sizes.group_size for row in going})
            rows, seen = len(going), sizes.prompt_tokens + passed + 1
            prompts = sizes.prompt_tokens * (groups if shared else rows)
            operations = rows * (self.cost.token + self.cost.sampled + self.cost.pair * seen) / 3
            cached = self.cache * (prompts + rows * (passed + 1))
            # The logits, float32, pass once.
            demands.append(Demand(operations, width * (self.weights + cached) + FLOAT32 * self.vocabulary * rows))
        return demands

    def update(
        self, sizes: Sizes, micro_batches: int = 1, width: int = FLOAT32, shared: bool = True
    ) -> dict[str, Demand]:
        """Forward and backward of one pass over the step, of the transformer below the head and of the head.

        Args:
            sizes: Of the step.
            packs: Forwards and backwards it is cut into. Each reads the weights twice, and adds to the gradients.
            width: Bytes of a weight in products.
            shared: Each prompt once per group, else once per completion.
        """
        trunk, head = round(self.cost.token / 6), round(self.cost.sampled / 6)
        per_weight = micro_batches * (2 * width + 2 * FLOAT32)
        pairs = self.cost.pair * sizes.pairs(shared)
        return {
            "trunk": Demand(self.cost.token * sizes.tokens(shared) + pairs, per_weight * trunk),
            "head": Demand(self.cost.sampled * sizes.sampled, per_weight * head),
        }

    def optimizer(self) -> Demand:
        """One update of AdamW in one pass over the parameters; its few operations per number do not count."""
        return Demand(0.0, ADAMW * self.parameters)
