"""What follows a step: its batch and its loss are checked, and monitors get its numbers.

On a GPU the numbers of a step are known long after its actions were issued. If no update depends on them, the host
reads them after it has issued the next step, so that the device does not wait for the host::

    host     step 1 │ step 2 │ checks of 1 │ step 3 │ checks of 2 │ …
    device       ╰─ step 1 ──╯╰─ step 2 ────────────╯╰─ step 3 ──

With monitors, and with ``on_nonfinite`` ``"raise"`` or ``"skip"``, a step is checked before it returns.

Each loss is checked for NaN and infinity, which raises, skips the update or warns, and names the stage where it began.
The stages record the largest magnitude of what they return for others. These numbers are read only
after such a loss::

    microbatch 3     stage 0   7.1 ──▶ stage 1   nan ──▶ stage 2   nan ──▶ loss nan        began in stage 1

A stage may return infinities on purpose, such as a mask of attention: those in outputs without a gradient are ignored.

A gradient may be infinite where the loss is finite. With clipping the global norm shows it at no cost. Clipping to such
a norm would make every parameter NaN, so it is handled like such a loss. Scalers skip such updates themselves.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from ...core.errors import NonFiniteError, warn_caller
from ...core.logs import LOGGER
from ...core.wording import counted
from ..engine.prepared import WEIGHT
from ..engine.results import Batch
from ..engine.step_data import StepOptions, peaks_of
from ..metrics import LazyValue
from ..microbatches import Microbatch
from ..monitor.monitors import Monitor
from ..settings import RAISE, SKIP, WARN
from ..update.training import Training
from ..update.update import NonFiniteNorm, Update
from .local_stages import LocalStages
from .monitoring import Monitoring
from .state import PipelineState


@frozen
class Origin:
    """Where the first value that is not finite was computed.

    Args:
        replica, microbatch, stage: the first such microbatch, and its first such stage; tensor ranks are replicas here.
        output: name of the stage's output; None for the loss itself.
        cause: an input of the stage that is not finite, in words; None if there is none.
        others: number of further microbatches.
    """

    replica: int
    microbatch: int
    stage: int
    output: str | None
    cause: str | None
    others: int


def _norm_text(step: int, norm: float, stage: int, name: str) -> str:
    cause = f"the gradient of '{name}' in stage {stage} is not finite" if name else "their squares are too large to add"
    return f"the loss of step {step} is finite and the global norm of its gradients is {norm}: {cause}"


def _non_finite_outputs(outputs: Sequence[Any], peaks: Sequence[Tensor | None]) -> list[str]:
    """Names of outputs that are not finite. An infinite one without a gradient is none of them: it may be a mask."""
    found = zip(outputs, map(_kind, peaks), strict=False)
    return [str(output.name) for output, kind in found if kind == "nan" or (kind == "inf" and output.differentiable)]


def _kind(peak: Tensor | None) -> str | None:
    """``"nan"`` or ``"inf"`` for a largest magnitude that is not finite."""
    value = 0.0 if peak is None else abs(peak.item())
    return None if math.isfinite(value) else "nan" if math.isnan(value) else "inf"


def _leaves_of(pieces: Sequence[Microbatch], microbatch: int) -> list[str]:
    """The tensors of a microbatch that are NaN, or infinite and finite in another microbatch, in words."""
    kinds = [
        [_kind(peaks_of([leaf])[0]) if isinstance(leaf, Tensor) else None for leaf in piece.leaves] for piece in pieces
    ]
    return [
        f"{name} is not finite in this microbatch"
        for place, (name, kind) in enumerate(zip(pieces[microbatch].names, kinds[microbatch], strict=True))
        if kind == "nan" or (kind == "inf" and None in {one[place] for one in kinds if place < len(one)})
    ]


def _parameters_of(parameters: Mapping[str, Tensor]) -> list[str]:
    found = [name for name, p in parameters.items() if _kind(peaks_of([p.detach()])[0]) is not None]
    return [f"parameter '{name}' is not finite" for name in found]


class StepChecks:
    """Checks steps, and reports them to monitors.

    Args:
        training: has what to do if a loss is not finite.
        scaled: whether a scaler skips updates.
    """

    def __init__(
        self,
        training: Training,
        monitors: Sequence[Monitor],
        stages: LocalStages,
        scaled: bool,
        state: PipelineState,
    ) -> None:
        self._mode, self._scaled, self._stages = training.on_nonfinite, scaled, stages
        self._monitoring = Monitoring(monitors, stages)
        self._last: Callable[[], NonFiniteError | None] | None = None
        self._state = state

    def follow(self, stages: LocalStages) -> None:
        """Continue with the stages of another plan."""
        self._stages = stages
        self._monitoring.follow(stages)

    def options(self, options: StepOptions) -> StepOptions:
        """The options of a step that is checked."""
        return evolve(self._monitoring.options(options), peaks=self._mode is not None)

    def check(self, batch: Batch, due: bool, outcome: str, end: Update, scale: float | None, start: float) -> None:
        """Check a step, and report it. All ranks call this together.

        Args:
            due: whether an update was due; otherwise gradients wait for more batches.
            outcome: the state of the model if the batch is refused, for the message.
            end: its update on the first device of this process.
            scale: the factor of its loss; None without a scaler.
            start: when the step was called, on Python's performance counter.

        Raises:
            NonFiniteError: the loss or the norm is not finite, and this is to be raised.
            RequestError: ranks were given different batches.
        """
        took_s, state = time.perf_counter() - start, self._state
        step, updated = state.steps, due and not state.skipped
        start_read = batch.queues[self._stages.team.local[0]].start_read
        loss, norm = start_read(batch.loss), LazyValue[NonFiniteNorm | None](lambda: None)
        if due and self._mode is not None and not self._scaled:
            norm = end.non_finite_norm(start_read)

        def check_now() -> NonFiniteError | None:
            batch.agreement.refuse(outcome)
            return self._check_loss(batch, step, due, updated, loss, norm)

        ahead = any(queue.runs_ahead for queue in batch.queues.values())
        if ahead and updated and not self._monitoring.on and self._mode in (None, WARN):
            self._last = check_now
            return
        failure = check_now()
        if self._monitoring.on:
            self._monitoring.report(batch, took_s, state, due, scale)
        self._raise(failure)

    def check_last(self) -> None:
        """Check the last step if `check` has postponed that. All ranks call this together.

        Raises:
            RequestError: ranks were given different batches.
        """
        check, self._last = self._last, None
        if check is not None:
            self._raise(check())

    def drop_last(self) -> None:
        """Do not check the last step, because its state is replaced."""
        self._last = None

    def close(self) -> None:
        """Close the monitors."""
        self._monitoring.close()

    def _raise(self, failure: NonFiniteError | None) -> None:
        if failure is not None:
            self._state.accumulated = None
            raise failure

    def _check_loss(
        self,
        batch: Batch,
        step: int,
        due: bool,
        updated: bool,
        read_loss: Callable[[], Tensor],
        non_finite_norm: LazyValue[NonFiniteNorm | None],
    ) -> NonFiniteError | None:
        """Check the loss of a step that ran, and its norm. They are equal on all ranks, which therefore do the same.

        Args:
            step: its number, from 1.
            updated: whether parameters were updated with its gradients.
            read_loss: waits for its loss, and returns it on the host.
            non_finite_norm: the global norm, if it is not finite.

        Returns:
            The error to raise, if any.
        """
        if self._mode is None:
            return None
        loss, norm = read_loss(), non_finite_norm()
        finite = bool(torch.isfinite(loss))
        if finite and norm is None:
            self._state.not_finite = 0
            return None
        if self._mode == WARN and due and not updated:
            return None  # a scaler has skipped the update, which is its use
        self._state.not_finite += 1
        if self._mode == WARN and self._state.not_finite > 1:
            return None
        origin = None if finite else self._origin(batch, updated)
        text = self._text(loss, step, origin) if norm is None or not finite else _norm_text(step, *norm)
        message = f"{text}; {self._outcome(due, updated)}"
        failure = NonFiniteError(message, step, norm[1] if finite and norm is not None else None)
        if origin is not None:
            failure = NonFiniteError(message, step, origin.stage, origin.microbatch, self._batch_of(origin))
        if self._mode == RAISE:
            return failure
        if self._stages.team.first:
            self._remark(message)
        return None

    def _outcome(self, due: bool, updated: bool) -> str:
        if not due and self._mode == SKIP:
            return "the update of its gradients will be skipped"
        if not due and self._mode == WARN:
            return "its gradients wait for their update"
        return "the update was made with it" if updated else "no parameter was updated"

    def _remark(self, message: str) -> None:
        if self._mode == WARN:
            warn_caller(f"{message}; further ones in a row are not reported", RuntimeWarning)
        else:
            again = f"; {counted(self._state.not_finite, 'step')} in a row" if self._state.not_finite > 1 else ""
            LOGGER.warning("%s%s", message, again)

    def _text(self, loss: Tensor, step: int, origin: Origin | None) -> str:
        text = f"the loss of step {step} is {loss.item()}"
        if origin is None:
            return f"{text} and that of each microbatch is finite: their sum is too large for {loss.dtype}"
        team = self._stages.team
        device = origin.replica * team.size + self._stages.plan.placement[origin.stage]
        where = f" on rank {team.rank(device)}" if len(team.local) < team.size or team.replicas > 1 else ""
        what = "the loss itself" if origin.output is None else f"its output '{origin.output}'"
        more = f", and so {'is' if origin.others == 1 else 'are'} {origin.others} more" if origin.others else ""
        replica = f" of replica {self._batch_of(origin)}" if team.batches > 1 else ""
        cause = "" if origin.cause is None else f" ({origin.cause})"
        return (
            f"{text}: microbatch {origin.microbatch}{replica} is not finite{more}; that began in stage "
            f"{origin.stage}{where}, with {what}{cause}"
        )

    def _batch_of(self, origin: Origin) -> int:
        """The number of the batch, which tensor ranks share."""
        team = self._stages.team
        return origin.replica // (team.replicas // team.batches)

    def _origin(self, batch: Batch, updated: bool) -> Origin | None:
        """The first microbatch whose loss is not finite, and its first stage; the same on every rank."""
        team = self._stages.team
        rows = batch.own
        finite = [math.isfinite(row[0]) and math.isfinite(row[WEIGHT]) for row in rows]
        bad = next((m for m, good in enumerate(finite) if not good), None)

        def find(device: int) -> dict[str, Any]:
            if bad is None:
                return {}
            outputs = {stage: run.outputs for stage, run in batch.prepared.runs.get(device, [{}])[0].items()}
            peaks = batch.records[device].peaks or {}
            found: dict[str, Any] = {"microbatch": bad, "others": finite.count(False) - 1}
            compiled = batch.prepared.compiled[bad]
            found["home"] = compiled.stage_of(compiled.operators.step.outputs.main_result)
            for stage in sorted(outputs):
                names = _non_finite_outputs(outputs[stage], peaks.get((stage, bad), ()))
                if names:
                    found |= {"stage": stage, "output": names[0]}
                    break
            at = found.get("stage", found["home"])
            found["causes"] = _leaves_of(batch.pieces, bad)
            if at in outputs and not updated:
                state = self._stages.states[at]
                found["causes"] += _parameters_of(state.parameters if state.shared is None else state.updated)
            return found

        documents = team.everywhere(find)
        for replica in range(team.replicas):
            own = documents[replica * team.size : (replica + 1) * team.size]
            if not own[0]:
                continue
            first = min((one for one in own if "stage" in one), key=lambda one: int(one["stage"]), default=None)
            home = int(own[0]["home"])
            one = first or own[self._stages.plan.placement[home]]
            stage, output = (home, None) if first is None else (int(first["stage"]), str(first["output"]))
            cause = one["causes"][0] if one["causes"] else None
            return Origin(replica, int(own[0]["microbatch"]), stage, output, cause, int(own[0]["others"]))
        return None
