"""Checkpoints of ranks: written while they train, and refused by all of them if one refuses."""

import re

import pytest

from ...support.launch import results


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    return results("saving", tmp_path_factory.mktemp("saving"))


def test_ranks_train_on_while_a_checkpoint_is_written(saving):
    for found in saving:
        assert found["again"]
        assert found["files"] == [
            "manifest.json",
            "tensors-00001-of-00002.safetensors",
            "tensors-00002-of-00002.safetensors",
        ]


def test_a_file_that_one_rank_refuses_is_refused_by_all_with_the_same_line(saving):
    first, second = saving
    said = "own1/tensors-00002-of-00002.safetensors' was changed since it was written: its hash differs"
    assert said in first["flipped on rank 1"]
    assert re.match(
        r"rank 1 has another checkpoint, in 'step-\d', than rank 0, in 'step-\d': ", first["another on rank 1"]
    )
    assert first["another on rank 1"] == second["another on rank 1"]
    assert first["flipped on rank 1"] == second["flipped on rank 1"]


def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all(saving):
    first, second = saving
    for case in ("written on rank 0 alone", "later"):
        assert "step-3' cannot be written: one of its files is larger" in first[case]
        assert first[case] == second[case]
    assert "other1/a' cannot be written: No such file or directory; give a folder" in first["folder of rank 1"]
    assert first["folder of rank 1"] == second["folder of rank 1"]
    assert first["refused at"] == second["refused at"]
    assert first["left"] == second["left"] == ["step-3"]
