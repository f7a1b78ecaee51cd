"""What a user asks to offload: ``"none"``, ``"all"``, ``"auto"``, or a share of each stage."""

from collections.abc import Mapping

from ..errors import RequestError

OffloadRequest = str | Mapping[int, float]
"""``"none"``; ``"all"``, as much as the links carry; ``"auto"``, what makes the step fastest within the memory limits;
or stage → share of its saved tensors that is offloaded."""

CHOICES = ("none", "all", "auto")


def parse_offload(text: str) -> OffloadRequest:
    """Read the option of the command line: a choice, or shares such as ``0:1,2:0.5``.

    Raises:
        RequestError: it is neither, or a share is not from 0 to 1.
    """
    if text in CHOICES:
        return text
    shares: dict[int, float] = {}
    for word in text.split(","):
        stage, _, share = word.partition(":")
        try:
            number, value = int(stage), float(share)
        except ValueError:
            raise RequestError(
                f"offload is '{text}': give none, all, auto, or the share of each stage, such as 0:1,2:0.5"
            ) from None
        if number in shares:
            raise RequestError(f"offload gives stage {number} twice: give one share for each stage")
        shares[number] = value
    check_offload_request(shares)
    return shares


def check_offload_request(wanted: OffloadRequest, stages: int | None = None) -> None:
    """Refuse an offload that no plan can have.

    Args:
        stages: number of the plan's stages, if known.

    Raises:
        RequestError: it is another text, a share is not from 0 to 1, or a stage does not exist.
    """
    if isinstance(wanted, str):
        if wanted not in CHOICES:
            raise RequestError(f"offload is '{wanted}': give 'none', 'all', 'auto', or the share of each stage")
        return
    if not isinstance(wanted, Mapping):
        raise RequestError(f"offload is {wanted!r}: give 'none', 'all', 'auto', or the share of each stage")
    for stage, share in wanted.items():
        if type(stage) is not int or stage < 0:
            raise RequestError(f"offload names stage {stage!r}: stages are numbered from 0")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise RequestError(f"offload of stage {stage} is {share!r}: give a share from 0 to 1")
        if stages is not None and stage >= stages:
            raise RequestError(f"offload names stage {stage}, and the plan has stages 0 to {stages - 1}: name those")
