"""Batches cut into microbatches: rows, shapes, weights, and what cannot be cut."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.microbatches import BatchCutter, split_batch


def rows(count):
    return torch.arange(float(count))


def batch(count):
    return {"x": torch.arange(2.0 * count).view(count, 2), "name": "words", "y": torch.arange(count)}


@pytest.mark.parametrize(
    ("samples", "parts", "sizes"), [(8, 4, [2] * 4), (7, 3, [3, 2, 2]), (5, 5, [1] * 5), (6, 1, [6])]
)
def test_rows_are_cut_in_order_into_sizes_that_differ_by_one_at_most(samples, parts, sizes):
    pieces = split_batch(batch(samples), parts)
    assert [piece.samples for piece in pieces] == sizes
    assert [piece.weight for piece in pieces] == pytest.approx([size / samples for size in sizes])
    for key in ("x", "y"):
        assert torch.equal(torch.cat([piece.batch[key] for piece in pieces]), batch(samples)[key])
    assert {piece.batch["name"] for piece in pieces} == {"words"}
    assert len({id(piece.shape) for piece in pieces}) == len(set(sizes))  # one object for each shape
    assert [piece.shape.samples for piece in pieces] == sizes


def test_rows_along_another_dimension_are_cut_into_contiguous_tensors():
    x = torch.arange(24.0).view(3, 8)
    first, second = split_batch({"x": x}, 2, {"x": 1})
    assert torch.equal(second.batch["x"], x[:, 4:])
    assert first.batch["x"].is_contiguous()


def test_fewer_samples_than_microbatches_are_refused_or_cut_into_one_each():
    with pytest.raises(RequestError, match=r"has 2 samples for 3 microbatches: .* use at most 2 microbatches"):
        split_batch(batch(2), 3)
    assert [piece.samples for piece in split_batch(batch(2), 3, fewer=True)] == [1, 1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": rows(4), "y": rows(3)}, r"batch\['x'\] has shape 4, which is 4 samples, and batch\['y'\] has shape 3"),
        ({"x": torch.zeros(0, 2)}, "the batch has 0 samples: a step needs at least one"),
        ({"name": "words"}, "holds no tensor with rows"),
    ],
)
def test_batch_without_a_row_for_each_sample_is_refused(given, said):
    with pytest.raises(RequestError, match=said):
        split_batch(given, 2, fewer=True)


def shape_of(given):
    return split_batch(given, 1)[0].shape


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (batch(3), None),  # numbers of rows do not count
        (
            {**batch(4), "x": torch.zeros(4, 3)},
            r"batch['x'] is 4×3 float32 in a microbatch, and 4×2 float32 in the example's",
        ),
        (
            {**batch(4), "x": torch.zeros(4, 2).double()},
            r"batch['x'] is 4×2 float64 in a microbatch, and 4×2 float32 in the example's",
        ),
        ({**batch(4), "name": "other"}, r"batch['name'] is 'other', and 'words' in the example"),
        ({key: value for key, value in batch(4).items() if key != "y"}, "batch['y'] is missing: the example has "),
        ({**batch(4), "z": rows(4)}, "batch['z'] is new: the example has "),
    ],
)
def test_first_difference_from_the_example_is_named(other, said):
    found = shape_of(batch(4)).difference(shape_of(other))
    assert found is None if said is None else found.startswith(said)


def cutter(microbatches=2):
    return BatchCutter(shape_of(batch(4)), microbatches)


def test_cutter_cuts_every_batch_as_the_example_and_small_ones_into_fewer():
    assert [piece.samples for piece in cutter(3).cut(batch(7))] == [3, 2, 2]
    assert [piece.samples for piece in cutter(3).cut(batch(2))] == [1, 1]


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (
            torch.zeros(4, 2).double(),
            r"is 4×2 float64, and 4×2 float32 in .* with \.to\(torch\.float32\)",
        ),
        (torch.zeros(4, 2).long(), r"is 4×2 int64, and 4×2 float32"),
        (3.0, r"is 3\.0, and 4×2 float32 in the example.* give a tensor"),
    ],
)
def test_cutter_refuses_other_kinds_of_dtypes(leaf, said):
    with pytest.raises(RequestError, match=said):
        cutter().cut({**batch(4), "x": leaf})


def test_cutter_accepts_integers_of_any_size():
    pieces = cutter().cut({**batch(4), "y": torch.zeros(4, dtype=torch.int32)})
    assert pieces[0].batch["y"].dtype is torch.int32
