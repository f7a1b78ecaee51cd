"""Checkpoints with one mutated file: its manifest is the valid one, or signed again, as an attacker would."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from panpipe.cli import main
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, FileRecord, manifest_bytes
from panpipe.runtimes.checkpoint.reading import CheckpointReader, Parts
from panpipe.runtimes.checkpoint.writing import Save, begin_save
from panpipe.runtimes.launch.team import ONE_PROCESS

from .mutations import dumped

TENSORS = "tensors-00001-of-00001.safetensors"
PARTS = Parts(
    {"model.a": torch.arange(4.0), "optimizer.state.a.step": torch.tensor(1.0), "model.c": torch.ones(1).cfloat()},
    {
        "optimizer.param_groups.a.lr": 0.1, "optimizer.param_groups.a.betas": (0.9, 0.99), "progress.steps": 1,
        "progress.updates": 1, "progress.evaluations": 0, "progress.seed": 0, "scaler": ("GradScaler", {"scale": 2.0}),
        "scheduler": ("StepLR", {"milestones": {1: 2}, "last_lr": [float("inf")]}),
    },
)  # fmt: skip


@cache
def valid_files() -> Mapping[str, bytes]:
    """The files of a checkpoint."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "step-1"
        Save(folder, begin_save(folder), PARTS, 1, None, 1).run(ONE_PROCESS)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def signed(tree: Any) -> bytes:
    """Plain data as a manifest whose own hash is right, if it has the shape of one."""
    if not isinstance(tree, dict) or "format" not in tree:
        return dumped(tree)
    text = dumped({key: value for key, value in tree.items() if key not in ("format", "xxh3_128")})[1:] + b"\n"
    digest = xxhash.xxh3_128_hexdigest(text).encode()
    return b'{"format": ' + dumped(tree["format"]) + b', "xxh3_128": "' + digest + b'",\n' + text


def resumed(name: str) -> Callable[[Path, Path], int]:
    """The use of a file as the one with this name in a checkpoint; its manifest has its hash."""

    def use(file: Path, folder: Path) -> int:
        checkpoint = _folder_of(file)
        files = {**valid_files(), name: file.read_bytes()}
        if name != MANIFEST_NAME:
            records = {
                each: FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))
                for each, data in files.items()
                if each != MANIFEST_NAME
            }
            files[MANIFEST_NAME] = manifest_bytes(1, records, PARTS.items)
        _write(checkpoint, files)
        CheckpointReader(checkpoint).whole()
        return 0

    return use


def checked(file: Path, folder: Path) -> int:
    """``panpipe checkpoint check`` of a checkpoint with a mutated manifest."""
    checkpoint = _folder_of(file)
    _write(checkpoint, {**valid_files(), MANIFEST_NAME: file.read_bytes()})
    return main(["checkpoint", "check", str(checkpoint), "--json"])


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _folder_of(file: Path) -> Path:
    """An empty folder, whose name begins with that of the file: errors have the names of other files of it, too."""
    folder = file.with_name(f"{file.name} folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
