"""The policy π_θ: a causal LM that says how likely it finds the tokens of completions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lightning import ragged, sharding, shared_prefix
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.shared_prefix import SharedPrefix
from grpo_lightning.types import UsageError

MEND = "Give a folder made by save_pretrained (config.json, weights, tokenizer) or a hub id"

HEAD_ELEMENTS = 2**25
"""Logits held at once by the vocabulary head: 128 MiB of float32."""


@dataclass(slots=True)
class TokenLogp:
    """What the policy says of N completion tokens."""

    logp: Tensor
    """[N] float32 log-probability of each token."""
    entropy: Tensor
    """[N] float32 entropy in nats of the distribution each token was drawn from; with gradient only if asked for."""


@final
class Policy(nn.Module):
    """A causal LM of transformers. Its weights are read by `load`, so that Lightning decides where and when.

    Args:
        path: Folder made by `save_pretrained`, or a model id of the Hugging Face hub.
        dtype: Type of the weights. With `bfloat16` weights, AdamW rounds small updates away: prefer float32 weights
            with the trainer's `precision: bf16-mixed`.
        attention: Attention implementation of transformers for the optimisation passes.
        dropout: Keep the model's dropout in training. Off by default: with it the first ratio is not 1.
        share_prefix: Pass a group's prompt through the model once instead of once a completion, where the architecture
            allows it (full attention everywhere). It changes speed and memory alone.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        compile: Compile the transformer with `torch.compile`.
        trust_remote_code: Run Python code shipped with the model. Leave it off for models you have not read.
    """

    model: PreTrainedModel
    shares_prefix: bool
    """Whether a group's prompt goes through the model once; known when the weights are."""

    def __init__(
        self,
        path: str,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
        dropout: bool = False,
        share_prefix: bool = True,
        gradient_checkpointing: bool = False,
        compile: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.path = path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.attention = attention
        self.dropout = dropout
        self.share_prefix = share_prefix
        self.gradient_checkpointing = gradient_checkpointing
        self.compile_model = compile
        self.trust_remote_code = trust_remote_code

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "Policy":
        """A policy around a model that exists already."""
        policy = cls(path=str(model.name_or_path))
        policy.tokenizer = tokenizer
        policy.config = model.config
        policy.model = model.eval()
        policy.shares_prefix = policy._try_shared_prefix()
        return policy

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that lies beside the weights."""
        return self._from_pretrained(AutoTokenizer)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, which is known before its weights are."""
        return self._from_pretrained(AutoConfig)

    def check(self) -> None:
        """Raises UsageError for what `path` lacks, before any weight is read."""
        folder = Path(self.path).expanduser()
        _ = self.config, self.tokenizer
        if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise UsageError(f"policy.path={self.path}: no weights (.safetensors or .bin) in this folder. {MEND}")

    def load(self) -> None:
        """Reads the weights; the second call does nothing."""
        if hasattr(self, "model"):
            return
        self.model = self._from_pretrained(AutoModelForCausalLM, dtype=self.dtype, attn_implementation=self.attention)
        if not self.dropout:
            remove_dropout(self.model)
        if self.gradient_checkpointing:
            recompute_activations(self.model)
        self._check_head()
        self.shares_prefix = self.share_prefix and self._try_shared_prefix()

    def _from_pretrained(self, auto_class: Any, **kwargs: Any) -> Any:
        looks_local = self.path.startswith((".", "/", "~")) or self.path.count("/") > 1
        path = Path(self.path).expanduser()
        if looks_local and not path.is_dir():
            raise UsageError(
                f"policy.path={self.path}: no such folder (looked in {Path.cwd()}). "
                "Give a folder made by save_pretrained or a hub id"
            )
        try:
            return auto_class.from_pretrained(
                str(path) if path.is_dir() else self.path, trust_remote_code=self.trust_remote_code, **kwargs
            )
        except (OSError, ValueError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"policy.path={self.path}: {auto_class.__name__} found no usable model there ({reason}). {MEND}"
            ) from error

    def shard(self, mesh: DeviceMesh) -> None:
        """Shares the weights out over the ranks of `mesh`; `forward` gathers them layer by layer."""
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        sharding.shard(self, layers, mesh)

    def gathered(self) -> AbstractContextManager[None]:
        """Whole weights on every rank, to use `hidden`, `logits` and `model` as often as each likes.

        Every rank must take part. Without sharding nothing happens.
        """
        return sharding.gathered(self)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def context_length(self) -> int | None:
        """Longest sequence, prompt and completion together, or None where the model sets no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a completion: those of the generation config, the model config and the tokenizer."""
        ids: set[int] = set()
        for owner in (self.model.generation_config, self.model.config, self.tokenizer):
            eos = getattr(owner, "eos_token_id", None)
            ids.update([eos] if isinstance(eos, int) else eos or [])
        return frozenset(ids)

    def hidden(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """[B, T] token ids -> [B, T, hidden] last hidden states."""
        return self.model.base_model(input_ids=input_ids, **kwargs).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] float32 logits."""
        logits = self.model.get_output_embeddings()(hidden).float()
        config = self.config
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def forward(self, rollouts: Rollouts, temperature: float = 1.0, entropy_gradient: bool = False) -> TokenLogp:
        """log π_θ of every completion token, with gradient where gradients are on.

        Args:
            rollouts: B completions with their prompts.
            temperature: That of the sampling; divides the logits.
            entropy_gradient: Whether the entropy has a gradient too, which costs memory.
        """
        shared = self.shares_prefix and len(rollouts) > len(rollouts.prompt_lengths)
        hidden = self._hidden_shared(rollouts) if shared else self._hidden_by_row(rollouts)
        return self._score(hidden, rollouts.token_ids, temperature, entropy_gradient)

    def _hidden_shared(self, rollouts: Rollouts) -> Tensor:
        """[N, hidden] the states that predict the completion tokens, each prompt computed once."""
        layout = SharedPrefix.of(rollouts)
        hidden = self._transformer(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            # Nobody looks at it, but a mask of four dimensions keeps transformers from making one of T x T.
            attention_mask=layout.input_ids.new_zeros(1, 1, 1, 1),
            shared_prefix=layout,
            use_cache=False,
        ).last_hidden_state
        return hidden[0].index_select(0, layout.predicts)

    def _hidden_by_row(self, rollouts: Rollouts) -> Tensor:
        """[N, hidden] the states that predict the completion tokens, from prompt and completion row by row.

        Rows are right-padded: with causal attention no token sees the padding behind it, so no mask is needed and the
        model's own positions are right.
        """
        prompt_lengths = rollouts.prompt_lengths[rollouts.group]
        lengths = prompt_lengths + rollouts.lengths
        prompts = rollouts.prompt_token_ids[ragged.take(rollouts.group, rollouts.prompt_lengths)]
        input_ids = rollouts.token_ids.new_zeros(len(lengths), int(lengths.max()))
        completion_row = ragged.segments(rollouts.lengths)
        completion_position = ragged.spread(prompt_lengths, rollouts.lengths) + ragged.positions(rollouts.lengths)
        input_ids[ragged.segments(prompt_lengths), ragged.positions(prompt_lengths)] = prompts
        input_ids[completion_row, completion_position] = rollouts.token_ids
        # The last token of the longest row predicts nothing.
        hidden = self._transformer(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
        return hidden[completion_row, completion_position - 1]

    @torch.no_grad()
    def _try_shared_prefix(self) -> bool:
        """Whether this model computes the same with the shared prefix; if so, its attention is set for it."""
        config = self.config
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        if self.model.config._attn_implementation != "sdpa" or windowed or not full:
            return False
        was_training = self.model.training
        self.model.eval()
        trial = Rollouts.from_lists([[1, 2, 3], [4]], [0, 1, 0], [[2, 3], [1, 2, 3], [4]]).to(self.device)
        expected = self._hidden_by_row(trial)
        self.model.set_attn_implementation(shared_prefix.ATTENTION)
        try:
            actual = self._hidden_shared(trial)
        except TypeError:  # The model hands no extra arguments on to its attention.
            actual = torch.full_like(expected, torch.nan)
        self.model.train(was_training)
        same = torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 if actual.dtype != torch.float32 else 1e-4)
        if not same:
            self.model.set_attn_implementation("sdpa")
        return same

    @cached_property
    def _transformer(self) -> Callable[..., Any]:
        # Compiled for the passes over whole sequences alone: decoding would compile anew for every length.
        base = self.model.base_model
        return torch.compile(base, dynamic=True) if self.compile_model else base.__call__

    def _score(self, hidden: Tensor, token_ids: Tensor, temperature: float, entropy_gradient: bool) -> TokenLogp:
        """[N, hidden], [N] -> log-probs; the logits exist a chunk at a time, and again in the backward pass."""

        def score(hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
            logp = (self.logits(hidden) / temperature).log_softmax(-1)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = -(logp.exp() * logp).sum(-1)
            # The sum of one: FSDP wants no view as a module's output.
            return logp.gather(-1, token_ids[:, None]).sum(-1), entropy

        chunk = max(1, HEAD_ELEMENTS // self.config.vocab_size)
        if len(token_ids) <= chunk:
            return TokenLogp(*score(hidden, token_ids))
        parts = [
            checkpoint(score, h, ids, use_reentrant=False) if torch.is_grad_enabled() else score(h, ids)
            for h, ids in zip(hidden.split(chunk), token_ids.split(chunk), strict=True)
        ]
        return TokenLogp(torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts]))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Makes sure that `hidden` and `logits` together are the model, whatever its class does behind its head."""
        was_training = self.model.training
        self.model.eval()
        input_ids = torch.arange(2, device=self.device)[None]
        expected = self.model(input_ids=input_ids, use_cache=False).logits.float()
        actual = self.logits(self.hidden(input_ids, use_cache=False))
        self.model.train(was_training)
        if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3):
            raise UsageError(
                f"policy.path={self.path}: {type(self.model).__name__} changes its logits after the output "
                "embedding in a way grpo_lightning does not know; please report it"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes weights and tokenizer as transformers reads them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def recompute_activations(model: PreTrainedModel) -> None:
    """Turns gradient checkpointing on, by the name the installed transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def remove_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of the model to 0, in its modules and in its config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
