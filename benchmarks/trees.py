"""Two working trees of this repository next to each other, so that one run can compare them."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[1]


@frozen
class Tree:
    """A working tree.

    Args:
        folder: where it is.
        imports: a folder with a link ``panpipe`` to it.
    """

    folder: Path
    imports: Path

    def run(self, *command: str) -> str:
        """Standard output of a command of Python, which imports this tree as ``panpipe``."""
        variables = {**os.environ, "PYTHONPATH": str(self.imports), "PANPIPE_CACHE": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.imports, env=variables, capture_output=True, text=True, check=False,
            encoding="utf-8",
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} in {self.folder} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def script(self, name: str, *arguments: str) -> str:
        """Standard output of a benchmark, whichever folder it is in."""
        found = sorted((self.folder / "benchmarks").rglob(f"{name}.py"))
        if not found:
            raise SystemExit(f"{self.folder} has no benchmark {name}.py")
        return self.run(str(found[0]), *arguments)

    def command(self, *arguments: str) -> tuple[dict[str, float], float]:
        """The answer of ``panpipe … --json``, and the seconds that it took of a core."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        text = self.run("-m", "panpipe", *arguments, "--json")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return json.loads(text), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def trees(commit: str, other: str | None = None) -> Iterator[tuple[Tree, Tree]]:
    """A commit's tree, checked out in a temporary folder, and this one, or that of another commit."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, found = Path(name), []
        for number, wanted in enumerate((commit, other)):
            tree = ROOT if wanted is None else stack.enter_context(_checked_out(wanted, folder / f"commit{number}"))
            imports = folder / f"imports{number}"
            imports.mkdir()
            (imports / "panpipe").symlink_to(tree, target_is_directory=True)
            found.append(Tree(tree, imports))
        yield found[0], found[1]


@contextmanager
def _checked_out(commit: str, folder: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)
