"""The last checkpoint of a folder, and the removal of older ones."""

import pytest
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, manifest_bytes
from panpipe.runtimes.checkpoint.writing import begin_save, hidden_folder


def checkpoint(folder, steps=1):
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_bytes(manifest_bytes(steps, {}, {"progress.steps": steps}))
    return folder


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
