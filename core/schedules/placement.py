"""Placements: which device runs each stage."""


def looped_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """Stage s on device s mod ``devices``: the pipeline runs ``chunks`` times around the devices."""
    return tuple(stage % devices for stage in range(devices * chunks))


def folded_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """There and back over the devices: a V for two chunks, a W for four."""
    there = list(range(devices))
    return tuple(device for chunk in range(chunks) for device in (there if chunk % 2 == 0 else reversed(there)))
