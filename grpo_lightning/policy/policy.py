"""The policy π_θ: a causal LM, and the log-probs that it gives to the tokens of completions."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from lightning.pytorch.utilities import rank_zero_info
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

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast import products, shared_prefix
from grpo_lightning.plugins.fast.fused_layers import fuse
from grpo_lightning.plugins.fast.offloading import InMainMemory
from grpo_lightning.plugins.fast.shared_prefix import SharedPrefix
from grpo_lightning.plugins.fast.token_logp import takes, token_logp
from grpo_lightning.policy import pretrained, sharding
from grpo_lightning.policy.adapter import LoRA, fingerprint, switched_off
from grpo_lightning.policy.adapter import save as save_adapter
from grpo_lightning.policy.padded_rows import PaddedRows
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError

log = logging.getLogger(__name__)

HEAD_ELEMENTS = 2**25
"""Logits held at once by the vocabulary head: 128 MiB of float32."""


@dataclass(slots=True)
class TokenLogp:
    """Log-probs and entropies of N drawn tokens, and what else was likely there."""

    logp: Tensor
    """[N] float32 log-prob of each token."""
    entropy: Tensor
    """[N] float32 entropy in nats of π_θ before each token; with gradient only on demand."""
    top_ids: Tensor | None = None
    """[N, K] int64 the likeliest tokens at each position, likeliest first; only on demand."""
    top_logp: Tensor | None = None
    """[N, K] float32 their log-probs."""

    @property
    def detached(self) -> "TokenLogp":
        """The log-probs and entropies without gradient."""
        return TokenLogp(self.logp.detach(), self.entropy.detach())


# Final, so that the command line takes its arguments as they are: `policy.path`, without a class path.
@final
class Policy(nn.Module):
    """A causal LM of transformers. `load` reads its weights, so that Lightning decides where and when.

    Args:
        path: Folder made by `save_pretrained`, or a model id of the Hugging Face hub.
        dtype: Type of the weights. With `bfloat16` weights, AdamW rounds small updates away: prefer float32 weights
            with the trainer's `precision: bf16-mixed`.
        attention: Attention implementation of transformers for the optimisation passes. A model that lacks `sdpa` gets
            `eager` instead, which is logged once. `flash_attention_2` needs its package and a GPU.
        dropout: Keep the model's dropout in training. Off by default: with it the first ratio is not 1.
        share_prefix: Pass a group's prompt through the model once instead of once per completion, where the
            architecture allows it (full attention everywhere). It changes only speed and memory.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        offload_activations: Keep activations in main memory until the backward pass. With `gradient_checkpointing` only
            the inputs of the layers are moved.
        compile: Compile the transformer and the fused log-probs with `torch.compile`.
        trust_remote_code: Run Python code shipped with the model. Leave it off for models whose code you have not read.
        adapter: What is trained in place of the weights, which then stay as they are. None trains the weights.
        products: What multiplies float32 matrices on a CPU: `torch` leaves it to the library that torch was built with,
            `onednn` is about twice as fast on AMD's processors, and `auto` takes it there. It changes only speed and
            rounding.
        fused: Compute log-probs and entropies in one pass over the vocabulary with a backward of its own, where the
            head is a plain linear layer; norms, gated MLPs and rotary embeddings of Llama's form in fewer passes,
            unless `compile` is on; and attention to a long prompt once for its group, on a CPU. It changes only
            speed, memory and rounding.
        threads: On a CPU, pass so many packs at once in an update, each in a thread with a part of the cores. It is
            faster for small models, whose products are too small to be divided among cores, and takes as many times
            the memory of a pack. It changes only speed, memory and rounding.
    """

    model: PreTrainedModel
    shares_prefix: bool
    """Whether a group's prompt goes through the model once; known after `load`."""
    version: int
    """Goes up by 1 at every optimizer update, and whenever weights are read into the policy.

    While it stays the same, so do the weights: rollouts that were drawn at this version are on policy."""
    base: str
    """The fingerprint of the weights beneath an adapter, known after `load`; empty without an adapter."""

    def __init__(
        self,
        path: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
        dropout: bool = False,
        share_prefix: bool = True,
        gradient_checkpointing: bool = False,
        offload_activations: bool = False,
        compile: bool = False,
        trust_remote_code: bool = False,
        adapter: LoRA | None = None,
        products: Literal["torch", "onednn", "auto"] = "torch",
        fused: bool = True,
        threads: int = 1,
    ) -> None:
        super().__init__()
        if threads < 1:
            raise UsageError(f"model.policy.threads={threads}: give 1 or more")
        self.threads = threads
        self.path = path
        self.adapter = adapter
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.attention = attention
        self.dropout = dropout
        self.share_prefix = share_prefix
        self.gradient_checkpointing = gradient_checkpointing
        self.offload_activations = offload_activations
        self.kept: Callable[[], AbstractContextManager[Any]] = InMainMemory if offload_activations else nullcontext
        """Makes the context of a forward pass, which decides where activations are kept."""
        self.compile_model = compile
        self.trust_remote_code = trust_remote_code
        self.products = products
        self.fused = fused
        self.logits_at_once: int | None = None
        """Elements of the blocks that fused log-probs are computed in; None: as many as suit the device."""
        self.shares_prefix = False
        self.version = 0
        self.base = ""
        self.register_load_state_dict_post_hook(_count_version)

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: LoRA | None = None
    ) -> "Policy":
        """A policy around a model that is loaded already."""
        policy = cls(path=str(model.name_or_path), adapter=adapter)
        policy.tokenizer = tokenizer
        policy.config = model.config
        if adapter is not None:
            policy.base = fingerprint(model)
            adapter.add(model)
        policy.model = model.eval()
        look_for_no_padding(policy.model)
        policy.shares_prefix = policy._try_shared_prefix()
        return policy

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in the same folder as the weights."""
        return self._from_pretrained(AutoTokenizer)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, which can be read without its weights."""
        return self._from_pretrained(AutoConfig)

    def check(self) -> None:
        """Raises UsageError for what `path` lacks, before any weight is read."""
        _ = self.config, self.tokenizer
        products.by_onednn(self.products)
        if self.adapter is not None:
            self.adapter.check()
        pretrained.check_weights(self.path, "model.policy.path")

    def load(self) -> None:
        """Reads the weights; the second call does nothing."""
        if hasattr(self, "model"):
            return
        model = self._read_weights()
        if self.adapter is not None:
            self.base = fingerprint(model)
        self.prepare(model)
        self.model, self.config = model, model.config
        # As in training: Lightning loads where every new tensor is made on the GPU.
        with torch.device("cpu"):
            try:
                self._check_head()
                self._set_attention()
            except BaseException:
                del self.model
                raise
            # Tried in any case: it also sets an attention that avoids slow kernels.
            self.shares_prefix = self._try_shared_prefix() and self.share_prefix

    def prepare(self, model: PreTrainedModel) -> None:
        """Makes a model as it was read into the one that is passed. Its weights may have no numbers."""
        if not self.dropout:
            remove_dropout(model)
        if self.adapter is not None:
            self.adapter.add(model)
        if products.by_onednn(self.products):
            products.use_onednn(model)
        if self.fused and not self.compile_model:
            fuse(model)
        if self.gradient_checkpointing:
            recompute_activations(model)
        freeze_all_but_text(model)
        look_for_no_padding(model)

    def _read_weights(self) -> PreTrainedModel:
        """The model with `sdpa` attention, or `eager` if it has none: both work with weights of any type."""
        how: dict[str, Any] = {"dtype": self.dtype} | (self.adapter.reading(self.dtype) if self.adapter else {})
        try:
            return self._from_pretrained(
                AutoModelForCausalLM,
                attn_implementation="eager" if self.attention == "eager" else "sdpa",
                **how,
            )
        except UsageError as error:
            if self.attention == "eager" or "attention" not in str(error):
                raise
            model = self._from_pretrained(AutoModelForCausalLM, attn_implementation="eager", **how)
            rank_zero_info(f"policy.attention: {type(model).__name__} has no sdpa attention, so eager is used")
            return model

    def _set_attention(self) -> None:
        """Switches to the attention asked for. Flash attention refuses float32 weights while they are loaded."""
        if self.attention in ("sdpa", "eager"):
            return
        try:
            self.model.set_attn_implementation(self.attention)
        except (ImportError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"policy.attention={self.attention}: {type(self.model).__name__} cannot use it here "
                f"({first_line(error)}); use policy.attention=sdpa"
            ) from error

    def _from_pretrained(self, auto_class: Any, **kwargs: Any) -> Any:
        """What `auto_class` reads at `path`."""
        return pretrained.load(
            auto_class, self.path, "model.policy.path", trust_remote_code=self.trust_remote_code, **kwargs
        )

    def shard(self, mesh: DeviceMesh) -> None:
        """Shards the weights over the ranks of `mesh`; `forward` gathers them layer by layer."""
        if self.adapter is not None and self.adapter.quantise is not None:
            raise UsageError(
                f"model.policy.adapter.quantise={self.adapter.quantise}: weights of 4 bits cannot be sharded. Use "
                "trainer.strategy=ddp, or leave quantise out"
            )
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        sharding.shard(self, layers, mesh)

    def gathered(self) -> AbstractContextManager[None]:
        """Whole weights on every rank, to call `hidden`, `logits` and `model` any number of times.

        Every rank must enter it; inside, each may call them as often as it likes. Without sharding nothing happens.
        """
        return sharding.gathered(self)

    def without_adapter(self) -> AbstractContextManager[None]:
        """A context in which `forward` is that of the model without its adapter, bit for bit."""
        return switched_off(self.model)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def text_config(self) -> PreTrainedConfig:
        """The text part of the configuration; the whole of it for a model of text alone."""
        return self.config.get_text_config(decoder=True)

    @property
    def context_length(self) -> int | None:
        """Longest sequence, prompt and completion together; None if the model sets no limit."""
        limits = (getattr(self.text_config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        return next((limit for limit in limits if limit is not None), None)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a completion: those of the generation config, the model config and the tokenizer."""
        return stop_ids_of(self.model, self.tokenizer)

    def hidden(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """[B, T] token ids -> [B, T, hidden] last hidden states."""
        return self.trunk(input_ids=input_ids, **kwargs).last_hidden_state

    @property
    def trunk(self) -> nn.Module:
        """The transformer below the head, adapter or not; of the text alone, where the model also sees or hears."""
        return trunk_of(self.model)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] float32 logits."""
        head = self.model.get_output_embeddings()
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)  # Mamba's residuals are float32 whatever its weights.
        logits = head(hidden).float()
        config = self.text_config
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        for cap in self._soft_caps:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def _logit_scale(self) -> float:
        """What the model's class multiplies its logits by."""
        scale, divisor = (getattr(self.text_config, name, None) for name in ("logit_scale", "logits_scaling"))
        return (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)

    @property
    def _soft_caps(self) -> list[float]:
        """The bounds that the model's class squeezes its logits into."""
        names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        return [cap for name in names if (cap := getattr(self.text_config, name, None)) is not None]

    def forward(self, rollouts: Rollouts, entropy_gradient: bool = False, num_top: int = 0) -> TokenLogp:
        """The log π_θ and entropy of every drawn token, with gradient where gradients are on.

        Context inside completions is seen by the tokens after it, and has no log-prob itself.

        Args:
            rollouts: B completions with their prompts.
            entropy_gradient: Whether the entropy has a gradient too, which costs memory.
            num_top: K, how many of the likeliest tokens to return at each position; call it without gradients.
        """
        # Each prompt once where completions share one, else each completion after its own copy of the prompt.
        several = len(rollouts) > len(rollouts.sizes.prompt_lengths)
        if self.shares_prefix and several:
            if not isinstance(rollouts.layout, SharedPrefix):
                rollouts.layout = SharedPrefix.from_rollouts(rollouts, in_parts=self.fused)
        elif not isinstance(rollouts.layout, PaddedRows):
            rollouts.layout = PaddedRows.from_rollouts(rollouts)
        with self.kept():
            hidden = self._hidden(rollouts, rollouts.layout)
        return self._score(hidden, rollouts.token_ids, rollouts.temperature, entropy_gradient, num_top)

    def _hidden(self, rollouts: Rollouts, layout: SharedPrefix | PaddedRows) -> Tensor:
        """[N, hidden] states that predict the drawn tokens."""
        inputs = layout.inputs(rollouts)
        if self.shares_prefix and isinstance(layout, PaddedRows):
            # To make its own mask, transformers would read the positions, which waits for a GPU.
            inputs |= {"attention_mask": rollouts.token_ids.new_zeros(1, 1, 1, 1), "padded_rows": True}
        hidden = self._transformer(**inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, layout.predicts)

    def free_masks(self, rollouts: Rollouts) -> None:
        """Frees the attention masks of a pack after its backward pass, which may have made them again."""
        if isinstance(rollouts.layout, SharedPrefix):
            rollouts.layout.masks.clear()

    @torch.no_grad()
    def _try_shared_prefix(self) -> bool:
        """Whether this model computes the same with a shared prefix.

        If it computes the same with this package's attention, that becomes its attention in any case.
        """
        if self.model.config._attn_implementation != "sdpa":
            return False
        trial = Rollouts.from_lists([[1, 2, 3], [4]], [0, 1, 0], [[2, 3], [1, 2, 3], [4]]).to(self.device)
        rows = shared = False
        with self.evaluating():
            expected = self._hidden(trial, PaddedRows.from_rollouts(trial))
            try:
                self.model.set_attn_implementation(shared_prefix.ATTENTION)
                rows = same(self._hidden(trial, PaddedRows.from_rollouts(trial)), expected)
                if rows and self._full_attention:
                    shared = same(self._hidden(trial, SharedPrefix.from_rollouts(trial)), expected)
            except Exception as error:  # A model that fails with another attention keeps its own.
                log.debug("%s keeps transformers' attention: %s", type(self.model).__name__, error)
            finally:
                if not rows:
                    self.model.set_attn_implementation("sdpa")
        return shared

    @property
    def _full_attention(self) -> bool:
        """Whether every layer attends to the whole sequence, according to the config."""
        config = self.text_config
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        return not windowed and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}

    @cached_property
    def _transformer(self) -> Callable[..., Any]:
        # Compiled only for passes over whole sequences: decoding would compile again for every length.
        base = self.trunk
        return torch.compile(base, dynamic=True) if self.compile_model else base.__call__

    def _score(
        self, hidden: Tensor, token_ids: Tensor, temperature: float, entropy_gradient: bool, num_top: int
    ) -> TokenLogp:
        """Log-probs of [N] tokens from [N, hidden] states. Logits are made chunk by chunk, and again in backward."""
        head = self.model.get_output_embeddings()
        if self.fused and not self._soft_caps and takes(head):
            scale = self._logit_scale / temperature
            logp, entropy, *top = token_logp(
                hidden, head, token_ids, scale, entropy_gradient, num_top, self.logits_at_once, self.compile_model
            )
            return TokenLogp(logp.float(), entropy.float(), *((top[0], top[1].float()) if num_top else ()))

        def score(hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
            logp = (self.logits(hidden) / temperature).log_softmax(-1)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = -(logp.exp() * logp).sum(-1)
            top = logp.topk(num_top) if num_top else ()
            # `sum` over one element makes a copy: FSDP must not get a view as a module's output.
            return logp.gather(-1, token_ids[:, None]).sum(-1), entropy, *reversed(top)

        chunk = max(1, HEAD_ELEMENTS // self.text_config.vocab_size)
        if len(token_ids) <= chunk:
            return TokenLogp(*score(hidden, token_ids))
        parts = [
            checkpoint(score, h, ids, use_reentrant=False) if torch.is_grad_enabled() else score(h, ids)
            for h, ids in zip(hidden.split(chunk), token_ids.split(chunk), strict=True)
        ]
        return TokenLogp(*(torch.cat(values) for values in zip(*parts, strict=True)))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Checks that the model is causal, and that `logits(hidden(x))` equals the model's own output.

        Its class may change the logits after the head. Both get the head's output in float32: so they agree to 1e-3, or
        differ for a reason, whatever the type of the weights. Then checks that the model computes the same in training.
        """
        name = type(self.model).__name__
        refusal = f"policy.path={self.path}: {name}"
        # Two rows that differ only in their second half, as padding would.
        input_ids = torch.arange(1, 17, device=self.device).repeat(2, 1) % self.text_config.vocab_size
        input_ids[1, 8:] = 0
        try:
            with self.evaluating():
                expected, actual = self._logits_both_ways(input_ids)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UsageError(
                f"{refusal} does not work as a causal LM of text ({first_line(error)}); use another model"
            ) from error
        if not torch.allclose(expected[0, :8], expected[1, :8], rtol=2e-2, atol=2e-2):
            raise UsageError(f"{refusal} is not causal, its logits depend on later tokens; use another model")
        if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3):
            raise UsageError(
                f"{refusal} changes its logits after the output embedding in a way grpo_lightning does not know; use "
                "another model, and please report it"
            )
        if not self.dropout and not torch.allclose(self._logits_in_training(input_ids), actual, rtol=2e-2, atol=2e-2):
            raise UsageError(
                f"{refusal} computes something else in training, so the first ratio would not be 1; use another model, "
                "or policy.dropout=true to train with its noise"
            )

    def _logits_both_ways(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, V] logits of the model's class and of `logits`, both from the head's output in float32."""
        head = self.model.get_output_embeddings().register_forward_hook(lambda module, args, output: output.float())
        try:
            expected = self.model(input_ids=input_ids, use_cache=False).logits.float()
            return expected, self.logits(self.hidden(input_ids, use_cache=False))
        finally:
            head.remove()

    def _logits_in_training(self, input_ids: Tensor) -> Tensor:
        """[B, T, V] logits of the model in training mode; the global random state is kept."""
        was_training = self.model.training
        self.model.train()
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                return self.logits(self.hidden(input_ids, use_cache=False))
        finally:
            self.model.train(was_training)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model is in eval mode inside: without dropout."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def trained_state_dict(self) -> dict[str, Tensor]:
        """The parameters with gradient, detached, by their names in `state_dict`. Sharded ones stay sharded.

        All that a checkpoint must hold where most weights are frozen, as under an adapter.
        """
        return {name: value.detach() for name, value in self.state_dict(keep_vars=True).items() if value.requires_grad}

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes weights and tokenizer in the format of transformers; of an adapter, its tensors alone."""
        if self.adapter is None:
            self.model.save_pretrained(folder)
        else:
            save_adapter(self.model, Path(folder), self.path)
        self.tokenizer.save_pretrained(folder)


def _count_version(policy: Policy, keys: Any) -> None:
    """Moves the version on: `load_state_dict` has changed the weights."""
    policy.version += 1


def stop_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: those of the generation config, the model config and the tokenizer."""
    ids: set[int] = set()
    for owner in (model.generation_config, model.config, model.config.get_text_config(decoder=True), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(ids)


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """The transformer below the head of `model`; that of the text alone, where it also sees or hears.

    Args:
        model: Of transformers, or a `PeftModel` around one, whose own `base_model` is the adapter.
    """
    model = getattr(model, "get_base_model", lambda: model)()
    composite = model.config.get_text_config(decoder=True) is not model.config
    trunk = model.get_decoder() if composite else model.base_model
    # Llama 4's text model has no base_model.
    return getattr(model, "model", model) if trunk is model else trunk


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Turns gradients off for weights that text never reaches, such as a vision tower."""
    reached = {id(p) for part in (trunk_of(model), model.get_output_embeddings()) if part for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in reached)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two ways to compute hidden states differ by no more than rounding explains."""
    return torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 if actual.dtype != torch.float32 else 1e-4)


def recompute_activations(model: PreTrainedModel) -> None:
    """Turns gradient checkpointing on, by the name that the installed transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def look_for_no_padding(model: PreTrainedModel) -> None:
    """Switches off a warning for which some models look for padding in every forward, which waits for a GPU."""
    trunk_of(model).__dict__["warn_if_padding_and_no_attention_mask"] = _nothing


def _nothing(*args: Any) -> None:
    """Does nothing."""


def remove_dropout(model: nn.Module) -> None:
    """Sets every dropout probability and jitter of the model to 0, in its modules; dropout in its config too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            noise = "dropout" in name or name in ("layerdrop", "jitter_noise", "input_jitter_noise")
            if noise and isinstance(value, float):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
