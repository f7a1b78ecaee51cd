"""The explorer as files, without a server: schedules of uniform stages on a grid of devices and microbatches.

The documentation's site has it: ``python -m panpipe.explore.static build/site/explorer``.
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..core.errors import InfeasibleError, RequestError
from ..core.files.write import write_text
from ..core.schedules.registry import resident_families
from .page import explorer_html
from .question import END, UniformQuestion, plain_question
from .results import Results
from .uniform_answers import answer, point_of, scored_of, why_not_faster

DEVICES, MICROBATCHES = (2, 4, 8), (4, 8, 16)


def write_explorer(folder: Path, devices: Sequence[int] = DEVICES, microbatches: Sequence[int] = MICROBATCHES) -> None:
    """Write the page and its answers, each as the lines of JSON that the server would send."""
    (folder / "answers").mkdir(parents=True, exist_ok=True)
    names = [family.name for family in resident_families() if family.name != "building-block"]
    grid = {"schedule": names, "devices": devices, "microbatches": microbatches}
    write_text(folder / "index.html", explorer_html(UniformQuestion(), Results(), None, grid=grid))
    for p, m in product(devices, microbatches):
        points = []
        for name in names:
            question = UniformQuestion(schedule=name, devices=p, microbatches=m)
            lines: list[dict[str, Any]]
            try:
                scored, misfit = scored_of(question)
            except (RequestError, InfeasibleError) as error:
                lines = [{"error": str(error)}]
            else:
                lines = [{"answer": answer(question, scored, misfit)}, {"idle": why_not_faster(scored)}]
                points.append({"point": {**point_of(question, scored, name, {}), "question": plain_question(question)}})
            _write(folder, f"{name}-{p}-{m}", lines)
        _write(folder, f"points-{p}-{m}", points)


def _write(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in (*lines, END))
    write_text(folder / "answers" / f"{name}.jsonl", text)


if __name__ == "__main__":
    write_explorer(Path(sys.argv[1]))
