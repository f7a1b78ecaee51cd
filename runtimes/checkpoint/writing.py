"""Writing a checkpoint: each process writes its files into a hidden folder, which the first process then renames.

    rank 0   hidden folder ─┬─ tensors ─┬─ manifest ── rename ── older ones removed (keep=)
    rank 1                  └─ tensors ─┘

A process that is killed at any time leaves earlier checkpoints as they were, and a hidden folder, which the next
checkpoint removes whose name differs in the number alone.

A folder has several checkpoints, one folder each, such as ``checkpoints/step-120``.
"""

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import RequestError, refuse_no_bool, refuse_other_kinds, warn_caller
from ...core.files.write import sync_folder
from ..flat_bytes import flat_bytes
from ..launch.team import Exchange
from ..weights.checkpoint import DTYPES, file_pieces
from .manifest import (
    DCP_METADATA,
    MANIFEST_NAME,
    FileRecord,
    cannot_write,
    check_listing,
    manifest_bytes,
    none_there,
    read_manifest,
    write_durable,
)
from .reading import CheckpointReader, Parts

_HIDDEN = ".partial-"


def begin_save(folder: Path) -> str:
    """Create the hidden folder of a new checkpoint; the first process calls this.

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
        raise RequestError(cannot_write(folder, error)) from None


@frozen
class Save:
    """The writing of one checkpoint, by all processes together.

    Args:
        hidden: the name of the folder that it is written into.
        parts: of this process; those that an earlier process has are left out.
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
            failure = failure or self._finish([each for each in written if each])
            shutil.rmtree(self._hidden, ignore_errors=True)
        failure = exchange.gather(failure)[0]
        if failure is not None:
            raise RequestError(failure)

    @property
    def _hidden(self) -> Path:
        return self.folder.with_name(self.hidden)

    def _written(self, names: Sequence[list[str]], number: int) -> list[Any] | str:
        """What this process writes: the name of its file, its size and hash, items, and dtypes that are stored as
        bytes; empty for nothing. Or the reason why it cannot be written."""
        if number >= self.writers:
            return []
        others = {name for earlier in names[:number] for name in earlier}
        mine = self.parts.only(name for name in self.parts.names if name not in others)
        file = f"tensors-{number + 1:05d}-of-{self.writers:05d}.safetensors"
        try:
            record, stored_as_bytes = write_tensor_file(self._hidden / file, mine.tensors)
            manifest_bytes(self.steps, {}, mine.items)  # refuses items that cannot be stored
        except Exception as error:
            return cannot_write(self.folder, error)
        return [file, record.bytes, record.xxh3_128, mine.items, stored_as_bytes]

    def _finish(self, written: Sequence[list[Any]]) -> str | None:
        """Complete the checkpoint; returns the reason if that fails."""
        files, items, dtypes = dict[str, FileRecord](), dict[str, Any](), dict[str, Any]()
        try:
            for name, size, digest, own, others in written:
                if (self._hidden / name).stat().st_size != size:
                    return self._not_one_folder()
                files[name] = FileRecord(size, digest)
                items |= own
                dtypes |= others
            write_durable(self._hidden / MANIFEST_NAME, [manifest_bytes(self.steps, files, items, dtypes)])
            sync_folder(self._hidden)
            self._hidden.rename(self.folder)
            sync_folder(self.folder.parent)
        except FileNotFoundError:
            return self._not_one_folder()
        except Exception as error:
            return cannot_write(self.folder, error)
        if self.keep is not None:
            remove_older(self.folder, self.keep)
        return None

    def _not_one_folder(self) -> str:
        return (
            f"'{self.folder}' cannot be written: its files were removed meanwhile, or it is not one folder on all "
            "ranks; give one that every rank reads and writes"
        )


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileRecord, dict[str, torch.dtype]]:
    """Write the tensors of one process.

    Returns:
        The file's size and hash, and the dtypes of tensors that are stored as bytes.

    Raises:
        OSError: the file cannot be written.
        RequestError: a tensor cannot be stored.
    """
    others = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in DTYPES.values()}
    stored = {name: _stored(name, tensor, name in others) for name, tensor in tensors.items()}
    return write_durable(path, file_pieces(stored)), others


