"""Models after ``parallelize_module`` over four real processes, two stages of two tensor ranks, equal one process."""

import pytest

from ..support.launch import results


def check(found, case):
    for rank in found:
        distances = rank[case]
        for name in ("loss", "gradient", "parameter", "norm"):
            assert distances[name] < 1e-9, (case, name, distances)
        assert distances["captures"] <= 1  # after the example's: all lengths take one more
    # A stage of the loss alone has no parameters.
    assert {name for rank in found for name in rank[case]["here"]} == set(found[0][case]["all"])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return results("tensor_ranks", tmp_path_factory.mktemp("tensor"), 4)


def test_tensor_ranks_train_as_one_process_does(four):
    check(four, "trained")
    held = [set(rank["trained"]["here"]) for rank in four]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert not held[0] & held[2]
    assert len(held[0] | held[2]) == 10


def test_options_and_changes_that_tensor_ranks_do_not_support_are_refused_on_all_of_them(four):
    for rank in four:
        for said, text in rank["refused"].items():
            assert said in text, (said, text)
        assert "'ups.0.weight' was frozen: freeze parameters of models with DTensors before" in rank["trained"]["then"]


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    return results("used_tensor_ranks", tmp_path_factory.mktemp("used"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["another size", "accumulated", "evaluated", "rows", "unchanged"])
def test_other_uses_over_tensor_ranks_equal_one_process(used, use):
    assert all(rank[use] < 1e-12 for rank in used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("batch", "rank 1 has other values in batch['x'] than rank 0"),
        ("function", "ema(function=) of a pipeline: not supported for models with DTensor parameters yet"),
        ("compile", "compile is given: not supported for models with DTensor parameters yet"),
        ("optimizer", "needs an elementwise optimizer"),
    ],
)
def test_what_tensor_ranks_do_not_support_is_refused_on_all_of_them(used, what, said):
    for rank in used:
        assert said in rank[what], rank[what]


@pytest.mark.slow
def test_checkpoints_of_tensor_ranks_have_whole_tensors_and_resume_with_the_same_bits(tmp_path):
    for rank in results("saved_tensor_ranks", tmp_path, 4):
        assert rank["apart"] < 1e-12
        assert rank["names"]
        assert rank["now"]
        assert rank["later"]
        assert rank["whole"] < 1e-12
        assert rank["averaged"] < 1e-12
        assert rank["state"]
        assert rank["dcp"]
        assert rank["mesh"] == [2, 1, 2, [[0, 1, 2, 3]]]


@pytest.mark.slow
def test_no_tensor_rank_updates_with_gradients_that_are_not_finite(tmp_path):
    found = results("guarded_tensor_ranks", tmp_path, 4)
    for rank in found:
        assert rank["one part"] == [[True, True, True]] * 2
        for one in (rank[case] for case in ("skip", "raise", "scaler")):
            assert one["far"] < 1e-12
            assert one["skipped"] == [False, True, False, False]
        assert rank["scaler"]["scales"] == [[1024, 1024], [512, 512], [512, 512], [1024, 1024]]
        assert rank["raise"]["said"] == found[0]["raise"]["said"]
    said = found[0]["raise"]["said"]
    assert said.startswith("0 1 the loss of step 2 is nan: microbatch 1 is not finite; that began in stage 0"), said


@pytest.mark.slow
def test_tensor_ranks_offload_saved_tensors_and_report_each_batch_once(tmp_path):
    found = results("observed_tensor_ranks", tmp_path, 4)
    check(found, "trained")
    rows, devices, updated = 4, 4, True
    assert [rank["reports"] for rank in found] == [[[rows, devices, updated]] * 3, [], [], []]
    for rank in found:
        assert rank["trained"]["offloaded"]["0"] > 0


@pytest.mark.slow
def test_slices_of_sequences_losses_in_parts_and_llama_equal_one_process(tmp_path):
    found = results("layouts_of_tensor_ranks", tmp_path, 4)
    check(found, "slices")
    check(found, "loss in parts")
    assert all(rank["llama"]["gradient"] < 1e-6 for rank in found)  # its norms compute in float32


@pytest.mark.slow
def test_replicas_of_tensor_ranks_equal_one_process_with_all_batches(tmp_path):
    for rank in results("replicas_of_tensor_ranks", tmp_path, 8):
        for mesh, one in rank.items():
            assert one["far"] < 1e-12, mesh
            assert one["mesh"] == [2, 2, 2]


@pytest.mark.slow
def test_replicas_of_a_tensor_rank_share_the_optimizer(tmp_path):
    for rank in results("sharing_replicas_of_tensor_ranks", tmp_path, 8):
        assert rank["far"] < 1e-12
        assert rank["mesh"] == [2, 2, 2]
        assert rank["elements"] == rank["held"] / 2


@pytest.mark.slow
def test_transformer_over_tensor_ranks_trains_by_automatic_plans(tmp_path):
    found = results("more_tensor_ranks", tmp_path, 4)
    check(found, "neighbours")
    check(found, "apart")


@pytest.mark.slow
def test_dropout_over_tensor_ranks_draws_the_numbers_of_one_process(tmp_path):
    found = results("dropout_over_tensor_ranks", tmp_path, 4)
    for case in found[0]:
        check(found, case)
