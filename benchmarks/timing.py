# SPDX-License-Identifier: BSD-3-Clause
"""Medians of interleaved runs, so that a drift of the machine hits every implementation alike."""

import statistics
import time
from collections.abc import Callable


def interleaved_medians(
    calls: dict[str, Callable[[], object]], seconds: float = 1.0, least: int = 3, most: int = 50
) -> dict[str, float]:
    """Median seconds of each call: one warm-up each, then rounds of one call each in turn.

    Args:
        calls: name -> function to time.
        seconds: about how long all rounds may take together.
        least: fewest rounds.
        most: most rounds.
    """
    warm = 0.0
    for call in calls.values():
        begin = time.perf_counter()
        call()
        warm += time.perf_counter() - begin
    rounds = max(least, min(most, int(seconds / max(warm, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}
