"""Captured steps of decoding: the kernels of one position, recorded once and launched together by a GPU.

A captured step knows addresses, not tensors. So everything that it reads and writes stays where it is: the tokens and
their positions, the column where keys are written, which columns are seen, keys and values, the logits, the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from grpo_lightning.engines.linear_copies import LinearCopies
from grpo_lightning.engines.slab import SlabLayer
from grpo_lightning.policy.policy import Policy

Step = Callable[[], None]

COLUMNS = 128
"""Captured steps attend to a multiple of so many columns."""


def row_bucket(rows: int) -> int:
    """The rows of the captured step that decodes `rows`: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ..."""
    power = 2 ** (rows - 1).bit_length()
    less = power // 4 * 3
    return less if power > 16 and rows <= less else power


def rows_within(rows: int) -> int:
    """The most rows that a captured step of at most `rows` rows has."""
    power = 2 ** (rows.bit_length() - 1)
    more = power // 2 * 3
    return more if power >= 16 and rows >= more else power


def column_bucket(columns: int) -> int:
    """The columns of the captured step that decodes with `columns`."""
    return -(-columns // COLUMNS) * COLUMNS


class CUDACapture:
    """Captures steps as CUDA graphs that share their memory. They are replayed one after another, never at once.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, step: Step) -> Step:
        """What does all that `step` does on the GPU, with none of its Python; `step` must be idempotent.

        Raises RuntimeError if `step` waits for the GPU.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            step()  # Libraries make their handles and workspaces, and models what they make lazily.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")  # A wait while capturing would leave the stream unusable.
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may go on with their work.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


CAPTURES: dict[str, Callable[[torch.device], Callable[[Step], Step]]] = {"cuda": CUDACapture}
"""What captures steps, by the type of the device."""


def reason_against(policy: Policy) -> str:
    """Why steps of this policy cannot be captured, in a few words; empty if they perhaps can."""
    if any(isinstance(module, FSDPModule) for module in policy.modules()):
        return "its weights are sharded, and somewhere else whenever they are gathered"
    if any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=policy.config).layers):
        return "it has sliding windows"
    return ""


class _BucketLayer(DynamicLayer):
    """The keys and values of one layer that a captured step reads. Their number of positions never changes."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.column = column
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes the states of one position at the column, and returns those of all columns, seen or not."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Positions before the new one, as if all columns were filled."""
        assert self.keys is not None
        return self.keys.shape[2] - 1


