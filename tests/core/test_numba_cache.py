"""Compiled functions with and without a cache folder."""

import ast
import os
import subprocess
import sys

import numpy as np
import pytest
from panpipe.core.numba_cache import COMPILING, interpreted, njit

HEAD = "from panpipe.core.numba_cache import is_compiled, njit\n"
DOUBLED = HEAD + "\n@njit()\ndef doubled(x):\n    return 2 * x\n"
NAMED = (
    HEAD
    + """
from typing import NamedTuple

class Old(NamedTuple):
    x: int

@njit()
def doubled(one):
    return 2 * one.x
"""
)
OUTER = HEAD + "from inner_example import times\n\n@njit()\ndef outer(x):\n    return times(x)\n"
USERS = "from numba import njit\n\n@njit(cache=True)\ndef tripled(x):\n    return 3 * x\n"
SCRIPT = """
import panpipe
panpipe.__path__.append(".")
import panpipe.noticed_example as noticed, users_example as users
import doubled_example, named_example, outer_example
from panpipe.core.numba_cache import compile_notice, is_compiled

def called(function, argument):
    return [is_compiled(function), function(argument), is_compiled(function)]

notices = []
with compile_notice(notices.append), compile_notice(notices.append):
    users.tripled(3)
    notices.append("then")
    noticed.doubled(21), noticed.doubled(2.0)
named = next(getattr(named_example, name) for name in ("Old", "New") if hasattr(named_example, name))
print([notices, called(doubled_example.doubled, 21), outer_example.outer(21), called(named_example.doubled, named(21))])
"""


def python(script, folder, **environment):
    """What a script prints in a new process, as a value."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=os.environ | environment, check=True, capture_output=True,
        encoding="utf-8",
    )  # fmt: skip
    return ast.literal_eval(done.stdout)


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """For two processes: notices, and whether functions are compiled before they are called, and what they return.

    Before the second process a function that another one calls is changed, and a class of an argument renamed.
    """
    folder, found = tmp_path_factory.mktemp("compiled"), []
    for factor, name in ((2, "Old"), (3, "New")):
        files = {
            "doubled": DOUBLED, "noticed": DOUBLED, "users": USERS, "outer": OUTER, "named": NAMED.replace("Old", name),
            "inner": f"{HEAD}\n@njit()\ndef times(x):\n    return {factor} * x\n",
        }  # fmt: skip
        for module, source in files.items():
            path = folder / f"{module}_example.py"
            if not path.exists() or path.read_text(encoding="utf-8") != source:
                path.write_text(source, encoding="utf-8")
        found.append(python(SCRIPT, folder, NUMBA_CACHE_DIR=str(folder / "cache")))
    return list(zip(*found, strict=True))


def test_notice_is_given_once_and_only_for_functions_of_panpipe(twice):
    assert twice[0] == (["then", COMPILING], ["then"])


def test_function_is_compiled_once_its_machine_code_is_on_disk(twice):
    assert twice[1] == ([False, 42, True], [True, 42, True])


def test_function_is_compiled_again_if_one_that_it_calls_has_changed(twice):
    assert twice[2] == (42, 63)


def test_function_is_compiled_again_if_its_index_names_a_removed_class(twice):
    assert twice[3] == ([False, 42, True], [False, 42, True])


def test_machine_code_next_to_the_sources_is_used_on_any_cpu(tmp_path):
    (tmp_path / "compiled_example.py").write_text(DOUBLED, encoding="utf-8")
    script = "import compiled_example as e; print([e.is_compiled(e.doubled), e.doubled(21), len(e.doubled.signatures)])"
    found = [python(script, tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR="")]
    os.utime(tmp_path / "compiled_example.py")  # an installation writes the file anew
    found.append(python(script, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "own")))
    assert found == [[False, 42, 1], [True, 42, 1]]
    assert not list((tmp_path / "own").rglob("*.nbi"))


def test_interpreted_functions_are_not_compiled_and_keep_the_callers_random_numbers():
    @njit()
    def drawn(seed, count):
        np.random.seed(seed)
        total = 0.0
        for _ in range(count):
            total += np.random.random() + np.random.randint(7)
        return total

    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    with interpreted():
        found = drawn(1, 10)
    assert np.random.random() == expected
    assert not drawn.signatures
    assert drawn(1, 10) == found
    assert drawn.signatures
