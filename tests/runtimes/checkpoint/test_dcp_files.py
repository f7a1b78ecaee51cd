"""Checkpoints of torch.distributed.checkpoint: converted in both directions, and never run."""

import io
import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import panpipe
import pytest
import torch
import torch.distributed.checkpoint as dcp
from panpipe.cli import main
from panpipe.runtimes.checkpoint.dcp_files import export_checkpoint, import_checkpoint
from panpipe.runtimes.checkpoint.reading import CheckpointReader
from panpipe.runtimes.checkpoint.state_parts import Parts
from panpipe.runtimes.checkpoint.writing import Save, begin_save
from panpipe.runtimes.launch.exchange import ONE_PROCESS
from torch.distributed.checkpoint.metadata import MetadataIndex

STATE = {
    "model": {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3, dtype=torch.complex128)},
    "optimizer": {"param_groups.a.bias.lr": torch.tensor(0.5), "param_groups.a.bias.betas": (0.9, 0.95)},
    "stepped": {"a.bias": True},
    "scheduler": ("MultiStepLR", {"milestones": {1: 2}, "last_epoch": 1}),
    "progress": {"steps": 4, "updates": 3, "evaluations": 0, "seed": 1},
}


def saved(folder, state=None):
    """A checkpoint of DCP, as panpipe wrote it before its own format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"pipe": STATE if state is None else state}, checkpoint_id=folder, no_dist=True)
    return folder


def metadata(folder, change):
    path = folder / ".metadata"
    kept = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(kept) or kept))


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def refused(folder, target, said):
    with pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{said}[^\n]*\Z"):
        import_checkpoint(folder, target)
    assert not target.exists()


def test_an_imported_checkpoint_has_the_same_values_and_is_exported_again(tmp_path, capsys):
    saved(tmp_path / "dcp")
    assert main(["checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "step-4")]) == 0
    assert main(["checkpoint", "check", str(tmp_path / "step-4"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["tensors"], len(found["files"])) == (4, 2, 2)
    assert panpipe.latest_checkpoint(tmp_path) == tmp_path / "step-4"
    export_checkpoint(tmp_path / "step-4", tmp_path / "again")
    state = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in STATE["model"].items()},
        "optimizer": {"param_groups.a.bias.lr": torch.zeros(()), "param_groups.a.bias.betas": None},
        "stepped": {"a.bias": None},
        "scheduler": None,
        "progress": dict.fromkeys(STATE["progress"]),
    }
    dcp.load({"pipe": state}, checkpoint_id=tmp_path / "again", no_dist=True)
    assert all(torch.equal(tensor, STATE["model"][name]) for name, tensor in state["model"].items())
    assert state["optimizer"] == STATE["optimizer"]
    assert {name: state[name] for name in ("stepped", "scheduler", "progress")} == {
        name: STATE[name] for name in ("stepped", "scheduler", "progress")
    }
    with pytest.raises(panpipe.RequestError, match="holds a checkpoint: give a new folder"):
        export_checkpoint(tmp_path / "step-4", tmp_path / "again")


def test_tensors_in_several_pieces_are_joined(tmp_path):
    """As sharded training writes them."""

    def split(kept):
        (index, place), = [(i, p) for i, p in kept.storage_data.items() if i.fqn == "pipe.model.a.weight"]  # fmt: skip
        del kept.storage_data[index]
        tensor = kept.state_dict_metadata["pipe.model.a.weight"]
        chunk = tensor.chunks.pop()
        for row in range(3):
            data = io.BytesIO()
            torch.save(STATE["model"]["a.weight"][row : row + 1].clone(), data)
            (tmp_path / "dcp" / f"row{row}").write_bytes(data.getvalue())
            offsets, sizes = torch.Size([row, 0]), torch.Size([1, 4])
            tensor.chunks.append(type(chunk)(offsets, sizes))
            where = type(place)(f"row{row}", 0, len(data.getvalue()))
            kept.storage_data[MetadataIndex("pipe.model.a.weight", offsets)] = where

    metadata(saved(tmp_path / "dcp"), split)
    import_checkpoint(tmp_path / "dcp", tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "b")
    state = {"model": {"a.weight": torch.zeros(3, 4)}}
    dcp.load({"pipe": state}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(state["model"]["a.weight"], STATE["model"]["a.weight"])
    metadata(tmp_path / "dcp", lambda kept: kept.state_dict_metadata["pipe.model.a.weight"].chunks.pop() and None)
    refused(tmp_path / "dcp", tmp_path / "c", "has values for only a part of its shape")


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    folder = saved(tmp_path / "metadata")
    metadata(folder, lambda kept: setattr(kept, "planner_data", Harmful(ran)))
    refused(folder, tmp_path / "a", "which is not plain data")
    folder = saved(tmp_path / "item", {**STATE, "scheduler": ("StepLR", {"a": Harmful(ran)})})
    refused(folder, tmp_path / "a", "cannot be read as a checkpoint of torch.distributed.checkpoint")
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(ran)))
    refused(folder, tmp_path / "a", "which is not plain data")
    with pytest.raises(panpipe.RequestError, match=r"a checkpoint of torch\.distributed\.checkpoint, whose"):
        CheckpointReader(folder)
    assert not ran.exists()


def test_a_pickle_cannot_change_the_classes_of_dcp(tmp_path):
    folder = saved(tmp_path / "dcp")
    # A class, and a state for it: unpickling sets the attributes of the class itself.
    (folder / ".metadata").write_bytes(
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}(Vversion\nVchanged\nu\x86b."
    )
    refused(folder, tmp_path / "a", "cannot be read")
    assert torch.distributed.checkpoint.metadata.Metadata.version is None


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a number of 31 bits in the memo
        b"\x80\x02})" + b"2\x86" * 100 + b"Ns.",  # a tuple of two tuples of two tuples …, as a key
        b"\x80\x02}ctorch\nSize\n)" + b"2\x86\x85R" * 100 + b"Ns.",
        b"\x80\x02ctorch.serialization\n_get_layout\n](" + b"]" * 2 + b"e2\x86\x85R.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of 63 bits of length
    ],
    ids=["memo", "tuples", "sizes", "layout", "bytes"],
)
def test_a_small_pickle_that_asks_for_much_is_refused(tmp_path, pickled):
    folder = saved(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickled)
    refused(folder, tmp_path / "a", "cannot be read")


def repacked(path):
    """The value in a file, in compressed archives."""
    found, target = zipfile.ZipFile(path), io.BytesIO()
    with zipfile.ZipFile(target, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for name in found.namelist():
            archive.writestr(name, found.read(name))
    path.write_bytes(target.getvalue())


def of_torch(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def doubled(value, times=100):
    for _ in range(times):
        value = type(value)((value, value))
    return value


def in_itself():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: doubled(()), "names tuples again"),
        (lambda: doubled([]), "more values than its file has bytes"),
        (lambda: [torch.zeros(1000)] * 4000, "more values than its file has bytes"),
        (lambda: torch.zeros(1).expand(1 << 40), "more values than its file has bytes"),
        (in_itself, "nested deeper than 100 levels"),
        (lambda: torch.nn.Linear(1, 1), "not plain data .*nn.modules.linear.Linear"),
        (lambda: [eval], "eval"),
    ],
    ids=["tuples", "lists", "tensors", "steps of 0", "in itself", "module", "eval"],
)
def test_values_that_are_no_plain_data_or_larger_than_their_file_are_refused(tmp_path, value, said):
    """The item of a scheduler, in a file of its own."""
    data = of_torch(value())

    def move(kept):
        ((index, place),) = [(i, p) for i, p in kept.storage_data.items() if i.fqn == "pipe.scheduler"]
        (tmp_path / "dcp" / "value").write_bytes(data)
        kept.storage_data[index] = type(place)("value", 0, len(data))

    metadata(saved(tmp_path / "dcp"), move)
    refused(tmp_path / "dcp", tmp_path / "a", said)


@pytest.mark.parametrize("kind", ["compressed", "pickle"])
def test_a_value_that_is_no_archive_of_torch_is_refused(tmp_path, kind):
    def move(kept):
        ((index, place),) = [(i, p) for i, p in kept.storage_data.items() if i.fqn == "pipe.scheduler"]
        path = tmp_path / "dcp" / "value"
        path.write_bytes(of_torch([0.5] * 1000) if kind == "compressed" else pickle.dumps({"a": 1}))
        if kind == "compressed":
            repacked(path)
        kept.storage_data[index] = type(place)("value", 0, path.stat().st_size)

    metadata(saved(tmp_path / "dcp"), move)
    refused(tmp_path / "dcp", tmp_path / "a", "compressed file" if kind == "compressed" else "no archive")


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd"])
def test_files_outside_of_the_folder_are_not_read(tmp_path, path):
    def move(kept):
        for place in kept.storage_data.values():
            place.relative_path = path

    metadata(saved(tmp_path / "dcp"), move)
    refused(tmp_path / "dcp", tmp_path / "a", "names a file outside of its folder")


def test_shapes_beyond_the_files_are_refused(tmp_path):
    def grow(kept):
        kept.state_dict_metadata["pipe.model.a.weight"].size = torch.Size([1 << 40, 1 << 20])

    metadata(saved(tmp_path / "dcp"), grow)
    refused(tmp_path / "dcp", tmp_path / "a", "has a shape of more bytes than the files have")


HUGE = tuple([1 << 8 * 200] * 4000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensor: setattr(tensor, "size", HUGE), "a shape of too many dimensions"),
        (lambda tensor: setattr(tensor, "chunks", [type(tensor.chunks[0])(torch.Size([0, 0]), HUGE)]), "too many dim"),
        (lambda tensor: tensor.chunks.append(tensor.chunks[0]), "more bytes than the files have"),
    ],
    ids=["sizes", "sizes of a chunk", "one chunk twice"],
)
def test_metadata_that_asks_for_much_is_refused(tmp_path, change, said):
    """A product of thousands of long integers takes hours."""
    state = {**STATE, "model": {**STATE["model"], "a.weight": torch.randn(100, 100)}}
    metadata(saved(tmp_path / "dcp", state), lambda k: change(k.state_dict_metadata["pipe.model.a.weight"]))
    refused(tmp_path / "dcp", tmp_path / "a", said)


def test_chunks_that_overlap_instead_of_covering_a_tensor_are_refused(tmp_path):
    def halve(kept):
        tensor = kept.state_dict_metadata["pipe.model.a.weight"]
        tensor.chunks[:] = [type(tensor.chunks[0])(torch.Size([0, 0]), torch.Size([3, 4]))] * 2
        tensor.size = torch.Size([6, 4])

    metadata(saved(tmp_path / "dcp"), halve)
    refused(tmp_path / "dcp", tmp_path / "a", "has values for only a part of its shape")


@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_data_that_is_no_regular_file_of_the_folder_is_refused(tmp_path, kind):
    """Opening a named pipe would wait forever."""
    (path,) = saved(tmp_path / "dcp").glob("*.distcp")
    path.rename(tmp_path / "elsewhere")
    {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    refused(tmp_path / "dcp", tmp_path / "a", "outside its folder|not a regular file|more bytes than the files have")


@pytest.mark.parametrize("steps", [True, 1 << 63, -1, 1.5])
def test_a_number_of_steps_that_no_manifest_has_is_refused(tmp_path, steps):
    folder = saved(tmp_path / "dcp", {**STATE, "progress": {**STATE["progress"], "steps": steps}})
    refused(folder, tmp_path / "a", "has no 'pipe.progress.steps'")


def test_other_checkpoints_are_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": STATE["model"]}, checkpoint_id=tmp_path / "plain", no_dist=True)
    refused(tmp_path / "plain", tmp_path / "a", "a checkpoint of a pipeline is saved from {'pipe': pipe}")
    refused(saved(tmp_path / "part", {"model": STATE["model"]}), tmp_path / "a", "has no 'pipe.progress.steps'")
    refused(tmp_path / "none", tmp_path / "a", "No such file")
    Save(tmp_path / "own", begin_save(tmp_path / "own"), Parts({}, {"progress.steps": 1}), 1, None, 1).run(ONE_PROCESS)
    refused(saved(tmp_path / "dcp", {**STATE, "more": {"x": 1}}), tmp_path / "a", "no part of the state of training")
    right = saved(tmp_path / "right")
    with pytest.raises(panpipe.RequestError, match="own' holds a checkpoint"):
        import_checkpoint(right, tmp_path / "own")


def test_wrong_arguments_of_the_command_are_refused(tmp_path, capsys):
    assert main(["checkpoint", "check", str(tmp_path), str(tmp_path)]) == 2
    assert main(["checkpoint", "export", str(tmp_path)]) == 2
    assert main(["checkpoint", "check", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["panpipe"] * 3
    assert "takes FOLDER alone" in said[0]
    assert "takes FOLDER and TARGET, a new folder" in said[1]
    assert "there is no whole checkpoint" in said[2]
