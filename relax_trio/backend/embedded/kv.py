"""Keys and values of the attempts that run: one slot row each, in tensors that all rows share.

Owns the memory, the writes and the views a step reads, and the transformers cache object that connects both to a model.
Not covered: which attempt has which row (rows.py), and what is kept after an attempt ended (prefix.py).
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, frozen
from transformers.cache_utils import Cache, CacheLayerMixin

_ROW_BUCKETS = (1, 8, 16, 32, 64)
_LEAST_CAPACITY = 128


@frozen(kw_only=True)
class KvSpec:
    """Shape of one token's keys and values in every layer."""

    n_layers: int
    n_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Memory of one cached token over all layers."""
        return self.n_layers * self.n_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@define(eq=False, kw_only=True)
class StepPlan:
    """What one forward pass writes and reads.

    Attributes:
      first, n_rows: the slot rows of the batch, `first` to `first + n_rows - 1`.
      length: keys and values that are read of each row.
      index: (n_rows * T,) int64 flat places of the new keys, `row * capacity + position`, or the trash place.
    """

    first: int
    n_rows: int
    length: int
    index: torch.Tensor


@frozen
class KvBlock:
    """A copy of one row's first tokens: keys and values (n_layers, length, heads * dim)."""

    keys: torch.Tensor
    values: torch.Tensor


class KvStore:
    """Slot rows in two tensors (n_layers, rows + 1, capacity, heads * dim); the last row takes what padding writes.

    Positions beyond a row's own length hold old numbers: finite, and masked out by every reader.
    """

    def __init__(self, spec: KvSpec, *, max_rows: int, max_len: int, fixed_rows: bool = False) -> None:
        self.spec = spec
        self.max_rows = max_rows
        self.max_len = max_len
        self.n_rows = max_rows if fixed_rows else 0
        self.capacity = 0
        self.plan = StepPlan(first=0, n_rows=0, length=0, index=torch.empty(0, dtype=torch.int64))
        self.cache = Cache(layers=[SlotLayer(self, layer) for layer in range(spec.n_layers)])
        self._keys = self._empty(0, 0, spec.key_dim)
        self._values = self._empty(0, 0, spec.value_dim)

    @property
    def trash(self) -> int:
        """Flat place that nobody reads."""
        return self.n_rows * self.capacity

    def grow(self, n_rows: int, length: int) -> None:
        """Make room for `n_rows` rows of `length` tokens; what is stored stays."""
        if n_rows <= self.n_rows and length <= self.capacity:
            return
        rows = max(self.n_rows, min(self.max_rows, _row_bucket(n_rows)))
        capacity = self.capacity
        if length > capacity:
            wanted = max(length, capacity + capacity // 2, _LEAST_CAPACITY)
            capacity = max(length, min(wanted, self.max_len))
        old_rows, old_capacity = self._keys.shape[1] - 1, self._keys.shape[2]
        for name, dim in (("_keys", self.spec.key_dim), ("_values", self.spec.value_dim)):
            old: torch.Tensor = getattr(self, name)
            new = self._empty(rows + 1, capacity, dim)
            if old_rows > 0:
                new[:, :old_rows, :old_capacity] = old[:, :old_rows]
            setattr(self, name, new)
        self.n_rows, self.capacity = rows, capacity

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values (B, heads, T, dim) at the plan's places."""
        for stored, new in ((self._keys[layer], keys), (self._values[layer], values)):
            rows = new.transpose(1, 2).reshape(self.plan.index.shape[0], -1)
            stored.view(-1, stored.shape[-1]).index_copy_(0, self.plan.index, rows)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The plan's rows as views (B, heads, length, dim)."""
        rows = slice(self.plan.first, self.plan.first + self.plan.n_rows)
        keys = self._keys[layer, rows, : self.plan.length]
        values = self._values[layer, rows, : self.plan.length]
        return (
            keys.view(*keys.shape[:2], self.spec.n_heads, self.spec.key_dim).transpose(1, 2),
            values.view(*values.shape[:2], self.spec.n_heads, self.spec.value_dim).transpose(1, 2),
        )

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row over another."""
        self._keys[:, target, :length] = self._keys[:, source, :length]
        self._values[:, target, :length] = self._values[:, source, :length]

    def take(self, row: int, length: int) -> KvBlock:
        """A copy of a row's first `length` tokens."""
        return KvBlock(self._keys[:, row, :length].clone(), self._values[:, row, :length].clone())

    def put(self, row: int, block: KvBlock, length: int) -> None:
        """Write the first `length` tokens of a copy into a row."""
        self._keys[:, row, :length] = block.keys[:, :length]
        self._values[:, row, :length] = block.values[:, :length]

    def wipe_row(self, row: int) -> None:
        """Forget a row, also numbers that are not finite: 0 * NaN is NaN, mask or not."""
        self._keys[:, row].zero_()
        self._values[:, row].zero_()

    def wipe(self) -> None:
        """Forget every row."""
        self._keys.zero_()
        self._values.zero_()

    def _empty(self, n_rows: int, capacity: int, dim: int) -> torch.Tensor:
        shape = (self.spec.n_layers, n_rows, capacity, self.spec.n_heads * dim)
        return torch.zeros(shape, dtype=self.spec.dtype, device=self.spec.device)


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """One layer of a `KvStore` in the shape transformers models ask for."""

    is_sliding = False

    def __init__(self, store: KvStore, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types here
        self._store = store
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the step's keys and values; return all that the step attends to."""
        self._store.write(self._layer, key_states, value_states)
        return self._store.read(self._layer)

    def get_seq_length(self) -> int:
        """Tokens before this step in the longest row; models that are given positions only report it."""
        return max(0, self._store.plan.length - 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a mask has to cover."""
        return self._store.plan.length, 0

    def get_max_length(self) -> int:
        """Limit of a row in tokens."""
        return self._store.max_len

    def get_max_cache_shape(self) -> int:
        """Limit of a row in tokens, by its name in earlier transformers 5 releases."""
        return self._store.max_len


def _row_bucket(n_rows: int) -> int:
    for bucket in _ROW_BUCKETS:
        if n_rows <= bucket:
            return bucket
    return -(-n_rows // 64) * 64
