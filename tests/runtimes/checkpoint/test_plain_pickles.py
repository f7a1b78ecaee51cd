"""Files of ``torch.save`` are read as plain data, and no more of it than the file has."""

import io
import pickle
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
from panpipe.runtimes.checkpoint.plain_pickles import saved_value
from torch import nn


def file_of(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def repacked(data, **options):
    """The same archive, written again."""
    found, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(target, "w", **options) as archive:
        for name in found.namelist():
            archive.writestr(name, found.read(name))
    return target.getvalue()


def doubled(value, times=100):
    for _ in range(times):
        value = type(value)((value, value))
    return value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(5, 6)[1:4, ::2],
        torch.randn(3, 4).t(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.arange(5).to(torch.uint16),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_tensors_are_read_as_torch_reads_them(tensor):
    found = saved_value(file_of(tensor))
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor.detach())


def test_plain_data_is_read_as_torch_reads_it():
    value = {
        "a": [1, 2.5, float("inf"), None, True, "é", b"\xff\0"], 3: (torch.Size([2]), torch.float32), "s": {1, 2},
        "d": torch.device("cpu"), "c": Counter([4, 4]), "o": OrderedDict(a=1), "long": 1 << 100,
    }  # fmt: skip
    found = saved_value(file_of(value))
    assert found == value
    assert type(found["c"]) is Counter


def test_storages_are_shared_and_tensors_of_float8_keep_their_bits():
    whole = torch.randn(10)
    first, second = saved_value(file_of((whole[:5], whole[5:])))
    assert torch.equal(torch.cat((first, second)), whole)
    small = torch.randn(4).to(torch.float8_e4m3fn)
    assert torch.equal(saved_value(file_of(small)).view(torch.uint8), small.view(torch.uint8))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: repacked(file_of(torch.zeros(1000)), compression=zipfile.ZIP_DEFLATED), "a compressed file"),
        (lambda: file_of(torch.zeros(1).expand(1 << 40)), "more values than it stores"),
        (lambda: file_of(doubled(())), "a tuple of more than 4096 values"),
        (lambda: file_of(doubled([])), "more values than its file has bytes"),
        (lambda: file_of([torch.zeros(1000)] * 4000), "more values than its file has bytes"),
        (lambda: file_of({"a": frozenset((1, 2))}), "names __builtin__.frozenset"),
        (lambda: file_of(1 << 10_000), "more than 255 bytes"),
        (lambda: file_of(nn.Linear(1, 1)), "which is not plain data"),
        (lambda: file_of([eval]), "names __builtin__.eval"),
        (lambda: pickle.dumps({"a": 1}), "not a zip file"),
    ],
    ids=["compressed", "steps of 0", "tuples", "lists", "tensors", "frozen set", "integer", "module", "eval", "pickle"],
)
def test_what_is_no_plain_data_or_more_than_the_file_is_refused(data, said):
    with pytest.raises((ValueError, pickle.UnpicklingError, zipfile.BadZipFile), match=said):
        saved_value(data())


def test_a_list_in_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        saved_value(file_of(value))


def test_files_of_an_archive_that_share_bytes_are_refused():
    data = file_of(torch.arange(1000.0))
    at, central = data.index(b"PK\x01\x02"), bytearray()
    end = data.index(b"PK\x05\x06") if b"PK\x06\x06" not in data else data.index(b"PK\x06\x06")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        central += data[at:end] * 20
        count = 20 * len(archive.infolist())
    tail = b"PK\x05\x06" + bytes(4) + count.to_bytes(2, "little") * 2 + len(central).to_bytes(4, "little")
    with pytest.raises(ValueError, match="files that share bytes"):
        saved_value(data[:at] + central + tail + at.to_bytes(4, "little") + bytes(2))
