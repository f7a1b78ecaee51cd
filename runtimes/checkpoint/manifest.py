"""The manifest of a checkpoint: its files with their sizes and hashes, and all that is not a tensor.

{"format": "panpipe.checkpoint/2", "xxh3_128": "…",        ◀── the hash of all bytes after this line
"steps": 120, "files": {"tensors-00001-of-00002.safetensors": {"bytes": …, "xxh3_128": "…"}, …}, "items": {…}, …}

It is written last.

Files are written once, hashed while they are written, and synchronized to disk.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from attrs import field, frozen
from attrs.validators import deep_mapping, ge, instance_of, lt

from ...core.documents import check_format
from ...core.errors import RequestError, in_a_line
from ...core.files.json_reader import check_values, values_in
from ...core.files.limits import Limits
from ...core.files.read import open_regular, read_bytes
from ...core.files.write import replace_file
from ...core.plain_data import decode, encode
from ...core.wording import first_of
from ..watch.activity import HERE

_PIECE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


_COUNT = [instance_of(int), ge(0), lt(1 << 63)]


@frozen
class FileRecord:
    """What a file contains.

    Args:
        xxh3_128: the XXH3 hash of its bytes, 128 bits in hexadecimal digits.
    """

    bytes: int = field(validator=_COUNT)
    xxh3_128: str = field(validator=instance_of(str))


def write_durable(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file and synchronize it to disk.

    Raises:
        OSError: it cannot be written.
    """
    digest, size = xxhash.xxh3_128(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in pieces:
            HERE.count += 1  # progress for ranks that wait
            digest.update(piece)
            size += len(piece)
            yield piece

    replace_file(path, hashed(), durable=True)
    return FileRecord(size, digest.hexdigest())


def read_record(path: Path) -> FileRecord:
    """The size and hash of an existing file.

    Raises:
        OSError, RequestError: it cannot be read.
    """
    digest, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES)), 0
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            HERE.count += 1
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def cannot_write(path: Path, error: Exception) -> str:
    """Why a checkpoint cannot be written, in one line."""
    if not isinstance(error, OSError):
        return str(error) if isinstance(error, RequestError) else f"no checkpoint '{path}': {in_a_line(error)}"
    if error.errno in _FULL:
        return (
            f"no space left on the disk of '{path.parent}' for the checkpoint '{path.name}': nothing of it is kept "
            "and earlier checkpoints are unchanged; free some space, or give another folder"
        )
    if error.errno == errno.EFBIG:
        return (
            f"the checkpoint '{path}' cannot be written: one of its files is larger than this process or the disk "
            "allows; earlier checkpoints are unchanged; raise the limit (ulimit -f), or give another folder"
        )
    return (
        f"the checkpoint '{path}' cannot be written: {error.strerror or error}; give a folder that every rank reads "
        "and writes"
    )


MANIFEST_NAME = "manifest.json"
FORMAT = "panpipe.checkpoint/2"
LIMITS = Limits(size=1 << 30)
"""Limits of a manifest; 100,000 parameters with 20 options each have some 100 MB and 3 million values."""
_FILE = re.compile(r"tensors-\d{5}-of-\d{5}\.safetensors")
_HEAD = re.compile(rb'\{"format": "([ -!#-\[\]-~]{1,100})", "xxh3_128": "([0-9a-f]{32})",\n')
ANOTHER = "resume from another checkpoint"
_INCOMPLETE = f"the checkpoint is incomplete; copy it again, or {ANOTHER}"
FOREIGN = f"it was not written by panpipe; {ANOTHER}"
DCP_METADATA = ".metadata"
"""The file of a checkpoint of ``torch.distributed.checkpoint`` that is read first; a pickle."""


def _records(given: Any) -> dict[str, FileRecord]:
    odd = next((name for name in given if _FILE.fullmatch(name) is None), None)
    if odd is not None:
        raise ValueError(f"{odd[:100]!r} is not a file of a checkpoint")
    return {name: FileRecord(**record) for name, record in given.items()}


@frozen
class Manifest:
    """The contents of a manifest.

    Args:
        xxh3_128: the hash of the manifest; it identifies the checkpoint.
        items: all parts of the state that are no tensors: plain data.
        stored_as_bytes: tensor whose dtype safetensors does not have → its dtype.
    """

    xxh3_128: str
    steps: int = field(validator=_COUNT)
    files: dict[str, FileRecord] = field(converter=_records)
    items: dict[str, Any] = field(validator=instance_of(dict))
    stored_as_bytes: dict[str, torch.dtype] = field(validator=deep_mapping(instance_of(str), instance_of(torch.dtype)))


