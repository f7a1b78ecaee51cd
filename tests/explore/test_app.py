"""The server: who may ask, what it answers, and how long work is cancelled."""

import json

import pytest
from panpipe.core.errors import RequestError
from panpipe.explore import uniform_answers
from panpipe.explore.app import Explorer, bind, serve
from panpipe.explore.question import PlanQuestion, UniformQuestion, parse_question
from panpipe.explore.results import Results
from starlette.testclient import TestClient

PORT, TOKEN = 8123, "secret"
HEADERS = {"X-Panpipe-Token": TOKEN}


@pytest.fixture(scope="module")
def client():
    app = Explorer(UniformQuestion(), Results()).application(TOKEN, PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as found:
        yield found


def lines(client, path, question, **more):
    response = client.post(path, json={"question": question, **more}, headers=HEADERS)
    found = [json.loads(line) for line in response.text.splitlines()]
    streamed = response.headers["Content-Type"] == "application/x-ndjson"
    assert not streamed or found.pop() == {"end": True}
    return found


def test_page_needs_the_token(client):
    assert client.get("/").status_code == 403
    assert client.get("/?token=other").status_code == 403
    page = client.get(f"/?token={TOKEN}")
    assert page.status_code == 200
    assert "connect-src 'self'" in page.text
    assert page.headers["Referrer-Policy"] == "no-referrer"
    assert client.post("/api/answer", json={"question": {"kind": "uniform"}}).status_code == 403


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:8123", "127.0.0.1:9", "127.0.0.1", ""])
def test_another_host_is_refused_even_with_the_token(client, host):
    # DNS rebinding: a name of another site that resolves to this machine.
    assert client.get(f"/?token={TOKEN}", headers={"Host": host}).status_code == 421


def test_another_site_is_refused(client):
    headers = {**HEADERS, "Origin": "http://attacker.example"}
    assert client.post("/api/answer", json={"question": {"kind": "uniform"}}, headers=headers).status_code == 403
    own = {**HEADERS, "Origin": f"http://127.0.0.1:{PORT}"}
    assert client.post("/api/answer", json={"question": {"kind": "uniform"}}, headers=own).status_code == 200


def test_answer_has_the_report_and_another_why_it_is_not_faster(client):
    question = {"kind": "uniform", "schedule": "zb-h1", "devices": 4, "comm": 0.5}
    (answer,) = lines(client, "/api/answer", question)
    (idle,) = lines(client, "/api/idle", question)
    report = answer["answer"]["report"]
    assert report["title"] == "zb-h1"
    assert report["units"] == "plain"
    assert answer["answer"]["command"] == "panpipe schedule zb-h1 --devices 4 --microbatches 8 --comm 0.5"
    causes = {cause["cause"]: cause["seconds"] for cause in idle["idle"]["causes"]}
    assert causes["messages"] > 0
    assert sum(causes.values()) == pytest.approx(idle["idle"]["idle_s"])


def test_schedule_above_the_limit_is_drawn_with_the_reason(client):
    answer, *_ = lines(client, "/api/answer", {"kind": "uniform", "schedule": "gpipe", "memory_limit": 2})
    assert "holds 8 on device 0" in answer["answer"]["misfit"]
    assert answer["answer"]["report"]["limits"] == [2.0] * 4


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"kind": "other"}, "a question's kind is uniform, plan, file"),
        ({"kind": ["plan"]}, "a question's kind is"),
        ({"kind": "uniform", "devices": 0}, "devices is 0: the explorer accepts 1 to 256"),
        ({"kind": "uniform", "microbatches": 1025}, "microbatches is 1025: the explorer accepts 1 to 1024"),
        ({"kind": "uniform", "chunks": 9}, "chunks is 9: the explorer accepts 1 to 8"),
        ({"kind": "uniform", "parameters": {"rounds": 2}}, "--rounds is no parameter of 1f1b"),
        ({"kind": "plan", "sudo": True}, "the page's question is not valid"),
        ({"kind": "uniform", "devices": "many"}, "question.devices"),
        ({"kind": "uniform", "color": 1}, "color"),
        ({"kind": "uniform", "schedule": "1f1c"}, "there is no schedule '1f1c': did you mean 1f1b"),
        ({"kind": "uniform", "parameters": {"block": "/etc/passwd"}}, "extra fields found (block)"),
        ({"kind": "file", "number": 3}, "there is no result 3"),
        ([], "a question's kind is"),
    ],
)
def test_wrong_question_is_refused_in_one_line(client, question, words):
    response = client.post("/api/answer", json={"question": question}, headers=HEADERS)
    assert words in json.loads(response.text.splitlines()[0])["error"]


def test_points_of_a_file_are_refused(client):
    response = client.post("/api/points", json={"question": {"kind": "file"}}, headers=HEADERS)
    assert "has no other schedules" in response.json()["error"]


def test_code_of_the_machine_runs_only_if_chosen(client):
    question = {"kind": "plan", "model": "os:getcwd"}
    for path in ("/api/answer", "/api/points", "/api/export"):
        response = client.post(path, json={"question": question, "what": "plan"}, headers=HEADERS)
        assert "is code of this machine" in json.loads(response.text.splitlines()[0])["error"]
    explorer = Explorer(UniformQuestion(), Results(), factory="os:getcwd")
    explorer._check_code(PlanQuestion(model="os:getcwd"), {})
    explorer._check_code(PlanQuestion(model="os:listdir"), {"run_code": "os:listdir"})
    with pytest.raises(RequestError, match="choose 'run its code'"):
        explorer._check_code(PlanQuestion(model="os:listdir"), {"run_code": "os:getcwd"})


def test_points_carry_their_questions():
    found = []
    question = UniformQuestion(devices=2, microbatches=4)

    def report(**line):
        found.append(line)
        if sum("point" in each for each in found) > 8:
            raise StopIteration

    with pytest.raises(StopIteration):
        uniform_answers.report_points(question, report)
    for point in (line["point"] for line in found if "point" in line):
        asked = parse_question(point["question"])
        scored, misfit = uniform_answers.scored_of(asked)
        assert misfit == ""
        assert scored.schedule.name == point["name"]
        assert scored.result.makespan == point["time"]


def test_port_in_use_is_refused_in_one_line():
    with bind(0) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"cannot listen on port {number} of 127.0.0.1: .*; give another --port"):
            bind(number)


def test_machine_without_a_browser_gets_the_address_and_a_line(monkeypatch, capsys):
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    serve(Explorer(UniformQuestion(), Results()), port=0, browser=True)
    printed = capsys.readouterr()
    assert printed.out.startswith("panpipe explore: http://127.0.0.1:")
    assert "?token=" in printed.out
    assert printed.err.startswith("no browser was found: open that address")
