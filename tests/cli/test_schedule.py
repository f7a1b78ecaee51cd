"""``panpipe schedule``, and what all commands share: help, version, exit status, a quick start."""

import json
import os
import subprocess
import sys

import pytest
from panpipe import cli


def run(capsys, *words):
    status = cli.main(["schedule", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def answer(capsys, *words):
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


SMALL = ("--devices", 4, "--microbatches", 8)


def test_schedule_json_has_the_evaluated_figures(capsys):
    got = answer(capsys, "1f1b", "--devices", 2, "--microbatches", 3, "--comm", 0.5)
    assert got["schedule"] == "1f1b"
    assert got["makespan"] == 14
    assert got["stage_span"] == 14
    assert got["bubble_ratio"] == pytest.approx(1 - 9 / 14)
    assert got["stage_span_bubble_ratio"] == pytest.approx(1 - 9 / 14)
    assert got["peak_memory"] == [2, 1]
    assert got["busy"] == [9, 9]
    assert got["placement"] == [0, 1]
    assert got["device_actions"] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]


def test_costs_are_of_a_device_and_split_over_its_chunks(capsys):
    one = answer(capsys, "interleaved-1f1b", *SMALL, "--chunks", 2, "--forward", 10, "--backward-input", 12,
                 "--backward-weight", 8, "--comm", 1)  # fmt: skip
    assert one["makespan"] == 299
    assert one["peak_memory"] == [5.5, 4.5, 3.5, 2.5]
    assert one["busy"] == [240] * 4


def test_schedule_takes_the_parameters_of_its_family(capsys):
    got = answer(capsys, "looped", "--devices", 2, "--microbatches", 4, "--chunks", 2, "--microbatches-per-loop", 4,
                 "--run-ahead", "8,8")  # fmt: skip
    assert got["schedule"] == "looped(loops=2,microbatches_per_loop=4,run_ahead=8,8)"
    assert got["peak_memory"] == [4, 4]
    assert (
        answer(capsys, "interleaved-1f1b", *SMALL, "--rounds", 1)["schedule"] == "interleaved-1f1b(chunks=2,rounds=1)"
    )


@pytest.mark.slow
def test_auto_is_at_least_as_fast_as_named_ones_within_the_limit(capsys):
    budget = "--evaluations", 10_000
    free = answer(capsys, "auto", *SMALL, "--comm", 0.1, *budget)
    tight = answer(capsys, "auto", *SMALL, "--comm", 0.1, "--memory-limit", 4, *budget)
    named = answer(capsys, "1f1b", *SMALL, "--comm", 0.1)
    assert free["lower_bound"] <= free["makespan"] <= named["makespan"]
    assert tight["makespan"] <= named["makespan"]
    assert tight["gap"] == tight["makespan"] / tight["lower_bound"] - 1
    assert max(tight["peak_memory"]) <= 4
    assert free["evaluations"] > 10
    status, out, err = run(capsys, "auto", *SMALL, *budget)
    assert status == 0
    assert "auto: the fastest of" in err
    assert "makespan" in out


def test_time_limit_ends_a_search_of_any_number_of_evaluations(capsys):
    found = answer(capsys, "auto", *SMALL, "--memory-limit", 2, "--seconds", 0.1, "--evaluations", 10**9)
    assert found["makespan"] <= answer(capsys, "zb-1p", *SMALL, "--memory-limit", 2)["makespan"]


def test_exceeded_memory_limit_is_reported_with_device_action_and_excess(capsys):
    status, out, err = run(capsys, "1f1b", *SMALL, "--memory-limit", 3)
    assert (status, out) == (3, "")
    assert err.startswith("panpipe: 1f1b holds 4 on device 0 at 0F3, 1 over the limit of 3: raise --memory-limit to 4")
    status, out, err = run(capsys, "auto", *SMALL, "--memory-limit", 0.1)
    assert (status, out) == (3, "")
    assert "the memory limit is 0.1: one microbatch on every stage of a device needs 1" in err


def test_schedule_prints_its_devices_and_chart(capsys):
    status, out, err = run(capsys, "interleaved-1f1b", *SMALL)
    assert (status, err) == (0, "")
    assert "interleaved-1f1b(chunks=2)" in out
    assert "makespan 28.5" in out
    chart = out.splitlines()[-4:]
    assert [line.split()[0] for line in chart] == ["0", "1", "2", "3"]
    assert len({len(line) for line in chart}) == 1
    assert chart[0].startswith("0 F")
    assert chart[3].startswith("3 ···")


def test_file_that_cannot_be_written_is_refused_before_the_search(capsys, monkeypatch):
    monkeypatch.setattr("panpipe.cli.schedule.build_schedule", None)
    assert cli.main(["schedule", "auto", *map(str, SMALL), "--csv", "/no/such/folder/x.csv"]) == 2
    assert "there is no folder '/no/such/folder'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zb", *SMALL), "there is no schedule 'zb': did you mean zb-"),
        (("1f1b", "--devices", 0, "--microbatches", 2), "devices is 0"),
        (("1f1b", "--devices", 2, "--microbatches", 0), "microbatches is 0"),
        (("1f1b", *SMALL, "--chunks", 2), "chunks is 2: 1f1b has one stage"),
        (("gpipe", *SMALL, "--chunks", 0), "--chunks is 0"),
        (("1f1b", *SMALL, "--forward", -1), "--forward is -1.0"),
        (("1f1b", *SMALL, "--backward-weight", "nan"), "--backward-weight is nan"),
        (("1f1b", *SMALL, "--comm", -1), "delay of a hop is -1.0"),
        (("1f1b", *SMALL, "--freed-by-input", 2), "--freed-by-input is 2.0"),
        (("1f1b", *SMALL, "--memory-limit", -1), "memory limit is -1.0"),
        (
            ("1f1b", *SMALL, "--stage-scale", "1,2"),
            "--stage-scale has 2 factors: 4 devices with 1 chunk have 4 stages",
        ),
        (("1f1b", *SMALL, "--stage-scale", "1,x,1,1"), "--stage-scale is '1,x,1,1': write numbers"),
        (("1f1b", *SMALL, "--stage-scale", "1,-1,1,1"), "--stage-scale has -1.0"),
        (("looped", *SMALL, "--run-ahead", "1,2"), "run-ahead 1,2 has 2 numbers"),
        (("looped", *SMALL, "--run-ahead", "1.5,2"), "--run-ahead is '1.5,2'"),
        (("1f1b", *SMALL, "--run-ahead", "4,3,2,1"), "--run-ahead is no parameter of 1f1b"),
        (("auto", *SMALL, "--rounds", "2"), "--rounds is no parameter of auto"),
        (("1f1b", *SMALL, "--csv", "/no/such/folder/x.csv"), "cannot write '/no/such/folder/x.csv'"),
        (("1f1b", *SMALL, "--svg", "/no/such/folder/x.svg"), "cannot write '/no/such/folder/x.svg'"),
        (("1f1b", "--devices", "x", "--microbatches", 2), "--devices"),
        (("1f1b", "--devices", 2), "--microbatches"),
        (("1f1b", *SMALL, "--bogus"), "--bogus"),
        ((), "NAME"),
    ],
)
def test_wrong_requests_are_one_line_and_status_2(capsys, words, message):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("panpipe: ")
    assert err.count("\n") == 1


