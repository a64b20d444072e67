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
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_count = itertools.count(1)


def empty(shape: Sequence[int], dtype: DTypeLike = np.float32) -> Array:
    """An array of zeros on 2 MB pages where the system gives them, every page of it touched.

    Two large arrays at the same offset in a page fall on each other's cache lines, so each starts
    some lines further into it than the one before.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    area = mmap.mmap(-1, size + 2 * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE // 2 and _MADV_HUGEPAGE is not None:
        area.madvise(_MADV_HUGEPAGE)
    raw = np.frombuffer(area, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE + _LINE * (next(_count) * 37 % 64)
    raw[start : start + size] = 0
    return raw[start : start + size].view(dtype).reshape(shape)


def copy(values: Array) -> Array:
    """Those values in an array of that kind."""
    result = empty(values.shape, values.dtype)
    result[...] = values
    return result
