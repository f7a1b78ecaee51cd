"""Elements that all charts use: colours of kinds and chunks, the format of pixels, and the time axis.

Kinds have the hues of Okabe and Ito (`Color Universal Design <https://jfly.uni-koeln.de/color/>`_); a device's later
chunks are paler.
"""

from collections.abc import Iterator, Sequence

from ...actions import Kind
from .layout import Axis

HUES = {Kind.F: (42, 111, 176), Kind.B: (227, 154, 27), Kind.I: (207, 91, 46), Kind.W: (31, 156, 127)}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradients", Kind.W: "weight gradients"}
PALEST = 0.62
"""Share of white in the colour of a device's last chunk."""

STYLE = """
text{font:11px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1c2127;
font-variant-numeric:tabular-nums}
.t{font-size:18px;font-weight:650}.s{fill:#5d6670}.e{text-anchor:end}.m{text-anchor:middle;font-size:10px}
.lane{fill:#f3f1ec}.grid{stroke:#e5e2db}.held{fill:#2a6fb0;fill-opacity:.22;stroke:#2a6fb0;stroke-width:1.2}
.limit{stroke:#b8432f;stroke-dasharray:4 3}.peak{stroke:#2a6fb0;stroke-opacity:.45;stroke-dasharray:1 3}
""".replace("\n", "")


def px(value: float) -> str:
    """A number of pixels as short text."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def class_name(kind: Kind, chunk: int) -> str:
    """The class that ``colours`` defines for a kind and a chunk."""
    return f"{kind.value.lower()}{chunk}"


def colours(kinds: Sequence[Kind], chunks: int) -> str:
    """A style rule for each kind and chunk; labels are white where that is easier to read."""
    rules = []
    for kind in kinds:
        for chunk in range(chunks):
            red, green, blue = _colour(kind, chunk, chunks)
            name = class_name(kind, chunk)
            rules.append(f".{name} rect{{fill:rgb({red},{green},{blue})}}")
            # Perceived lightness, ITU-R BT.601.
            if 0.299 * red + 0.587 * green + 0.114 * blue < 140:
                rules.append(f".{name} text{{fill:#fff}}")
    return "".join(rules)


def _colour(kind: Kind, chunk: int, chunks: int) -> tuple[int, ...]:
    white = PALEST * chunk / max(chunks - 1, 1)
    return tuple(round(part + (255 - part) * white) for part in HUES[kind])


def time_axis(axis: Axis, height: float) -> Iterator[str]:
    """Grid lines and labels at round times, for a chart of this height in pixels."""
    for time in axis.ticks():
        x = px(axis.x(time))
        yield f'<path class="grid" d="M{x} -4V{px(height)}"/><text class="s m" x="{x}" y="-8">{time:.6g}</text>'
