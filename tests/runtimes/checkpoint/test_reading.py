"""Reading a checkpoint: parts by name, and files that do not fit."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, manifest_bytes
from panpipe.runtimes.checkpoint.reading import CheckpointReader
from panpipe.runtimes.checkpoint.state_parts import write_tensor_file


def written(folder, *tensors, stored_as_bytes=None):
    files, dtypes = {}, {}
    for number, own in enumerate(tensors, start=1):
        name = f"tensors-{number:05d}-of-{len(tensors):05d}.safetensors"
        files[name], others = write_tensor_file(folder / name, own)
        dtypes |= others
    (folder / MANIFEST_NAME).write_bytes(manifest_bytes(1, files, {}, stored_as_bytes or dtypes))
    return folder


def test_bytes_that_do_not_fit_their_dtype_are_refused(tmp_path):
    narrow = {"model.z": torch.ones(2, dtype=torch.complex64)}
    wide = written(tmp_path, narrow, stored_as_bytes={"model.z": torch.complex128})
    with pytest.raises(RequestError, match=r"'model\.z' does not have the bytes of torch\.complex128"):
        CheckpointReader(wide)