def manifest_bytes(
    steps: int,
    files: Mapping[str, FileRecord],
    items: Mapping[str, Any],
    stored_as_bytes: Mapping[str, torch.dtype] | None = None,
) -> bytes:
    """The bytes of a manifest.

    Raises:
        RequestError: an item is no plain data, or they are too many.
    """
    kept = {name: {"bytes": one.bytes, "xxh3_128": one.xxh3_128} for name, one in sorted(files.items())}
    document = {"steps": steps, "files": kept, "items": items, "stored_as_bytes": stored_as_bytes or {}}
    try:
        text = encode(document, objects=False)[1:] + b"\n"
    except TypeError as error:
        raise RequestError(f"a checkpoint can store only plain data, and {str(error).removeprefix('items.')}") from None
    if len(text) > LIMITS.size or values_in(text) > LIMITS.values:
        raise RequestError(
            f"the options of the optimizer and of the scheduler have more than {LIMITS.values} values or "
            f"{LIMITS.size >> 20} MiB, which no checkpoint can store: use fewer"
        )
    return f'{{"format": "{FORMAT}", "xxh3_128": "{xxhash.xxh3_128_hexdigest(text)}",\n'.encode() + text


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Of hashes only its own is checked.

    Raises:
        RequestError: there is none, it is damaged, or it is of another format.
    """
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        raise RequestError(none_there(folder))
    if path.is_symlink():
        raise RequestError(f"cannot read '{path}', which is a link: {_INCOMPLETE}")
    data = read_bytes(path, LIMITS.size)
    head = _HEAD.match(data)
    if head is not None:
        check_format(head[1].decode(), FORMAT, f"'{path}'")
    if head is None or xxhash.xxh3_128_hexdigest(memoryview(data)[head.end() :]) != head[2].decode():
        raise RequestError(f"'{path}' is damaged: its hash differs; {ANOTHER}")
    try:
        text = "{" + data[head.end() :].decode()
        check_values(text, f"'{path}'", LIMITS)
        return Manifest(head[2].decode(), **decode(text, objects=False))
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"'{path}' is not a manifest ({in_a_line(error)[:300]}): {FOREIGN}") from None


def none_there(folder: Path) -> str:
    """Why a folder without a manifest is refused."""
    if (folder / DCP_METADATA).is_file():
        return (
            f"'{folder}' is a checkpoint of torch.distributed.checkpoint, whose metadata is a pickle, and reading a "
            "pickle can run code: if you trust it, read it with torch.distributed.checkpoint.load({'pipe': pipe}, "
            "checkpoint_id=folder), and write it with pipe.checkpoint(new_folder)"
        )
    return (
        f"there is no whole checkpoint in '{folder}': its file {MANIFEST_NAME}, which is written last, is missing; "
        "give the folder of one, such as panpipe.latest_checkpoint('checkpoints'); weights alone are read by "
        "Run(weights=) or model.load_state_dict(...)"
    )


def check_listing(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder without all files of its manifest, with other files, or with files of other sizes.

    Raises:
        RequestError: the message names the first such file.
    """
    with os.scandir(folder) as entries:
        there = {entry.name: entry for entry in entries if entry.name != MANIFEST_NAME}
        extra = [f"'{name}'" for name in sorted(there) if name not in manifest.files]
        if extra:
            raise RequestError(
                f"'{folder}' has {first_of(extra)}, which is not in its manifest: something else wrote into the "
                "checkpoint; move it away"
            )
        for name, record in manifest.files.items():
            if name not in there:
                raise RequestError(f"'{folder / name}' is missing: {_INCOMPLETE}")
            if not there[name].is_file(follow_symlinks=False):
                raise RequestError(f"'{folder / name}' is a link, or not a regular file: {_INCOMPLETE}")
            size = there[name].stat(follow_symlinks=False).st_size
            if size != record.bytes:
                what = "is truncated" if size < record.bytes else "is longer than when it was written"
                raise RequestError(
                    f"'{folder / name}' {what}: it has {size} bytes and the manifest has {record.bytes}; {ANOTHER}"
                )
