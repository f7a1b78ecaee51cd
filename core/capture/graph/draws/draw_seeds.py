"""The seed of one random draw, from the key of its microbatch and its ordinal in the whole graph."""

from hashlib import blake2b

from torch import Tensor


def seed_of(key: Tensor, ordinal: int) -> int:
    """The seed of one draw.

    Args:
        key: of the microbatch, see `randomness.random_key`.
        ordinal: of the draw in the whole graph.
    """
    text = ",".join(str(part) for part in (*key.tolist(), ordinal))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
