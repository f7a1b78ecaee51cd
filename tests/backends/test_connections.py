"""The number of hardware queues of a GPU: requested when the package is imported, before CUDA is initialized."""

import json
import os
import subprocess
import sys
import warnings

import pytest
from panpipe.backends.nccl import VARIABLE, warn_of_few_connections

SCRIPT = """
import json, os, sys, types, warnings
if sys.argv[1] != "no torch":
    cuda = types.SimpleNamespace(is_initialized=lambda: sys.argv[1] == "initialized")
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import panpipe
print(json.dumps([os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), [str(each.message) for each in said]]))
"""


@pytest.mark.parametrize(
    ("state", "given", "found", "warned"),
    [
        ("no torch", None, "32", False),
        ("imported", None, "32", False),
        ("initialized", None, None, True),
        ("initialized", "16", "16", False),
        ("no torch", "1", "1", False),
    ],
)
def test_importing_the_package_requests_all_queues_unless_it_is_too_late(state, given, found, warned):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if given is None else {VARIABLE: given}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, state], env=environment, capture_output=True, text=True, check=True
    )
    value, said = json.loads(done.stdout)
    assert value == found
    assert len(said) == warned
    assert all("import panpipe first, or set CUDA_DEVICE_MAX_CONNECTIONS=32" in text for text in said)


@pytest.mark.parametrize(("given", "warned"), [("1", True), (None, True), ("16", False), ("32", False)])
def test_nccl_warns_once_of_few_queues(given, warned, monkeypatch):
    warn_of_few_connections.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_few_connections()
    assert len(said) == warned
    warn_of_few_connections.cache_clear()