def _stored(name: str, tensor: Tensor, as_bytes: bool) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise RequestError(
            f"'{name}' is a {tensor.layout} tensor: a checkpoint can store only dense tensors; convert it"
        )
    if not as_bytes:
        return tensor
    flat = flat_bytes(tensor.detach().resolve_conj().resolve_neg())
    return flat.reshape(*tensor.shape, tensor.dtype.itemsize)


def latest_checkpoint(folder: str | Path, *, verify: bool = False) -> Path | None:
    """The last whole checkpoint among the folders in a folder.

    The last one has the highest number at the end of its name, such as ``step-120``. Folders without a whole manifest,
    and ones whose files are missing or have other sizes than in the manifest, are skipped.

    Args:
        folder: holds a folder for each checkpoint; it may be missing.
        verify: whether the hashes of all files are compared, too, so that a checkpoint that `Pipeline.resume` would
            refuse is skipped, with a warning. It reads the whole checkpoint.

    Returns:
        The checkpoint's folder, or None.

    Raises:
        RequestError: there are only checkpoints of ``torch.distributed.checkpoint``, such as older versions of panpipe
            wrote: a job that continued without them would lose its progress.
    """
    refuse_other_kinds("folder", folder, str | Path, "the path of a folder that has a folder for each checkpoint")
    refuse_no_bool(verify=verify)
    for path in reversed(_numbered(Path(folder))):
        try:
            check_listing(path, read_manifest(path))
            if verify:
                reader = CheckpointReader(path)
                reader.check(reader.manifest.files)
        except (RequestError, OSError) as error:
            if verify:
                warn_caller(f"'{path}' is skipped: {error}")
            continue
        return path
    if others := _numbered(Path(folder), DCP_METADATA):
        raise RequestError(none_there(others[-1]))
    return None


def remove_older(newest: Path, keep: int) -> None:
    """Remove the oldest checkpoints next to the newest one whose names differ from its name in the number alone.

    Args:
        newest: the checkpoint that was just written; ones with higher numbers are not counted and not removed.
    """
    stem, number = split_number(newest.name)
    alike = [path for path in _numbered(newest.parent) if split_number(path.name)[0] == stem and path != newest]
    older = [path for path in alike if split_number(path.name)[1] <= number]
    try:
        for path in older[: len(older) + 1 - keep]:
            hidden = hidden_folder(path)
            path.rename(hidden)  # first, so that no reader finds a part of it
            shutil.rmtree(hidden, ignore_errors=True)
        remove_left_over(newest)
        sync_folder(newest.parent)
    except OSError as error:
        warn_caller(f"older checkpoints than '{newest}' cannot be removed: {error.strerror}")


def remove_left_over(newest: Path) -> None:
    """Remove what a killed process left of checkpoints whose names differ from a new one's in the number alone."""
    stem, _ = split_number(_shortened(newest.name))
    for found in newest.parent.glob(f"{_HIDDEN}*"):
        if split_number(found.name.removeprefix(_HIDDEN).rpartition("-")[0])[0] == stem:
            shutil.rmtree(found, ignore_errors=True)


def hidden_folder(path: Path) -> Path:
    """Create a folder next to ``path``, to be renamed to it, with a name that cannot be predicted."""
    made = path.with_name(f"{_HIDDEN}{_shortened(path.name)}-{secrets.token_hex(8)}")
    made.mkdir()  # not mkdtemp, whose folders only this user may read
    return made


def _shortened(name: str) -> str:
    """The beginning of the name of a checkpoint, as its hidden folder has it."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


def _numbered(folder: Path, having: str = MANIFEST_NAME) -> list[Path]:
    """The folders that have such a file, by their numbers; hidden ones are being written or removed."""
    found = (file.parent for file in folder.glob(f"*/{having}") if not file.parent.name.startswith("."))
    return sorted(found, key=lambda path: (split_number(path.name)[1], path.name))


def split_number(name: str) -> tuple[str, int]:
    """A name and the number at its end; -1 if it has none."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits) if digits.isascii() and 0 < len(digits) < 100 else -1
