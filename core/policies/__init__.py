"""Policies of memory and communication, one a file: where their actions are inserted, what waits for them, times and
memory.

Lowering, validation, the engine, the simulator, traces and reports read the declarations and name no policy. How many
files another one touches, counted for a fourth level of sharding, in which replicas share offloaded tensors, too:

1. `sharding`: the level, its text, and what a replica holds;
2. `offload`: copies of a part, their size, and a kind that gathers after a RELOAD, with what it allocates and frees;
3. `memory` (core/plan): the size of a part in the table, which OFFLOAD allocates and RELOAD frees on the host;
4. `choice` (core/offload): the bytes of copies and of the host, of which a replica has a part;
5. `runtimes/engine/instructions/offload.py`: the instruction;
6. `runtimes/offload/device_offload.py`: the arena of a part;
7. `runtimes/settings.py` and `docs/memory.md`: their text.

Requests, the automatic choice of a level, checks, reports and checkpoints go over the levels of `sharding`.
"""
