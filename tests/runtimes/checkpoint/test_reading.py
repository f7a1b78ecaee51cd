"""Reading a checkpoint: parts by name, hashes that are compared before, and files that do not fit."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, manifest_bytes
from panpipe.runtimes.checkpoint.reading import CheckpointReader
from panpipe.runtimes.checkpoint.state_parts import PartNames, Parts, write_parts
from panpipe.runtimes.checkpoint.writing import Save, begin_save
from panpipe.runtimes.launch.team import ONE_PROCESS

TENSORS = {
    "model.a": torch.arange(6.0).reshape(2, 3),
    "model.z": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    "model.scalar": torch.tensor(4, dtype=torch.int64),
}
NAMES = PartNames(1, 1)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-3"
    Save(path, begin_save(path), Parts(dict(TENSORS), {"progress.steps": 3}), 3, None, 1).run(ONE_PROCESS)
    return path


def test_file_that_is_written_after_it_was_checked_is_refused(folder):
    reader, path = CheckpointReader(folder), folder / NAMES.tensors
    reader.check([NAMES.tensors])
    reader.refuse_changed()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)  # the same bytes in another file
    with pytest.raises(RequestError, match=f"{NAMES.tensors}' was written while it was read"):
        reader.refuse_changed()


def test_bytes_that_do_not_fit_their_dtype_are_refused(tmp_path):
    records = []
    for dtype in (torch.complex128, torch.complex64):
        (tmp_path / str(dtype)).mkdir()
        records.append(write_parts(tmp_path / str(dtype), NAMES, Parts({"model.z": torch.ones(2, dtype=dtype)})))
    wide, narrow = (tmp_path / str(dtype) for dtype in (torch.complex128, torch.complex64))
    (wide / NAMES.tensors).write_bytes((narrow / NAMES.tensors).read_bytes())
    files = {NAMES.items: records[0][NAMES.items], NAMES.tensors: records[1][NAMES.tensors]}
    (wide / MANIFEST_NAME).write_bytes(manifest_bytes(1, files))
    with pytest.raises(RequestError, match=r"'model\.z' does not have the bytes of torch\.complex128"):
        CheckpointReader(wide)
