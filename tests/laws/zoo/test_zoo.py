"""A sample of the zoo, by threads and on ranks; `make zoo` runs all of it. Quick: `test_ordinary`."""

import pytest

from .run import run_zoo
from .sample import REFUSED, TRAINED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_zoo((*TRAINED, *REFUSED), tmp_path_factory.mktemp("zoo"), limit_s=900)


@pytest.mark.parametrize("name", TRAINED)
def test_model_trains_like_one_process(results, name):
    found = [result for result in results if result["model"] == name]
    assert len(found) == 9, found
    for result in found:
        assert result["outcome"] == "right", result


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_as_expected(results, name):
    found = [result for result in results if result["model"] == name]
    assert {result["backend"] for result in found} == {"threads", "gloo"}
    assert {result["outcome"] for result in found} == {"refused"}, found


def test_the_zoo_is_as_large_as_it_says():
    from .models import ZOO  # with all of transformers and diffusers that it reads

    assert len(ZOO) >= 137
    assert {bool(ZOO[name].refusal) for name in TRAINED} == {False}
    assert {bool(ZOO[name].refusal) for name in REFUSED} == {True}
