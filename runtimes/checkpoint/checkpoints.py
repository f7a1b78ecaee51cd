"""Checkpoints of training: files of torch's distributed checkpoint; each process writes and reads its part.

Their contents are defined in `training_state`.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from ...core.errors import RequestError, in_a_line
from ..launch.team import Team
from ..training.averages import Averages
from ..training.counts import Counts
from ..training.evaluation import Evaluator
from ..training.local_stages import LocalStages
from ..training.steps import StepRunner
from .training_state import Listing, TrainingState

ROOT = "pipe"
"""The name of a pipeline in its checkpoints: ``dcp.save({"pipe": pipe}, …)`` writes the same."""

_METADATA = ".metadata"
"""The file that DCP writes last: a checkpoint without it is incomplete."""


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The last complete checkpoint among the folders in a folder.

    The last one has the highest number at the end of its name, such as ``step-120``. Incomplete ones are skipped.

    Args:
        folder: holds a folder for each checkpoint; it may be missing.

    Returns:
        The checkpoint's folder, or None.
    """
    whole = [found.parent for found in Path(folder).glob(f"*/{_METADATA}")]
    return max(whole, key=lambda path: (_number(path.name), path.name), default=None)


def _number(name: str) -> int:
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else -1


class Checkpoints:
    """The checkpoints of a pipeline; a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        stages: of this process.
        runner, evaluator: whose random numbers are continued.
        counts: of the pipeline.
        averages: of the weights.
        scaler: of the loss; None or a disabled one for none.
        team: the devices.
    """

    def __init__(
        self,
        stages: LocalStages,
        runner: StepRunner,
        evaluator: Evaluator,
        counts: Counts,
        averages: Averages,
        scaler: GradScaler | None,
        team: Team,
    ) -> None:
        self._stages, self._runner, self._evaluator = stages, runner, evaluator
        self._counts, self._averages, self._team = counts, averages, team
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def _training_state(self) -> TrainingState:
        stages = self._stages
        stages.have_values()
        return TrainingState(stages.model, stages.states, stages.copy_buffers, self._scaler, self._averages.all)

    def state_dict(self) -> dict[str, Any]:
        """The state of this process; see `Pipeline.state_dict`."""
        if self._runner.accumulating:
            raise RequestError(
                "gradients wait for an update since step(batch, update=False), and a checkpoint holds none: save "
                "after a step that updates"
            )
        counts = {"steps": self._counts.steps, "updates": self._counts.updates, "evaluations": self._evaluator.count}
        return self._training_state.read({**counts, "seed": self._runner.seed})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state; see `Pipeline.load_state_dict`."""
        self._training_state.write(state_dict)
        self._stages.initial.overwrite()
        found = state_dict["progress"]
        self._counts.steps, self._counts.updates = found["steps"], found["updates"]
        self._evaluator.count = found["evaluations"]
        self._runner.seed = self._evaluator.seed = found["seed"]
        self._runner.drop_accumulated()

    def write(self, folder: str | Path) -> None:
        """Write a checkpoint; see `Pipeline.checkpoint`."""
        self._averages.refuse_applied("write a checkpoint")
        self._stages.have_equal_values()
        write_checkpoint(Path(folder), self.state_dict(), self._team)

    def read(self, folder: str | Path) -> None:
        """Resume from a checkpoint; see `Pipeline.resume`."""
        self._averages.refuse_applied("resume")
        read_checkpoint(Path(folder), self, self._training_state, self._team)


def write_checkpoint(folder: Path, state: Mapping[str, Any], team: Team) -> None:
    """Write the state of all processes; every rank calls this.

    Args:
        folder: one that all ranks can access.
        state: the state of this process.
        team: the devices.

    Raises:
        RequestError: the folder holds a checkpoint, or cannot be written; on every rank.
    """
    if team.decide((folder / _METADATA).exists):
        raise RequestError(
            f"'{folder}' holds a checkpoint: a job that dies while it is overwritten would leave none; give each a "
            "folder of its own, such as checkpoints/120"
        )
    _together(team, lambda: state_dict_saver.save({ROOT: state}, checkpoint_id=folder), f"'{folder}' cannot be written")


def read_checkpoint(folder: Path, pipe: Stateful, state: TrainingState, team: Team) -> None:
    """Read this process's part into a pipeline; every rank calls this.

    Args:
        folder: of the checkpoint.
        pipe: the pipeline.
        state: its state, which checks that the checkpoint fits.
        team: the devices.

    Raises:
        RequestError: there is none, it cannot be read, or it does not fit; on every rank. Nothing is changed, unless
            files are damaged or parameter groups are formed differently.
    """

    def refuse() -> None:
        listing = _listing(folder)
        state.check_classes(_classes(folder, listing))
        state.check(listing)

    team.agree(_refusal(refuse, f"'{folder}' cannot be read"))
    _together(team, lambda: state_dict_loader.load({ROOT: pipe}, checkpoint_id=folder), f"'{folder}' cannot be read")


def _listing(folder: Path) -> Listing:
    if not (folder / _METADATA).is_file():
        raise RequestError(
            f"there is no whole checkpoint in '{folder}': its file {_METADATA}, which is written last, is missing; "
            "give the folder of one, such as panpipe.latest_checkpoint('checkpoints')"
        )
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{ROOT}."): tuple(one.size) if isinstance(one, TensorStorageMetadata) else None
        for name, one in kept.items()
        if name.startswith(f"{ROOT}.")
    }


def _classes(folder: Path, listing: Listing) -> dict[str, Any]:
    """The names of a checkpoint's optimizer and scheduler classes; small, and read by every process separately."""
    wanted: dict[str, Any] = {"scheduler": ()} if "scheduler" in listing else {}
    if "progress.optimizer" in listing:
        wanted["progress"] = {"optimizer": ""}
    if wanted:
        state_dict_loader.load({ROOT: wanted}, checkpoint_id=folder, no_dist=True)
    return wanted


def _together(team: Team, work: Callable[[], Any], what: str) -> None:
    """Run a collective operation of DCP on all processes; a failure of one is raised on all."""
    team.agree(team.collectively(lambda: _refusal(work, what)))


def _refusal(work: Callable[[], Any], what: str) -> RequestError | None:
    """The error that `work` raises, as a RequestError of one line; None if it raises none."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            work()
    except RequestError as failure:
        return failure
    except CheckpointException as failures:
        rank, (first, _) = next(iter(failures.failures.items()))
        return first if isinstance(first, RequestError) else _failed(what, first, f"rank {rank}: ")
    except Exception as failure:
        return _failed(what, failure)
    return None


def _failed(what: str, failure: BaseException, where: str = "") -> RequestError:
    return RequestError(
        f"the checkpoint {what}: {where}{in_a_line(failure)}; give a folder that every rank reads and writes"
    )
