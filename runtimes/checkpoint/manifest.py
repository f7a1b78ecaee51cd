"""The manifest of a checkpoint: its files with their sizes and hashes. It is written last, and has its own hash.

{"format": "panpipe.checkpoint/1", "xxh3_128": "…",        ◀── the hash of all bytes after this line
"steps": 120, "files": {"tensors-00001-of-00002.safetensors": {"bytes": …, "xxh3_128": "…"}, …}}
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import xxhash
from attrs import frozen

from ...core.documents import check_format, from_json
from ...core.errors import RequestError, in_a_line
from ...core.wording import first_of
from .durable_files import FileRecord, read_regular

MANIFEST_NAME = "manifest.json"
FORMAT = "panpipe.checkpoint/1"
_FILE = re.compile(r"(tensors-\d{5}-of-\d{5}\.safetensors|items-\d{5}-of-\d{5}\.json)")
_HEAD = re.compile(rb'\{"format": "([ -!#-\[\]-~]{1,100})", "xxh3_128": "([0-9a-f]{32})",\n')
_MOST_BYTES = 64 << 20
"""Most bytes of a manifest; a process has two files, of 120 bytes each."""
_ANOTHER = "resume from another checkpoint"
_INCOMPLETE = f"the checkpoint is incomplete; copy it again, or {_ANOTHER}"
_FOREIGN = f"it was not written by panpipe; {_ANOTHER}"
DCP_METADATA = ".metadata"
"""The file of a checkpoint of ``torch.distributed.checkpoint`` that is read first; a pickle."""


@frozen
class Manifest:
    """The contents of a manifest.

    Args:
        xxh3_128: the hash of the manifest; it identifies the checkpoint.
        steps: of training.
        files: name → size and hash.
    """

    xxh3_128: str
    steps: int
    files: dict[str, FileRecord]


def manifest_bytes(steps: int, files: Mapping[str, FileRecord]) -> bytes:
    """The bytes of a manifest."""
    kept = {name: {"bytes": one.bytes, "xxh3_128": one.xxh3_128} for name, one in sorted(files.items())}
    text = json.dumps({"steps": steps, "files": kept}, indent=1).removeprefix("{").lstrip().encode() + b"\n"
    digest = xxhash.xxh3_128_hexdigest(text)
    return f'{{"format": "{FORMAT}", "xxh3_128": "{digest}",\n'.encode() + text


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Only its own hash is checked: see `check_files` for those of the files.

    Raises:
        RequestError: there is none, it is damaged, or it is of another format.
    """
    path = folder / MANIFEST_NAME
    try:
        data = read_regular(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(none_there(folder)) from None
    except OSError as error:
        raise RequestError(
            f"cannot read '{path}': {error.strerror}; every rank must be able to read the checkpoint"
        ) from None
    head = _HEAD.match(data)
    if head is not None:
        check_format(head[1].decode(), FORMAT, f"'{path}'")
    if head is None or xxhash.xxh3_128_hexdigest(memoryview(data)[head.end() :]) != head[2].decode():
        raise RequestError(f"'{path}' is damaged: its hash differs; {_ANOTHER}")
    try:
        found = from_json(data.decode(), FORMAT, Manifest, f"'{path}'")
    except ValueError as error:  # of numbers with thousands of digits, and of bytes that are no text
        raise RequestError(f"'{path}' is not a manifest ({in_a_line(error)}): {_FOREIGN}") from None
    odd = next((name for name in found.files if _FILE.fullmatch(name) is None), None)
    if odd is not None:
        raise RequestError(
            f"'{path}' names {odd[:100]!r}, which is not a file of a checkpoint: it was not written by panpipe"
        )
    if any(not 0 <= one.bytes < 1 << 63 for one in found.files.values()) or not 0 <= found.steps < 1 << 63:
        raise RequestError(
            f"'{path}' has sizes or steps that are negative or beyond 2⁶³: it was not written by panpipe"
        )
    return found


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
        "give the folder of one, such as panpipe.latest_checkpoint('checkpoints')"
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
                    f"'{folder / name}' {what}: it has {size} bytes and the manifest has {record.bytes}; {_ANOTHER}"
                )


def check_file(folder: Path, name: str, wanted: FileRecord, found: FileRecord) -> None:
    """Refuse a file that was changed since it was written.

    Raises:
        RequestError: the message names it.
    """
    if found != wanted:
        raise RequestError(f"'{folder / name}' was changed since it was written: its hash differs; {_ANOTHER}")
