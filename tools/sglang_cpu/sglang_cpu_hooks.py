"""What SGLang needs changed on a machine without CUDA; imported at the start of each Python of its environment.

* torchvision, installed beside a torch that its compiled part was not built for: the operators that its Python part
  registers fake kernels for are declared, so that the import works. Transforms work, operators don't.
* Pinning host memory for CUDA becomes a no-op; with adapters, in all of torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def _declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # a library that is collected takes its operators with it


def _unpin(module: ModuleType) -> None:
    module._cuda_host_register = lambda *_args, **_kwargs: None


def _unpin_torch(_: ModuleType) -> None:
    import torch

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_args, **_kwargs: tensor  # type: ignore[method-assign]


def _without_pinning(make: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(make)
    def made(*args: object, pin_memory: bool = False, **kwargs: object) -> object:
        return make(*args, **kwargs)

    return made


_kept: list[object] = []
_BEFORE: dict[str, Callable[[], None]] = {"torchvision": _declare_torchvision_operators}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _unpin,
    "sglang.srt.lora.layers": _unpin_torch,
}


class _Loader(importlib.abc.Loader):
    """Another loader, with something done after it."""

    def __init__(self, inner: importlib.abc.Loader, after: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        before = _BEFORE.pop(name, None)  # popped first: what it does imports, too
        if before is not None:
            before()
        after = _AFTER.get(name)
        if after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, after)
        return spec


sys.meta_path.insert(0, _Finder())