@dataclass(slots=True)
class _Buffers:
    """What captured steps read and write, at addresses that stay. Each step has the first rows and columns of it."""

    token: Tensor
    """[R, 1] int64."""
    position: Tensor
    """[R, 1] int64 of the tokens in their sequences."""
    column: Tensor
    """[1] int64, where the keys and values of the tokens are written."""
    seen: Tensor
    """[R, 1, 1, C] bool."""
    keys: list[Tensor]
    """[R, K, C, D] of each layer."""
    values: list[Tensor]
    """[R, K, C, E] of each layer."""
    logits: Tensor
    """[R, V] float32."""

    @classmethod
    def like(cls, layers: Sequence[SlabLayer], rows: int, columns: int, vocabulary: int) -> "_Buffers":
        """Buffers for layers of these types and sizes."""
        device = layers[0].key_slab.device

        def states(slab: Tensor) -> Tensor:
            return slab.new_empty(rows, slab.shape[1], columns, slab.shape[3])

        return cls(
            token=torch.zeros(rows, 1, dtype=torch.int64, device=device),
            position=torch.zeros(rows, 1, dtype=torch.int64, device=device),
            column=torch.zeros(1, dtype=torch.int64, device=device),
            seen=torch.zeros(rows, 1, 1, columns, dtype=torch.bool, device=device),
            keys=[states(layer.key_slab) for layer in layers],
            values=[states(layer.value_slab) for layer in layers],
            logits=torch.zeros(rows, vocabulary, device=device),
        )

    @property
    def states(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [*self.keys, *self.values]

    @property
    def rows(self) -> int:
        return len(self.token)

    @property
    def columns(self) -> int:
        return self.seen.shape[3]


class Graphs:
    """The captured steps of a policy, one per bucket of rows and columns, and the batch that is decoded with them.

    Rows and columns are rounded up. The rows beyond those of the batch are dead: they compute something that nobody
    reads. A step is captured when it is first needed and holds until something that it reads is at another address.
    Optimizers change weights where they are, so it survives updates.

    Args:
        policy: Its model is in eval mode and has the slab's attention whenever a batch is decoded.
        fits: The rows that fit into memory with so many columns.
    """

    def __init__(self, policy: Policy, fits: Callable[[int], int]) -> None:
        self.policy = policy
        self.copies: LinearCopies | None = None
        """Those that the model computes with."""
        self._fits = fits
        self._capture = CAPTURES[policy.device.type](policy.device)
        self._buffers: _Buffers | None = None
        self._steps: dict[tuple[int, int], Step] = {}
        self._known: object = None
        """What was true when the steps were captured."""
        self.rows = 0
        """Rows of the batch."""
        self.length = 0
        """Columns of the batch that are filled."""

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that it holds, whatever they hold."""
        return 0 if self._buffers is None else sum(states.nbytes for states in self._buffers.states)

    # Tensors made or changed in inference mode could not be changed outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, layers: Sequence[SlabLayer], prompt: Tensor, lengths: Tensor, max_new_tokens: int) -> None:
        """Begins a batch after its prompts have been read.

        Args:
            layers: Keys and values of the prompts.
            prompt: [r] int64 prompt of each row.
            lengths: [r] int64 tokens of each row's prompt.
            max_new_tokens: Columns that follow the prompts.
        """
        self.rows, self.length = len(prompt), layers[0].length
        buffers = self._room(layers, row_bucket(self.rows), column_bucket(self.length + max_new_tokens))
        if (known := self._conditions()) != self._known:
            self._steps.clear()
            self._known = known
        for states in buffers.states:
            states.zero_()  # What is not seen has weight 0, and 0 times infinity would be NaN.
        for layer, keys, values in zip(layers, buffers.keys, buffers.values, strict=True):
            keys[: self.rows, :, : self.length] = layer.key_slab[:, :, : self.length].index_select(0, prompt)
            values[: self.rows, :, : self.length] = layer.value_slab[:, :, : self.length].index_select(0, prompt)
        buffers.position.zero_()
        buffers.seen.zero_()
        filled = torch.arange(self.length, device=lengths.device) < lengths[:, None]
        buffers.seen[: self.rows, 0, 0, : self.length] = filled

    def _room(self, layers: Sequence[SlabLayer], rows: int, columns: int) -> _Buffers:
        """Buffers of at least so many rows and columns, the old ones if they are large enough."""
        old, dtype = self._buffers, layers[0].key_slab.dtype
        if old is None or rows > old.rows or columns > old.columns or old.keys[0].dtype != dtype:
            most = (max(rows, old.rows), max(columns, old.columns)) if old else (rows, columns)
            if most[0] <= self._fits(most[1]):
                rows, columns = most
            # Not two at a time.
            del old
            self._steps.clear()
            self._buffers = None
            self._buffers = _Buffers.like(layers, rows, columns, self.policy.text_config.vocab_size)
        assert self._buffers is not None
        return self._buffers

    def _conditions(self) -> object:
        """What captured steps depend on, beside the buffers: the addresses of weights, and the type of products."""
        kind = self.policy.device.type
        copies = self.copies.tensors() if self.copies else []
        tensors = [*self.policy.model.parameters(), *self.policy.model.buffers(), *copies]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return [tensor.data_ptr() for tensor in tensors], dtype

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep(self, rows: Tensor) -> None:
        """Compacts the batch to `rows` [r]."""
        assert self._buffers is not None
        count = len(rows)
        for states in self._buffers.states:
            states[:count, :, : self.length] = states[: self.rows, :, : self.length].index_select(0, rows)
        seen = self._buffers.seen
        seen[:count] = seen[: self.rows].index_select(0, rows)
        # Frequencies that depend on the furthest position must not see that of a dead row.
        self._buffers.position.zero_()
        self.rows = count

    @torch.inference_mode(False)
    @torch.no_grad()
    def decode(self, token: Tensor, position: Tensor) -> Tensor:
        """[r, V] float32 logits that follow [r] `token` at [r] `position`; the next call overwrites them."""
        assert self._buffers is not None
        buffers = self._buffers
        # No wait: numbers go along with the kernels that write them.
        buffers.token[: self.rows, 0] = token
        buffers.position[: self.rows, 0] = position
        buffers.column.fill_(self.length)
        self.length += 1
        bucket = row_bucket(self.rows), column_bucket(self.length)
        if bucket not in self._steps:
            self._steps[bucket] = self._captured(buffers, *bucket)
        self._steps[bucket]()
        return buffers.logits[: self.rows]

    def _captured(self, buffers: _Buffers, rows: int, columns: int) -> Step:
        """Captures the step of a bucket."""
        states = zip(buffers.keys, buffers.values, strict=True)
        layers = [
            _BucketLayer(keys[:rows, :, :columns], values[:rows, :, :columns], buffers.column)
            for keys, values in states
        ]
        cache = Cache(layers=[*layers])
        seen = buffers.seen[:rows, ..., :columns]

        def step() -> None:
            seen.index_fill_(3, buffers.column, True)
            hidden = self.policy.hidden(
                buffers.token[:rows],
                past_key_values=cache,
                position_ids=buffers.position[:rows],
                attention_mask=seen,
                use_cache=True,
            )
            buffers.logits[:rows] = self.policy.logits(hidden[:, 0])

        # Autocast keeps its copies of weights until its context ends. A captured step would read one that is of earlier
        # weights, or freed. Without them it casts what has no copy of its own (`LinearCopies`) whenever it runs.
        kind = self.policy.device.type
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False):
            return self._capture(step)
