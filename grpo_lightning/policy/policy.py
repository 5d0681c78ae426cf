"""The policy π_θ: a causal LM, and its log-probs of the tokens of completions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy import architecture, pretrained, rope, sharding
from grpo_lightning.policy.adapter import LoRA, adapted_layers, fingerprint
from grpo_lightning.policy.adapter import save as save_adapter
from grpo_lightning.policy.architecture import Head, forget_casts
from grpo_lightning.policy.compute import Compute, Layout, TokenLogp
from grpo_lightning.types import ImageStates, Prompt, UsageError

SHARDED = (
    "an encoder with sharded weights cannot read images in every pass, since ranks with fewer images would wait for "
    "others; use --trainer.strategy ddp"
)
"""A refusal."""
NUM_ELEMENTS = 16
"""Elements of every weight in a fingerprint."""


# Final, so that the command line takes its arguments as they are: `policy.path`, without a class path.
@final
class Policy(nn.Module):
    """A causal LM of transformers. `load` reads its weights, so that Lightning decides where and when.

    Args:
        path: Folder made by `save_pretrained`, or a model id of the Hugging Face hub.
        dtype: Type of the weights. With `bfloat16` weights, AdamW rounds small updates away: prefer float32 weights
            with the trainer's `precision: bf16-mixed`.
        float32_head: Compute logits in float32 where the rest computes in 16 bits, in sampling and in updates alike. In
            bfloat16 a logit of 16 or more is a multiple of 0.125. Engines of other libraries keep their head.
        dropout: Keep the model's dropout in training. Off by default: with it the first ratio is not 1.
        trust_remote_code: Run Python code shipped with the model. Leave it off for models whose code you have not read.
        adapter: What is trained in place of the weights, which then stay as they are. None trains the weights.
        compute: How log-probs are computed. It changes speed, memory and rounding, never what is learned.
        vision: Train the image encoder too, which then reads the images again in every pass. Off by default: a frozen
            encoder reads an image once per step.
    """

    model: PreTrainedModel
    """The causal LM with its weights; missing before `load`."""
    key: str = "model.policy"
    """The setting whose value the policy is, for messages."""

    def __init__(
        self,
        path: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
        float32_head: bool = False,
        dropout: bool = False,
        trust_remote_code: bool = False,
        adapter: LoRA | None = None,
        compute: Compute | None = None,
        vision: bool = False,
    ) -> None:
        super().__init__()
        self.path = path
        self.dropout = dropout
        self.trust_remote_code = trust_remote_code
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.float32_head = float32_head
        self.adapter = adapter
        self.compute = compute or Compute()
        self.vision = vision
        self.encodes_anew = vision
        """True if every forward encodes images itself; False if it takes the states that come with the prompts."""
        self._reads_images = False
        """True after the trial with the first prompt that has images."""
        self.version = 0
        """Goes up by 1 at every optimizer update, and when weights are read: rollouts of this version are on policy."""
        self.base = ""
        """The fingerprint of the weights beneath an adapter, set by `load`; empty without an adapter."""
        self.register_load_state_dict_post_hook(_count_version)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any,
        adapter: LoRA | None = None,
        compute: Compute | None = None,
        **options: Any,
    ) -> "Policy":
        """Makes a policy of a model and a tokenizer that are loaded already.

        The model itself is prepared as in `load`: its dropout is removed, its layers may be exchanged for faster ones,
        and a model that cannot be trained raises UsageError.

        Args:
            model: The causal LM, which becomes the policy's own.
            tokenizer: Its tokenizer.
            adapter: As for the class.
            compute: As for the class.
            options: The other arguments of the class.
        """
        policy = cls(str(model.name_or_path), adapter=adapter, compute=compute, **options)
        policy.tokenizer = tokenizer
        policy._take(model.eval())
        return policy

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the same folder as the weights."""
        return self._from_pretrained(AutoTokenizer)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, which can be read without its weights."""
        return self._from_pretrained(AutoConfig)

    def check(self) -> None:
        """Raises UsageError if `path` lacks a file, or the machine a package, before any weight is read."""
        _ = self.config, self.tokenizer
        self.compute.check()
        if self.adapter is not None:
            self.adapter.check()
        folder = Path(pretrained.location(self.path))
        if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise UsageError(
                f"{self.key}.path={self.path}: no weights (.safetensors or .bin) in this folder. {pretrained.FIX}"
            )

    def load(self) -> None:
        """Reads the weights; the second call does nothing."""
        if hasattr(self, "model"):
            return
        self._take(self._read_weights())

    def _take(self, model: PreTrainedModel) -> None:
        """Makes `model` the policy's model; raises UsageError if it cannot be trained."""
        if self.adapter is not None:
            self.base = fingerprint(model)
        self.prepare(model)
        # Tensors of the trials are made on the CPU, as the weights are: under Lightning new tensors are on the GPU.
        with torch.device("cpu"):
            architecture.check_model(model, self.path, self.dropout)
            self.compute.adapt(model, architecture.trunk_of(model))
        self.model, self.config = model, model.config

    def prepare(self, model: PreTrainedModel) -> None:
        """Changes a model that was just read into the model that computes. Its weights may be without values."""
        rope.fix_frequencies(model)
        if not self.dropout:
            architecture.remove_dropout(model)
        if self.float32_head:
            architecture.compute_head_in_float32(model, f"{self.key}.float32_head")
        if self.adapter is not None:
            self.adapter.add(model)
        self.compute.prepare(model)
        encoder_parameters = architecture.encoder_parameters(model)
        if self.vision and not encoder_parameters:
            raise UsageError(f"{self.key}.vision=true: {type(model).__name__} has no image encoder; leave it false")
        if not self.vision:
            for parameter in encoder_parameters:
                parameter.requires_grad_(False)

    def _read_weights(self) -> PreTrainedModel:
        # Flash attention comes later: it refuses float32 weights.
        attention = "eager" if self.compute.attention == "eager" else "sdpa"
        model_class = pretrained.model_class(self.config)
        try:
            return self._from_pretrained(model_class, attn_implementation=attention, dtype=self.dtype)
        except UsageError as error:
            if attention == "eager" or "attention" not in str(error):
                raise
            model = self._from_pretrained(model_class, attn_implementation="eager", dtype=self.dtype)
            rank_zero_info(f"policy.compute.attention: {type(model).__name__} has no sdpa attention, so eager is used")
            return model

    def _from_pretrained(self, auto_class: Any, **kwargs: Any) -> Any:
        kwargs["trust_remote_code"] = self.trust_remote_code
        return pretrained.load(auto_class, self.path, f"{self.key}.path", **kwargs)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shards the weights over the ranks of `mesh`; `forward` assembles them layer by layer."""
        if self.vision:
            raise UsageError(f"{self.key}.vision=true: {SHARDED}, or leave it false")
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        sharding.shard(self, layers, mesh)

    def gathered(self) -> AbstractContextManager[None]:
        """Opens a context with whole weights on every rank, for calls of any submodule. Every rank must enter it."""
        return sharding.gathered(self)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Opens a context in which `forward` computes as the model without its adapter, bit for bit."""
        layers = adapted_layers(self.model).values()
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def mark_written(self) -> None:
        """Counts a new version after the weights were written: earlier samples are of an earlier version."""
        self.version += 1
        forget_casts()

    def fingerprint(self) -> bytes:
        """Returns a few elements of every weight, and which adapters are on; only this rank's shards, if sharded.

        `version` counts the changes that were announced with `mark_written`. A fingerprint shows the others too, for
        engines that have copies.
        """
        elements = []
        for parameter in self.parameters():
            flat = sharding.local(parameter.detach()).flatten()
            # With an odd stride the elements of a matrix come from several columns.
            stride = flat.numel() // NUM_ELEMENTS | 1
            elements.append(flat[::stride][:NUM_ELEMENTS].double())
        values = torch.cat(elements).cpu()
        layers = adapted_layers(self.model).values() if self.adapter is not None else ()
        return values.numpy().tobytes() + bytes(layer.disable_adapters for layer in layers)

    def evaluating(self) -> AbstractContextManager[None]:
        """Opens a context in which the model is in eval mode: without dropout."""
        return architecture.evaluating(self.model)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def text_config(self) -> PreTrainedConfig:
        """The text part of the configuration."""
        return self.config.get_text_config(decoder=True)

    @property
    def context_length(self) -> int | None:
        """Longest sequence, prompt and completion together; None if the model sets no limit."""
        return rope.context_length(self.text_config)

    @property
    def longrope_length(self) -> int | None:
        """Length at which `longrope` would change all frequencies, so the context ends. None with other types."""
        return rope.longrope_length(self.text_config)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a completion, by the generation config, the model config or the tokenizer."""
        generation_config = self.model.generation_config if hasattr(self, "model") else self._generation_config
        return architecture.stop_ids_of(generation_config, self.config, self.tokenizer)

    @cached_property
    def _generation_config(self) -> GenerationConfig | None:
        """The generation config, before the weights are read; None if the model has none."""
        try:
            return self._from_pretrained(GenerationConfig)
        except UsageError:
            return None

    @property
    def trunk(self) -> nn.Module:
        """The transformer below the head, adapter or not."""
        return architecture.trunk_of(self.model)

    @property
    def head(self) -> Head:
        """The vocabulary head."""
        return Head(self.model)

    def hidden(self, input_ids: Tensor | None, **kwargs: Any) -> Tensor:
        """[B, T] token ids, or None with `inputs_embeds` -> [B, T, hidden] last hidden states."""
        return self.trunk(input_ids=input_ids, **kwargs).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] float32 logits."""
        return self.head(hidden)

    def forward(
        self,
        rollouts: Rollouts,
        entropy_gradient: bool = False,
        num_top: int = 0,
        layout: Layout | None = None,
        read: Callable[[Tensor, Head], Any] | None = None,
    ) -> TokenLogp:
        """Returns log π_θ and entropy of every sampled token, with gradient where gradients are on.

        Args:
            rollouts: B completions with their prompts. Context tokens inside them get no log-prob.
            entropy_gradient: Give the entropy a gradient too, which costs memory.
            num_top: K, the number of likeliest tokens to return at each position; call it without gradients.
            layout: The layout that `compute.layout` made of these rollouts; None makes it.
            read: Reads more from the [N, hidden] states that predict the sampled tokens, and from the head.
        """
        layout = layout or self.compute.layout(rollouts)
        if self.encodes_anew and rollouts.image_states:
            rollouts = replace(rollouts, image_states=self._encoded_anew(rollouts))
        hidden = self.compute.hidden(self.trunk, rollouts, layout)
        if self.vision and hidden.requires_grad:
            # Other ranks wait for a gradient of every trained weight, and these prompts may have no images.
            trained = [weight for weight in architecture.encoder_parameters(self.model) if weight.requires_grad]
            hidden = hidden + 0 * torch.stack([weight.sum() for weight in trained]).sum()
        scored = self.compute.score(
            self.head, hidden, rollouts.token_ids, rollouts.temperature, entropy_gradient, num_top
        )
        scored.read = read and read(hidden, self.head)
        return scored

    def _encoded_anew(self, rollouts: Rollouts) -> list[ImageStates | None]:
        """Returns the images of the prompts as the encoder reads them now."""
        if isinstance(self, FSDPModule):
            raise UsageError(f"{self.key}: for prompts with images, {SHARDED}")
        prompts = rollouts.prompt_token_ids.split(rollouts.sizes.prompt_lengths.tolist())
        return [
            states and states.images.states(self.model, prompt_ids)
            for prompt_ids, states in zip(prompts, rollouts.image_states, strict=True)
        ]

    @torch.no_grad()
    def encode_images(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns the prompts with the `image_states` of their images, each encoded once. Call it with whole weights.

        A model that cannot be shown images raises UsageError at the first prompt that has some.
        """
        encoded = []
        for prompt in prompts:
            if prompt.images is not None:
                prompt_ids = torch.tensor(prompt.token_ids, device=self.device)
                with self.evaluating():
                    states = prompt.images.states(self.model, prompt_ids, tries=not self._reads_images)
                self._reads_images = True
                prompt = replace(prompt, image_states=states)
            encoded.append(prompt)
        return encoded

    def trained_state_dict(self) -> dict[str, Tensor]:
        """Returns the parameters with gradient, detached, by their names in `state_dict`. Shards stay shards."""
        return {name: value.detach() for name, value in self.state_dict(keep_vars=True).items() if value.requires_grad}

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes weights and tokenizer in the format of transformers; with an adapter, its tensors alone."""
        if self.adapter is None:
            self.model.save_pretrained(folder)
        else:
            save_adapter(self.model, Path(folder), self.path)
        self.tokenizer.save_pretrained(folder)
        pretrained.copy_processor(self.path, Path(folder))


def _count_version(policy: Policy, keys: Any) -> None:
    policy.mark_written()
