"""How much of a step its devices compute: the bubble ratio and the efficiency, which the glossary defines."""


def bubble_ratio(busiest_s: float, span_s: float) -> float:
    """1 − compute time of the busiest device ÷ step time; 0 for a step that takes no time.

    Args:
        busiest_s: time in which the busiest device computes; of another device, the result is the share that it idles.
        span_s: the step or makespan; for the Zero Bubble paper's definition the longest time from a device's own first
            action to its own last one.
    """
    return 1 - busiest_s / span_s if span_s else 0.0


def efficiency(compute_s: float, devices: int, step_s: float) -> float:
    """Compute time of all devices ÷ (number of devices × step time); 0 for a step that takes no time."""
    return compute_s / (devices * step_s) if step_s else 0.0
