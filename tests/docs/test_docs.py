"""The documentation: its Python and its commands run, its links lead somewhere, its make targets exist.

A page's Python blocks run in order, in one namespace and in an empty folder, after what the page hides in a comment
``<!-- setup … -->``. Of its shell blocks the lines that start with ``panpipe`` run; tests/examples/test_commands.py
runs those with an example. After ``<!-- slow -->`` a block runs in ``make test-slow`` alone, after ``<!-- 4 ranks
-->`` on ranks, after the file PAGE_on_ranks.py of this folder, and after ``<!-- not run: why -->`` never. A block after
``<!-- output -->`` is what the Python block before it prints. The meshes that pages name train.
"""

import contextlib
import io
import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from attrs import frozen
from panpipe import api
from panpipe.cli import COMMANDS, main
from panpipe.runtimes import pipeline

from ..support.launch import forked_script, torchrun_script

ROOT = Path(__file__).parents[2]
MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PART = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->"
    r"|(?:<!-- (?P<how>slow|output|not run: [^>]+|\d+ ranks) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

pytestmark = pytest.mark.filterwarnings("default")  # what a page shows may warn, as it would a reader


@frozen
class Block:
    """A piece of a page that can run: ``language`` is ``python`` or ``sh``; ``how`` says whether it does."""

    language: str
    code: str
    how: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for part in PART.finditer(text):
        start = "setup" if part["setup"] else "code"
        line = text.count("\n", 0, part.start(start)) + 1
        found.append(Block(part["language"] or "python", part[start], part["how"] or "", line))
    return found


def run(page: Path, ones: list[Block]) -> None:
    namespace, printed = {"__name__": "__main__"}, io.StringIO()
    for block in ones:
        if block.how == "output":
            assert printed.getvalue() == block.code, f"{page.name}, line {block.line}"
        elif block.how.endswith("ranks"):
            before = Path(__file__).with_name(f"{page.stem}_on_ranks.py").read_text(encoding="utf-8")
            Path("ranks.py").write_text(f"{before}\n{block.code}", encoding="utf-8")
            forked_script(Path("ranks.py").resolve(), ranks=int(block.how.split()[0]))
        elif block.language == "python":
            with contextlib.redirect_stdout(printed := io.StringIO()):
                # Blank lines in front: an error names the page's own line.
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        elif block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.startswith("panpipe "):
                    assert main(shlex.split(line, comments=True)[1:]) == 0, f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_and_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(page, [block for block in blocks(page) if block.how != "slow" and not block.how.startswith("not run")])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_everything_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(page, [block for block in blocks(page) if not block.how.startswith("not run")])


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_script_of_a_page_runs_on_two_ranks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("".join(b.code for b in blocks(ROOT / page) if b.language == "python"), encoding="utf-8")
    done = torchrun_script(script, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]


SHELL = re.compile(r"panpipe |make \w|(OMP_NUM_THREADS=1 )?(torchrun|python) .*\b(examples|benchmarks)/\w+\.py|$")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_block_is_left_out_by_its_form(page):
    text, found = page.read_text(encoding="utf-8"), blocks(page)
    assert 2 * len([block for block in found if f"```{block.language}\n{block.code}" in text]) == text.count("```")
    for block in found:
        assert block.language in ("python", "sh", "text", "toml", "json"), block
        if block.language == "sh" and not block.how.startswith("not run"):
            for line in block.code.replace("\\\n", " ").splitlines():
                assert SHELL.match(line), f"{page.name}: nothing runs {line}"


