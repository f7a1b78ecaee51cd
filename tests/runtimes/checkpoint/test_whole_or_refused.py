"""A checkpoint is loaded whole, or refused with its file's name while the pipeline is as it was."""

import json
import os
import random
import re
import shutil
import stat
import warnings

import panpipe
import pytest
import torch
import xxhash
from panpipe.runtimes.checkpoint.manifest import FileRecord, manifest_bytes, read_manifest
from panpipe.runtimes.checkpoint.reading import CheckpointReader, Parts
from panpipe.runtimes.checkpoint.writing import Save, begin_save, remove_older
from panpipe.runtimes.launch.team import ONE_PROCESS
from panpipe.runtimes.weights.checkpoint import write_tensors
from safetensors.torch import load_file

from ...support.programs.optimizing import everything, pipe_of, train, warm_up
from ...support.training import unequal

CONV = "batchnorm with a skip"
MANIFEST = "manifest.json"
TENSORS = "tensors-00001-of-00001.safetensors"
FILES = (MANIFEST, TENSORS)


@pytest.fixture(scope="module")
def pipe():
    made = pipe_of(CONV, scheduler=warm_up)
    train(made, CONV, 1)
    return made


@pytest.fixture(scope="module")
def written(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "step-1"
    pipe.checkpoint(folder)
    return folder


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "step-1")


def state(pipe):
    """Everything that a resume may change."""
    counts = (pipe.metrics.steps, pipe.metrics.updates, pipe.metrics.learning_rates, pipe.state_dict()["progress"])
    return {name: tensor.clone() for name, tensor in everything(pipe).items()}, counts


def refused(pipe, folder, said):
    """Refused in one line, and nothing has changed."""
    tensors, counts = state(pipe)
    with pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{said}[^\n]*\Z") as error:
        pipe.resume(folder)
    assert len(str(error.value)) < 1000
    assert unequal(everything(pipe), tensors) == []
    assert state(pipe)[1] == counts


def checked(folder):
    """A reader of a folder whose files were all compared with their hashes."""
    reader = CheckpointReader(folder)
    reader.check(reader.manifest.files)
    return reader


def signed(folder):
    """Give a folder with changed files a manifest that is right again, as an attacker would."""
    kept = read_manifest(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    records = {n: FileRecord(len(data), xxhash.xxh3_128_hexdigest(data)) for n, data in files.items()}
    (folder / MANIFEST).write_bytes(manifest_bytes(1, records, kept.items))


def test_a_checkpoint_has_no_pickle(written):
    assert sorted(path.name for path in written.iterdir()) == sorted(FILES)
    document = json.loads((written / MANIFEST).read_text())
    assert (document["format"], document["items"]["progress.steps"]) == ("panpipe.checkpoint/2", 1)
    assert load_file(written / TENSORS)["model.head.bias"].shape == (3,)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_refused(written, tmp_path, name):
    """At 100 random positions of a file, at each of its first bytes, and at its end."""
    data, draw = (written / name).read_bytes(), random.Random(name)
    folder = shutil.copytree(written, tmp_path / "step-1")
    places = [draw.randrange(8 * len(data)) for _ in range(100)]
    for place in (*places, *range(0, 8 * min(120, len(data)), 5), 8 * len(data) - 1):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        (folder / name).write_bytes(changed)
        with pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{name}[^\n]*\Z"):
            checked(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_named_and_the_pipeline_is_as_it_was(pipe, copied, name):
    changed = bytearray((copied / name).read_bytes())
    changed[len(changed) // 2] ^= 4
    (copied / name).write_bytes(changed)
    refused(pipe, copied, f"step-1/{name}' (was changed since it was written|is damaged): its hash differs")


def test_a_truncated_missing_or_extra_file_is_named(pipe, copied):
    name = TENSORS
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[:-1])
    refused(pipe, copied, rf"{name}' is truncated: it has {len(data) - 1} bytes and the manifest has {len(data)}")
    (copied / name).write_bytes(data + b" ")
    refused(pipe, copied, rf"{name}' is longer than when it was written")
    (copied / name).unlink()
    refused(pipe, copied, rf"{name}' is missing: the checkpoint is incomplete")
    (copied / name).write_bytes(data)
    (copied / "notes").touch()
    refused(pipe, copied, r"step-1' has 'notes', which is not in its manifest")
    (copied / "notes").unlink()
    pipe.resume(copied)


def test_a_truncated_manifest_is_refused(pipe, copied):
    data = (copied / MANIFEST).read_bytes()
    for size in (0, 10, 80, len(data) - 1):
        (copied / MANIFEST).write_bytes(data[:size])
        refused(pipe, copied, "manifest.json' is damaged")


def test_links_and_pipes_are_refused(pipe, copied, tmp_path):
    (copied / TENSORS).rename(tmp_path / "tensors")
    (copied / TENSORS).symlink_to(tmp_path / "tensors")
    refused(pipe, copied, f"{TENSORS}' is a link, or not a regular file")
    (copied / TENSORS).unlink()
    os.mkfifo(copied / TENSORS)
    refused(pipe, copied, f"{TENSORS}' is a link, or not a regular file")
    (copied / MANIFEST).rename(tmp_path / "manifest")
    (copied / MANIFEST).symlink_to(tmp_path / "manifest")
    refused(pipe, copied, "cannot read '.*manifest.json'")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"steps": 1, "files": {"../../secret": {"bytes": 1, "xxh3_128": "0"}}}, "not a file of a checkpoint"),
        ({"steps": 1, "files": {"/etc/passwd": {"bytes": 1, "xxh3_128": "0"}}}, "not a file of a checkpoint"),
        ({"steps": 1, "files": {TENSORS + "\n": {"bytes": 1, "xxh3_128": "0"}}}, "not a file of a checkpoint"),
        ({"steps": 1, "files": {TENSORS: {"bytes": -1, "xxh3_128": "0"}}}, "'bytes' must be >= 0"),
        ({"steps": 10**300, "files": {}}, "manifest.json' is not a manifest"),
        ({"steps": "1", "files": {}}, "'steps' must be"),
        ({"steps": 1, "files": []}, "is not a manifest"),
        ({"steps": 1, "files": {}, "more": 1}, "is not a manifest"),
        ({"steps": 1, "files": {}, "xxh3_128": "0"}, "is not a manifest"),
        ({"files": {}}, "is not a manifest"),
        ({"steps": 1, "files": {}, "items": 1}, "'items' must be"),
        ({"steps": 1, "files": {}, "stored_as_bytes": 2}, "is not a manifest"),
    ],
)
def test_a_hostile_manifest_is_refused(pipe, copied, document, said):
    _sign_manifest(copied, json.dumps({"items": {}, "stored_as_bytes": {}, **document})[1:])
    refused(pipe, copied, said)


