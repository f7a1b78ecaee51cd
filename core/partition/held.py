"""What each device holds under given cuts."""

from attrs import frozen

from .problem import Cuts, PartitionProblem


@frozen
class Held:
    """Bytes of one device at its peak, by kind; ``in_flight`` says for people how many microbatches it holds."""

    state_bytes: float
    saved_bytes: float
    workspace_bytes: float
    in_flight: str

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.saved_bytes + self.workspace_bytes


def held(problem: PartitionProblem, cuts: Cuts) -> tuple[Held, ...]:
    """Per device, by the memory that :class:`PartitionProblem` states."""
    tables = problem.tables
    result = []
    for device in range(problem.devices):
        stages = problem.stages_on(device)
        ranges = [(cuts[stage + 1], cuts[stage]) for stage in stages]
        counts = [f"{problem.in_flight[stage]:g}" for stage in stages]
        result.append(
            Held(
                sum(float(tables.state_bytes[at]) for at in ranges),
                sum(problem.in_flight[s] * float(tables.saved_bytes[at]) for s, at in zip(stages, ranges, strict=True)),
                max(float(tables.workspace_bytes[at]) for at in ranges),
                f"{counts[0]} microbatches" if len(counts) == 1 else f"{' + '.join(counts)} microbatches of its stages",
            )
        )
    return tuple(result)


def device_times(problem: PartitionProblem, cuts: Cuts) -> tuple[float, ...]:
    """Seconds of each device for one microbatch: the sum over its stages of the time the problem counts."""
    times = [0.0] * problem.devices
    for stage, table in enumerate(problem.time_tables()):
        times[problem.placement[stage]] += float(table[cuts[stage + 1], cuts[stage]])
    return tuple(times)
