"""Arrays for timing: on 2 MB pages, touched, and no two at the same offset in a page."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

_HUGE_PAGE = 2 << 20
_LINE = 64
_AREA = 512 << 20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


class _Area:
    """Memory that arrays are cut from, one after the other."""

    def __init__(self, size: int) -> None:
        area = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _MADV_HUGEPAGE is not None:
            area.madvise(_MADV_HUGEPAGE)
        raw = np.frombuffer(area, np.uint8)
        self.bytes = raw[-raw.ctypes.data % _HUGE_PAGE :][:size]
        self.used = 0

    def cut(self, size: int, offset: int) -> Array | None:
        """So many bytes that far into the next free page, or None if there is no room."""
        start = -(-self.used // _HUGE_PAGE) * _HUGE_PAGE + offset
        if start + size > len(self.bytes):
            return None
        self.used = start + size
        return self.bytes[start : self.used]


_areas: list[_Area] = []
_count = itertools.count(1)


def empty(shape: Sequence[int], dtype: DTypeLike = np.float32) -> Array:
    """An array of zeros, every page of it touched.

    Two large arrays at the same offset in a page fall on each other's cache lines, so each starts
    some lines further into it than the one before. It is valid until `reset`.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    offset = _LINE * (next(_count) * 37 % 64)
    cut = next((c for area in _areas if (c := area.cut(size, offset)) is not None), None)
    if cut is None:
        _areas.append(_Area(max(_AREA, size + _HUGE_PAGE)))
        cut = _areas[-1].cut(size, offset)
        assert cut is not None
    cut[:] = 0
    return cut.view(dtype).reshape(shape)


def copy(values: Array) -> Array:
    """Those values in an array of that kind."""
    result = empty(values.shape, values.dtype)
    result[...] = values
    return result


def reset() -> None:
    """Takes all arrays back. The pages stay: new ones cost a virtual machine seconds."""
    for area in _areas:
        area.used = 0
