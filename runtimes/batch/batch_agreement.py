"""Checks in every step that all ranks of a pipeline have the same batch, by fingerprints of its contents.

    step begins ──▶ an all-reduce gathers each rank's row ──▶ last backward ──▶ rows are compared ──▶ update
                    │ waits │ on GPU │ change │ samples │ nesting │ leaf 0: shape │ … │ leaf 0: values │ … │

A rank's update needs gradients that passed through all other ranks, so all of them have begun the step, the table has
arrived, and no rank updates if rows differ. The processes exchange the table: no GPU waits, and the host only for the
other hosts to begin the step. If a rank has tensors of its batch on a GPU, their fingerprints are there, too: a second
all-reduce, of the values alone, is issued to the GPUs after the last backward, and the host reads it after it has
issued the next step (`waits`), so that the device never waits for the host; the update has run by then.

If a rank has new shapes, or a Python value that the step reads has changed, the ranks compare before they capture:
otherwise a rank that captures would wait for ranks that do not.

Fingerprints of tensors: 52 bits over all of their bytes, computed on the tensor's device.

Equal bits have equal fingerprints, on every device. The bytes are read as int32 words w. Every 2**15 of them are
reduced to ``sum(w[i] * a[i])`` modulo 2**64, with fixed random odd 64-bit numbers a, and the sums are reduced in the
same way until one is left. The position of a word matters, so that shuffled samples have another fingerprint; a plain
sum would not detect a shuffle. With words of 32 bits and factors of 64 a change of a sign bit, which is a multiple of
2**31, changes 33 bits of the sum.

3 GB/s on one core (39 MB of float32 in eight parts: 13 ms, torch 2.13).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor

from ...backends.contract import Handle
from ...core.errors import RequestError
from ..devices.compute import ComputeQueue
from ..flat_bytes import flat_bytes
from ..launch.team import Team
from ..microbatches import Microbatch

_LEAVES = 16
"""Leaves with separate columns in a row; further leaves share these columns."""
_WAITS, _ON_GPU, _METHOD, _CHANGE, _SAMPLES, _NESTING, _SHAPES = range(7)
_VALUES = _SHAPES + _LEAVES
_COLUMNS = _VALUES + _LEAVES
_RULE = (
    "the ranks of a pipeline compute parts of one batch; give it to all of them, with samplers and random numbers of "
    "the same seed, and shard data by replicas"
)
_ONE_ORDER = (
    "all ranks of a pipeline must call the same methods in the same order, and none may leave one by an exception alone"
)
_ONE_PYTHON = "all ranks of a pipeline must run the same step; change what it reads on all of them alike"


NOT_UPDATED = "no parameter was updated, and gradients that waited for an update are dropped"
"""The state of the model after a step that was refused before its update."""


@frozen
class ChangedValues:
    """The Python values that the step reads and that changed since it was captured.

    Args:
        text: the first one, for messages.
    """

    digest: int
    text: str


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is not in the host's memory."""
    return tensor.device.type != "cpu"


