# SPDX-License-Identifier: BSD-3-Clause
"""Medians of interleaved runs, so that a drift of the machine hits every implementation alike.

On the CPU by the wall clock. On a GPU by events around each call, with the L2 cache overwritten
before it; a call that is short, or that the host cannot issue fast enough, is captured in a CUDA
graph and replayed. Work on a GPU must be issued on a stream that is not the default one.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SHORT = 50e-6  # seconds below which a call is timed as a graph
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Median of one call's runs."""

    seconds: float
    spread: float  # distance of the quartiles over the median
    rounds: int
    how: str  # "wall", "events" or "graph"


def summarise(values: list[float], how: str) -> Timing:
    median = statistics.median(values)
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [median] * 3
    return Timing(median, (quartiles[2] - quartiles[0]) / max(median, 1e-12), len(values), how)


def measure(
    calls: Calls,
    cuda: bool,
    seconds: float,
    least: int = 5,
    most: int = 100,
    graphs: bool = True,
) -> dict:
    """name -> Timing of each call; rounds of one call each in turn.

    Args:
        calls: name -> function to time.
        cuda: whether they run on the current GPU.
        seconds: about how long the rounds of one call may take.
        least: fewest rounds.
        most: most rounds.
        graphs: capture short calls. Not those that draw torch's random numbers: a capture that
            breaks off leaves their generator unusable.
    """
    if not calls:
        return {}
    if cuda:
        return _measure_cuda(calls, seconds, least, most, graphs)
    return _measure_cpu(calls, seconds, least, most)


def _rounds(costs: list[float], seconds: float, least: int, most: int) -> int:
    return max(least, min(most, int(seconds * len(costs) / max(sum(costs), 1e-6))))


def _in_turn(calls: Calls, rounds: int):
    """Names, `rounds` of each, every round beginning with another one."""
    names = list(calls)
    for i in range(rounds):
        for j in range(len(names)):
            yield names[(i + j) % len(names)]


def _measure_cpu(calls: Calls, seconds: float, least: int, most: int) -> dict[str, Timing]:
    costs = []
    for call in calls.values():
        begin = time.perf_counter()
        call()
        costs.append(time.perf_counter() - begin)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in _in_turn(calls, _rounds(costs, seconds, least, most)):
        begin = time.perf_counter()
        calls[name]()
        times[name].append(time.perf_counter() - begin)
    return {name: summarise(values, "wall") for name, values in times.items()}


def _measure_cuda(
    calls: Calls, seconds: float, least: int, most: int, graphs: bool
) -> dict[str, Timing]:
    ready, costs, how = {}, [], {}
    for name, call in calls.items():
        ready[name], cost, how[name] = prepare(call, graphs)
        costs.append(cost)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events: dict[str, list] = {name: [] for name in calls}
    for name in _in_turn(calls, _rounds([c + 60e-6 for c in costs], seconds, least, most)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        ready[name]()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: summarise([a.elapsed_time(b) / 1e3 for a, b in pairs], how[name])
        for name, pairs in events.items()
    }


def prepare(
    call: Callable[[], object], graphs: bool = True
) -> tuple[Callable[[], object], float, str]:
    """(what to time, about how many seconds it takes, "events" or "graph") of a call that has run
    before.
    """
    seconds, host = _estimate(call)
    if not graphs or (seconds > SHORT and host < 0.5 * seconds):
        return call, seconds, "events"
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    except RuntimeError:  # it synchronises, say; then the host's share is in its time
        torch.cuda.synchronize()
        return call, seconds, "events"
    graph.replay()
    return graph.replay, _estimate(graph.replay)[0], "graph"


def _estimate(call: Callable[[], object], times: int = 2) -> tuple[float, float]:
    """(seconds of one call on the GPU, seconds the host needs to issue it)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    host = time.perf_counter() - start
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times, host / times


def peak_bytes(call: Callable[[], object]) -> int:
    """Most GPU memory that a call holds beyond what was held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
