"""Every command of a page or an example that starts a script: with ``python`` here, with ``torchrun`` on its ranks.

Ranks are forks, which import once for all of them.
"""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from ..support.launch import forked_script

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^ *(?:OMP_NUM_THREADS=1 )?(python|torchrun [^\n]*?) ?(examples/\w+\.py)([^\n]*)$", re.MULTILINE)
ELSEWHERE = {"examples/elastic.py": "test_elastic.py", "examples/train_gpt2.py": "test_train_gpt2.py"}
"""What other tests run: two agents, and minutes of training."""
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


QUICK = {"accelerate_loop.py", "lightning_module.py", "own_backend.py", "own_loop.py"}
"""What runs in ``make test`` in one process; and ``resume.py`` on two ranks."""


def commands() -> list[tuple[str, str, str]]:
    """Launcher, script and arguments of each command."""
    found = {}
    for file in FILES:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        found |= {match.groups(): None for match in COMMAND.finditer(text) if match[2] not in ELSEWHERE}
    return list(found)


def marks(launcher: str, script: str, options: str) -> list[pytest.MarkDecorator]:
    name = Path(script).name
    quick = name in QUICK if launcher == "python" else name == "resume.py" and not options.strip()
    return [] if quick else [pytest.mark.slow]


def test_every_example_has_a_command_and_every_file_of_another_test_exists():
    scripts = {script for _, script, _ in commands()} | set(ELSEWHERE)
    assert scripts == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert all((Path(__file__).parent / name).exists() for name in ELSEWHERE.values())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("launcher", "script", "options"),
    [pytest.param(*each, id=" ".join(each), marks=marks(*each)) for each in commands()],
)
def test_documented_command_runs(launcher, script, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(options, comments=True)
    if launcher == "python":
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        ranks = int(re.search(r"--nproc-per-node (\d+)", launcher)[1])
        forked_script(ROOT / script, *arguments, ranks=ranks)
