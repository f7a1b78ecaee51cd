"""Models to which the user applied ``parallelize_module``: the program of one tensor rank, for planning.

The step runs once over fake tensors, with DTensors around fake parts of the parameters, and torch's DTensor decides
what each rank computes and where it communicates. The recorded program has plain tensors and all-reduces::

    step(model) ──▶ DTensor over fake tensors ──▶ operators of one rank, _c10d_functional.all_reduce ──▶ a plain step

No gradient flows while it is recorded. The backward is derived from the recorded forward, where each all-reduce has an
all-reduce as its gradient: as many as DTensor's own backward has with column and row layouts, at other places.
torch's fake process group is enough: no other rank and no device is needed.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..core.capture.graph.tensor_sums import ALL_REDUCE, SUM
from ..core.capture.values.distributed_tensors import distributed_tensors
from ..core.errors import RequestError

Step = Callable[[nn.Module, Any], Any]


def program_of_rank(model: nn.Module, step: Step, tensor: int) -> tuple[nn.Module, Step]:
    """A model of one rank's parts of the parameters, under their names, and the step that computes with it.

    Args:
        model: with DTensor parameters; it does not change.
        step: the user's.
        tensor: number of tensor ranks that the user asks for.

    Raises:
        RequestError: the DTensors are on another number of ranks, on several meshes, or in a layout with uneven or
            partial parts.
    """
    found = distributed_tensors(model)
    for name, value in found.items():
        _check_layout(name, value, tensor)
    buffer = next((name for name, _ in model.named_buffers() if name in found), None)
    if buffer is not None:
        raise RequestError(f"buffer '{buffer}' is a DTensor: plans support DTensor parameters only; keep it whole")
    if len({value.device_mesh for value in found.values()}) > 1:
        raise RequestError(
            f"the parameters of {type(model).__name__} are DTensors on several meshes: use one tp dimension for all"
        )
    return _parts(model), StepOfRank(model, step, found)


def _check_layout(name: str, value: Any, tensor: int) -> None:
    mesh = value.device_mesh
    if mesh.ndim != 1 or mesh.size() != tensor:
        raise RequestError(
            f"'{name}' is a DTensor on {mesh}: --tp {tensor} needs a mesh of one dimension with {tensor} ranks"
        )
    (placement,) = value.placements
    whole = placement.is_replicate() or (placement.is_shard() and value.shape[placement.dim] % tensor == 0)
    if not whole:
        raise RequestError(
            f"'{name}' has shape {tuple(value.shape)} and layout {placement} over {tensor} ranks: parts must be equal; "
            "use Replicate, or Shard of a dimension that the ranks divide"
        )


def _parts(model: nn.Module) -> nn.Module:
    """Modules without code that hold one rank's parts of the parameters; tied ones stay one parameter."""
    root = nn.Module()
    known: dict[int, nn.Parameter] = {}

    def place(name: str) -> tuple[nn.Module, str]:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            inner = module._modules[part]
            assert inner is not None
            module = inner
        return module, last

    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in known:
            known[id(parameter)] = nn.Parameter(_part(parameter), requires_grad=parameter.requires_grad)
        module, last = place(name)
        module.register_parameter(last, known[id(parameter)])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, last = place(name)
        module.register_buffer(last, buffer)
    return root


def _part(parameter: Any) -> Tensor:
    """The part of a parameter that this rank holds."""
    local = parameter.detach()
    return local.to_local() if hasattr(local, "to_local") else local  # type: ignore[no-any-return]


class StepOfRank:
    """The recorded step of one rank; recorded again for each shape of the batch.

    Args:
        model: the user's.
        step: the user's.
        found: the DTensor parameters by name.
    """

    def __init__(self, model: nn.Module, step: Step, found: Mapping[str, Any]) -> None:
        self._model, self._step, self._found = model, step, found
        self._known: dict[Hashable, fx.GraphModule] = {}

    def __call__(self, parts: nn.Module, batch: Any) -> Any:
        """Run one rank's program with its parts of the parameters."""
        leaves, spec = pytree.tree_flatten(batch)
        key = (spec, *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves))
        if repr(key) not in self._known:
            with _disable_current_modes():
                self._known[repr(key)] = self._recorded(leaves, spec)
        state = _state(parts)
        return fx.Interpreter(self._known[repr(key)]).run([*state.values()], leaves)

    def _recorded(self, leaves: list[Any], spec: pytree.TreeSpec) -> fx.GraphModule:
        from torch.distributed.tensor import DTensor

        model, names = self._model, list(_state(self._model))
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

        def run(state: list[Tensor], given: list[Any]) -> Any:
            values: dict[str, Tensor] = dict(zip(names, state, strict=True))
            for name, whole in self._found.items():
                values[name] = DTensor.from_local(
                    values[name], whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
                    stride=whole.stride(),
                )  # fmt: skip
            with torch.no_grad(), _reparametrize_module(model, values):
                return self._step(model, pytree.tree_unflatten(given, spec))

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            local = _part(value)
            return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")

        with fake_mode:
            state, given = [fake(value) for value in _state(model).values()], [fake(leaf) for leaf in leaves]
        program = make_fx(run, tracing_mode="fake")(state, given)
        _replace_collectives(program.graph)
        program.recompile()
        return program


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _replace_collectives(graph: fx.Graph) -> None:
    """Replace functional all-reduces by panpipe's.

    Raises:
        RequestError: the program communicates in another way.
    """
    for node in list(graph.nodes):
        target = node.target
        if not (isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"):
            continue
        name = target._schema.name.split("::")[-1]
        if name == "wait_tensor":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name == "all_reduce" and node.args[1] == SUM:
            node.target, node.args = ALL_REDUCE, node.args[:2]
        else:
            what = f"{name} of a maximum, as loss_parallel does" if name == "all_reduce" else name
            raise RequestError(
                f"the model's layouts need {what} between tensor ranks: plans support all-reduces of sums, as "
                "ColwiseParallel and RowwiseParallel need them; use no sequence-parallel or other layouts"
            )
