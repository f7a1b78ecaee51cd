"""Saving while training goes on: a copy of the state in the host's memory, and one thread that writes it."""

import atexit
import copy
import logging
import threading
from typing import Any

import torch
from torch import Tensor

from ...core.errors import WorkerError, message_of
from ..launch.exchange import Exchange
from ..watch.uncaught import failure_at_exit
from .state_parts import Parts
from .writing import Save

_LOG = logging.getLogger("panpipe.checkpoint")


class StateCopy:
    """A copy of a state in the host's memory. Its memory is allocated once, and used for every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, parts: Parts) -> Parts:
        """A copy of parts. The copy before it is overwritten."""
        tensors, gpus = {}, set[torch.device]()
        for name, tensor in parts.tensors.items():
            tensors[name] = buffer = self._buffer(name, tensor)
            buffer.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:
                gpus.add(tensor.device)
        for gpu in gpus:  # the optimizer changes the tensors next
            torch.cuda.current_stream(gpu).synchronize()
        self._buffers = tensors
        return Parts(tensors, {name: _copied(item) for name, item in parts.items.items()})

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(item: Any) -> Any:
    return item if isinstance(item, bool | int | float | str | None) else copy.deepcopy(item)


class BackgroundSave:
    """The save that is in flight, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, save: Save, exchange: Exchange) -> None:
        """Begin to write a checkpoint; no other one may be in flight."""

        def body() -> None:
            try:
                save.run(exchange)
            except WorkerError as failure:  # a rank is lost: all ranks end, each with one line about it
                self._failure = failure
            except BaseException as failure:
                self._failure = failure
                _LOG.error("%s", message_of(failure))

        # A daemon: a process that ends after a failure does not wait for other ranks.
        self._thread = threading.Thread(target=body, name="panpipe checkpoint", daemon=True)
        self._thread.start()
        atexit.register(self._finish_at_exit)

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and not waited for; the same on every rank."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether the save in flight has ended in this process."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            RequestError: it failed; raised once, on every rank.
        """
        if self._thread is None:
            return
        self._thread.join()
        atexit.unregister(self._finish_at_exit)
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def _finish_at_exit(self) -> None:
        if self._thread is not None and failure_at_exit() is None:
            self._thread.join()
            if isinstance(self._failure, WorkerError):
                _LOG.error("no checkpoint was written: %s", message_of(self._failure))
