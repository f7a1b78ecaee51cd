"""Writing a checkpoint: each process writes its files into a hidden folder, which the first process then renames.

    rank 0   hidden folder ─┬─ tensors, items ─┬─ manifest ── rename ── older ones removed (keep=)
    rank 1                  └─ tensors, items ─┘

A process that is killed at any time leaves earlier checkpoints as they were, and a hidden folder, which the next
checkpoint removes whose name differs in the number alone.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ...core.errors import RequestError, in_a_line
from ..launch.exchange import Exchange
from .durable_files import (
    FileRecord,
    cannot_write,
    hidden_folder,
    sync_folder,
    write_durable,
)
from .folders import remove_left_over, remove_older
from .manifest import DCP_METADATA, MANIFEST_NAME, manifest_bytes
from .state_parts import PartNames, Parts, write_parts


def begin_save(folder: Path) -> str:
    """Create the hidden folder of a new checkpoint; the first process calls this.

    Args:
        folder: of the checkpoint; absolute.

    Returns:
        The hidden folder's name; it is next to ``folder``.

    Raises:
        RequestError: the folder has files already, or none can be created there.
    """
    if (folder / MANIFEST_NAME).exists() or (folder / DCP_METADATA).exists():
        raise RequestError(
            f"'{folder}' holds a checkpoint: a job that dies while it is overwritten would leave none; give each a "
            "folder of its own, such as checkpoints/120"
        )
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise RequestError(f"'{folder}' has other files: a checkpoint has a folder of its own; give a new one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"'{folder}' is a file: a checkpoint is a folder; give a new one")
        remove_left_over(folder)
        return hidden_folder(folder).name
    except OSError as error:
        raise cannot_write(folder, error) from None


@frozen
class Save:
    """The writing of one checkpoint, by all processes together.

    Args:
        folder: of the checkpoint; absolute.
        hidden: the name of the folder that it is written into.
        parts: of this process; those that an earlier process has are left out.
        steps: of training.
        keep: the number of checkpoints to keep; None keeps all.
        writers: how many processes write: those of the first replica.
    """

    folder: Path
    hidden: str
    parts: Parts
    steps: int
    keep: int | None
    writers: int

    def run(self, exchange: Exchange) -> None:
        """Write it.

        Raises:
            RequestError: it cannot be written; on every process, with the same message. Nothing of it is left.
        """
        written = exchange.gather(self._written(exchange.gather(self.parts.names), exchange.number))
        failure = next((each for each in written if isinstance(each, str)), None)
        if exchange.number == 0:
            failure = failure or self._finish({name: record for records in written for name, record in records.items()})
            shutil.rmtree(self._hidden, ignore_errors=True)
        failure = exchange.gather(failure)[0]
        if failure is not None:
            raise RequestError(failure)

    @property
    def _hidden(self) -> Path:
        return self.folder.with_name(self.hidden)

    def _written(self, names: Sequence[list[str]], number: int) -> dict[str, list[Any]] | str:
        """The files of this process with their sizes and hashes, or the reason why they cannot be written."""
        if number >= self.writers:
            return {}
        others = {name for earlier in names[:number] for name in earlier}
        mine = self.parts.only(name for name in self.parts.names if name not in others)
        try:
            found = write_parts(self._hidden, PartNames(number + 1, self.writers), mine)
            return {name: [one.bytes, one.xxh3_128] for name, one in found.items()}
        except OSError as error:
            return str(cannot_write(self.folder, error))
        except Exception as error:
            return str(error) if isinstance(error, RequestError) else _failed(self.folder, error)

    def _finish(self, written: Mapping[str, list[Any]]) -> str | None:
        """Complete the checkpoint; returns the reason if that fails."""
        files = {name: FileRecord(size, digest) for name, (size, digest) in written.items()}
        try:
            for name, record in files.items():
                if (self._hidden / name).stat().st_size != record.bytes:
                    return self._not_one_folder()
            write_durable(self._hidden / MANIFEST_NAME, [manifest_bytes(self.steps, files)])
            sync_folder(self._hidden)
            self._hidden.rename(self.folder)
            sync_folder(self.folder.parent)
        except FileNotFoundError:
            return self._not_one_folder()
        except OSError as error:
            return str(cannot_write(self.folder, error))
        except Exception as error:
            return _failed(self.folder, error)
        if self.keep is not None:
            remove_older(self.folder, self.keep)
        return None

    def _not_one_folder(self) -> str:
        return (
            f"'{self.folder}' cannot be written: its files were removed meanwhile, or it is not one folder on all "
            "ranks; give one that every rank reads and writes"
        )


def _failed(folder: Path, error: Exception) -> str:
    return f"the checkpoint '{folder}' cannot be written: {in_a_line(error)}"
