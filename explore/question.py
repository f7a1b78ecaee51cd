"""Questions of the page: the state of its form, as the options of ``panpipe schedule`` or ``panpipe plan``.

A question is all that an answer depends on: the same question gives the same answer, here and on the command line. Jobs
report lines with an answer, a point, progress, or an error.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypedDict

from attrs import asdict, field, fields, frozen

from ..answers.plan.options import CONTEXT_OPTIONS, TENSOR_OPTIONS, PlanOptions
from ..answers.uniform import UniformStages
from ..core.documents import converter, reasons
from ..core.errors import RequestError
from ..core.files.json_reader import parse_json
from ..core.files.limits import Limits, short

MOST_DEVICES, MOST_MICROBATCHES, MOST_CHUNKS = 256, 1024, 8
"""Bounds of the sliders' numbers: beyond them a browser takes seconds to draw."""

REQUEST_LIMITS = Limits(size=1 << 20, values=10_000)
"""Limits of a request's body."""


class ScheduleParameters(TypedDict, total=False):
    """Parameters of schedules that the page sets, named as the options of ``panpipe schedule``."""

    rounds: int
    microbatches_per_loop: int
    run_ahead: tuple[int, ...]
    group_size: int
    evaluations: int
    seed: int


@frozen(kw_only=True)
class UniformQuestion(UniformStages):
    """A schedule of uniform stages. Fields are the options of ``panpipe schedule``; None and defaults are omitted.

    Args:
        schedule: a family's name, or ``auto``.
        parameters: of the schedule, by name.
    """

    kind: ClassVar[str] = "uniform"

    devices: int = 4
    microbatches: int = 8
    backward_input: float | None = 1.0
    backward_weight: float | None = 1.0
    host_copy: float | None = 0.0
    schedule: str = "1f1b"
    parameters: ScheduleParameters = field(factory=ScheduleParameters)

    def __attrs_post_init__(self) -> None:
        bounds = {"devices": MOST_DEVICES, "microbatches": MOST_MICROBATCHES, "chunks": MOST_CHUNKS}
        for name, most in bounds.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise RequestError(f"{name} is {value}: the explorer accepts 1 to {most}")

    @property
    def command(self) -> str:
        """The command line with the same answer."""
        options = {each.name: getattr(self, each.name) for each in fields(UniformStages)}
        always = {"devices", "microbatches", *({"backward_input", "backward_weight"} if self.forward != 1 else ())}
        return _command(["panpipe", "schedule", self.schedule], self, {**options, **self.parameters}, always)


@frozen(kw_only=True)
class PlanQuestion(PlanOptions):
    """A plan. Fields are the options of ``panpipe plan``; None and defaults are omitted.

    Args:
        tp: number of tensor ranks.
        rank: which of the plans of ``--top``: 1 is the fastest, and later ones need less memory.
    """

    kind: ClassVar[str] = "plan"

    cluster: str = "4xA100-40GB"
    microbatches: int | None = 8
    tp: int = 1
    rank: int = 1

    @property
    def runs_code(self) -> bool:
        """Whether the model is a function of the user's, which has to be called."""
        return self.model is not None and ":" in self.model

    @property
    def command(self) -> str:
        """The command line with the same answer."""
        unused = {*(TENSOR_OPTIONS if self.tp == 1 else ()), *(CONTEXT_OPTIONS if self.cp == 1 else ())}
        options = {name: value for name, value in asdict(self).items() if name not in unused}
        rank = options.pop("rank")
        line = _command(["panpipe", "plan"], self, options, {"cluster", "microbatches"})
        return line if rank == 1 else f"{line} --top {rank}"


@frozen(kw_only=True)
class FileQuestion:
    """Files that the command line named."""

    kind: ClassVar[str] = "file"

    command: ClassVar[str] = ""
    """No command gives the same answer, because the results are files."""

    number: int = 0


Question = UniformQuestion | PlanQuestion | FileQuestion
KINDS: Mapping[str, type[Question]] = {each.kind: each for each in (UniformQuestion, PlanQuestion, FileQuestion)}


def parse_request(body: bytes) -> dict[str, Any]:
    """Read the body of a request as plain data.

    Raises:
        RequestError: it is no JSON object, or exceeds a limit.
    """
    if len(body) > REQUEST_LIMITS.size:
        raise RequestError(f"the request has {len(body)} bytes: at most {REQUEST_LIMITS.size} are read")
    data = parse_json(body.decode("utf-8", "replace"), "the request", REQUEST_LIMITS)
    if not isinstance(data, dict):
        raise RequestError(f"the request is {short(data)}: it must be a JSON object")
    return data


def parse_question(data: object) -> Question:
    """Read a question of the page.

    Raises:
        RequestError: it is not one; the message names the field.
    """
    named = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(named, str) or named not in KINDS:
        raise RequestError(f"a question's kind is {', '.join(KINDS)}, not {str(data)[:80]!r}")
    kind = KINDS[named]
    try:
        return converter.structure({name: value for name, value in data.items() if name != "kind"}, kind)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"the page's question is not valid: {reasons(error, 'question')}") from None


def plain_question(question: Question) -> dict[str, Any]:
    """The question as plain data: its kind, and the fields that are not at their default."""
    return {"kind": question.kind, **dict(_given(question))}


def key_of(question: Question) -> str:
    """A text that equal questions share."""
    return json.dumps(plain_question(question), sort_keys=True)


def _given(question: Question) -> Iterator[tuple[str, Any]]:
    default = type(question)()
    for each in fields(type(question)):
        value = getattr(question, each.name)
        if value != getattr(default, each.name):
            yield each.name, value


def _command(words: list[str], question: Question, options: Mapping[str, Any], always: set[str]) -> str:
    default = asdict(type(question)())
    for name, value in options.items():
        if value is None or (name not in always and name in default and value == default[name]):
            continue
        if value is False:
            words.append("--operators")  # the only flag with a name for no
            continue
        words += ["--" + name.replace("_", "-"), *(() if value is True else (_text(value),))]
    return shlex.join(words)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    return str(value)


class Report(Protocol):
    """Reports a line of a job. It raises if the job was cancelled."""

    def __call__(self, **line: Any) -> None: ...


END = {"end": True}
"""The last line of a stream to the page: without it an answer was cut off."""


def progress(text: str, done: int = 0, of: int = 0) -> dict[str, Any]:
    """A line on how far a job is; ``of`` is 0 if that is not known."""
    return {"progress": {"text": text, "done": done, "of": of}}
