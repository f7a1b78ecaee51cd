"""safetensors files, piece by piece: what the library writes is read, and what is damaged is refused."""

import json
import subprocess
import sys

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.weights import checkpoint
from panpipe.runtimes.weights.checkpoint import entries_of, write_tensors, write_whole
from safetensors.torch import load_file, save_file

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4), "scalar": torch.tensor(7, dtype=torch.int64), "none": torch.zeros(0, 3),
    "half": torch.arange(5).bfloat16(), "mask": torch.tensor([True, False]),
    "column": torch.arange(8.0).view(4, 2)[:, 1], "second": torch.arange(8.0)[::2], "one": torch.arange(4.0)[::4],
}  # fmt: skip


def test_file_is_what_the_library_reads_and_the_other_way_round(tmp_path):
    mine, theirs = tmp_path / "mine.safetensors", tmp_path / "theirs.safetensors"
    assert write_tensors(mine, {**TENSORS, "turned": TENSORS["weight"].t()}) == 48 + 8 + 0 + 10 + 2 + 16 + 16 + 4 + 48
    read = load_file(mine)
    assert torch.equal(read.pop("turned"), TENSORS["weight"].t())
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, theirs)
    for path, found in ((mine, read), (theirs, {})):
        file = entries_of(path)
        for name, tensor in TENSORS.items():
            found[name] = torch.empty_like(tensor)
            file[name].read_into(found[name])
            assert file[name].shape == tuple(tensor.shape)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tensors_are_read_in_pieces_into_any_layout_and_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 16)  # four numbers
    path = tmp_path / "one.safetensors"
    write_tensors(path, {"weight": TENSORS["weight"]})
    turned = torch.empty(4, 3, dtype=torch.float64).t()
    entries_of(path)["weight"].read_into(turned)
    assert turned.tolist() == TENSORS["weight"].tolist()


def test_dtype_without_a_name_and_a_folder_that_is_none_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"'z' is torch\.complex128, which safetensors does not support"):
        write_tensors(tmp_path / "one", {"z": torch.zeros(1, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RequestError, match=r"cannot write .* give another folder"):
        write_whole(tmp_path / "none" / "file", [b"x"])
    with pytest.raises(RequestError, match=r"cannot read .*none': No such file"):
        entries_of(tmp_path / "none")


def test_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def failing():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(RequestError, match="No space left on device"):
        write_whole(path, failing())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def damaged(tmp_path, header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "damaged.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def spec(start, end, dtype="F32", shape=(4,)):
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


@pytest.mark.parametrize(
    "given",
    [
        {"header": b"", "length": 1 << 60}, {"header": b"{", "data": b""}, {"header": b"[]"},
        {"header": {"t": {"dtype": "F32"}}}, {"header": spec(0, 16), "length": 4096},
        {"header": spec(0, 16), "data": b"\0" * 15}, {"header": spec(0, 12)}, {"header": spec(-16, 0)},
        {"header": spec(0, 16, shape=(-2, -2))}, {"header": spec(8, 16, shape=(2,))},
        {"header": spec(0, 16) | {"u": spec(0, 16)["t"]}}, {"header": spec(0, 16, shape=(4, *[1] * 100))},
        {"header": {"t": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}}, {"header": spec(0, 16, dtype="I64\n")},
        {"header": {"t\n": spec(0, 16)["t"]}},
    ],
)  # fmt: skip
def test_damaged_file_is_refused_in_one_line(tmp_path, given):
    with pytest.raises(RequestError, match=r"is not a whole safetensors file \(.*\): copy it again") as error:
        entries_of(damaged(tmp_path, **given))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_small_limit_on_data_does_not_matter(tmp_path):
    """The library's own reader maps all of a file, private and writable."""
    path = tmp_path / "large.safetensors"
    save_file({"large": torch.ones(16 << 20)}, path)
    script = f"""
import resource
import pathlib
import torch
from panpipe.runtimes.weights.checkpoint import entries_of
tensor = torch.empty(16 << 20)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (32 << 20),) * 2)
entries_of(pathlib.Path({str(path)!r}))["large"].read_into(tensor)
assert tensor.sum() == 16 << 20
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_file_that_is_cut_off_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "one.safetensors"
    write_tensors(path, {"weight": TENSORS["weight"]})
    file = entries_of(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RequestError, match="is truncated"):
        file["weight"].read_into(torch.empty(3, 4))


def test_file_whose_header_has_640_bytes_is_no_pickle(tmp_path):
    """Its first bytes are 80 02, as those of a pickle of protocol 2."""
    path = tmp_path / "one.safetensors"
    write_tensors(path, {"t" * 547: TENSORS["weight"]})
    assert path.read_bytes()[:2] == b"\x80\2"
    assert entries_of(path).keys() == {"t" * 547}
