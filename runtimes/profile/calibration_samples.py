"""Samples for fitting a device type, from the measured operators of a model instead of the bundled ones."""

import statistics
from collections import defaultdict
from collections.abc import Mapping

from ...core.analytic.calibration import Sample
from ...core.analytic.kernels import Kernel
from ...core.analytic.model import ModelWork
from ...core.costs.graph import OpGraph


def model_samples(work: ModelWork, measured: OpGraph) -> list[Sample]:
    """One sample each of F, I and W for all operators that do the same work, with the median of their times.

    Args:
        work: kernels of the model's operators.
        measured: the operators with measured times.
    """
    times: Mapping[int, list[tuple[str, tuple[float, ...]]]] = defaultdict(list)
    kernels: dict[int, tuple[tuple[str, tuple[Kernel, ...]], ...]] = {}
    for node, operator in zip(measured.nodes, work.operators, strict=True):
        own = operator.work
        kernels[id(own)] = ("F", own.forward), ("I", own.backward_input), ("W", own.backward_weight)
        times[id(own)].append((node.name, (node.forward_s, node.backward_input_s, node.backward_weight_s)))
    samples = []
    for key, parts in kernels.items():
        name = times[key][0][0]
        for position, (part, found) in enumerate(parts):
            seconds = statistics.median(each[position] for _, each in times[key])
            if found and seconds > 0:
                samples.append(Sample(f"{name} {part}", name, found, seconds))
    return samples
