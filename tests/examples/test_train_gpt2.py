"""How the demo ends: a wrong result is a failure, a missed prediction a warning."""

from pathlib import Path

import pytest

from ..support import demo
from ..support.launch import torchrun_script


def test_demo_only_warns_of_a_missed_prediction(tmp_path, capfd):
    demo.run(tmp_path)
    said = capfd.readouterr().err
    assert "! missed: predicted step time" in said
    assert "wrong" not in said
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("fault", "what"), [("nan", "gradients"), ("loss", "loss of two steps")])
def test_demo_fails_where_a_result_is_wrong(tmp_path, capfd, fault, what):
    with pytest.raises(SystemExit) as ended:
        demo.run(tmp_path, fault)
    assert ended.value.code == 1
    assert f"✗ wrong: {what}" in capfd.readouterr().err
    assert (tmp_path / "report.html").exists()


def test_wrong_gradient_on_another_rank_reaches_the_exit_status(tmp_path):
    done = torchrun_script(Path(demo.__file__), str(tmp_path), "gradient")
    assert done.returncode != 0
    assert "✗ wrong: gradients, worst tensor in norm: 1.0e-03 relative" in done.stderr
    assert "rank      : 0" in done.stderr.partition("Root Cause")[2]
    ranks, _, _ = done.stderr.partition("torch/distributed/elastic")
    assert "Traceback" not in ranks
