"""How the benchmarks of a step measure: versions in turns, medians, warm-up outside; on CUDA events around runs of steps."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]
RUN = 20  # steps, at least, between two CUDA events, with no waiting in between: as in a training loop
LENGTH = 50  # milliseconds that such a run should take: the first steps after another version's are slower on the host


def medians(steps: Mapping[str, Step], device: torch.device, repeats: int, warm_up: int | None = None) -> dict[str, float]:
    """Median milliseconds of one step of each version. They take turns, in an order that is shuffled for each round."""
    for step in steps.values():
        for _ in range(warm_up if warm_up is not None else 5 if device.type == "cpu" else RUN):
            step()
    measure: dict[str, Callable[[Step], float]] = dict.fromkeys(steps, _on_cpu)
    if device.type == "cuda":
        runs = {name: max(RUN, min(10 * RUN, round(LENGTH / _on_cuda(step, RUN)))) for name, step in steps.items()}
        measure = {name: partial(_on_cuda, num_steps=count) for name, count in runs.items()}
    order, shuffle = list(steps), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            times[name].append(measure[name](steps[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _on_cpu(step: Step) -> float:
    """On one core the time that this process had on it: what others do on the machine meanwhile does not count."""
    clock = time.process_time if _num_cores() == 1 else time.perf_counter
    began = clock()
    step()
    return 1e3 * (clock() - began)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_cuda(step: Step, num_steps: int) -> float:
    """A run of steps, from the moment an idle device gets the first to the end of the last: the slower of host and device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(num_steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_steps


def captured(step: Step, places: Sequence[Tensor], batch: Sequence[Tensor], params: Iterable[Tensor]) -> Step:
    """The step as a CUDA graph, captured by hand: a function that copies the batch to its places and replays.

    `step` must leave the gradients of `params` where they are: they are forgotten once before the capture, so that in the
    graph each backward writes them anew.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    params = list(params)
    with torch.cuda.stream(side):
        for _ in range(5):
            for p in params:
                p.grad = None
            step()
    torch.cuda.current_stream().wait_stream(side)
    for p in params:
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        for place, part in zip(places, batch, strict=True):
            place.copy_(part)
        graph.replay()

    replay.step = step  # type: ignore[attr-defined]  # what the graph works on must live as long as it
    return replay


def bind(cores: int) -> None:
    """Bind this process to so many of its cores, before any library starts its threads, and have it keep its memory.

    By default glibc gives large blocks back to the system when they are freed, or does not, as earlier blocks had it: where it
    does, the next step waits for fresh pages. That is up to a quarter of a step, and differs from process to process.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(cores)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
        for option, value in {m_mmap_max: 0, m_trim_threshold: 2**31 - 1, m_arena_max: 1}.items():
            libc.mallopt(option, value)


def machine(device: torch.device) -> dict[str, Any]:
    """Where it was measured, in words."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    return {"device": platform.machine() + " CPU", "torch": torch.__version__, "threads": torch.get_num_threads()}
