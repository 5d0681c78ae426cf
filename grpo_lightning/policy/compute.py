"""How a policy computes its log-probs, which never changes what they are. This plain way is the definition."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpo_lightning.maths import ragged
from grpo_lightning.maths.images import decoder_inputs
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.architecture import Head, evaluating, recompute_activations
from grpo_lightning.policy.machine import Machine
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError

T = TypeVar("T")
R = TypeVar("R")

TRIAL = Rollouts.from_lists([[1, 2, 3], [4]], [0, 1, 0], [[2, 3], [1, 2, 3], [4]])
"""The rollouts with which a model is tried before the run."""
HEAD_ELEMENTS = 2**25
"""Logits held at once by the vocabulary head: 128 MiB of float32."""

# On Hopper and Blackwell torch takes cuDNN's attention first. It builds a plan for every new shape (0.4 s), and every
# decoded position is a new shape. Its gradient may be NaN under a mask (pytorch issue 196678).
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(slots=True)
class TokenLogp:
    """Log-probs and entropies of N sampled tokens, and the likeliest tokens at their positions."""

    logp: Tensor
    """[N] float32 log-prob of each token, in nats."""
    entropy: Tensor
    """[N] float32 entropy of π_θ before each token, in nats; with gradient only on demand."""
    top_ids: Tensor | None = None
    """[N, K] int64 likeliest tokens at each position, the likeliest first; only on demand."""
    top_logp: Tensor | None = None
    """[N, K] float32 log-probs of `top_ids`, in nats."""
    read: Any = None
    """The result of the caller's function `read` of states and head; only on demand."""

    @property
    def detached(self) -> "TokenLogp":
        """The log-probs, the entropies and `read`, without gradient."""
        read = self.read.detach() if isinstance(self.read, Tensor) else None
        return TokenLogp(self.logp.detach(), self.entropy.detach(), read=read)


class Layout(Protocol):
    """Places of the tokens of rollouts in a forward pass."""

    predicts: Tensor
    """[N] int64 index, in the flattened input, of the token that predicts each sampled token."""
    tokens: Tensor | None
    """Index of each token of the input in `Rollouts.all_token_ids`; None if the order is the same."""

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        """Returns the arguments of the transformer."""

    def free(self) -> None:
        """Frees tensors of a pass that a later pass can make again."""


@dataclass(slots=True)
class PaddedRows(Layout):
    """Prompts and completions row by row, padded on the right to T, the longest, whose last token predicts nothing.

    With causal attention no token sees the padding behind it: no mask is needed, and the model's positions are right.
    """

    predicts: Tensor
    """[N] int64 index, in the flattened input, of the token that predicts each sampled token."""
    tokens: Tensor
    """[B, T - 1] int64 index of each token in `Rollouts.all_token_ids`; 0 for padding."""

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PaddedRows":
        """Lays out the prompts and completions of `rollouts`. The work is done on the host."""
        sizes = rollouts.sizes
        prompt_lengths = sizes.prompt_lengths[sizes.group]
        lengths = sizes.completion_lengths
        width = int(sizes.sequence_lengths.max()) - 1

        # Each row begins with its prompt.
        index = torch.zeros(len(prompt_lengths), width + 1, dtype=torch.int64)
        prompt_tokens = ragged.take(sizes.group, sizes.prompt_lengths)
        index[ragged.segments(prompt_lengths), ragged.positions(prompt_lengths)] = prompt_tokens

        # The completion follows; the tokens of completions stand behind all prompts in `all_token_ids`.
        row = ragged.segments(lengths)
        position = ragged.per_element(prompt_lengths, lengths) + ragged.positions(lengths)
        index[row, position] = int(sizes.prompt_lengths.sum()) + sizes.order
        predictor = (row * width + position - 1)[sizes.sampled]

        # A copy that blocks would wait until the device has done the work of earlier micro-batches.
        device = rollouts.token_ids.device
        return cls(predictor.to(device, non_blocking=True), index[:, :-1].to(device, non_blocking=True))

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        return {"input_ids": rollouts.all_token_ids[self.tokens]}


