"""Adapters: a few trained tensors beside weights that stay as they are."""

import copy
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from grpo_lightning.policy import sharding
from grpo_lightning.policy.pretrained import first_line, location
from grpo_lightning.types import UsageError, at_least

if TYPE_CHECKING:
    from peft import PeftConfig

INSTALL = {"peft": "pip install 'grpo-lightning[peft]'", "bitsandbytes": "pip install 'grpo-lightning[nf4]'"}
"""How to install what an adapter needs."""


class LoRA:
    """Trains two thin matrices beside each linear layer, while the weights stay as they are (LoRA, arXiv 2106.09685).

    A layer computes W x + s B A x (eq. 3) with A of [rank, in], B of [out, rank] and s = alpha / rank. B starts at 0:
    the first policy is the model itself. Gradients, optimizer state and checkpoints shrink to a hundredth or so, and
    the reference costs nothing. Learning rates are about ten times those of all weights: 1e-5 to 3e-4.

    PEFT makes it (`pip install 'grpo-lightning[peft]'`). The matrices are float32 whatever the type of the weights. A
    subclass that overrides `config` trains what else PEFT adds to layers.

    Args:
        rank: Rows of A and columns of B.
        alpha: Numerator of the scale s.
        target_modules: `all-linear` for every linear layer but the head, the names of layers such as
            `[q_proj, v_proj]`, or a regular expression for whole names.
        dora: Also train the norm of every row of W + s B A (DoRA, arXiv 2402.09353). Slower.
        rslora: Take s = alpha / sqrt(rank), so that a large rank learns as fast as a small one (arXiv 2312.03732).
        quantise: `nf4` keeps the weights of linear layers in 4 bits through bitsandbytes (QLoRA, arXiv 2305.14314): a
            quarter of the memory of bfloat16, slower, and a slightly different base model.
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 32.0,
        target_modules: list[str] | str = "all-linear",
        dora: bool = False,
        rslora: bool = False,
        quantise: Literal["nf4"] | None = None,
    ) -> None:
        at_least("model.policy.adapter.rank", rank, 1)
        if not alpha > 0:
            raise UsageError(f"model.policy.adapter.alpha={alpha}: give more than 0, such as twice the rank")
        self.rank = rank
        self.alpha = alpha
        self.target_modules = target_modules
        self.dora = dora
        self.rslora = rslora
        self.quantise = quantise

    def check(self) -> None:
        """Raises UsageError for a package that is missing, before any weight is read."""
        require("peft", "model.policy.adapter")
        if self.quantise is not None:
            require("bitsandbytes", f"model.policy.adapter.quantise={self.quantise}")

    def config(self) -> "PeftConfig":
        """The adapter as PEFT describes it."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=0.0,
            target_modules=self.target_modules,
            use_dora=self.dora,
            use_rslora=self.rslora,
            task_type="CAUSAL_LM",
        )

    def reading(self, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of `from_pretrained` by which the weights are read as the adapter wants them.

        Args:
            dtype: The type of the weights, and of products with those that are quantised.
        """
        if self.quantise is None:
            return {}
        from transformers import BitsAndBytesConfig

        device = torch.get_default_device()
        if device.type != "cuda":
            # On a CPU, bitsandbytes packs weights for decoding in a way that has no right gradient.
            raise UsageError(
                f"model.policy.adapter.quantise={self.quantise}: the weights are read onto a {device.type} device, and "
                "weights of 4 bits can be trained beside on a CUDA GPU alone. Use trainer.accelerator=gpu, or leave "
                "quantise out"
            )
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quantise,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        return {"quantization_config": config, "device_map": {"": device}}

    def add(self, model: PreTrainedModel) -> None:
        """Adds the trained tensors to the layers of `model`, and freezes everything else.

        The matrices A are random: they are drawn from the global generator.
        """
        require("peft", "model.policy.adapter")
        from peft import inject_adapter_in_model

        try:
            with warnings.catch_warnings():
                # Of GPT-2's layers, which are transposed: PEFT finds out.
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
                # Refused below.
                warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
                inject_adapter_in_model(self.config(), model)
        except ValueError as error:
            raise UsageError(
                f"model.policy.adapter.target_modules={self.target_modules}: {first_line(error)}. Give all-linear, or "
                f"names of layers of {type(model).__name__}"
            ) from error
        self._refuse_tied(model)
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    # bfloat16 would round most updates away.
                    setattr(module, name, torch.nn.Parameter(parameter.detach().float()))

    def _refuse_tied(self, model: PreTrainedModel) -> None:
        """Raises UsageError for an adapter on one of two layers that share their weights."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
        if tied and any(isinstance(module, BaseTunerLayer) for module in embeddings):
            raise UsageError(
                f"model.policy.adapter.target_modules={self.target_modules}: embedding and head of "
                f"{type(model).__name__} share their weights, and could not be merged with an adapter on one of them. "
                "Leave them out, as all-linear does"
            )


@contextmanager
def switched_off(model: PreTrainedModel) -> Iterator[None]:
    """A context in which `model` computes what it did before its adapter was added, bit for bit."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers of PEFT in `model`, by their names in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Adds what the adapter computes to the weights, and takes the adapter away. Do it in float32: bfloat16 rounds."""
    for name, layer in adapted_layers(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config


def plus_adapter(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """W + s B A, for an engine that has weights of its own.

    Args:
        weight: [out, in] W, whole. GPT-2's layers have it transposed.
        layer: Of `adapted_layers`; its matrices may be sharded, so every rank must call this.

    Raises:
        UsageError: It computes something else, as with DoRA or weights of 4 bits.
    """
    if getattr(layer, "lora_variant", True) or not weight.is_floating_point():
        raise UsageError(
            "model.policy.adapter: this engine has weights of its own, and takes LoRA without dora and quantise. "
            "Use model.engine=NativeEngine, or leave them out"
        )
    (name,) = layer.lora_A
    added = sharding.assembled(layer.lora_B[name].weight) @ sharding.assembled(layer.lora_A[name].weight)
    added = (added.T if layer.fan_in_fan_out else added) * layer.scaling[name]
    return (weight.float() + added).to(weight.dtype)


def save(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Writes the adapter alone, as PEFT reads it.

    Args:
        model: It has the adapter; its other weights are not read.
        folder: There, or made.
        base: Path of the model without the adapter: a folder, or an id of the Hugging Face hub.
    """
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": value.contiguous() for name, value in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.base_model_name_or_path = location(base)
    config.save_pretrained(str(folder))


def fingerprint(model: PreTrainedModel) -> str:
    """A short text that differs for models of other weights; the same for weights in float32 and in bfloat16.

    It is of a few numbers of every tensor; those in 4 bits are left out.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            flat = parameter.detach().flatten()
            some = flat[:: max(1, flat.numel() // 16)][:16]
            digest.update(some.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def num_elements(parameter: torch.Tensor) -> int:
    """Numbers in a parameter; those that bitsandbytes has packed count as they were."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else packed.shape.numel()


def require(package: str, key: str) -> None:
    """Raises UsageError, with the command that installs it, where an optional package is missing.

    Args:
        package: One of INSTALL.
        key: The setting that needs it.
    """
    if find_spec(package) is None:
        raise UsageError(f"{key}: it needs {package}, which is not installed. {INSTALL[package]}")
