"""Checkpoints of a pipeline: writing them, also in the background, and resuming from them.

    state_dict ──▶ parts ──▶ files of each process ──▶ manifest                     `reading`, `writing`
    folder ──▶ manifest and hashes ──▶ do they fit? ──▶ all ranks agree ──▶ tensors   `manifest`, `reading`

Their contents are defined in `training_state`. While training goes on, a copy of the state in the host's memory is
saved by one thread.
"""

import atexit
import copy
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ...core.errors import PanpipeError, RequestError, WorkerError, in_a_line, message_of
from ..launch.team import Exchange, Team
from ..training.averages import Averages
from ..training.local_stages import LocalStages
from ..training.state import PROGRESS, PipelineState
from ..watch.process import failure_at_exit
from .manifest import DCP_METADATA, cannot_write
from .reading import CheckpointReader, Parts, gathered, narrowed, parts_of, state_of
from .training_state import TrainingState, fitted
from .writing import Save, begin_save, split_number


@frozen
class Saving:
    """A checkpoint that is being written.

    Args:
        wait: waits until the last checkpoint is complete; every rank calls it. It raises a RequestError if that could
            not be written, once: here, or in the next `step`, `checkpoint`, `resume` or `close`.
    """

    wait: Callable[[], None]


class Checkpoints:
    """The checkpoints of a pipeline; a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        scaler: of the loss; None or a disabled one for none.
    """

    def __init__(
        self,
        stages: LocalStages,
        state: PipelineState,
        averages: Averages,
        scaler: GradScaler | None,
        team: Team,
    ) -> None:
        self._stages, self._state, self._averages, self._team = stages, state, averages, team
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._in_flight, self._state_copy = BackgroundSave(), StateCopy()

    def follow(self, stages: LocalStages) -> None:
        """Continue with the stages of another plan."""
        self._stages = stages

    @property
    def _training_state(self) -> TrainingState:
        stages = self._stages
        stages.ensure_values()
        return TrainingState(stages.model, stages.states, stages.copy_buffers, self._scaler, self._averages.all)

    def state_dict(self) -> dict[str, Any]:
        """The state of this process; see `Pipeline.state_dict`."""
        with self._stages.whole_parameters():
            found = self.whole_state()
            if self._stages.shares_parameters:  # they lose their memory
                found.add("model", {name: t.to("cpu", copy=True) for name, t in found.section("model").items()})
        return state_of(gathered(found, self._team.tensors))

    def whole_state(self) -> Parts:
        """The state of this process, while the parameters that replicas share are whole; tensors are not copied."""
        if self._state.accumulated is not None:
            raise RequestError(
                "gradients wait for an update since step(batch, update=False), and a checkpoint does not store "
                "gradients: save after a step that updates"
            )
        return self._read()

    def _read(self) -> Parts:
        return self._training_state.read({name: getattr(self._state, name) for name in PROGRESS})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state with whole tensors; see `Pipeline.load_state_dict`."""
        parts = parts_of(state_dict)
        with self._stages.whole_parameters(gather=False):
            own = self._read()
            parts = narrowed(parts, own.tensors, self._team.tensors)
            self._training_state.check(own, parts.tensors, parts.items)
            self.load(parts)

    def load(self, parts: Parts) -> None:
        """Restore the state of this process, with its parts of tensors."""
        training = self._training_state
        with self._stages.whole_parameters(gather=False):
            training.write(parts)
        self._stages.initial.forget_overwritten()
        for name in PROGRESS:
            setattr(self._state, name, parts.items[f"progress.{name}"])
        self._state.accumulated = None

    def write(self, folder: str | Path, wait: bool = True, keep: int | None = None) -> Saving:
        """Write a checkpoint; see `Pipeline.checkpoint`."""
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise RequestError(f"keep is {keep!r}: give the number of checkpoints to keep, from 1, or None for all")
        if keep is not None and split_number(Path(folder).name)[1] < 0:
            raise RequestError(
                f"keep is {keep} and '{Path(folder).name}' has no number at its end, by which older checkpoints are "
                "found: name folders such as step-120, or leave keep out"
            )
        self._averages.refuse_applied("write a checkpoint")
        self._stages.ensure_equal_values()
        self.wait()
        team, path = self._team, Path(folder).absolute()
        with self._stages.whole_parameters():
            self._write(team, path, wait, keep)
        return Saving(self.wait)

    def _write(self, team: Team, path: Path, wait: bool, keep: int | None) -> None:
        failure, parts = None, Parts()
        try:
            found = gathered(self.whole_state(), team.tensors)
            if team.replica == 0:
                parts = found if wait else self._state_copy.of(found)
        except Exception as error:
            failure = error if isinstance(error, PanpipeError) else RequestError(cannot_write(path, error))
        team.agree(failure)
        hidden = team.decide(lambda: begin_save(path))
        writers = team.size // len(team.local)  # the processes of a replica
        save = Save(path, hidden, parts, self._state.steps, keep, writers)
        if wait:
            save.run(team.exchange())
        else:
            self._in_flight.start(save, team.background_exchange())

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; see `Saving`."""
        with self._team.waiting("the checkpoint that is being written"):
            self._in_flight.wait()

    def refuse_failed(self) -> None:
        """Raise the failure of a background save that has ended everywhere; all ranks call this before a step.

        Ranks send each other a message while a save is in flight, so that all of them raise before the same step.
        """
        if self._in_flight.in_flight and all(self._team.exchange().gather(self._in_flight.ended)):
            self._in_flight.wait()

    def read(self, folder: str | Path) -> None:
        """Resume from a checkpoint; see `Pipeline.resume`."""
        self._averages.refuse_applied("resume")
        self.wait()
        training = self._training_state
        with self._stages.whole_parameters():
            self._resume(training, Path(folder).absolute())

    def _resume(self, training: TrainingState, path: Path) -> None:
        team = self._team
        damage, misfit, parts = None, None, Parts()
        reader: CheckpointReader | None = None
        own = self._read()  # replicas that share an optimizer read it together
        try:
            reader = CheckpointReader(path)
            reader.narrow(own.tensors, team.tensors)
            try:
                parts = fitted(own, reader, training)
            except PanpipeError as error:  # a changed name of a tensor looks like another model's
                misfit = message_of(error)
            reader.check(sorted({reader.tensors[name].path.name for name in parts.tensors}))
            # Of the other files, each process checks some.
            reader.check(sorted(reader.manifest.files)[team.exchange().number :: team.exchange().count])
        except Exception as error:
            damage = _reason(path, error)
        self._agree([damage, misfit, None if reader is None else reader.manifest.xxh3_128, path.name])
        assert reader is not None
        try:
            reader.read_into(parts.tensors)
            self.load(parts)
        except Exception as error:
            raise WorkerError(
                f"{_reason(path, error)}; a part of the checkpoint is loaded already: build the pipeline again"
            ) from error

    def _agree(self, mine: list[str | None]) -> None:
        """Refuse a checkpoint on all ranks, with the same line, if one rank refuses it or has another one."""
        damages, misfits, digests, names = zip(*self._team.exchange().gather(mine), strict=True)
        failure = next((each for each in (*damages, *misfits) if each is not None), None)
        if failure is not None:
            raise RequestError(failure)
        other = next((number for number, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise RequestError(
                f"rank {self._team.rank(other)} has another checkpoint, in '{names[other]}', than rank "
                f"{self._team.rank(0)}, in '{names[0]}': all ranks must resume from the same one; give the same folder "
                "on all of them"
            )


def _reason(path: Path, error: Exception) -> str:
    """Why a checkpoint is refused, in a line."""
    return message_of(error) if isinstance(error, PanpipeError) else f"'{path}' cannot be read: {in_a_line(error)}"


_LOG = logging.getLogger("panpipe.checkpoint")


class StateCopy:
    """A copy of a state in the host's memory. Its memory is allocated once, and used for every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, parts: Parts) -> Parts:
        """A copy of parts. The copy before it is overwritten."""
        tensors, gpus = {}, set[torch.device]()
        for name, tensor in parts.tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            tensors[name] = buffer.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:
                gpus.add(tensor.device)
        for gpu in gpus:  # the optimizer changes the tensors next
            torch.cuda.current_stream(gpu).synchronize()
        self._buffers = tensors
        return Parts(tensors, copy.deepcopy(parts.items))


class BackgroundSave:
    """The save that is in flight, if there is one."""

    def __init__(self) -> None:
        self._done: Future[None] | None = None

    def start(self, save: Save, exchange: Exchange) -> None:
        """Begin to write a checkpoint; no other one may be in flight."""
        done = self._done = Future[None]()

        def body() -> None:
            try:
                save.run(exchange)
            except BaseException as failure:
                if not isinstance(failure, WorkerError):  # a rank is lost: all ranks end, each with one line about it
                    _LOG.error("%s", message_of(failure))
                done.set_exception(failure)
            else:
                done.set_result(None)

        # A daemon: a process that ends after a failure does not wait for other ranks.
        threading.Thread(target=body, name="panpipe checkpoint", daemon=True).start()
        atexit.register(self._finish_at_exit)

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and not waited for; the same on every rank."""
        return self._done is not None

    @property
    def ended(self) -> bool:
        """Whether the save in flight has ended in this process."""
        return self._done is not None and self._done.done()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            RequestError: it failed; raised once, on every rank.
        """
        if self._done is not None:
            failure, self._done = self._done.exception(), None
            atexit.unregister(self._finish_at_exit)
            if failure is not None:
                raise failure

    def _finish_at_exit(self) -> None:
        if self._done is not None and failure_at_exit() is None:
            failure = self._done.exception()
            if isinstance(failure, WorkerError):
                _LOG.error("no checkpoint was written: %s", message_of(failure))


ROOT = "pipe"
"""The name of a pipeline in DCP's checkpoints: ``dcp.save({"pipe": pipe}, …)`` writes the same."""


def export_checkpoint(folder: str | Path, target: str | Path) -> None:
    """Convert a checkpoint of `Pipeline.checkpoint` to one of DCP, for its tools and for plain PyTorch.

    One process reads all of it into memory. DCP writes its metadata as a pickle.

    Args:
        target: the folder of DCP's files; it must not have a checkpoint yet.

    Raises:
        RequestError: there is no whole checkpoint, or the target cannot be written.
    """
    state, target = state_of(CheckpointReader(Path(folder).absolute()).whole()), Path(target)
    if (target / DCP_METADATA).exists():
        raise RequestError(f"'{target}' holds a checkpoint: give a new folder")
    from torch.distributed.checkpoint import state_dict_saver  # a quarter of a second that training does without

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_saver.save({ROOT: state}, checkpoint_id=target, no_dist=True)
    except OSError as error:
        raise RequestError(cannot_write(target, error)) from None
    except Exception as error:
        raise RequestError(f"'{target}' cannot be written: {in_a_line(error)[:300]}; give another folder") from None
