"""Array types that the surface is written in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]  # counts are whole, so that they can index
Sol = Callable[..., F64]  # a roofline: one array per axis -> ms
