"""A team of four real ranks, two replicas of two devices: what each call returns, and failures that reach all."""

from ...support.launch import results


def test_pipeline_goes_on_after_the_one_that_created_the_process_group_is_closed(tmp_path):
    """The group, and what the second one's watch reads in the job's store, were removed with the first one."""
    first, second = results("outlives_the_first", tmp_path, 2)
    assert first["losses"] == second["losses"] == sorted(first["losses"], reverse=True)
    assert max(first["seconds"], second["seconds"]) < 2.5
    assert (first["remains"], first["group"]) == (True, False)
