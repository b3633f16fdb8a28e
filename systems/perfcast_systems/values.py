"""How latencies are written exactly and small.

Measured latencies are not arbitrary float64: nearly all are a whole number of nanoseconds, rounded to float32 by the
timer that gave them, and divided once or twice in float64 by a count of repetitions; others were rounded to a few
decimals. Such a value is stored as the whole number and the form it went through, anything else as it stands. A form
is used only where it gives back the very bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Ints = NDArray[np.int64]

RAW = 255
_SAMPLE = 4000
_WORTH = 0.002  # share of the sample that a form must explain


class Form(NamedTuple):
    """value = whole / scale, rounded to float32 if ``single``, then divided by each of ``divisors`` in turn."""

    scale: float
    single: bool = False
    divisors: tuple[int, ...] = ()

    def value(self, whole: Reals) -> Reals:
        x = whole / self.scale
        if self.single:
            x = x.astype(np.float32).astype(np.float64)
        for divisor in self.divisors:
            x = x / divisor
        return x

    def fit(self, values: Reals) -> tuple[Reals, NDArray[np.bool_]]:
        """The whole number of each value, and for which values this form is exact."""
        x = values
        with np.errstate(over="ignore"):
            for divisor in reversed(self.divisors):
                x = x * divisor
            whole = np.round(x * self.scale) + 0.0  # no negative zero
        usable = (whole >= 0) & (whole < 2.0**32)
        whole = np.where(usable, whole, 0.0)
        return whole, usable & (self.value(whole).view(np.int64) == values.view(np.int64))


# Part of the pack format: a pack names forms by their place here. Append only.
_TICKS = 1e6
FORMS = (
    *(Form(10.0**digits) for digits in (3, 4, 5, 6, 7, 8)),
    *(
        Form(_TICKS, True, divisors)
        for divisors in (
            *((), (3,), (6,), (7,), (9,), (15,), (20,), (25,), (60,), (75,), (100,), (1000,)),
            *((3, 3), (3, 5), (5, 3), (5, 5), (7, 7), (3, 1000), (5, 1000), (7, 1000), (1000, 3), (1000, 5), (1000, 7)),
            *((3, 5, 5), (5, 5, 3), (5, 5, 5), (3, 5, 1000), (5, 5, 1000), (7, 7, 1000), (1000, 5, 5), (1000, 7, 7)),
            *((3, 5, 5, 5), (5, 5, 5, 3), (5, 5, 3, 1000), (3, 5, 5, 1000), (1000, 3, 5, 5), (1000, 5, 5, 3)),
        )
    ),
)


class Exact(NamedTuple):
    """Values taken apart: per row the place of its form in ``forms`` (RAW for none) and its whole number (0 for none);
    ``rest`` holds the values of the RAW rows in order."""

    forms: tuple[int, ...]
    form: Ints
    whole: Ints
    rest: Reals


def take_apart(values: Reals) -> Exact:
    """Forms that explain the values, those that explain most first."""
    form = np.full(len(values), RAW, np.int64)
    whole = np.zeros(len(values), np.int64)
    left = np.arange(len(values))
    used: list[int] = []
    while len(left) and len(used) < RAW:
        sample = values[left[:: max(len(left) // _SAMPLE, 1)]]
        hits = [0 if i in used else int(f.fit(sample)[1].sum()) for i, f in enumerate(FORMS)]
        best = int(np.argmax(hits))
        if hits[best] < max(1.0, _WORTH * len(sample)):
            break
        found, exact = FORMS[best].fit(values[left])
        form[left[exact]] = len(used)
        whole[left[exact]] = found[exact].astype(np.int64)
        used.append(best)
        left = left[~exact]
    return Exact(tuple(used), form, whole, values[left])


def put_together(forms: tuple[int, ...], form: NDArray[np.integer], whole: NDArray[np.integer], rest: Reals) -> Reals:
    """The values that ``take_apart`` took apart, bit by bit. IndexError for a form that this program does not know."""
    if len(forms) == 1 and not len(rest):
        return FORMS[forms[0]].value(whole.astype(np.float64))
    values = np.empty(len(whole))
    for place, index in enumerate(forms):
        rows = form == place
        values[rows] = FORMS[index].value(whole[rows].astype(np.float64))
    values[form == RAW] = rest
    return values
