"""Whose a file of source code is."""

import logging
from pathlib import Path

import numpy
import panpipe.core.capture
import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.values.code_origin import Origin, is_own, is_user_code, is_users_own, origin_of

_ROOT = Path(panpipe.core.capture.__file__).parents[2]


@pytest.mark.parametrize(("file", "origin", "named"), [
    (__file__, Origin.USER, True),
    ("/home/me/train.py", Origin.USER, True),
    (f"{_ROOT}/core_of_mine/train.py", Origin.USER, True),
    (f"{_ROOT}/examples/train.py", Origin.USER, True),
    ("<stdin>", Origin.USER, False),
    ("<string>", Origin.USER, False),
    (numpy.__file__, Origin.LIBRARY, True),
    (f"{Path(torch.__file__).parent}vision/models.py", Origin.LIBRARY, True),
    ("/usr/lib/python3/dist-packages/PIL/Image.py", Origin.LIBRARY, True),
    (torch.nn.Linear.forward.__code__.co_filename, Origin.LAYERS, False),
    (torch.nn.Module.__call__.__code__.co_filename, Origin.INTERNAL, False),
    (torch.__file__, Origin.INTERNAL, False),
    (logging.__file__, Origin.INTERNAL, False),
    (capture_step.__code__.co_filename, Origin.INTERNAL, False),
    ("<frozen importlib._bootstrap>", Origin.INTERNAL, False),
])  # fmt: skip
def test_the_origin_of_a_file_decides_whether_its_lines_are_named(file, origin, named):
    assert origin_of(file) is origin
    assert is_user_code(file) == named
    assert is_users_own(file) == (origin is Origin.USER)
    assert not (is_own(file) and named)