def meshes() -> dict[str, bool]:
    """Mesh → whether it is slow, of each mesh that a page names: all but replicas of two stages."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = {mesh for text in texts for mesh in re.findall(r"\b(pp=\d+(?:,dp=\d+)?\b(?!,)|dp=\d+,pp=\d+)", text)}
    return {mesh: mesh != "pp=2,dp=2" for mesh in sorted(found)}


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.slow] if slow else []) for mesh, slow in meshes().items()]
)
def test_mesh_of_a_page_trains_or_is_planned(mesh, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ranks = math.prod(map(int, re.findall(r"\d+", mesh)))
    if ranks <= 16:
        code = next(block.code for block in blocks(ROOT / "docs" / "clusters.md") if block.language == "python")
        script = tmp_path / "train.py"
        script.write_text(code.replace('plan="1f1b"', f'plan="1f1b", mesh="{mesh}"'), encoding="utf-8")
        assert mesh in script.read_text(encoding="utf-8")
        forked_script(script, ranks=ranks)
    else:
        command = f"plan --model gpt2 --cluster {ranks // 8}x8xA100-80GB --mesh {mesh} --microbatches {ranks}"
        assert main(command.split()) == 0


@pytest.mark.slow
def test_mesh_of_three_dimensions_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = next(block for block in blocks(ROOT / "docs" / "planning.md") if block.how == "4 ranks")
    code = block.code.replace('(2, 2), mesh_dim_names=("pp", "tp")', '(2, 2, 2), mesh_dim_names=("pp", "dp", "tp")')
    code = code.replace('mesh="pp=2,tp=2"', 'mesh="pp=2,dp=2,tp=2"')  # of docs/works-with.md
    before = Path(__file__).with_name("planning_on_ranks.py").read_text(encoding="utf-8")
    Path("ranks.py").write_text(f"{before}\n{code}\nassert pipe.step(batch).isfinite()\n", encoding="utf-8")
    assert "dp=2,tp=2" in code
    forked_script(Path("ranks.py").resolve(), ranks=8)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_in_sentences_exist(page, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    text = PART.sub("", page.read_text(encoding="utf-8"))
    for command, rest in re.findall(r"`panpipe ([a-z]+)([^`]*)`", text):
        assert command in COMMANDS, f"{page.name} names panpipe {command}"
        main([command, "--help"])
        shown = capsys.readouterr().out
        for option in re.findall(r"--[\w-]+", rest):
            assert option in shown, f"{page.name} names {option} of panpipe {command}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"`pip install '[\w.]+\[(\w+)\]'`", text)) <= set(extras)
    for path in re.findall(r"`python ([\w/]+\.py)`", text):
        assert path == "train.py" or (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in headings(linked), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub forms them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_make_targets_and_scripts_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in blocks(page):
        if block.language != "sh":
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "make":
                assert set(words[1:]) <= targets, f"{page.name}: {line}"
            for word in words:
                if re.match(r"(examples|benchmarks)/[\w/]+\.py$", word):
                    assert (ROOT / word).exists(), f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_source_files_that_a_page_names_exist(page):
    folders = "answers|backends|benchmarks|cli|core|docs|examples|explore|integrations|runtimes|simulators|tests"
    for path in re.findall(rf"`((?:{folders})/[\w/.]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_names_of_the_api_reference_exist_and_their_options_are_on_lines_of_their_own():
    lines = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    names = [line.removeprefix("::: ") for line in lines if line.startswith(":::")]
    assert len(names) > 15
    for name in names:
        path = ROOT.joinpath(*name.split(".")[1:])
        if not path.with_suffix(".py").exists():
            source = path.parent.with_suffix(".py").read_text(encoding="utf-8")
            assert re.search(rf"^(class|def) {path.name}\b", source, re.MULTILINE), name
    assert [line for line in lines if "options:" in line] == ["    options:"] * 3


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index


def test_messages_of_the_troubleshooting_page_are_messages_of_the_package():
    joined = re.compile(r"\"\s*\n\s*f?\"")  # a message over several lines
    text = "".join(
        joined.sub("", path.read_text(encoding="utf-8"))
        for folder in ("core", "runtimes", "backends", "cli", "integrations")
        for path in (ROOT / folder).rglob("*.py")
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        part for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for part in re.findall(r"`([^`]+)`", row)
    ]
    assert quoted
    for message in quoted:
        assert message in text, f"no message contains: {message}"


def figures(text: str) -> list[str]:
    """The numbers of a text, without marks between thousands; of names such as 1F1B none."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text.replace(",", ""))


def is_in(figure: str, text: str) -> bool:
    """Whether a text has a number that rounds to this figure."""
    digits = len(figure.partition(".")[2])
    return any(f"{float(found):.{digits}f}" == figure for found in figures(text))


def test_figures_of_the_page_of_measurements_are_in_the_result_files_that_it_names():
    rows = [row.split("|")[1:4] for row in MEASURED.splitlines() if ".md` |" in row]
    assert len(rows) > 8
    for what, said, files in rows:
        found = [ROOT / "benchmarks" / "results" / name for name in re.findall(r"`(\w+\.md)`", files)]
        text = "".join(path.read_text(encoding="utf-8") for path in found)
        for figure in figures(said):
            assert is_in(figure, text), f"{figure} of '{what.strip()}' is not in {files}"


def test_figures_of_the_readme_are_on_the_page_of_measurements():
    tables = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## Compared")[2].partition("## Documentation")[0]
    )
    for row in re.findall(r"^\| [^|]+\|(.+)\|$", tables, re.MULTILINE):
        for figure in figures(row):
            assert is_in(figure, MEASURED), f"{figure} is not in docs/measured.md: {row}"


def test_each_result_file_opens_with_what_it_shows_and_on_which_commit():
    for path in (ROOT / "benchmarks" / "results").glob("*.md"):
        opening = path.read_text(encoding="utf-8").partition("\n\n")[0]
        assert opening[0] not in "#|", path.name
        assert re.search(r"\b[0-9a-f]{8}\b", opening), path.name


def test_one_page_lists_the_names_of_earlier_releases():
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").split("# Names of earlier releases")[1]
    renamed = {name for name, instead in pipeline._INSTEAD.items() if ": it is " in instead}
    assert [name for name in {*api._MOVED, *renamed} if f"`{name}`" not in page] == []
