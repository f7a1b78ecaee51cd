"""Policies of memory and communication, one a file: where their actions are inserted, what waits for them, times and
memory.

Lowering, validation, the engine, the simulator, traces and reports read the declarations and name no policy. How many
files another one touches, counted for a fourth level of sharding, in which replicas share offloaded tensors, too:

1. `sharding`: the level, its text, and what a replica holds;
2. `offload`: copies of a part, with an action that gathers it after a RELOAD;
3. `memory` (core/plan): what that action allocates and frees;
4. `choice` (core/offload): the bytes of copies and of the host, of which a replica has a part;
5. `arrays` (core/search/problem): the time of the gathers in the search;
6. `runtimes/engine/instructions/offload.py`: the instruction;
7. `runtimes/offload/device_offload.py`: the arena of a part;
8. `docs/memory.md`.

Requests, the automatic choice of a level, checks, reports and checkpoints go over the levels of `sharding`.
"""
