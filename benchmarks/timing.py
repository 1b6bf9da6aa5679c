"""How the benchmarks of a step measure: versions in turns, medians, warm-up outside; on CUDA events around runs of steps."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]
RUN = 20  # steps between two CUDA events, with no waiting in between: as in a training loop


def medians(steps: Mapping[str, Step], device: torch.device, repeats: int, warm_up: int | None = None) -> dict[str, float]:
    """Median milliseconds of one step of each version. They take turns, in an order that is shuffled for each round."""
    for step in steps.values():
        for _ in range(warm_up if warm_up is not None else 5 if device.type == "cpu" else RUN):
            step()
    measure = _on_cuda if device.type == "cuda" else _on_cpu
    order, shuffle = list(steps), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            times[name].append(measure(steps[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _on_cpu(step: Step) -> float:
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def _on_cuda(step: Step) -> float:
    """A run of steps, from the moment an idle device gets the first to the end of the last: the slower of host and device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(RUN):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / RUN


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

    return replay


def machine(device: torch.device) -> dict[str, Any]:
    """Where it was measured, in words."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    return {"device": platform.machine() + " CPU", "torch": torch.__version__, "threads": torch.get_num_threads()}