class Compute:
    """Computes plainly: completions in padded rows, logits in chunks.

    Args:
        attention: Attention of the optimisation passes, by any name of transformers: `sdpa`, `eager`,
            `flash_attention_2` (its package and a GPU), a kernel of the Hub such as `kernels-community/flash-attn2`
            (the package kernels), or a name that you registered. A model that lacks `sdpa` gets `eager`, which is
            logged once. Others are tried before the run, and refused if they compute something else than `sdpa`.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
    """

    shares_prefix: bool = False
    """True if a group's prompt goes through the model once; known after `adapt`."""

    def __init__(self, attention: str = "sdpa", gradient_checkpointing: bool = False) -> None:
        self.attention, self.gradient_checkpointing = attention, gradient_checkpointing

    def check(self) -> None:
        """Raises UsageError if this machine lacks what the arguments need, before any weight is read."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Changes a model that was just read into the model that computes. Its weights may be without values."""
        if self.gradient_checkpointing:
            recompute_activations(model)

    def adapt(self, model: PreTrainedModel, trunk: nn.Module) -> None:
        """Tries what this model allows, when its weights have values. Raises UsageError if it refuses `attention`."""
        if self.attention in ("sdpa", "eager"):
            return
        try:
            fault = self._try_attention(model, trunk)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Kernels raise exceptions of any class.
            fault = first_line(error)
        if fault:
            key = "model.policy.compute.attention"
            raise UsageError(
                f"{key}={self.attention}: {type(model).__name__} cannot use it here ({fault}); use {key}=sdpa"
            )

    def _try_attention(self, model: PreTrainedModel, trunk: nn.Module) -> str:
        """Switches `model` to the attention. Returns its fault, forward or backward; empty if it works."""
        device = next(model.parameters()).device
        previous_attention = model.config._attn_implementation
        is_flash = "flash" in self.attention
        if is_flash and device.type == "cpu":
            # Sharded weights are loaded on the CPU, where flash attention does not run.
            model.set_attn_implementation(self.attention)
            return ""
        rollouts = TRIAL.to(device)
        layout = PaddedRows.from_rollouts(rollouts)
        results = []
        # A gradient of the embeddings has passed all attention layers, adapter or not.
        embeddings = list[Tensor]()
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: embeddings.append(output.requires_grad_())
        )
        try:
            # Flash attention takes no float32.
            with evaluating(model), torch.autocast(device.type, torch.bfloat16, enabled=is_flash), torch.enable_grad():
                for name in (previous_attention, self.attention):
                    model.set_attn_implementation(name)
                    hidden = self.hidden(trunk, rollouts, layout)
                    total = (hidden * torch.linspace(-1, 1, hidden.shape[-1], device=device)).sum()
                    results.append([hidden.detach(), *torch.autograd.grad(total, embeddings[-1])])
        finally:
            hook.remove()
        if model.config._attn_implementation == previous_attention:
            return "its attention cannot be exchanged"
        tolerance = 0.05 if is_flash or model.dtype != torch.float32 else 1e-3
        error = max(float((new - old).norm() / old.norm().clamp(min=1e-6)) for old, new in zip(*results, strict=True))
        return "" if error <= tolerance else f"its states or gradients would be off by {error:.2g} of their norm"

    def layout(self, rollouts: Rollouts) -> Layout:
        """Lays out prompts and completions for any number of passes."""
        return PaddedRows.from_rollouts(rollouts)

    def hidden(self, trunk: nn.Module, rollouts: Rollouts, layout: Layout) -> Tensor:
        """[N, hidden] states that predict the sampled tokens."""
        inputs = layout.inputs(rollouts)
        if rollouts.image_states:
            ids = inputs["input_ids"]
            tokens = torch.arange(ids.numel(), device=ids.device) if layout.tokens is None else layout.tokens
            inputs |= decoder_inputs(trunk, ids, tokens.view_as(ids), rollouts)
        states = trunk(**inputs, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, layout.predicts)

    def score(
        self, head: Head, hidden: Tensor, token_ids: Tensor, temperature: float, entropy_gradient: bool, num_top: int
    ) -> TokenLogp:
        """Returns log-probs and entropies of [N] tokens from the [N, hidden] states that predict them.

        Logits are made chunk by chunk, and with several chunks again in the backward pass.

        Args:
            head: The vocabulary head.
            hidden: [N, hidden] states.
            token_ids: [N] int64 sampled tokens.
            temperature: Divides the logits.
            entropy_gradient: Give the entropy a gradient too.
            num_top: K, the number of likeliest tokens to return at each position.
        """

        def score_chunk(hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
            logp = (head(hidden) / temperature).log_softmax(-1)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                # An impossible token adds nothing: 0 log 0 is 0.
                entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
            top = logp.topk(num_top) if num_top else ()
            # `sum` over one element makes a copy: FSDP must not get a view as a module's output.
            return logp.gather(-1, token_ids[:, None]).sum(-1), entropy, *reversed(top)

        chunk = max(1, HEAD_ELEMENTS // head.vocab_size)
        recomputes = torch.is_grad_enabled() and len(token_ids) > chunk
        chunks = [
            checkpoint(score_chunk, states, ids, use_reentrant=False) if recomputes else score_chunk(states, ids)
            for states, ids in zip(hidden.split(chunk), token_ids.split(chunk), strict=True)
        ]
        return TokenLogp(*(torch.cat(values) for values in zip(*chunks, strict=True)))

    def gradients(
        self, micro_batches: Sequence[T], forward: Callable[[T], tuple[Tensor, R]], machine: Machine
    ) -> Iterator[R]:
        """Adds the gradient of each micro-batch's objective to the weights' gradients.

        Args:
            micro_batches: The micro-batches of one update on this rank, at least one.
            forward: Returns the objective of a micro-batch, and a result.
            machine: The device or the ranks that the update runs on.

        Yields:
            The result of `forward` for each micro-batch.
        """
        for index, micro_batch in enumerate(micro_batches, start=1):
            with machine.synced(index == len(micro_batches)):
                objective, result = forward(micro_batch)
                machine.backward(objective)
            yield result
