"""The conformance suite: panpipe's backends and the example keep the contract, and every violation is reported."""

import re
from pathlib import Path

import pytest
from panpipe.backends import conformance, gloo, memcpy
from panpipe.backends.kind import BackendKind
from panpipe.core.errors import RequestError

from ...support.launch import HANGS_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
def broken(monkeypatch):
    """The deliberately broken backends, importable in other processes, too."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support" / "backends"))
    import broken_backends

    return broken_backends


@pytest.mark.parametrize("kind", [memcpy.KIND, gloo.KIND], ids=lambda kind: kind.name)
def test_built_in_backends_conform(kind):
    conformance.check(kind, limit_s=HANGS_S)


@pytest.mark.cuda
def test_memcpy_conforms_between_gpus():
    conformance.check(memcpy.KIND, where="cuda")


def test_example_backend_conforms_and_is_short(monkeypatch):
    path = ROOT / "examples" / "own_backend.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100
    monkeypatch.syspath_prepend(str(path.parent))
    import own_backend

    conformance.check(own_backend.KIND, devices=2, limit_s=HANGS_S)


@pytest.mark.parametrize(
    ("name", "rule", "said"),
    [
        ("Swapping", "order", "message 1 from device 1 to 0 arrived where message 0 from device 1 to 0 was due"),
        ("Blocking", "overlap", "device 0, 1 had not finished after 5 s"),
        ("Answering", "early receives", "RuntimeError: it is not this device's turn to receive"),
        ("Bounded", "in flight", "BufferError: 50 messages are in flight"),
        ("InTurn", "waiting", "RuntimeError: an earlier receive was not waited for"),
        ("Solid", "shapes", "ValueError: there is nothing to send"),
        ("Rounding", "dtypes", r"a tensor \[3, 11\] of uint8, arrived with \d+ of 33 bytes changed"),
        ("Dense", "layouts", r"transposed from device ., a tensor \[10, 6\] of float32, arrived with \d+ of 240 bytes"),
        ("Eager", "reuse", "a tensor that device 0 overwrote after it had waited for the send"),
        ("Spilling", "bounds", "received from . into a part of a tensor, and bytes outside it were written"),
        ("Disordered", "sums", r"a sum \[3, 5, 7\] of float64 on device . differs in bits from that on device ."),
        ("Forgetful", "sums", r"a sum \[\] of float32 on device . is off by"),
        ("Single", "sums in flight", "RuntimeError: another sum is under way"),
        ("Partial", "parts", r"a reduce-scatter \[40022\] of float32 on device . is off by"),
        ("Ungathered", "parts", r"an all-gather \[40022\] of float32 on device"),
        ("Silent", "broadcasts", r"a broadcast from device ., a tensor \[\] of float32, arrived with \d of 4 bytes"),
        ("Late", "progress", "doesn't match the broadcast shape"),  # its addend meets a later sum of the other's
        ("Nameless", "death", "raised OSError and not WorkerError: something went wrong"),
    ],
)
def test_each_violation_of_the_contract_breaks_exactly_one_rule(broken, name, rule, said):
    findings = {
        one.rule.name: one.problem
        for one in conformance.examine(
            broken.kind(name), 3 if name == "Disordered" else 2, limit_s=5 if name == "Blocking" else HANGS_S
        )
    }
    assert list(findings) == [rule.name for rule in conformance.RULES]
    assert [name for name, problem in findings.items() if problem is not None] == [rule], findings
    assert re.search(said, findings[rule]), findings[rule]


def test_conformance_error_lists_every_broken_rule_on_a_line(broken):
    with pytest.raises(conformance.ConformanceError) as refusal:
        conformance.check(broken.kind("Rounding"), 2)
    first, *lines = str(refusal.value).splitlines()
    assert first == f"backend 'rounding' breaks {len(lines)} of {len(conformance.RULES)} rules:"
    assert lines[0].startswith(
        "- dtypes, over threads: every dtype that the backend moves arrives bit for bit. device "
    )


def test_a_backend_that_does_not_connect_is_reported(broken):
    findings = conformance.examine(broken.kind("unconnected"), 2)
    assert all("connecting failed with OSError: no wire" in one.problem for one in findings)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (memcpy.KIND, {"devices": 1}, "devices is 1: messages need at least two"),
        (gloo.KIND, {"where": "xpu"}, "'gloo' sends no tensors on xpu: try cpu, cuda"),
        (BackendKind("own", "", threads=lambda devices: []), {}, "'own' cannot be pickled for another process"),
        (
            BackendKind("own", "", threads=memcpy.connect, missing=lambda: "no wire"),
            {},
            "'own' cannot be used here: no wire",
        ),
    ],
)
def test_conformance_check_refuses_impossible_options(kind, options, said):
    with pytest.raises(RequestError, match=said) as refusal:
        conformance.check(kind, **options)
    assert "\n" not in str(refusal.value)
