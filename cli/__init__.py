"""The command line: one file per command, each imported only when the command is used."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import getdoc
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from ..core.errors import PanpipeError, printed
from ..core.garbage import rare_collections
from ..core.version import version

COMMANDS = {
    "schedule": "Build a schedule for uniform stages and evaluate it.",
    "schedules": "Compare all schedules for uniform stages: time against memory.",
    "plan": "Plan how a model trains on a cluster.",
    "doctor": "Check that a model trains as a pipeline, equal to one process.",
    "simulate": "Run a plan in the simulator.",
    "validate": "Check a plan or a schedule file.",
    "profile": "Measure operators, or links between ranks, and fit a device or a cluster to them.",
    "catalog": "Show devices, links and clusters, and where each number comes from.",
    "backends": "Show transports: which work here, and whether one passes the conformance tests.",
    "checkpoint": "Check a checkpoint of training, or convert one of torch.distributed.checkpoint.",
    "compare": "Compare a predicted trace with a measured one.",
    "explore": "Explore schedules, plans and results in a browser.",
}
"""Every command with its line in ``panpipe --help``. Command ``x`` is the function ``x`` of the module ``cli/x.py``."""

# Typer's error for wrong flags: a class of click, or of Typer's copy of click in newer versions. This finds either.
_FlagError: type[Exception] = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those after ``panpipe``; the process's own if None.

    Returns:
        The exit status: 0 done, 2 the request is wrong, 3 infeasible, 1 a failure. Errors of panpipe are printed in one
        line on standard error; any other exception is raised, and ends the process with a traceback and status 1.
    """
    # Characters that the locale lacks become question marks; in errors, which name files, escape sequences.
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # A shell that completes a command line passes it in the environment.
    words = os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()[1:] or given
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        with rare_collections():
            status = _application(chosen)(args=given, prog_name="panpipe", standalone_mode=False)
    except PanpipeError as error:
        print(f"panpipe: {printed(error)}", file=sys.stderr)
        return error.exit_status
    except _FlagError as error:
        context = getattr(error, "ctx", None)
        command = "panpipe" if context is None else context.command_path
        message = _flag_message(error.format_message().rstrip("."), given)  # type: ignore[attr-defined]
        print(f"panpipe: {message}; see {command} --help", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


_NUMBER_RULES = {
    "valid integer": "a whole number",
    "valid (?:number|float)": "a number",
    r"greater than or equal to (\S+)": "at least {}",
    r"less than or equal to (\S+)": "at most {}",
}
"""What pydantic writes about a wrong number, and what to give."""


def _flag_message(message: str, given: Sequence[str]) -> str:
    """The message of wrong flags, with the value of a number, which pydantic's text lacks."""
    for rule, wanted in _NUMBER_RULES.items():
        if found := re.search(rf"'(--[\w-]+)'.*{rule}", message):
            option, *limit = found.groups()
            words = [part for word in given for part in word.split("=", 1)]
            value = words[words.index(option) + 1] if option in words[:-1] else ""
            return f"{option} is '{value}': give {wanted.format(*limit)}"
    return message.replace("Value error, ", "")


def _application(chosen: str | None) -> typer.Typer:
    """All commands by name; only the chosen one's module is imported, so that ``--help`` needs no torch."""
    app = typer.Typer(pretty_exceptions_enable=False, help=_about.__doc__)
    app.callback()(_about)
    for name, line in COMMANDS.items():
        if name == chosen:
            function: Callable[..., Any] = getattr(import_module(f".{name}", __name__), name)
            app.command(name, help=_paragraphs(function))(function)
        else:
            app.command(name, help=line)(_unloaded)
    return app


def _paragraphs(function: Callable[..., Any]) -> str:
    """The docstring with each paragraph on one line, which the help wraps at the width of the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in (getdoc(function) or "").split("\n\n"))


def _unloaded() -> None:
    """The function of every command that is only listed."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version())
        raise typer.Exit


def _about(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan pipeline-parallel training of PyTorch models, and predict its time and memory."""
