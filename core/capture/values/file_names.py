"""File names that the locale cannot decode, in the stack traces that torch takes while it traces.

Python keeps the bytes of such a name as lone surrogates, which UTF-8 does not have. torch's C++ refuses a stack with
one ("Unable to cast Python instance of type <class 'str'>"), and with it every trace of the user's code; torch's logs
refuse to encode it. So Python takes such a stack, and its names are escaped as on standard error.
"""

import sys
import traceback

from torch.utils._traceback import CapturedTraceback


def accept_any_file_name() -> None:
    """Have Python take torch's stack traces from now on if torch's C++ cannot."""
    if getattr(CapturedTraceback.summary, "accepts_any_file_name", False):
        return
    summary = CapturedTraceback.summary

    def summary_of_any(captured: CapturedTraceback) -> traceback.StackSummary:
        try:
            found: traceback.StackSummary = summary(captured)  # type: ignore[no-untyped-call]
        except RuntimeError:  # pybind11's failure to cast; torch asks for most summaries where it takes the stack
            found = traceback.StackSummary()
            for frame, line in reversed(list(traceback.walk_stack(sys._getframe(1)))):
                file = frame.f_code.co_filename.encode("ascii", "backslashreplace").decode()
                found.append(traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False))
        return found

    summary_of_any.accepts_any_file_name = True  # type: ignore[attr-defined]
    CapturedTraceback.summary = summary_of_any  # type: ignore[method-assign]
