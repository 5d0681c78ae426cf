"""Adapters: a few trained tensors beside weights that stay as they are."""

import copy
import hashlib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from grpo_lightning.policy.pretrained import first_line, location
from grpo_lightning.types import UsageError, at_least, require

if TYPE_CHECKING:
    from peft import PeftConfig


class LoRA:
    """Trains two thin matrices beside each linear layer, while the weights stay as they are (LoRA, arXiv 2106.09685).

    A layer computes W x + s B A x (eq. 3) with A of [rank, in], B of [out, rank] and s = alpha / rank. B starts at 0:
    the first policy is the model itself. Gradients, optimizer state and checkpoints shrink to a hundredth or so, and
    the reference costs nothing. Learning rates are about ten times those of all weights: 1e-5 to 3e-4.

    PEFT makes the matrices (`pip install 'grpo-lightning[peft]'`). They are float32 with weights of any type. A
    subclass that overrides `config` trains other adapters of PEFT.

    Args:
        rank: Rows of A and columns of B.
        alpha: Numerator of the scale s.
        target_modules: `all-linear` for every linear layer but the head, the names of layers such as
            `[q_proj, v_proj]`, or a regular expression for whole names.
        dora: Also train the norm of every row of W + s B A (DoRA, arXiv 2402.09353). Slower.
        rslora: Take s = alpha / sqrt(rank), so that a large rank learns as fast as a small one (arXiv 2312.03732).
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 32.0,
        target_modules: list[str] | str = "all-linear",
        dora: bool = False,
        rslora: bool = False,
    ) -> None:
        at_least("model.policy.adapter.rank", rank, 1)
        require(alpha > 0, f"model.policy.adapter.alpha={alpha}: give more than 0, such as twice the rank")
        self.rank = rank
        self.alpha = alpha
        self.target_modules = target_modules
        self.dora = dora
        self.rslora = rslora

    def check(self) -> None:
        """Raises UsageError where PEFT is missing."""
        if find_spec("peft") is None:
            raise UsageError(
                "model.policy.adapter: it needs peft, which is not installed. pip install 'grpo-lightning[peft]'"
            )

    def config(self) -> "PeftConfig":
        """Returns the adapter in PEFT's description."""
        from peft import LoraConfig

        options: Any = {"lora_alpha": self.alpha, "use_dora": self.dora, "use_rslora": self.rslora}
        return LoraConfig(r=self.rank, target_modules=self.target_modules, task_type="CAUSAL_LM", **options)

    def add(self, model: PreTrainedModel) -> None:
        """Adds the trained tensors, sampled with the global generator, to layers of `model`; freezes all others."""
        self.check()
        from peft import inject_adapter_in_model

        key = f"model.policy.adapter.target_modules={self.target_modules}"
        name = type(model).__name__
        try:
            with warnings.catch_warnings():
                # PEFT sees by itself that GPT-2's layers are transposed; tied embeddings are refused below.
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to|Model has `tie_word_embeddings=True`")
                inject_adapter_in_model(self.config(), model)
        except ValueError as error:
            raise UsageError(f"{key}: {first_line(error)}. Give all-linear, or names of layers of {name}") from error
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        is_tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
        if is_tied and any(layer in embeddings for layer in adapted_layers(model).values()):
            raise UsageError(
                f"{key}: embedding and head of {name} share their weights, and could not be merged with an adapter on "
                "one of them. Leave them out, as all-linear does"
            )
        # bfloat16 would round most updates away.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the layers of PEFT in `model`, by their names in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def save(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Writes only the adapter of `model`, as PEFT reads it, for the model at the path or hub id `base`."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": value.contiguous() for name, value in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.base_model_name_or_path = location(base)
    config.save_pretrained(str(folder))


def fingerprint(model: PreTrainedModel) -> str:
    """Returns a short text that differs between weights, but not between float32 and bfloat16."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            flat = parameter.detach().flatten()
            probe = flat[:: max(1, flat.numel() // 16)][:16]
            digest.update(probe.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
