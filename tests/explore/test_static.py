"""The explorer without a server, for the documentation's site."""

import json
import re

from panpipe.cli import main
from panpipe.explore.static import write_explorer


def test_every_choice_of_the_page_has_a_file_with_the_answer_of_the_command(tmp_path, capsys):
    write_explorer(tmp_path, devices=(2,), microbatches=(4,))
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    for name in data["grid"]["schedule"]:
        text = (tmp_path / "answers" / f"{name}-2-4.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        assert set(lines[0]) <= {"answer", "error"}, name
    assert main(["schedule", "1f1b", "--devices", "2", "--microbatches", "4", "--json"]) == 0
    first = json.loads((tmp_path / "answers" / "1f1b-2-4.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["answer"]["figures"]["makespan"] == json.loads(capsys.readouterr().out)["makespan"]
    points = (tmp_path / "answers" / "points-2-4.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(points.pop()) == {"end": True}
    assert {json.loads(line)["point"]["family"] for line in points} >= {"1f1b", "gpipe", "zb-v"}
