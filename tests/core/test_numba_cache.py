"""Compiled functions with and without a cache folder."""

import os
import subprocess
import sys

import numpy as np
from panpipe.core.numba_cache import COMPILING, interpreted, njit


def test_function_is_compiled_once_its_machine_code_is_on_disk(tmp_path):
    source = "from panpipe.core.numba_cache import is_compiled, njit\n\n@njit()\ndef doubled(x):\n    return 2 * x\n"
    (tmp_path / "compiled_example.py").write_text(source, encoding="utf-8")
    script = "import compiled_example as e; print(e.is_compiled(e.doubled), e.doubled(21), e.is_compiled(e.doubled))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    found = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
            encoding="utf-8",
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert found == [["False", "42", "True"], ["True", "42", "True"]]


def test_machine_code_next_to_the_sources_is_used_on_any_cpu(tmp_path):
    source = "from panpipe.core.numba_cache import is_compiled, njit\n\n@njit()\ndef doubled(x):\n    return 2 * x\n"
    (tmp_path / "compiled_example.py").write_text(source, encoding="utf-8")
    script = "import compiled_example as e; print(e.is_compiled(e.doubled), e.doubled(21), len(e.doubled.signatures))"
    found = []
    for environment in (
        {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": ""},
        {"NUMBA_CACHE_DIR": str(tmp_path / "own")},
    ):
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment, check=True, capture_output=True, text=True
        )
        found.append(done.stdout.split())
        os.utime(tmp_path / "compiled_example.py")  # an installation writes the file anew
    assert found == [["False", "42", "1"], ["True", "42", "1"]]
    assert not list((tmp_path / "own").rglob("*.nbi"))


def test_function_is_compiled_again_if_one_that_it_calls_has_changed(tmp_path):
    head = "from panpipe.core.numba_cache import njit\n"
    calls = head + "from inner_example import times\n\n@njit()\ndef outer(x):\n    return times(x)\n"
    (tmp_path / "outer_example.py").write_text(calls, encoding="utf-8")
    environment, found = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}, []
    for factor in (2, 3):
        inner = f"{head}\n@njit()\ndef times(x):\n    return {factor} * x\n"
        (tmp_path / "inner_example.py").write_text(inner, encoding="utf-8")
        command = [sys.executable, "-c", "import outer_example as e; print(e.outer(21))"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True)
        found.append(done.stdout.strip())
    assert found == ["42", "63"]


def test_function_is_compiled_again_if_its_index_names_a_removed_class(tmp_path):
    source = (
        "from typing import NamedTuple\n\nfrom panpipe.core.numba_cache import is_compiled, njit\n\n"
        "class Old(NamedTuple):\n    x: int\n\n@njit()\ndef doubled(one):\n    return 2 * one.x\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for name in ("Old", "New"):
        (tmp_path / "compiled_example.py").write_text(source.replace("Old", name), encoding="utf-8")
        script = f"import compiled_example as e; print(e.is_compiled(e.doubled), e.doubled(e.{name}(21)))"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True)
        found.append(done.stdout.split())
    assert found == [["False", "42"], ["False", "42"]]


NOTICE = """
import panpipe
panpipe.__path__.append(".")
import panpipe.compiled_example as example, users_example as users
from panpipe.core.numba_cache import compile_notice
with compile_notice(print), compile_notice(print):
    users.tripled(3)
    print("then")
    example.doubled(21), example.doubled(2.0)
"""


def test_notice_is_given_once_and_only_for_functions_of_panpipe(tmp_path):
    source = "from numba import njit\n\n@njit(cache=True)\ndef {0}(x):\n    return {1} * x\n"
    (tmp_path / "users_example.py").write_text(source.format("tripled", 3), encoding="utf-8")
    (tmp_path / "compiled_example.py").write_text(
        source.format("doubled", 2).replace("from numba", "from panpipe.core.numba_cache").replace("cache=True", ""),
        encoding="utf-8",
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    found = [
        subprocess.run(
            [sys.executable, "-c", NOTICE], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
            encoding="utf-8",
        ).stdout.splitlines()
        for _ in range(2)
    ]  # fmt: skip
    assert found == [["then", COMPILING], ["then"]]


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