class BatchAgreement:
    """The comparison for one batch. All ranks of a replica create one for each step, evaluation or forward.

    Args:
        known: whether this rank has programs for these microbatches; if not, it compares before it compiles them.
        change: the changed values that the step reads, if any.
    """

    def __init__(
        self,
        team: Team,
        queues: Mapping[int, ComputeQueue],
        pieces: Sequence[Microbatch],
        known: bool,
        change: ChangedValues | None = None,
    ) -> None:
        self._team, self._pieces, self._change = team, pieces, change
        self._handle: Handle | None = None
        self._device = team.local[0]
        self._place = team.replica * team.size + self._device - team.batch_devices.start
        self._queue = queues[self._device]
        self._rows: list[list[float]] | None = None
        self._compared = _COLUMNS
        self._stopped_update = False
        self._read: Callable[[], Tensor] | None = None
        self._differing_replica: Callable[[], int | None] | None = None
        if len(team.local) == team.size:
            self._rows = []
            return
        self._table = self._empty_table(_COLUMNS, torch.device("cpu"))
        self._table[self._place], self._values = self._own_row(known)
        self._handle = team.sum_over_processes(self._table)

    def refuse_before_run(self) -> None:
        """Wait for the other ranks, and refuse different batches before anything runs.

        Raises:
            RequestError: ranks have different batches.
        """
        if self._rows is not None:
            return
        self._team.collectively(self._receive)
        if self._compared < _COLUMNS:  # the others are in the same call, or their absence is detected there
            self._add_values(self._team.in_replica(lambda _: self._values.tolist()))
        failure = self._failure()
        if failure is not None:
            if not self._team.tensors.divided and not self._all_wait():
                self._team.fail(failure)  # ranks that know their shapes run the step, and wait for this one
            raise failure

    def _all_wait(self) -> bool:
        """Whether all ranks compare before they run."""
        return all(row[_WAITS] for row in self._rows or ())

    def differ(self) -> bool:
        """Whether ranks of this replica have different batches, as far as known without waiting for a GPU."""
        self._receive()
        self._stopped_update = self._failure() is not None
        return self._stopped_update

    def start_exchange(self) -> None:
        """Issue the all-reduce of the values after a GPU's last backward, if a rank has some of them on its GPU."""
        if not self._queue.runs_ahead:
            return
        self._receive()
        if self._compared < _COLUMNS:
            self._table = self._empty_table(_LEAVES, self._queue.device)
            self._table[self._place] = self._values.to(self._queue.device)
            self._handle = self._team.backend(self._device).all_reduce(self._table)

    def collect(self) -> None:
        """Make what is issued later wait for all rows. The host does not wait for those of a GPU."""
        if self._rows is None:
            self._receive()
        elif self._handle is not None:
            self._handle.wait()
            self._handle, self._read = None, self._queue.start_read(self._table)

    def _receive(self) -> None:
        """Wait on the host for the table of the processes."""
        if self._rows is None and self._handle is not None:
            self._handle.wait()
            rows: list[list[float]] = self._table.tolist()
            self._handle, self._rows = None, rows
            self._compared = _VALUES if any(row[_ON_GPU] for row in rows) else _COLUMNS

    def _add_values(self, values: list[list[float]]) -> None:
        """Complete the rows by the values that were exchanged on GPUs."""
        assert self._rows is not None
        self._rows = [[*row[:_VALUES], *own] for row, own in zip(self._rows, values, strict=True)]
        self._compared = _COLUMNS

    def note_replica(self, replica: Callable[[], int | None]) -> None:
        """Set the function that `refuse` asks for a replica whose ranks have different batches.

        Args:
            replica: returns its number, as exchanged between replicas, or None; it may wait for the device.
        """
        self._differing_replica = replica

    @property
    def waits(self) -> bool:
        """Whether `refuse` makes the host wait for the device."""
        return self._queue.runs_ahead and (self._read is not None or self._differing_replica is not None)

    def refuse(self, outcome: str) -> None:
        """Refuse the batch of a step that ran.

        Args:
            outcome: the step's outcome for the message, if no difference was known before its update.

        Raises:
            RequestError: ranks have different batches.
        """
        self.collect()
        if self._read is not None:  # the rows of a GPU
            values, self._read = self._read().tolist(), None
            self._add_values(values)
        failure = self._failure()
        replica = None if self._differing_replica is None else self._differing_replica()
        if failure is None and replica is not None:
            failure = RequestError(f"the ranks of replica {replica} were given different batches: {_RULE}")
        if failure is not None:
            raise RequestError(f"{failure}; {NOT_UPDATED if self._stopped_update else outcome}")

    def _empty_table(self, columns: int, device: torch.device) -> Tensor:
        return torch.zeros(len(self._team.batch_devices), columns, dtype=torch.float64, device=device)

    def _own_row(self, known: bool) -> tuple[Tensor, Tensor]:
        """This rank's row, without values if one of them is on a GPU; and its values, where they are."""
        host = torch.zeros(_COLUMNS, dtype=torch.int64)
        host[_WAITS] = not known
        host[_METHOD] = crc32(self._method.encode())
        host[_CHANGE] = 0 if self._change is None else self._change.digest
        host[_SAMPLES] = sum(piece.samples for piece in self._pieces)
        host[_NESTING] = crc32(repr(self._names).encode())
        parts: dict[str, list[Tensor]] = {}
        shapes: dict[str, dict[str, None]] = {}
        before = None
        for piece in self._pieces:
            if piece.shape is not before:
                before = piece.shape
                for name, what in zip(piece.names, before.leaves, strict=True):
                    shapes.setdefault(name, {})[repr(what)] = None
            for name, leaf in zip(piece.names, piece.leaves, strict=True):
                own = parts.setdefault(name, [])
                if isinstance(leaf, Tensor) and not (own and own[-1] is leaf):
                    own.append(leaf)
        found = {name: fingerprint(parts[name]) for name in self._names if parts[name]}
        host[_ON_GPU] = any(is_on_gpu(value) for value in found.values())
        device = self._queue.device if host[_ON_GPU] else host.device
        values = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(_LEAVES)]
        for place, name in enumerate(self._names):
            slot, factor = place % _LEAVES, 2 * (place // _LEAVES) + 1
            host[_SHAPES + slot] += factor * crc32(" ".join(shapes[name]).encode())
            if name in found:
                values[slot] = values[slot] + (factor * found[name]).to(device)
        mine = (torch.stack(values) & MASK).double()
        row = host.double()
        if not host[_ON_GPU]:
            row[_VALUES:] = mine
        return row, mine

    @property
    def _method(self) -> str:
        """The method that runs, with the number of the step."""
        activity = self._team.activities.get(self._device)
        return "" if activity is None else activity.method

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the leaves of the first microbatch, which is one of the largest."""
        return self._pieces[0].names

    def _failure(self) -> RequestError | None:
        """The error for the first rank whose row differs from that of the replica's first rank; None if none does."""
        first, *others = self._rows or [[]]
        for number, other in enumerate(others, 1):
            column = next((i for i in range(_METHOD, self._compared) if other[i] != first[i]), None)
            if column is not None:
                base = self._team.batch_devices.start
                one, known = (f"rank {self._team.rank(base + each)}" for each in (number, 0))
                if column == _METHOD:
                    mine = f"rank {self._team.rank(base + self._place)} is in {self._method or 'none'}"
                    return RequestError(f"{one} is in another method than {known}: {mine}; {_ONE_ORDER}")
                if column == _CHANGE:
                    mine = f"on rank {self._team.rank(base + self._place)} "
                    mine += "nothing changed" if self._change is None else self._change.text
                    return RequestError(
                        f"other values that the step reads changed on {one} than on {known}: {mine}; {_ONE_PYTHON}"
                    )
                if column == _SAMPLES:
                    what = f"{one} has a batch of {other[column]:.0f} samples and {known} one of {first[column]:.0f}"
                else:
                    what = f"{one} has {self._about(column)} than {known}"
                return RequestError(f"{what}: {_RULE}")
        return None

    def _about(self, column: int) -> str:
        if column == _NESTING:
            return "a batch with other leaves"
        where = " or ".join(self._names[(column - _SHAPES) % _LEAVES :: _LEAVES])
        return f"other values in {where}" if column >= _VALUES else f"another shape, dtype or value of {where}"


_ROW = 1 << 15
_ROWS_ON_CPU, _ROWS_ON_ACCELERATORS = 2, 64
"""Rows that are multiplied at a time. On a CPU their products stay in the cache: 4 MiB of products take seven times as
long, because of page faults."""
_SEED = 0x5EED
BITS = 52
"""A float64 represents integers of this many bits exactly, so an all-reduce of a float64 table keeps them."""
MASK = (1 << BITS) - 1


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator)
    return (drawn | 1).to(device)


