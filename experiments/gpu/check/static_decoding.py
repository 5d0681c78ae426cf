"""Decoding with static shapes, so that one position can be one CUDA graph.

Off by default and outside the package until a GPU has confirmed it. It draws the engine's tokens, which a test asks on
a CPU, without a graph. It has no end of a row and no compaction: a graph per number of rows would be captured as rows
end.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from grpo_lightning import NativeEngine, RandomKey, Request, Sampling, StopStrings
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import sample_tokens
from grpo_lightning.plugins.compute.fast.attention import additive, masked
from grpo_lightning.plugins.engines.native.native import slab_attention
from grpo_lightning.plugins.engines.native.native_batch import Batch, groups_of

ATTENTION = "static_slab"


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """[B, H, 1, D], [B, K, C, D] x 2 -> [B, 1, H, D], over all columns there will be, under a mask."""
    return masked(query.to(key.dtype), key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, attention_mask=None, **kwargs: attention_mask)


class StaticLayer(DynamicLayer):
    """Keys and values of all positions there will be; new ones are written at `column`, a tensor on the device."""

    def __init__(self, slabs: list[Tensor], column: Tensor) -> None:
        super().__init__()
        self.slabs, self.column, self.is_initialized = slabs, column, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for slab, states in zip(self.slabs, (key_states, value_states), strict=True):
            slab.index_copy_(2, self.column, states.to(slab.dtype))
        return self.slabs[0], self.slabs[1]

    def get_seq_length(self) -> int:
        return 0


class StaticDecoder:
    """Decodes `new` tokens of each request as `engine` does, which has been synced to its policy."""

    def __init__(self, engine: NativeEngine, requests: list[Request], new: int, key: RandomKey) -> None:
        assert engine.policy is not None
        self.policy, self.engine, self.requests, self.new, self.key = engine.policy, engine, requests, new, key

    def prepare(self, capture: bool) -> None:
        """Reads the prompts, and captures a position as a CUDA graph."""
        policy, sampling = self.policy, Sampling(max_new_tokens=-(-self.new // 8) * 8)
        stops = StopStrings(policy, [])
        stops.ids = frozenset()
        batch = Batch(policy, self.requests, groups_of(self.requests), sampling, self.key, stops)
        with slab_attention(policy), self._copies():
            batch.read()
        width, device = batch.width, policy.device
        prompt_id, sample, position, length = batch.keys.unbind(1)
        self.order = torch.tensor(batch.request_of_row).argsort()
        self.uniform = uniforms(self.key, prompt_id, sample, position, self.new)
        # All columns there will be, in rows that begin at multiples of 8.
        padding = -(width + sampling.max_new_tokens) % 8
        columns = torch.arange(width + sampling.max_new_tokens + padding, device=device)
        self.mask = additive((columns < length[:, None])[:, None, None], batch.layers[0].dtype)
        self.column = torch.full((1,), width, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        slabs = [[torch.nn.functional.pad(slab, (0, 0, 0, padding)) for slab in layer.slabs] for layer in batch.layers]
        self.cache = {batch.cache_name: Cache(layers=[StaticLayer(pair, self.column) for pair in slabs])}
        self.logits, self.position = batch.logits.clone(), length.clone()
        self.tokens = torch.zeros(len(self.requests), self.new, dtype=torch.int64, device=device)
        self.logps = torch.zeros(len(self.requests), self.new, dtype=torch.float32, device=device)
        self.graph: Any = None
        if capture:
            self._capture([self.mask, self.column, self.step, self.logits, self.position])

    def decode(self) -> tuple[Tensor, Tensor]:
        """[rows, new] tokens and their log-probs, in the order of the requests."""
        with self._in_use():
            for _ in range(self.new):
                _ = self.graph.replay() if self.graph else self._decode_position()
        return self.tokens.cpu()[self.order], self.logps.cpu()[self.order]

    def _decode_position(self) -> None:
        """Draws a token per row and passes it on. No shape depends on the position, and nothing waits."""
        uniform = self.uniform.index_select(1, self.step)[:, 0]
        token, logp = sample_tokens(self.logits, uniform, Sampling(max_new_tokens=self.new))
        self.tokens.index_copy_(1, self.step, token[:, None])
        self.logps.index_copy_(1, self.step, logp[:, None])
        self.mask.index_fill_(3, self.column, 0.0)
        inputs = {"position_ids": self.position[:, None], "attention_mask": self.mask, **self.cache}
        hidden = self.policy.hidden(token[:, None], use_cache=True, **inputs)
        self.logits.copy_(self.policy.logits(hidden[:, 0]))
        for counter in (self.column, self.step, self.position):
            counter += 1

    def _capture(self, state: list[Tensor]) -> None:
        before = [tensor.clone() for tensor in state]
        with self._in_use():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._decode_position()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._decode_position()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)

    def _copies(self) -> Any:
        return self.engine._copies.in_use() if self.engine._copies else nullcontext()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        model, own = self.policy.model, self.policy.model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        try:
            with self._copies(), self.policy.evaluating():
                yield
        finally:
            model.set_attn_implementation(own)
