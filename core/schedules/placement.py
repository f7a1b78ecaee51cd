"""Placements: which device runs each stage."""


def looped_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """Stage s on device s mod ``devices``: the pipeline runs ``chunks`` times around the devices."""
    return tuple(stage % devices for stage in range(devices * chunks))
