"""The instructions at the end of a step: what each starts and waits for, and that tied weights are reduced once."""

from types import SimpleNamespace

from panpipe.core.actions import Action, Kind, parse_action
from panpipe.core.trace.trace import COLLECTIVE_QUEUE
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.frame import Frame
from panpipe.runtimes.engine.instructions import step_end  # noqa: F401 - registers its kinds
from panpipe.runtimes.engine.instructions.instructions import INSTRUCTIONS

REPLICAS, TRANSPORT = object(), object()


class InFlight:
    """A reduction or a gather over replicas."""

    bytes = 96

    def __init__(self):
        self.watched = self.waited = False

    def watch(self):
        self.watched = True

    def wait(self):
        self.waited = True


class Parts:
    """What the instructions drive: a stage's state, the update, and tied weights; it lists the calls."""

    def __init__(self, traced=False):
        self.calls = []
        self.state = SimpleNamespace(
            reduce_gradients=lambda replicas: self.note("reduce", replicas), gather=lambda r: self.note("gather", r)
        )
        update = SimpleNamespace(
            sync=lambda backend: self.note("sync", backend), step=lambda state: self.note("step", state)
        )
        self.frame = Frame(TRANSPORT, None, HostQueue(), update, replicas=REPLICAS, traced=traced)
        self.tied = SimpleNamespace(reduce=lambda backend: self.note("tied", backend))

    def note(self, what, given):
        self.calls.append((what, given))
        return InFlight()

    def run_of(self, action):
        return SimpleNamespace(state=self.state)

    def bind(self, text):
        action = parse_action(text)
        return INSTRUCTIONS[action.kind](self, action)


def test_sums_of_a_microbatch_are_left_in_flight_also_of_one_that_other_replicas_alone_have():
    parts = Parts()
    parts.state.scatter = SimpleNamespace(scatter=lambda: parts.note("scatter", None))
    parts.runs = [{1: SimpleNamespace(state=parts.state)}]
    instruction = parts.bind("1SCATTER_GRAD5")
    instruction.run()
    assert parts.calls == [("scatter", None)]
    assert instruction.moved() == 96
    assert list(parts.frame.pending) == [Action(1, Kind.SCATTER_GRAD, 5)]


def test_reduction_over_replicas_is_left_in_flight_with_its_bytes():
    parts = Parts()
    instruction = parts.bind("2REDUCE_GRAD")
    assert instruction.queue == COLLECTIVE_QUEUE
    assert instruction.moved() == 0  # nothing is known before it has run
    instruction.run()
    assert parts.calls == [("reduce", REPLICAS)]
    (started,) = parts.frame.pending.values()
    assert list(parts.frame.pending) == [Action(2, Kind.REDUCE_GRAD)]
    assert (instruction.moved(), started.waited, started.watched) == (96, False, False)


def test_end_of_a_reduction_is_recorded_in_a_traced_step_of_a_cpu():
    parts = Parts(traced=True)
    parts.bind("0REDUCE_GRAD").run()
    assert parts.frame.pending[Action(0, Kind.REDUCE_GRAD)].watched


def test_unshard_gathers_the_parameters():
    parts = Parts()
    parts.bind("1UNSHARD").run()
    assert parts.calls == [("gather", REPLICAS)]
    assert list(parts.frame.pending) == [Action(1, Kind.UNSHARD)]


def test_run_gathers_shared_parameters_and_frees_them_with_what_was_computed_from_them():
    parts = Parts()
    parts.state.unshard = lambda replicas: parts.note("unshard", replicas)
    parts.state.shared = SimpleNamespace(free=lambda: parts.note("free", None))
    run = SimpleNamespace(state=parts.state, free_shared=lambda: parts.note("free what was computed", None))
    parts.runs = [{1: run}, {1: run}]
    parts.bind("1UNSHARD7").run()
    started = parts.frame.pending[Action(1, Kind.UNSHARD, 7)]
    reshard = parts.bind("1RESHARD7")
    assert reshard.queue == COLLECTIVE_QUEUE
    reshard.wait()  # also where no action of the run is here
    assert started.waited
    reshard.run()
    assert parts.calls == [("unshard", REPLICAS), ("free what was computed", None), ("free", None)]


def test_tied_weights_of_all_stages_are_reduced_by_the_first_of_their_actions():
    parts = Parts()
    first, second = parts.bind("0REDUCE_TIED"), parts.bind("1REDUCE_TIED")
    pending = parts.frame.pending[Action(0, Kind.REDUCE_GRAD)] = InFlight()
    first.wait()
    assert pending.waited  # sums over replicas come first
    first.run()
    second.run()
    assert parts.calls == [("tied", TRANSPORT)]


def test_sync_waits_for_reductions_and_exchanges_over_the_pipeline():
    parts = Parts()
    instruction = parts.bind("0SYNC")
    pending = parts.frame.pending[Action(0, Kind.REDUCE_GRAD)] = InFlight()
    instruction.wait()
    instruction.run()
    assert pending.waited
    assert parts.calls == [("sync", TRANSPORT)]


def test_step_updates_the_state_of_its_stage():
    parts = Parts()
    parts.bind("3STEP").run()
    assert parts.calls == [("step", parts.state)]
