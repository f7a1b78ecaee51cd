"""How the demo ends: a wrong result is a failure, a missed prediction a warning."""

import pytest

from ..support.launch import alone
from ..support.ranks import demo


@pytest.mark.slow
def test_demo_only_warns_of_a_missed_prediction(tmp_path, capfd):
    demo.run(tmp_path)
    said = capfd.readouterr().err
    assert "! missed: predicted step time" in said
    assert "wrong" not in said
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("fault", "what"), [("nan", "gradients"), pytest.param("loss", "loss of two steps", marks=pytest.mark.slow)]
)
def test_demo_fails_where_a_result_is_wrong(tmp_path, capfd, fault, what):
    with pytest.raises(SystemExit) as ended:
        demo.run(tmp_path, fault)
    assert ended.value.code == 1
    assert f"✗ wrong: {what}" in capfd.readouterr().err
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_wrong_gradient_on_another_rank_reaches_the_exit_status(tmp_path):
    first, _ = alone("demo_with_a_wrong_gradient", tmp_path)
    assert first.returncode == 1
    assert "✗ wrong: gradients, worst tensor in norm: 1.0e-03 relative" in first.stderr
    assert "Traceback" not in first.stderr
