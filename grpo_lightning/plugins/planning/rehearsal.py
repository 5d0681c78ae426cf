"""The memory of a pass, found by the policy's own code, whatever its options, on tensors that have no numbers."""

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from grpo_lightning.maths.kl import KLEstimator
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast.compute import Fast, has_full_attention
from grpo_lightning.plugins.fast.shared_prefix import ATTENTION
from grpo_lightning.plugins.fast.token_logp import logits_at_once
from grpo_lightning.plugins.planning import internals
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.policy.policy import Policy


class LiveBytes(internals.TorchDispatchMode):
    """Counts the bytes of live tensors that were made under it; views and `known` tensors cost nothing."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # Fake tensors work out their shapes by tensors of the device `meta`.
        tensors = [leaf for leaf in internals.tree_leaves(made) if isinstance(leaf, Tensor) and not leaf.is_meta]
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage not in self._seen:
                self._seen.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return made

    def _change(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def without_numbers(policy: Policy, dtype: torch.dtype, device: str, beside: Policy | None = None) -> Policy:
    """A policy of the same settings and shape, loaded or not, without numbers; as on a device of this kind.

    Its tensors go together with those of the one `beside` it.
    """
    fake = copy.copy(policy)
    fake._modules = {}
    # Activations in main memory count as if they stayed; compiled models need less; oneDNN computes with numbers.
    compute = fake.compute = copy.copy(policy.compute)
    if isinstance(compute, Fast):
        compute.offload_activations, compute.compile, compute.products = False, False, "torch"
        compute.logits_at_once = logits_at_once(device)
    if hasattr(policy, "model"):
        attention = internals.attention_of(policy.model)
    else:  # What models do as a rule: the policy tries it when it has its weights.
        own = ATTENTION if isinstance(compute, Fast) else "sdpa"
        attention = "eager" if compute.attention == "eager" else own
        if isinstance(compute, Fast):
            compute.shares_prefix = compute.share_prefix and attention == own and has_full_attention(policy.config)
    with torch.device("meta"):
        fake.model = AutoModelForCausalLM.from_config(
            copy.deepcopy(policy.config),
            dtype=dtype,
            # flash_attention_2 cannot be made without a GPU; it holds what sdpa's fused kernels hold.
            attn_implementation=ATTENTION if attention.startswith("flash") else attention,
            trust_remote_code=policy.trust_remote_code,
        )
        fake.prepare(fake.model)
    mode = beside.__dict__["_mode"] if beside else internals.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake.model.to_empty(device="cpu")
    fake.model.tie_weights()
    fake.__dict__["_mode"] = mode
    return fake


class StandIn(nn.Module):
    """A policy without numbers in the place of a reference."""

    def __init__(self, fake: Policy) -> None:
        super().__init__()
        self.parts = [fake]  # in a list, so that it is no module of this one

    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        """As `PolicySnapshot.scored`."""
        return Policy.forward(self.parts[0], rollouts, read=read)


def peak_of(
    fake: Policy,
    pack: Rollouts,
    backward: bool,
    autocasts: bool,
    entropy_gradient: bool = False,
    kl: KLEstimator | None = None,
    reference: Policy | None = None,
) -> int:
    """Most bytes at once beside weights and gradients: of a forward over `pack`, and perhaps its backward.

    A `kl` that reads distributions compares those of `fake` with those of `reference`, by default of its own shape.
    """
    reference = reference or fake
    fake.model.train(backward)
    with fake.__dict__["_mode"]:
        for parameter in fake.parameters():
            parameter.grad = torch.zeros_like(parameter) if backward and parameter.requires_grad else None
    grads = [parameter.grad for parameter in fake.parameters() if parameter.grad is not None]
    live = LiveBytes([*fake.parameters(), *fake.buffers(), *reference.parameters(), *reference.buffers(), *grads])

    def transformer(trunk: nn.Module, **inputs: Any) -> Any:
        # What the transformer makes itself must be fake too; packs and their layouts must not.
        with fake.__dict__["_mode"], live:
            return trunk(**inputs, use_cache=False)

    for one in (fake, reference):
        vars(one.compute)["call"] = transformer
    with live, torch.autocast("cpu", torch.bfloat16, enabled=autocasts), torch.set_grad_enabled(backward):
        read = kl.reading(StandIn(reference), fake, pack) if kl is not None else None
        scored = Policy.forward(fake, pack, entropy_gradient, read=read)
        if backward:
            (scored.logp + scored.entropy + (0 if read is None else scored.read)).sum().backward()
        del scored
    return live.peak
