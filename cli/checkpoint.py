"""``panpipe checkpoint``: check a checkpoint, or convert it to one of ``torch.distributed.checkpoint``."""

from enum import StrEnum
from pathlib import Path

from ..answers.options import argument, json_flag
from ..answers.output import note, print_json
from ..core.errors import RequestError
from ..core.wording import counted
from ..runtimes.checkpoint.checkpoints import export_checkpoint
from ..runtimes.checkpoint.reading import CheckpointReader


class CheckpointAction(StrEnum):
    """What ``panpipe checkpoint`` does with a checkpoint."""

    CHECK = "check"
    EXPORT = "export"


def checkpoint(
    action: CheckpointAction = argument("check or export.", ...),
    folder: Path = argument("The folder of the checkpoint.", ...),
    target: Path | None = argument("With export: the new folder."),
    json: bool = json_flag(),
) -> None:
    """Check all files of a checkpoint, or convert it.

    check compares every file with its hash. export writes a checkpoint of torch.distributed.checkpoint (DCP).
    """
    if (target is None) != (action is CheckpointAction.CHECK):
        taken = "FOLDER alone" if action is CheckpointAction.CHECK else "FOLDER and TARGET, a new folder"
        raise RequestError(f"panpipe checkpoint {action} takes {taken}")
    if action is CheckpointAction.CHECK:
        reader = CheckpointReader(folder)
        reader.check(reader.manifest.files)
        _print(reader, json)
        return
    assert target is not None
    export_checkpoint(folder, target)
    note(f"written to {target}")
    if json:
        print_json({"folder": str(folder), "target": str(target)})


def _print(reader: CheckpointReader, json: bool) -> None:
    files = reader.manifest.files
    size = sum(file.bytes for file in files.values())
    if json:
        print_json(
            {
                "folder": str(reader.folder),
                "steps": reader.manifest.steps,
                "bytes": size,
                "tensors": len(reader.tensors),
                "files": {name: {"bytes": file.bytes, "xxh3_128": file.xxh3_128} for name, file in files.items()},
            }
        )
        return
    print(
        f"{reader.folder}: whole, after {counted(reader.manifest.steps, 'step')}; {counted(len(files), 'file')} with "
        f"{counted(len(reader.tensors), 'tensor')}, {size} bytes; all hashes are right"
    )
