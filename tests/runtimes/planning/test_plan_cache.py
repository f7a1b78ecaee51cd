"""Plans of earlier runs, and what progress shows."""

import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.progress import show_progress
from panpipe.runtimes.planning import plan_cache
from panpipe.runtimes.planning.automatic import Planning
from torch import nn

from ...laws.grouped import grouped
from ...support.launch import forked_script

SCRIPT = Path(__file__).parents[2] / "support" / "ranks" / "plan_cache_ranks.py"


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(8, 4), "y": torch.zeros(8, dtype=torch.int64)}


def _step(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def _pipeline(**options):
    phases: list[str] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    options = {"microbatches": 2, "max_chunks": 1, "schedule": "1f1b", "cluster": "cpu:2", **options}
    pipe = panpipe.pipeline(
        model, _step, _batch(), **grouped(progress=lambda phase, done, total: phases.append(phase), **options),
    )  # fmt: skip
    return pipe, phases


class PlansAnew(Exception):
    """Raised in place of planning."""


def _plans(planning):
    raise PlansAnew


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with one cached plan, and that plan."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PANPIPE_CACHE", str(folder))
        pipe, phases = _pipeline()
        pipe.close()
    assert any("measuring operators" in phase for phase in phases)
    assert phases[-1].startswith("planned: 1f1b, 2 stages on 2 devices, 2 microbatches")
    return folder, pipe.plan


def test_second_pipeline_uses_the_cached_plan_and_prints_how_to_plan_again(planned, monkeypatch):
    folder, plan = planned
    monkeypatch.setenv("PANPIPE_CACHE", str(folder))
    pipe, phases = _pipeline()
    assert pipe.plan == plan
    assert not any("measuring" in phase for phase in phases)
    assert any(str(folder) in phase and "cache=False" in phase for phase in phases)
    assert torch.isfinite(pipe.step(_batch()))
    pipe.close()


@pytest.mark.parametrize(
    "other",
    [
        {"microbatches": 4}, {"optimizer": torch.optim.SGD}, {"recompute": "all"},
        {"clip_norm": 1.0}, {"schedule": "gpipe"}, {"cache": False},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_request_does_not_use_the_cached_plan(planned, monkeypatch, other):
    folder, _ = planned
    monkeypatch.setenv("PANPIPE_CACHE", str(folder))
    monkeypatch.setattr(Planning, "candidates", _plans)
    with pytest.raises(PlansAnew):
        _pipeline(**other)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((text, "") for text in ("", "{", "[" * 100_000, "null", "\x00\xff")),
        *((f'{{"format": "panpipe.cached-plan/{rest}}}', "") for rest in ('1"', '3", "plans": []')),
        (lambda found: found["plans"][0]["device_actions"][0].pop(0), "0F0"),
        (lambda found: found.update(key={"graph": "c"}), "it is for another request"),
        (lambda found: found.update(fastest=[{"seconds": 1.0, "size": 0}]), "it has a step of 1.0 s and 0 elements"),
    ],
)
def test_unusable_cached_plan_is_reported_and_planned_again(planned, monkeypatch, tmp_path, content, reason):
    folder, plan = planned
    (path,) = folder.glob("*.json")
    if callable(content):
        content(document := json.loads(path.read_text()))
        content = json.dumps(document)
    (tmp_path / path.name).write_text(content, encoding="latin-1")
    monkeypatch.setenv("PANPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(Planning, "candidates", lambda planning: [plan])
    pipe, phases = _pipeline()
    pipe.close()
    (line,) = (phase for phase in phases if "cannot be used, planning anew" in phase)
    assert reason in line
    assert "\n" not in line
    assert pipe.plan.hash == plan.hash
    assert json.loads((tmp_path / path.name).read_text())["format"] == plan_cache.FORMAT


def test_cache_holds_a_bounded_number_of_files_and_removes_the_least_recently_used(planned, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_cache, "MOST_FILES", 3)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for age in range(1, 5):
        path = folder / f"plan-{age}.json"
        path.write_text("{}")
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - age * 10**9))
    monkeypatch.setenv("PANPIPE_CACHE", str(folder))
    monkeypatch.setattr(Planning, "candidates", lambda planning: [planned[1]])
    pipe, _ = _pipeline()
    pipe.close()
    left = {path.name for path in folder.iterdir()}
    assert {"plan-1.json", "plan-2.json"} < left
    assert len(left) == 3


