"""The calls of groups in generated programs, which are bound to functions when the programs are complete."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from .fusing import Call, Fusion


@frozen
class Fusions:
    """The calls of groups in programs. Until `bind`, a call only allocates its outputs.

    Args:
        sections: whether programs are divided into sections; otherwise operators between large kernels are grouped.
        places: the global variables of a program, the name in them that the program calls, and the group.
    """

    sections: bool = False
    places: list[tuple[dict[str, Any], str, Fusion]] = field(factory=list)

    def add(self, scope: dict[str, Any], name: str, fusion: Fusion, unbound: Call | None = None) -> None:
        """Bind a name in a program to a group.

        Args:
            scope, name: of the program.
            fusion: the group.
            unbound: is called until `bind`; by default a call allocates the outputs.
        """
        scope[name] = _allocating(fusion) if unbound is None else unbound
        self.places.append((scope, name, fusion))

    def bind(self, call_of: Callable[[Fusion], Call], now: Collection[Any] | None = None) -> None:
        """Set the function of each group.

        Args:
            call_of: compiles a group.
            now: the programs whose groups are compiled now, and not when they are first called; None for all.
        """
        scopes = None if now is None else [program.__globals__ for program in now]
        for scope, name, fusion in self.places:
            if scopes is None or any(scope is one for one in scopes):
                scope[name] = call_of(fusion)
            else:
                scope[name] = _late(scope, name, fusion, call_of)


def _late(scope: dict[str, Any], name: str, fusion: Fusion, call_of: Callable[[Fusion], Call]) -> Call:
    def call(given: list[Any]) -> Sequence[Tensor]:
        scope[name] = found = call_of(fusion)
        return found(given)

    return call


def _allocating(fusion: Fusion) -> Call:
    made = [node.meta["val"] for node in fusion.outputs]

    def call(_given: list[Any]) -> list[Tensor]:
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in made]

    return call
