"""The structure: the direction of imports, no circles, and folders of a size that one can read."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PARTS = {
    "core": {"core"},
    "backends": {"core", "backends"},
    "runtimes": {"core", "backends", "runtimes"},
    "simulators": {"core", "simulators"},
}
"""Part of the package → the parts that it may import."""
FILES = 20
"""Most source files in a folder."""
SOURCES = {".py", ".js", ".css", ".html"}
"""Endings of source files."""


def modules() -> list[Path]:
    return [path.relative_to(ROOT) for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]


@cache
def statements(module: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


@cache
def imports(module: Path) -> tuple[Path, ...]:
    """The files of this package that a module imports, at once or in a function."""
    found = []
    for node in statements(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = [module, *module.parents][node.level].joinpath(*(node.module or "").split("."))
            files = [folder / f"{alias.name}.py" for alias in node.names]
            other = folder.with_suffix(".py") if (ROOT / folder.with_suffix(".py")).exists() else folder / "__init__.py"
            found += [file if (ROOT / file).exists() else other for file in files]
    return tuple(found)


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_one_way(part):
    for module in modules():
        if module.parts[0] == part:
            strangers = [one for one in imports(module) if one.parts[0] in PARTS and one.parts[0] not in PARTS[part]]
            assert not strangers, f"{module} imports {strangers[0]}"


def test_core_does_not_import_simpy():
    for module in modules():
        if module.parts[0] == "core":
            for node in statements(module):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert "simpy" not in {name.split(".")[0] for name in names}, module


def edges() -> Iterator[tuple[Path, Path]]:
    for module in modules():
        for other in imports(module):
            yield module, other


def test_modules_import_each_other_in_no_circle():
    circles = networkx.strongly_connected_components(networkx.DiGraph(edges()))
    assert not [sorted(map(str, circle)) for circle in circles if len(circle) > 1]


def test_folders_import_each_other_in_no_circle():
    """A folder may share with its own sub-folders, as a package does with its modules."""
    between = {
        (module.parent, other.parent)
        for module, other in edges()
        if module.parent not in (other.parent, *other.parent.parents) and other.parent not in module.parent.parents
    }
    circles = networkx.strongly_connected_components(networkx.DiGraph(between))
    assert not [sorted(map(str, circle)) for circle in circles if len(circle) > 1]


def test_a_step_passes_the_files_that_the_documentation_lists():
    """Each file is linked to an earlier one by an import, or by the table in which kinds of instructions register."""
    table = Path("runtimes/engine/instructions/instructions.py")
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    section = text.split("## A step, file by file")[1].split("\n## ")[0]
    files = [Path(name) for name in re.findall(r"^\d+\. `(.*?)`", section, re.MULTILINE)]
    assert 2 <= len(files) <= 12
    assert len({file.parent for file in files}) <= 5
    for number, file in enumerate(files[1:], 1):
        earlier = files[:number]
        registered = table in imports(file) and any(table in imports(one) for one in earlier)
        linked = any(file in imports(one) for one in earlier) or set(imports(file)) & set(earlier)
        assert linked or registered, file


def test_no_folder_has_more_source_files_than_one_can_read():
    tops = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    folders = [
        folder
        for top in tops
        if top.name not in ("build", "dist", "out")
        for folder in (top, *top.rglob("*"))
        if folder.is_dir()
    ]
    for folder in folders:
        count = sum(1 for path in folder.iterdir() if path.suffix in SOURCES and path.name != "__init__.py")
        assert count <= FILES, f"{folder.relative_to(ROOT)} has {count} source files: move some to another folder"


LINES = 450
"""Most lines of a module: what one concept takes, with its documentation."""
LONG = {
    "runtimes/pipeline.py",  # the public class, whose docstrings are its reference
}
"""Modules that are longer."""
TESTED_PARTS = (*PARTS, "cli", "answers", "explore", "integrations")


def all_modules() -> list[Path]:
    found = (path for part in TESTED_PARTS for path in sorted((ROOT / part).rglob("*.py")))
    return [path.relative_to(ROOT) for path in found if path.name != "__init__.py"]


def test_no_module_is_longer_than_one_concept():
    for module in all_modules():
        lines = len((ROOT / module).read_text(encoding="utf-8").splitlines())
        assert lines <= LINES or str(module) in LONG, f"{module} has {lines} lines: divide it by concepts"


def strangers_to_users(file: Path) -> Iterator[str]:
    """What a file of tests, or one of its helpers, uses of panpipe that is no public name."""
    import panpipe

    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("panpipe."))
        elif isinstance(node, ast.ImportFrom) and node.level:
            folder = [file, *file.parents][node.level].joinpath(*(node.module or "").split("."))
            files = {folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)}
            for other in files:
                if other.exists() and LAWS not in other.parents:
                    yield from strangers_to_users(other)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "panpipe":
            names = {alias.name for alias in node.names}
            parts = {f"panpipe.{part}" for part in panpipe.PARTS}
            yield from ({node.module} - parts if "." in node.module else names - set(panpipe.__all__))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "panpipe":
            yield from {node.attr} - {*panpipe.__all__, "__version__"}


LAWS = ROOT / "tests" / "laws"


def test_laws_use_public_names_alone():
    for file in LAWS.rglob("*.py"):
        found = list(strangers_to_users(file))
        assert not found, f"{file.relative_to(ROOT)} uses {found[0]}"
