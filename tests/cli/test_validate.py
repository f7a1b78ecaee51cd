"""``panpipe validate``: plans and schedule files, exit statuses 0, 2 and 3."""

import json

import pytest
from panpipe.cli import main
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import plan_json
from panpipe.core.schedules.schedule_csv import schedule_csv

from ..support.plans import hosted, leaves, orders, plan_of, scheduled

PLAN = scheduled("1f1b", 2, 4)
TOO_LARGE = scheduled("1f1b", 2, 4, cluster=fully_connected(2, 150, 1.0, 0.0))
OFFLOADS = scheduled(
    "1f1b", 2, 4, cluster=hosted(fully_connected(2, 10**9, 100.0, 0.0), 100.0), offload=[leaves(0, 80, "1: 0B0 0B0")]
)
LOWERED = "\n".join(
    ",".join(f"{a.stage}{a.kind}{a.microbatch}" for a in row if a.microbatch is not None) for row in lower(PLAN)
)
DEADLOCK = plan_of(orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), (0, 1))


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, newline="", encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_validate_json_of_a_plan(write, capsys):
    assert main(["validate", write("plan.json", plan_json(PLAN)), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["valid"], answer["devices"], answer["actions"], answer["warnings"]) == (True, 2, 16, [])
    assert answer["peak_saved_bytes"] == [200, 100]


@pytest.mark.parametrize(
    "text",
    [schedule_csv(PLAN.device_actions, PLAN.placement), LOWERED],
    ids=["compute-only", "lowered"],
)
def test_validate_of_a_schedule_file(text, write, capsys):
    assert main(["validate", write("schedule.csv", text), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["stages"], answer["microbatches"], answer["actions"]) == (2, 4, 16)
    assert answer["peak_memory_bytes"] == []


@pytest.mark.parametrize(
    ("file", "status", "message"),
    [
        (("plan.json", plan_json(DEADLOCK)), 2, "the plan deadlocks: "),
        (("plan.json", plan_json(PLAN)[:100]), 2, "is not a whole JSON file"),
        (("schedule.csv", "0F0,0B0\n1F0,0F1\n"), 2, "a stage has one device"),
        (("schedule.csv", "0F0,0B0,0F1\n"), 2, "stage 0 has no backward for microbatch 1"),
        (("schedule.csv", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), 2, "the plan deadlocks: "),
        (("schedule.csv", "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n"), 2, "device 1 issues no 1RECV_F0<0: add it"),
        (("plan.json", plan_json(TOO_LARGE)), 3, "device 0 holds 207 bytes at 0F1 and has 150: 57 too many"),
    ],
)
def test_invalid_plans_are_refused(file, status, message, write, capsys):
    assert main(["validate", write(*file)]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_plan_that_offloads_shows_its_host_arenas(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = write("plan.json", plan_json(OFFLOADS))
    assert main(["validate", path]) == 0
    assert "on the host" in capsys.readouterr().out
    assert main(["validate", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_bytes"] == [128, 0]


def test_hand_edited_offload_is_refused_with_the_action(write, capsys):
    path = write("plan.json", plan_json(OFFLOADS).replace('"reload_after": "0B0"', '"reload_after": "0B1"'))
    assert main(["validate", path]) == 2
    assert "reload_after is 0B1, and 0B1 reads the saved tensors" in capsys.readouterr().err


def test_host_that_is_too_small_exits_3_with_what_would_fit(write, capsys):
    text = plan_json(OFFLOADS).replace('"kind": "host"', '"kind": "host", "memory_bytes": 100')
    assert main(["validate", write("plan.json", text)]) == 3
    said = capsys.readouterr().err
    assert "host 'host' holds 128 bytes of offloaded tensors of device 0 and has 100: 28 too many" in said
    assert "keep stage 0 on the device (nothing else is offloaded then)" in said
