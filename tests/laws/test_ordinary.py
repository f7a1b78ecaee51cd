"""The scripts of ``ordinary/``: equal to one process by the default call, by a split schedule, and on two ranks."""

import functools
import json
from pathlib import Path

import panpipe
import pytest

from ..support.launch import forked_script, torchrun_script
from .scripts import Script, alone, problems, run, scripts

SCRIPTS, RANKS = scripts(), Path(__file__).with_name("ranks.py")
SPLIT = {("batch_norm_net", "zb-v"), ("tied_weights_of_a_language_model", "zb-h1")}
"""What the fast suite also trains by a schedule with split backwards."""


@functools.cache
def reference(name: str):
    return alone(SCRIPTS[name])


def marks(fast: bool):
    return [] if fast else [pytest.mark.slow]


def assert_right(script: Script, **options):
    if "refused" in script.tags:
        with pytest.raises(panpipe.RequestError, match=script.tags["refused"]):
            run(script, panpipe.pipeline, **options)
    else:
        found = problems(script, run(script, panpipe.pipeline, **options), reference(script.name))
        assert found == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks("fast" in script.tags)) for name, script in SCRIPTS.items()]
)
def test_default_call_trains_as_one_process(name):
    assert_right(SCRIPTS[name])


@pytest.mark.parametrize(("name", "schedule"), [
    pytest.param(name, schedule, marks=marks((name, schedule) in SPLIT))
    for name, script in SCRIPTS.items() if "refused" not in script.tags
    for schedule in ("zb-v", "zb-h1") if "few" not in script.tags or schedule == "zb-h1"
])  # fmt: skip
def test_split_backwards_train_as_one_process(name, schedule):
    assert_right(SCRIPTS[name], plan=schedule)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Run scripts on two ranks, all in one start, and return name → problems on each rank."""

    @functools.cache
    def results(names: tuple[str, ...], forked: bool):
        folder = tmp_path_factory.mktemp("ranks")
        said, more = "", {"PANPIPE_TIMEOUT_S": "60"}
        if forked:
            forked_script(RANKS, str(folder), *names, **more)
        else:
            said = torchrun_script(RANKS, str(folder), *names, **more).stderr[-2000:]
        files = [folder / f"{rank}.json" for rank in range(2)]
        found = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files]
        return {name: [one.get(name, said) for one in found] for name in names}

    return results


TRAINED = [script for script in SCRIPTS.values() if "refused" not in script.tags]
FAST = tuple(script.name for script in TRAINED if "ranks" in script.tags)
OTHERS = tuple(script.name for script in TRAINED if not {"ranks", "threads"} & script.tags.keys())
TOGETHER = 16
"""Number of scripts of one start of ranks."""


@pytest.mark.parametrize("name", FAST)
def test_two_ranks_train_as_one_process(name, on_ranks):
    """Statistics of batches and tied weights over ranks are in runtimes/test_ranks.py, lengths in laws/lengths."""
    assert on_ranks(FAST, True)[name] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OTHERS)), ids=OTHERS)
def test_two_ranks_train_all_others_as_one_process(number, on_ranks):
    start = number // TOGETHER * TOGETHER
    assert on_ranks(OTHERS[start : start + TOGETHER], False)[OTHERS[number]] == [[], []]