def _sign_manifest(folder, rest):
    text = rest.encode("latin-1")
    head = f'{{"format": "panpipe.checkpoint/2", "xxh3_128": "{xxhash.xxh3_128_hexdigest(text)}",\n'
    (folder / MANIFEST).write_bytes(head.encode() + text)


def with_items(folder, **changes):
    document = json.loads((folder / MANIFEST).read_text())
    document["items"].update(changes)
    _sign_manifest(
        folder, json.dumps({key: document[key] for key in ("steps", "files", "items", "stored_as_bytes")})[1:]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"progress.steps": -1}, "'progress.steps' is -1 .* must be a number of steps"),
        ({"progress.steps": 10**400}, "'progress.steps' is an integer of 1329 bits"),
        ({"progress.seed": "x"}, "'progress.seed' is 'x'"),
        ({"progress.optimizer": ["list", "Adam"]}, "of the optimizer .* and the pipeline has AdamW"),
        ({"scheduler": {"a": 1}}, "'scheduler' is an object of 1 .* must be a class name and a state"),
        (
            {"scheduler": ["tuple", "SequentialLR", {"step": "x"}]},
            r"'scheduler\[1\].* is NOTHING in the checkpoint and must be as in the pipeline",
        ),
        ({"optimizer.param_groups.head.bias.lr": "high"}, "'optimizer.param_groups.head.bias.lr' is 'high'"),
        ({"optimizer.param_groups.head.bias.lr": {}}, "is an object of 0 .* must be as in the pipeline, 0.0"),
        ({"optimizer.param_groups.head.bias.betas": ["tuple", 0.9]}, r"must be as in the pipeline, \(0"),
        ({"stepped.head.bias": 7}, "must be as in the pipeline, True"),
        ({"evil.name": 1}, ""),
        ({"model.head.bias": 1}, "another file or the manifest has"),
        ({"progress.steps": ["object", "core.cluster.mesh:Mesh", [1, 1, None]]}, "unknown tag 'object'"),
        ({"progress.steps": ["tensor", "float32", [1 << 40], ""]}, "is not a manifest"),
    ],
)
def test_hostile_items_are_refused(pipe, copied, changes, said):
    if not said:  # more than the pipeline has: not used
        with_items(copied, **changes)
        pipe.resume(copied)
        return
    with_items(copied, **changes)
    refused(pipe, copied, said)


def test_items_of_more_values_than_memory_are_refused(pipe, copied):
    """A list of two bytes takes 60 in memory."""
    _sign_manifest(copied, '"items":{},"stored_as_bytes":[[]' + ",[]" * 8_000_000 + "]}")
    refused(pipe, copied, "manifest.json' has more than 8000000 values")


def with_tensor(folder, name, tensor):
    tensors = load_file(folder / TENSORS)
    tensors.update({name: tensor})
    write_tensors(folder / TENSORS, tensors)
    signed(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.head.bias", torch.zeros(5), r"'model.head.bias' has the shape \(5,\) in the checkpoint"),
        (
            "model.head.bias",
            torch.zeros(3, dtype=torch.float64),
            "'model.head.bias' is torch.float64 in",
        ),
        (
            "optimizer.state.head.bias.exp_avg",
            torch.zeros(1),
            r"'optimizer.*head.bias.exp_avg' has the shape \(1,\)",
        ),
        ("optimizer.state.head.bias.step", torch.zeros(2), "'optimizer.state.head.bias.step' has the shape"),
        ("model.strange", torch.zeros(5), "has 'model.strange', which the pipeline does not have"),
    ],
)
def test_tensors_of_other_shapes_are_refused(pipe, copied, name, tensor, said):
    with_tensor(copied, name, tensor)
    refused(pipe, copied, said)


