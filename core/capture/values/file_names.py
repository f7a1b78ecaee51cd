"""Makes the stack traces that torch takes while it traces cheap, and allows files of any name in them.

Torch summarises the stack at each operator of a step: some hundred frames, nearly all of them those of the operator
before. A frame is summarised once, with its line of source: otherwise these lines take 4 % of planning a bundled model.

Python keeps the bytes of a file name that is not valid UTF-8 as lone surrogates. torch's C++ refuses a stack with such
a name ("Unable to cast Python instance of type <class 'str'>"), and with it every trace of the user's code; torch's
logs refuse to encode it. So Python takes such a stack, and its names are escaped as on standard error.
"""

import sys
import traceback
from functools import lru_cache

from torch._C._profiler import symbolize_tracebacks
from torch.utils._traceback import CapturedTraceback


def accept_any_file_name() -> None:
    """Have Python take torch's stack traces from now on if torch's C++ cannot."""
    if getattr(CapturedTraceback.summary, "accepts_any_file_name", False):
        return

    def summary_of_any(captured: CapturedTraceback) -> traceback.StackSummary:
        found = traceback.StackSummary()
        if captured.tb is None:
            return found
        try:
            frames = symbolize_tracebacks([captured.tb])[0][captured.skip :]
            found.extend(_frame(frame["filename"], frame["line"], frame["name"]) for frame in reversed(frames))
        except RuntimeError:  # pybind11's failure to cast; torch asks for most summaries where it takes the stack
            for frame, line in reversed(list(traceback.walk_stack(sys._getframe(1)))):
                file = frame.f_code.co_filename.encode("ascii", "backslashreplace").decode()
                found.append(traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False))
        return found

    summary_of_any.accepts_any_file_name = True  # type: ignore[attr-defined]
    CapturedTraceback.summary = summary_of_any  # type: ignore[method-assign]


@lru_cache(maxsize=1 << 14)
def _frame(file: str, line: int, name: str) -> traceback.FrameSummary:
    """A frame with its line of source."""
    return traceback.FrameSummary(file, line, name)
