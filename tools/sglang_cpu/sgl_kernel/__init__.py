"""Stands in for SGLang's compiled kernels, which are published for CUDA only.

No operator of the real package is registered, so SGLang finds no AMX support and takes its paths in plain torch. Of
the functions that it imports by name, those that plain torch has no path for are written here; any other may be
imported and fails when it is called. Nothing is served fast from here: it is for tests.
"""

from __future__ import annotations

from typing import NoReturn

import torch

# Looked up on torch.ops while model files are imported, by models that are never run here.
_LOOKED_UP = (
    "fused_input_proj_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)

_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in _LOOKED_UP:
    _operators.define(f"{_name}(Tensor x) -> Tensor")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,  # (B,) rows of the table
    req_to_token: torch.Tensor,  # (R, L) cache slot of each position of each request
    start_offset: torch.Tensor,  # (B,)
    end_offset: torch.Tensor,  # (B,)
    out_cache_loc: torch.Tensor,  # (sum of lengths,) slots to write, request after request
    *_rest: object,
) -> None:
    """Write the slots that each request was given into its row of the table."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    taken = 0
    for row, start, end in bounds:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


class _Kernel:
    """A kernel that can be imported, not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self.__name__}: a CUDA kernel, which this stand-in does not have")


def __getattr__(name: str) -> _Kernel:
    if name.startswith("_"):
        raise AttributeError(name)
    return _Kernel(name)
