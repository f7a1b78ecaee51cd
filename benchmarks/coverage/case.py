"""What a model of a suite is, and how models are found in a folder of foreign sources."""

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from attrs import field, frozen
from torch import Tensor, nn

ROWS = 8
"""Samples in each batch."""
UNUSED = (
    "cv2", "gym", "gymnasium", "inflect", "iopath", "kaldi_io", "kornia", "lameenc", "librosa", "matplotlib", "musdb",
    "museval",
    "onnx", "pandas", "pycocotools", "pypdfium2", "requests", "sklearn", "skimage", "spacy", "tensorboardX",
    "torchtext",
    "treetable", "unidecode",
)  # fmt: skip
"""Packages for data, plots and logs that no training step uses; mocks, where they are not installed."""


@frozen
class Case:
    """A model with its training step.

    Args:
        model: with random weights, in training mode.
        step: ``step(model, batch)``, as its own training script computes the loss.
        batch: of random values, in the shapes of real ones.
        options: for the second try, if the default call is refused: where the samples are, or one microbatch for a
            batch that is one sample. The reference has them, too.
    """

    model: nn.Module
    step: Callable[[Any, Any], Any]
    batch: Any
    options: dict[str, Any] = field(factory=lambda: {"batch_dims": 0})


Suite = dict[str, Callable[[], Case]]


def images(size: int = 64, channels: int = 3, rows: int = ROWS) -> Tensor:
    """Random images."""
    return torch.randn(rows, channels, size, size)


def classes(count: int, *shape: int) -> Tensor:
    """Random class numbers, one a sample if no shape is given."""
    return torch.randint(0, count, shape or (ROWS,))


class _Unused(MetaPathFinder, Loader):
    """Finds packages that are not installed and that no training step uses, as mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in UNUSED else None

    def create_module(self, spec: ModuleSpec) -> Any:
        mock = MagicMock()
        mock.__path__ = []
        mock.__spec__ = spec
        mock.__version__ = "0"
        return mock

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(_Unused())


def definitions(path: Path, **known: Any) -> types.ModuleType:
    """The imports, functions and classes of a script, which is not run.

    Args:
        path: of the script.
        known: globals that its functions read.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = (ast.Import, ast.FunctionDef, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, kept) or _imports_a_package(node)]
    module = types.ModuleType(f"foreign_{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    vars(module).update(known)
    sys.path.append(str(path.parent))
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


def _imports_a_package(node: ast.stmt) -> bool:
    """Whether it imports names, and not from the frame of TorchBench, which needs all its packages."""
    return isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith("torchbenchmark")


def package(folder: Path, name: str) -> Any:
    """A module of a folder, whose parent packages are not run: they would import whole frameworks.

    Args:
        folder: of the outermost package.
        name: such as ``torchbenchmark.models.dlrm.dlrm_s_pytorch``.
    """
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        if parent not in sys.modules:
            module = types.ModuleType(parent)
            module.__path__ = [str(folder.joinpath(*parents[:depth]))]
            sys.modules[parent] = module
    return importlib.import_module(name)
