"""The last checkpoint of a folder, and the removal of older ones."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.durable_files import hidden_folder
from panpipe.runtimes.checkpoint.folders import latest_checkpoint, remove_older
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, manifest_bytes
from panpipe.runtimes.checkpoint.state_parts import PartNames, Parts, write_parts
from panpipe.runtimes.checkpoint.writing import begin_save

ITEMS = "items-00001-of-00001.json"


def checkpoint(folder, steps=1):
    folder.mkdir(parents=True)
    records = write_parts(folder, PartNames(1, 1), Parts(items={"progress.steps": steps}))
    (folder / MANIFEST_NAME).write_bytes(manifest_bytes(steps, records))
    return folder


def test_last_checkpoint_has_the_highest_number_not_the_last_name(tmp_path):
    for name in ("step-9", "step-120", "step-20", "plain"):
        checkpoint(tmp_path / name)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-120"


def test_incomplete_and_hidden_folders_are_skipped(tmp_path):
    first = checkpoint(tmp_path / "step-1")
    checkpoint(tmp_path / ".partial-step-9-00")
    (checkpoint(tmp_path / "step-2") / ITEMS).unlink()
    (checkpoint(tmp_path / "step-3") / MANIFEST_NAME).unlink()
    (checkpoint(tmp_path / "step-4") / MANIFEST_NAME).write_bytes(b"{}")
    assert latest_checkpoint(tmp_path) == first
    assert latest_checkpoint(tmp_path / "missing") is None


def test_changed_checkpoint_is_skipped_where_hashes_are_verified(tmp_path):
    first = checkpoint(tmp_path / "step-1")
    changed = checkpoint(tmp_path / "step-2")
    data = (changed / ITEMS).read_bytes()
    (changed / ITEMS).write_bytes(data.replace(b"1", b"2"))
    assert latest_checkpoint(tmp_path) == changed
    with pytest.warns(UserWarning, match="step-2' is skipped: .*"):
        assert latest_checkpoint(tmp_path, verify=True) == first


def test_folder_with_checkpoints_of_dcp_alone_is_refused(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".metadata").write_bytes(b"")
    with pytest.raises(RequestError, match=r"torch\.distributed\.checkpoint"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("killed_while_it", ["writes", "removes"])
def test_what_a_killed_process_left_is_removed_by_the_next_save_of_the_series(tmp_path, killed_while_it):
    """A job that resumes may never write a checkpoint of the same number again."""
    long = "x" * 120
    for name in ("step-7", f"{long}-7", "best-7", "steps-7", "step-7-7"):
        left = hidden_folder(tmp_path / name)
        if killed_while_it == "removes":
            left.rmdir()
            checkpoint(left)
    assert begin_save(tmp_path / "step-9").startswith(".partial-step-9-")
    assert begin_save(tmp_path / f"{long}-9").startswith(".partial-xxx")
    kept = sorted(path.name.removeprefix(".partial-").rpartition("-")[0] for path in tmp_path.iterdir())
    assert kept == ["best-7", "step-7-7", "step-9", "steps-7", "x" * 100]


def test_oldest_checkpoints_of_the_same_series_are_removed(tmp_path):
    for name in ("step-1", "step-2", "step-10", "other-1"):
        checkpoint(tmp_path / name)
    checkpoint(tmp_path / "step-11")  # of an earlier, longer run
    remove_older(tmp_path / "step-10", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1", "step-10", "step-11", "step-2"]
    remove_older(tmp_path / "step-10", keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1", "step-10", "step-11"]
