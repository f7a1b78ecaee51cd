"""The checkpoints in a folder, one folder each, such as ``checkpoints/step-120``: the last one, and the oldest ones."""

import warnings
from collections.abc import Iterator
from pathlib import Path

from ...core.errors import RequestError
from .durable_files import remove_folder, remove_hidden, shortened, sync_folder
from .manifest import DCP_METADATA, MANIFEST_NAME, check_listing, none_there, read_manifest
from .reading import CheckpointReader


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
    for path in sorted(_numbered(Path(folder)), key=_order, reverse=True):
        try:
            check_listing(path, read_manifest(path))
            if verify:
                reader = CheckpointReader(path)
                reader.check(reader.manifest.files)
        except (RequestError, OSError) as error:
            if verify:
                warnings.warn(f"'{path}' is skipped: {error}", stacklevel=2)
            continue
        return path
    other = max((found.parent for found in Path(folder).glob(f"*/{DCP_METADATA}")), key=_order, default=None)
    if other is not None:
        raise RequestError(none_there(other))
    return None


def remove_older(newest: Path, keep: int) -> None:
    """Remove the oldest checkpoints next to the newest one whose names differ from its name in the number alone.

    Args:
        newest: the checkpoint that was just written; ones with higher numbers are not counted and not removed.
        keep: how many remain.
    """
    stem, number = _split(newest.name)
    found = [path for path in _numbered(newest.parent) if _split(path.name)[0] == stem]
    older = sorted((path for path in found if _split(path.name)[1] <= number and path != newest), key=_order)
    try:
        for path in older[: len(older) + 1 - keep]:
            remove_folder(path)
        remove_left_over(newest)
        sync_folder(newest.parent)
    except OSError as error:
        warnings.warn(f"older checkpoints than '{newest}' cannot be removed: {error.strerror}", stacklevel=2)


def remove_left_over(newest: Path) -> None:
    """Remove what a killed process left of checkpoints whose names differ from a new one's in the number alone."""
    stem, _ = _split(shortened(newest.name))
    remove_hidden(newest.parent, lambda name: _split(name)[0] == stem)


def _numbered(folder: Path) -> Iterator[Path]:
    """The folders with a manifest; hidden ones are being written or removed."""
    return (found.parent for found in folder.glob(f"*/{MANIFEST_NAME}") if not found.parent.name.startswith("."))


def _split(name: str) -> tuple[str, int]:
    """A name and the number at its end; -1 if it has none."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits) if digits.isascii() and 0 < len(digits) < 100 else -1


def _order(path: Path) -> tuple[int, str]:
    return _split(path.name)[1], path.name
