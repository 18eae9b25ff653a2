"""Counts the bytes that tensors hold, allocation by allocation: what a GPU's allocator would say, on a CPU."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Within the block: `bytes` held now by tensors made in it, and their `peak`. What was there before does not count."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._known = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._refs or storage.data_ptr() in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.bytes -= size
            del self._refs[key]

        self._refs[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
