"""Runs the rules for a backend in separate processes, so that a rule that hangs or crashes does not stop the caller.

A process runs the rules with one device, or with all of them as threads.
"""

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Sequence
from itertools import permutations
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch._C._distributed_c10d import TCPStore

from ...core.errors import RequestError
from ..contract import Backend
from ..kind import BackendKind
from .bench import DTYPES, Bench, BrokenRuleError
from .rules import RULES, Rule, rules_of

HOST = "127.0.0.1"


@frozen
class Job:
    """The job of the processes.

    Args:
        ranks: whether each device has a separate process.
        first: number of the first rule to run.
        port: of the store on this machine through which the processes connect.
    """

    kind: BackendKind
    ranks: bool
    devices: int
    where: str
    first: int
    port: int


def serve(job: Job, local: Sequence[int], line: Connection) -> None:
    """Run the rules on this process's devices, and send (device, number of the rule, problem) for each.

    The number ``first - 1`` reports that the device is connected.

    Args:
        line: the pipe to the process that started this one.
    """
    torch.set_num_threads(1)
    ends = _connect(job, local, line)
    speaking, broken = threading.Lock(), threading.Event()

    def walk(end: Backend) -> None:
        try:
            end.connect(permutations(range(end.devices), 2))
        except BaseException as error:
            line.send((end.device, job.first, f"connect failed with {type(error).__name__}: {error}"))
            broken.set()
            return
        dtypes = [dtype for dtype in DTYPES if job.kind.dtypes is None or dtype in job.kind.dtypes]
        bench = Bench(end, dtypes=dtypes, where=_place(job, end.device), alone=job.ranks)
        with speaking:
            line.send((end.device, job.first - 1, None))
        for number in range(job.first, len(rules_of(job.kind))):
            problem = _problem(number, bench)
            with speaking:
                line.send((end.device, number, problem))
            if problem is not None:
                broken.set()
                return

    threads = [threading.Thread(target=walk, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parent = multiprocessing.parent_process()
    if broken.is_set() and parent is not None:
        parent.join()  # it kills this process; an earlier exit would look like a second problem to the other devices
    line.close()
    os._exit(0)  # without waiting for threads that the backend left running


def _problem(number: int, bench: Bench) -> str | None:
    try:
        RULES[number].run(bench)
    except BrokenRuleError as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def _connect(job: Job, local: Sequence[int], line: Connection) -> Sequence[Backend]:
    try:
        if job.ranks:
            assert job.kind.ranks is not None
            if job.where == "cuda":
                torch.cuda.set_device(_place(job, local[0]))  # a rank's end of the transport uses the current device
            store = TCPStore(HOST, job.port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=local[0], world_size=job.devices)
            return [job.kind.ranks(dist.group.WORLD)]
        assert job.kind.threads is not None
        return job.kind.threads(job.devices)
    except BaseException as error:
        for device in local:
            line.send((device, job.first, f"connecting failed with {type(error).__name__}: {error}"))
        raise


def _place(job: Job, device: int) -> torch.device:
    if job.where != "cuda":
        return torch.device(job.where)
    return torch.device("cuda", device % torch.cuda.device_count())


DEVICES = 3
LIMIT_S = 30.0
_START_S = 120.0
"""Most seconds for processes to start: importing torch is slow on a busy machine."""
_GATHER_S = 1.0
"""Seconds to wait for further reports after the first device reported a broken rule."""


class ConformanceError(AssertionError):
    """A backend breaks rules of the contract; the message has each of them with the problem."""


@frozen
class Finding:
    """The result of one rule.

    Args:
        rule: the rule.
        workers: whether the devices were ``threads`` or ``ranks``.
        problem: how the rule is broken; None if the backend keeps it.
    """

    rule: Rule
    workers: str
    problem: str | None


def check(kind: BackendKind, devices: int = DEVICES, *, where: str = "cpu", limit_s: float = LIMIT_S) -> None:
    """Run every rule; one call is a whole test.

    Args:
        kind: the backend; defined in a module, because other processes import it.
        devices: how many; three or more find problems that two cannot show.
        where: the type of device of the tensors.
        limit_s: most seconds for a rule.

    Raises:
        ConformanceError: rules are broken.
        RequestError: the backend cannot be used here.
    """
    findings = examine(kind, devices, where=where, limit_s=limit_s)
    broken = [
        f"- {one.rule.name}, over {one.workers}: {one.rule.text}. {one.problem}" for one in findings if one.problem
    ]
    if broken:
        lines = "\n".join(broken)
        raise ConformanceError(f"backend '{kind.name}' breaks {len(broken)} of {len(findings)} rules:\n{lines}")


def examine(
    kind: BackendKind, devices: int = DEVICES, *, where: str = "cpu", limit_s: float = LIMIT_S
) -> list[Finding]:
    """Run every rule, also after a broken one; see `check`.

    Returns:
        The result of each rule, for threads and for ranks if the backend connects both.
    """
    if devices < 2:
        raise RequestError(f"devices is {devices}: messages need at least two; give 3, which find more problems")
    if where not in kind.device_types:
        raise RequestError(
            f"backend '{kind.name}' sends no tensors on {where}: try {', '.join(sorted(kind.device_types))}"
        )
    if where == "cuda" and not torch.cuda.is_available():
        raise RequestError("tensors on cuda need a GPU and PyTorch finds none: check on cpu, or on a GPU machine")
    if kind.unavailable is not None:
        raise RequestError(f"backend '{kind.name}' cannot be used here: {kind.unavailable}")
    try:
        pickle.dumps(kind)
    except Exception as error:
        raise RequestError(
            f"backend '{kind.name}' cannot be pickled for another process ({error}): define its functions at the top "
            "level of a module"
        ) from error
    findings: list[Finding] = []
    for workers in kind.runs:
        found: list[Finding] = []
        while len(found) < len(rules_of(kind)):  # a broken rule may leave messages in flight: start new processes
            store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            job = Job(kind, workers == "ranks", devices, where, len(found), store.port)
            problems = _Examination(job, limit_s).run()
            first = len(found)
            found += [Finding(RULES[first + i], workers, problem) for i, problem in enumerate(problems)]
        findings += found
    return findings


@define
class _Examination:
    """Processes that run the rules from the job's first one, until one is broken.

    Args:
        limit_s: most seconds for a rule.
    """

    job: Job
    limit_s: float
    processes: list[BaseProcess] = field(factory=list)
    lines: dict[Connection, Sequence[int]] = field(factory=dict)
    reports: dict[int, dict[int, str | None]] = field(factory=dict)

    def run(self) -> list[str | None]:
        """The problem or None of each rule, in order; it ends with the first problem."""
        found: list[str | None] = []
        self._start()
        try:
            self._await_start()
            while self.job.first + len(found) < len(rules_of(self.job.kind)):
                found.append(self._outcome(self.job.first + len(found), self.limit_s))
                if found[-1] is not None:
                    break
        finally:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
            for line in self.lines:
                line.close()
        return found

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once for all of them
        context.set_forkserver_preload([serve.__module__])
        everyone = range(self.job.devices)
        for local in [[device] for device in everyone] if self.job.ranks else [list(everyone)]:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(self.job, local, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines[mine] = local

    def _await_start(self) -> None:
        """Return when every device is connected, or one of them has reported why it is not."""
        first, deadline = self.job.first, time.monotonic() + _START_S
        ready = self.reports.setdefault(first - 1, {})
        while len(ready) < self.job.devices and not any(self.reports.get(first, {}).values()):
            if not self._listen(deadline - time.monotonic(), first):
                return

    def _outcome(self, rule: int, limit_s: float) -> str | None:
        """The problem with a rule; None once all devices have kept it."""
        reported = self.reports.setdefault(rule, {})
        expected = set(range(self.job.devices))
        if RULES[rule] is RULES[-1]:
            expected.discard(self.job.devices - 1)
        deadline = time.monotonic() + limit_s
        while expected - reported.keys() or any(reported.values()):
            broken = [f"device {device}: {problem}" for device, problem in sorted(reported.items()) if problem]
            left = min(deadline, time.monotonic() + _GATHER_S if broken else deadline) - time.monotonic()
            if (broken and (not expected - reported.keys())) or not self._listen(left, rule):
                late = ", ".join(map(str, sorted(expected - reported.keys())))
                return "; ".join(broken) or f"device {late} had not finished after {limit_s:g} s"
        return None

    def _listen(self, limit_s: float, rule: int) -> bool:
        """Read the next reports; False if none arrives in time."""
        ready = wait(list(self.lines), max(limit_s, 0))
        for line in ready:
            assert isinstance(line, Connection)
            try:
                device, about, problem = line.recv()
            except (EOFError, OSError):
                for gone in self.lines.pop(line):
                    self._missed(gone, rule)
                line.close()
                continue
            self.reports.setdefault(about, {})[device] = problem
        return bool(ready)

    def _missed(self, device: int, rule: int) -> None:
        """Record that a process ended; in the last rule, after all earlier ones, it is expected to."""
        unfinished = next((i for i in range(rule, len(RULES) - 1) if device not in self.reports.get(i, {})), None)
        if unfinished is not None:
            self.reports.setdefault(unfinished, {})[device] = "its process ended"
        elif device != self.job.devices - 1:
            self.reports.setdefault(len(RULES) - 1, {}).setdefault(device, "its process ended")
