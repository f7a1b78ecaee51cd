"""Runs the rules for a backend, in processes of their own: a rule that hangs or kills ends nobody else."""

import multiprocessing
import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from attrs import define, field, frozen
from torch._C._distributed_c10d import TCPStore

from ...core.errors import RequestError
from ..kind import BackendKind
from .bench_process import HOST, Job, serve
from .rules import RULES, Rule, rules_of

DEVICES = 3
LIMIT_S = 30.0
_START_S = 120.0
"""How long processes may take to start: importing torch takes long where much else runs."""
_GATHER_S = 1.0
"""How long to go on listening when one device saw a rule broken."""


class ConformanceError(AssertionError):
    """A backend breaks rules of the contract; the message has each with how it is broken."""


@frozen
class Finding:
    """What came of a rule.

    Args:
        rule: the rule.
        workers: what the devices were: ``threads`` or ``ranks``.
        problem: how it is broken; None where it is kept.
    """

    rule: Rule
    workers: str
    problem: str | None


def check(kind: BackendKind, devices: int = DEVICES, *, where: str = "cpu", limit_s: float = LIMIT_S) -> None:
    """Run every rule; one call is a whole test.

    Args:
        kind: the backend; defined in a module, because other processes run it.
        devices: how many; three or more show what two cannot.
        where: the type of device that tensors are on.
        limit_s: how long a rule may take.

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
    """Run every rule, whatever comes of the others; see `check`.

    Returns:
        What came of each, for threads and for ranks if the backend connects both.
    """
    if devices < 2:
        raise RequestError(f"{devices} devices: messages need two; three show more")
    if where not in kind.device_types:
        raise RequestError(
            f"backend '{kind.name}' moves no tensors on {where}: try {', '.join(sorted(kind.device_types))}"
        )
    if where == "cuda" and not torch.cuda.is_available():
        raise RequestError("tensors on cuda and PyTorch finds no GPU here: check on cpu, or where there is one")
    if kind.unavailable is not None:
        raise RequestError(f"backend '{kind.name}' cannot be used here: {kind.unavailable}")
    try:
        pickle.dumps(kind)
    except Exception as error:
        raise RequestError(
            f"backend '{kind.name}' cannot be given to another process ({error}): define its functions at the top of a "
            "module"
        ) from error
    findings: list[Finding] = []
    for workers in kind.runs:
        found: list[Finding] = []
        while len(found) < len(rules_of(kind)):  # behind a broken rule nobody knows what is in flight: begin anew
            store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            job = Job(kind, workers == "ranks", devices, where, len(found), store.port)
            problems = _Examination(job, limit_s).run()
            first = len(found)
            found += [Finding(RULES[first + i], workers, problem) for i, problem in enumerate(problems)]
        findings += found
    return findings


@define
class _Examination:
    """Processes that run the rules from one on, until one is broken.

    Args:
        job: what they do.
        limit_s: how long a rule may take.
    """

    job: Job
    limit_s: float
    processes: list[BaseProcess] = field(factory=list)
    lines: dict[Connection, Sequence[int]] = field(factory=dict)
    reports: dict[int, dict[int, str | None]] = field(factory=dict)

    def run(self) -> list[str | None]:
        """What came of the rules, in order; a problem is the last."""
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
        """Return when every device is connected, or one of them says why it is not."""
        first, deadline = self.job.first, time.monotonic() + _START_S
        ready = self.reports.setdefault(first - 1, {})
        while len(ready) < self.job.devices and not any(self.reports.get(first, {}).values()):
            if not self._listen(deadline - time.monotonic(), first):
                return

    def _outcome(self, rule: int, limit_s: float) -> str | None:
        """What came of a rule: None once all devices have kept it."""
        told = self.reports.setdefault(rule, {})
        expected = set(range(self.job.devices))
        if RULES[rule] is RULES[-1]:
            expected.discard(self.job.devices - 1)
        deadline = time.monotonic() + limit_s
        while expected - told.keys() or any(told.values()):
            broken = [f"device {device}: {problem}" for device, problem in sorted(told.items()) if problem]
            left = min(deadline, time.monotonic() + _GATHER_S if broken else deadline) - time.monotonic()
            if (broken and (not expected - told.keys())) or not self._listen(left, rule):
                late = ", ".join(map(str, sorted(expected - told.keys())))
                return "; ".join(broken) or f"device {late} had not finished after {limit_s:g} s"
        return None

    def _listen(self, limit_s: float, rule: int) -> bool:
        """Take the next reports in; false if there are none in time."""
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
        """A process ended: that is its part of the last rule, once it is through with those before."""
        unfinished = next((i for i in range(rule, len(RULES) - 1) if device not in self.reports.get(i, {})), None)
        if unfinished is not None:
            self.reports.setdefault(unfinished, {})[device] = "its process ended"
        elif device != self.job.devices - 1:
            self.reports.setdefault(len(RULES) - 1, {}).setdefault(device, "its process ended")
