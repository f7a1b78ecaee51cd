"""Placements: which device runs each stage."""


def looped_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """Stage s on device s mod ``devices``: the pipeline runs ``chunks`` times around the devices."""
    return tuple(stage % devices for stage in range(devices * chunks))


def folded_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """Alternating forward and backward over the devices: a V for two chunks, a W for four."""
    there = list(range(devices))
    return tuple(device for chunk in range(chunks) for device in (there if chunk % 2 == 0 else reversed(there)))


def hooked_placement(devices: int) -> tuple[int, ...]:
    """The fold for two chunks, with the last two devices swapped in the second half.

    The last two devices' passes are adjacent in pairs, which leaves wider gaps: with little memory it can be faster
    than the fold, for one more hop (found by search over all placements of four devices and two chunks).
    """
    folded = list(folded_placement(devices, 2))
    folded[devices], folded[devices + 1] = folded[devices + 1], folded[devices]
    return tuple(folded)