def test_plans_are_their_owners_and_cached_although_another_process_removes_files(planned, monkeypatch, tmp_path):
    def prune(folder):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(plan_cache, "_prune", prune)
    monkeypatch.setenv("PANPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Planning, "candidates", lambda planning: [planned[1]])
    pipe, phases = _pipeline()
    pipe.close()
    assert not any("not cached" in phase for phase in phases)
    (path,) = (tmp_path / "cache").iterdir()
    assert path.suffix == ".json"
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0, "nobody else writes plans here, whatever the umask"


def test_progress_is_one_line_with_part_and_number_of_parts_on_a_terminal():
    code = (
        "from panpipe.runtimes.launch.progress import show_progress\n"
        "with show_progress(True, True) as report:\n"
        "    report('measuring')\n"
        "    for done in range(3): report('choosing', done, 3)\n"
    )
    reader, terminal = os.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stderr=terminal, env=environment, check=True)
    os.close(terminal)
    said = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(reader, 65536):
            said += part
    os.close(reader)
    assert b"choosing" in said
    assert b"3 of 3" in said


@pytest.mark.parametrize(("progress", "first"), [(False, True), (True, False)])
def test_progress_is_silent_where_it_is_switched_off_and_on_other_ranks(capsys, progress, first):
    with show_progress(progress, first) as report:
        report("measuring")
    assert capsys.readouterr() == ("", "")


def test_plan_cache_of_another_type_is_refused():
    with pytest.raises(RequestError, match="cache is '/tmp': give True or False; PANPIPE_CACHE names the folder"):
        panpipe.pipeline(nn.Linear(2, 2), _step, _batch(), plan=panpipe.Auto(cache="/tmp"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"microbatches": 4}, "microbatches is 4 and the plan has 2: leave microbatches out, or plan again with it"),
        ({"recompute": "all"}, r"recompute is stages \[0, 1\] and the plan has no stages: leave recompute out"),
        ({"mesh": "pp=3"}, "mesh is 'pp=3' and the plan is for pp=2"),
    ],
)
def test_arguments_that_contradict_a_given_plan_are_refused(planned, given, message):
    _, plan = planned
    with pytest.raises(RequestError, match=message):
        panpipe.pipeline(nn.Linear(2, 2), _step, _batch(), **grouped(plan=plan, **given))


def test_arguments_that_agree_with_a_given_plan_are_accepted(planned):
    _, plan = planned
    pipe = panpipe.pipeline(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), _step, _batch(),
        **grouped(plan=plan, mesh="pp=2", recompute="none", progress=False),
    )  # fmt: skip
    assert pipe.plan is plan
    pipe.close()


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"format": "other/1"}', "\x00"])
def test_file_without_a_plan_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(RequestError) as caught:
        panpipe.Plan.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_all_ranks_run_the_plan_in_the_first_ranks_cache(tmp_path):
    found = []
    for _ in range(2):
        forked_script(SCRIPT, str(tmp_path))
        found.append([(tmp_path / f"said{rank}").read_text().split() for rank in range(2)])
    (first, other), (again, silent) = found
    assert first[:2] == ["True", "True"]
    assert again[:2] == ["True", "False"]
    assert other[:2] == silent[:2] == ["False", "False"]
    assert first[2] == other[2] == again[2] == silent[2]
    assert not (tmp_path / "1").exists()