def test_a_header_that_claims_another_shape_is_refused(pipe, copied):
    data = (copied / TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for shape in ([1 << 62, 1 << 62], [-3], [10**400], ["x"], [3, 1]):
        header["model.head.bias"]["shape"] = shape
        text = json.dumps(header).encode()
        (copied / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        signed(copied)
        refused(pipe, copied, "")


# Which one is the last, and which ones are kept


def test_latest_checkpoint_skips_what_is_not_whole(pipe, written, tmp_path):
    assert panpipe.latest_checkpoint(tmp_path / "none") is None
    for number in (9, 10, 11, 12, 13):
        shutil.copytree(written, tmp_path / f"step-{number}")
    shutil.copytree(written, tmp_path / ".partial-step-99-0")
    (tmp_path / "step-14").mkdir()
    (tmp_path / "step-13" / MANIFEST).write_text("{}")
    (tmp_path / "step-12" / TENSORS).unlink()
    os.truncate(tmp_path / "step-11" / TENSORS, 10)
    assert panpipe.latest_checkpoint(tmp_path) == tmp_path / "step-10"
    data = bytearray((tmp_path / "step-10" / TENSORS).read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-10" / TENSORS).write_bytes(data)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert panpipe.latest_checkpoint(tmp_path, verify=True) == tmp_path / "step-9"
    assert len(warned) == 4
    assert re.search(r"step-10' is skipped: .*its hash differs", str(warned[-1].message))


def test_checkpoints_of_dcp_alone_are_named_and_not_skipped(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / ".metadata").touch()
    with pytest.raises(
        panpipe.RequestError, match=r"step-3' is a checkpoint of torch\.distributed.*if you trust it, read it with"
    ):
        panpipe.latest_checkpoint(tmp_path)


def test_keep_removes_the_oldest_checkpoints_of_the_same_name_alone(pipe, written, tmp_path):
    for name in ("step-7", "step-8", "step-9", "step-20", "best-1", "other"):
        shutil.copytree(written, tmp_path / name)
    (tmp_path / "step-1").mkdir()  # no checkpoint
    pipe.checkpoint(tmp_path / "step-10", keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["best-1", "other", "step-1", "step-10", "step-20", "step-9"]
    remove_older(tmp_path / "step-20", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-1", "other", "step-1", "step-20"]
    for keep in (0, -1, True, 1.5, "2"):
        with pytest.raises(panpipe.RequestError, match=r"keep is .*: give the number of checkpoints to keep"):
            pipe.checkpoint(tmp_path / "step-30", keep=keep)
    with pytest.raises(panpipe.RequestError, match="keep is 2 and 'last' has no number at its end"):
        pipe.checkpoint(tmp_path / "last", keep=2)
    with pytest.raises(panpipe.RequestError, match="wait is 'no': give True or False"):
        pipe.checkpoint(tmp_path / "step-30", wait="no")
    with pytest.raises(panpipe.RequestError, match="update is 'no': give True or False"):
        pipe.step({}, update="no")


def test_a_checkpoint_has_the_permissions_of_a_new_folder(written, tmp_path):
    (tmp_path / "new").mkdir()
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE((tmp_path / "new").stat().st_mode)


# dtypes that safetensors does not have


def test_parameters_of_every_dtype_keep_their_bits(tmp_path):
    tensors = {
        "model.complex": torch.randn(2, 3, dtype=torch.complex128),
        "model.half": torch.randn(3).to(torch.bfloat16),
        "model.scalar": torch.tensor(1 + 2j, dtype=torch.complex128),
        "model.empty": torch.empty(0, 4),
        "model.view": torch.randn(4, 4).t()[1:],
        "model.conj": torch.randn(3, dtype=torch.complex64).conj(),
        "model.f8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    folder = tmp_path / "a"
    Save(folder, begin_save(folder), Parts(tensors, {"progress.steps": 3}), 3, None, 1).run(ONE_PROCESS)
    found = CheckpointReader(folder).whole()
    assert found.items == {"progress.steps": 3}
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name].view(torch.uint8) if "f8" in name else found.tensors[name],
                           tensor.view(torch.uint8) if "f8" in name else tensor), name  # fmt: skip


def test_state_that_is_no_plain_data_is_refused(tmp_path):
    class Odd(torch.optim.lr_scheduler.StepLR):
        def __init__(self, optimizer):
            self.kept = object()
            super().__init__(optimizer, 1)

    pipe = pipe_of(CONV, scheduler=Odd)
    with pytest.raises(panpipe.RequestError, match=r"only plain data, and scheduler\[1\].kept is of type object"):
        pipe.checkpoint(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