def test_help_lists_every_command(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"


@pytest.mark.parametrize("words", [["nope"], ["--nope"]])
def test_unknown_commands_and_flags_are_status_2(capsys, words):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nope" in err
    assert err.count("\n") == 1


def test_wrong_option_names_the_help_of_its_command(capsys):
    assert cli.main(["schedule", "1f1b", "--stages", "4"]) == 2
    assert capsys.readouterr().err.endswith("; see panpipe schedule --help\n")
    assert cli.main(["checkpoint", "verify", "folder"]) == 2
    assert "'verify' is not one of 'check', 'export'" in capsys.readouterr().err
    assert cli.main(["--nope"]) == 2
    assert capsys.readouterr().err.endswith("; see panpipe --help\n")


def test_locale_without_a_character_gets_a_question_mark():
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"} | ascii_alone
    command = [sys.executable, "-m", "panpipe", "schedule", "1f1b", "--devices", "2", "--microbatches", "2"]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"?" in done.stdout


def test_an_unexpected_failure_is_a_traceback_and_status_1():
    code = (
        "import sys, panpipe.cli as cli, panpipe.answers.uniform as s\n"
        "s.find_family = lambda name: 1 / 0\n"
        "sys.exit(cli.main(['schedule', '1f1b', '--devices', '1', '--microbatches', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_schedule_command_does_not_import_heavy_packages():
    code = (
        "import sys; from panpipe.cli import main\n"
        "for line in '--help', 'schedule --help', 'schedule interleaved-1f1b --devices 8 --microbatches 9':\n"
        "    assert main(line.split()) == 0\n"
        "heavy = {'torch', 'simpy', 'scipy', 'networkx', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")


def test_schedules_that_offload_hold_less(capsys):
    options = ("--devices", 8, "--microbatches", 16)
    free, slow = (answer(capsys, "po-f", *options, "--host-copy", time) for time in (0, 3))
    assert max(free["peak_memory"]) <= max(slow["peak_memory"]) <= 2  # four passes of half a device's share
    assert slow["makespan"] == pytest.approx(free["makespan"])
    assert slow["offload"] == {str(stage): 1.0 for stage in range(16)}
    half = answer(capsys, "po-h", *options, "--host-copy", 3)
    assert max(slow["peak_memory"]) < max(half["peak_memory"]) < max(answer(capsys, "gis-h", *options)["peak_memory"])
    assert set(half["offload"]) == {str(stage) for stage in range(8)}
    assert "offload" not in answer(capsys, "gis-h", *options)


def test_link_that_is_too_slow_holds_more_and_takes_no_longer(capsys):
    options = ("--devices", 4, "--microbatches", 8)
    fast, slow, never = (answer(capsys, "po-f", *options, "--host-copy", time) for time in (1, 20, 1e6))
    assert max(fast["peak_memory"]) < max(slow["peak_memory"]) <= max(never["peak_memory"])
    assert slow["makespan"] <= 1.02 * never["makespan"]


def test_wrong_time_of_a_copy_is_refused(capsys):
    status, _, err = run(capsys, "po-f", *SMALL, "--host-copy", "inf")
    assert (status, err) == (2, "panpipe: --host-copy is inf: a time must be finite, at least 0\n")
