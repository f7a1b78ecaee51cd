"""Conversion of a checkpoint to one of ``torch.distributed.checkpoint`` (DCP), by DCP's own writer.

The other direction needs the pipeline, because DCP's metadata is a pickle, and reading one can run code: the user
reads what they trust by ``dcp.load({"pipe": pipe}, checkpoint_id=folder)``, and calls ``pipe.checkpoint``.
"""

import warnings
from pathlib import Path

from torch.distributed.checkpoint import state_dict_saver

from ...core.errors import RequestError, in_a_line
from .durable_files import cannot_write
from .manifest import DCP_METADATA
from .reading import CheckpointReader
from .state_parts import state_of

ROOT = "pipe"
"""The name of a pipeline in DCP's checkpoints: ``dcp.save({"pipe": pipe}, …)`` writes the same."""


def export_checkpoint(folder: str | Path, target: str | Path) -> None:
    """Convert a checkpoint of `Pipeline.checkpoint` to one of DCP, for its tools and for plain PyTorch.

    One process reads all of it into memory. DCP writes its metadata as a pickle.

    Args:
        folder: of the checkpoint.
        target: the folder of DCP's files; it must not have a checkpoint yet.

    Raises:
        RequestError: there is no whole checkpoint, or the target cannot be written.
    """
    state, target = state_of(CheckpointReader(Path(folder).absolute()).whole()), Path(target)
    if (target / DCP_METADATA).exists():
        raise RequestError(f"'{target}' holds a checkpoint: give a new folder")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_saver.save({ROOT: state}, checkpoint_id=target, no_dist=True)
    except OSError as error:
        raise cannot_write(target, error) from None
    except Exception as error:
        raise RequestError(f"'{target}' cannot be written: {in_a_line(error)[:300]}; give another folder") from None
