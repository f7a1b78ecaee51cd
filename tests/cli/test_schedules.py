"""``panpipe schedules``: the table of all of them."""

import json

import pytest
from panpipe import cli
from panpipe.core.errors import InfeasibleError

SMALL = ("--devices", "4", "--microbatches", "8", "--forward", "10", "--backward-input", "12", "--backward-weight", "8")


def run(capsys, *words):
    status = cli.main(["schedules", *words])
    out, err = capsys.readouterr()
    return status, out, err


def answer(capsys, *words):
    status, out, err = run(capsys, *words, "--json")
    assert status == 0
    return json.loads(out)["schedules"], err


def test_schedules_lists_all_and_marks_the_best(capsys):
    rows, err = answer(capsys, *SMALL)
    assert err == ""
    assert [row["peak_memory"] for row in rows] == sorted(row["peak_memory"] for row in rows)
    names = {row["schedule"].partition("(")[0] for row in rows}
    assert {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-min", "v-half", "gis", "dualpipe-v"} <= names
    best = [row for row in rows if row["on_frontier"]]
    assert [row["makespan"] for row in best] == sorted((row["makespan"] for row in best), reverse=True)
    for row in rows:
        beaten = [b for b in best if b["peak_memory"] <= row["peak_memory"] and b["makespan"] <= row["makespan"]]
        assert beaten


def test_search_is_compared_with_schedules_that_keep_their_saved_tensors(capsys, monkeypatch):
    limits = []

    def search(problems, given):
        limits.append(problems[0].memory_limit / problems[0].chunks)
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr("panpipe.cli.schedules.run_search", search)
    rows, err = answer(capsys, *SMALL, "--host-copy", "2", "--auto")
    offloading = {row["peak_memory"] for row in rows if row["schedule"].startswith("po-f") and row["on_frontier"]}
    assert min(offloading) < 1
    assert limits
    assert not offloading & set(limits)
    assert err.splitlines()[1] == "auto: nothing fits"


def test_memory_limit_below_one_microbatch_is_for_schedules_that_offload(capsys):
    rows, _ = answer(capsys, *SMALL, "--host-copy", "2", "--memory-limit", "0.8")
    assert {row["schedule"].partition("(")[0] for row in rows} == {"po-f"}
    status, _, err = run(capsys, *SMALL, "--host-copy", "2", "--memory-limit", "0.1")
    assert (status, err) == (
        3,
        "panpipe: no schedule holds at most 0.1 on each device: raise --memory-limit, or leave it out\n",
    )


def test_schedules_prints_all_schedules_with_a_star_for_the_best(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, err = run(capsys, *SMALL)
    assert (status, err) == (0, "")
    assert "★" in out
    assert "interleaved-1f1b" in out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--devices", "0", "--microbatches", "8"), 2, "devices is 0"),
        ((*SMALL, "--seed", "1"), 2, "--seed is for the search: also give --auto"),
        ((*SMALL, "--auto", "--evaluations", "0"), 2, "--evaluations is 0"),
        ((*SMALL, "--auto", "--seconds", "0"), 2, "--seconds is 0"),
        ((*SMALL, "--memory-limit", "0.5"), 3, "the memory limit is 0.5"),
        ((*SMALL, "--chunks", "0"), 2, "--chunks is 0"),
        ((*SMALL, "--stage-scale", "1,2,3"), 2, "--stage-scale has 3 factors"),
    ],
)
def test_wrong_schedules_requests_are_refused(capsys, words, status, said):
    got, out, err = run(capsys, *words)
    assert (got, out) == (status, "")
    assert said in err
    assert err.count("\n") == 1