def fingerprint(parts: Sequence[Tensor]) -> Tensor:
    """The fingerprint of the concatenation of tensors of one device and dtype: a scalar int64 on that device.

    Args:
        parts: strided, such as the rows of a batch's microbatches; those on meta are left out.
    """
    with torch.no_grad():
        parts = [part.detach().resolve_conj().resolve_neg() for part in parts if not part.is_meta]
        if not parts:
            return torch.zeros((), dtype=torch.int64)
        words = _words(parts)
        while words.numel() > _ROW:
            words = _sums_of_rows(words).view(torch.int32)
        found = (words * _factors(words.device)[: words.numel()]).sum()
        # The low bits of a sum of products depend only on the low bits of the words, so the high ones are kept.
        kept: Tensor = (found >> (64 - BITS)) & MASK
        return kept


def _sums_of_rows(words: Tensor) -> Tensor:
    factors, count = _factors(words.device), words.numel()
    whole, rest = divmod(count, _ROW)
    rows = words[: whole * _ROW].view(whole, _ROW)
    sums = torch.empty(whole + (rest > 0), dtype=torch.int64, device=words.device)
    at_once = _ROWS_ON_CPU if words.device.type == "cpu" else _ROWS_ON_ACCELERATORS
    for start in range(0, whole, at_once):
        some = rows[start : start + at_once]
        sums[start : start + len(some)] = (some * factors).sum(1)
    if rest:
        sums[-1] = (words[whole * _ROW :] * factors[:rest]).sum()
    return sums


def _words(parts: Sequence[Tensor]) -> Tensor:
    """The concatenated bytes of tensors as int32, padded with zeros."""
    whole = _joined([flat_bytes(part) for part in parts])
    lacking = -whole.numel() % 4
    if lacking:
        whole = torch.cat([whole, whole.new_zeros(lacking)])
    elif whole.storage_offset() % 4:
        whole = whole.clone()
    return whole.view(torch.int32)


def _joined(flat: Sequence[Tensor]) -> Tensor:
    """The concatenated bytes; without a copy if they are adjacent in memory, as microbatches of one batch."""
    first, storage = flat[0], flat[0].untyped_storage().data_ptr()
    end = first.data_ptr()
    for part in flat:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return torch.cat(list(flat))
        end += part.numel()
    return first.as_strided((end - first.data_ptr(),), (1,))
