"""Mutations of files: of their bytes, of their structure, and of values that stay well formed.

Every mutation draws from one ``random.Random``, so a seed gives the same files again.
"""

import gzip
import json
import pickle
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS = (
    0, -1, 1, 2, 3, 7, 0.5, -0.0, 1e-9, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**8, 10**12,
    10**18, 1e30, 1e31, 1e300, 1e308, 5e-324, 1e-300, 1e-31, 10**5000, 1.5,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "n0", "a\nb", "a\0b", "\ud800", "\u202eabc", "é" * 10, "x" * 300, "x" * 100_000, "../../etc/passwd",
    "/etc/passwd", "0F0", "1B1", "0W0", "0I1", "9999999F0", "10000000000F1", "0F" + "9" * 5000, "0F0>1", "٣F٣",
    "<script>", "{{}}", "%s%n", "$(reboot)", "null", "nan", "inf", "1e9", "-1", "send to 99999999999999999999",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": 1}, [0], [None], {"": {}})
TOKENS = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "0x10", "01", "1_000", "+1", "9" * 5000,
    "1." + "0" * 5000 + "1", "1e99999999", "null", "true", '"\\ud800"', '"\\u0000"', '"' + "a" * 150_000 + '"',
    "[" * 200_000, '{"a":' * 5000, "[" * 5000 + "]" * 5000, "[[],[]]", "{}", "'x'", "", ",",
    "[0" + ",0" * 50_000 + "]",
)  # fmt: skip
NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
STRING = re.compile(rb'"[^"\n]*"')


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """The file with a change of its bytes or of one token."""
    return random.choice(_OF_BYTES)(data, random)


def _truncated(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _flipped(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _inserted(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    more = random.choice(
        (b"\0", b"\xff\xfe", b"\r\n", b"\n", b'"', b"{", b"]", b",", b"\\", b"#", random.randbytes(16))
    )
    return data[:at] + more * random.choice((1, 1, 1, 100)) + data[at:]


def _cut(data: bytes, random: Random) -> bytes:
    first, last = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[last:]


def _repeated(data: bytes, random: Random) -> bytes:
    first, last = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last] * random.choice((1, 2, 20)) + data[last:]


def _with_token(pattern: re.Pattern[bytes]) -> Callable[[bytes, Random], bytes]:
    def change(data: bytes, random: Random) -> bytes:
        found = list(pattern.finditer(data))
        if not found:
            return _flipped(data, random)
        match = random.choice(found)
        token = random.choice((*TOKENS, *(_plain(number) for number in NUMBERS)))
        return data[: match.start()] + token.encode("utf-8", "surrogatepass") + data[match.end() :]

    return change


def _plain(number: float) -> str:
    return str(number) if not isinstance(number, int) or abs(number) < 10**4000 else "1" + "0" * 5000


def _line(data: bytes, random: Random) -> bytes:
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    kind = random.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        other = random.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at:at] = [lines[at]] * 2000
    return b"\n".join(lines)


def _encoded(data: bytes, random: Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return random.choice(
        (
            text.encode("utf-16"),
            text.encode("utf-32"),
            b"\xef\xbb\xbf" + data,
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            text.encode("latin-1", "replace").replace(b" ", b"\xa0"),
            gzip.compress(data, mtime=0),
            data + b"\0",
            b"\0" * len(data),
        )
    )


def _other(data: bytes, random: Random) -> bytes:
    return random.choice(
        (
            b"", b" ", b"\n", b"null", b"0", b'""', b"[]", b"{}", b"\xff" * 100, b"[" * 100_000, b'{"a":' * 50_000,
            b"9" * 100_000, b'"' + b"a" * 500_000, b'"' + b"a" * 500_000 + b'"', b"," * 500_000, b"\n" * 500_000,
            b"[" + b"[]," * 400_000 + b"[]]", b"a" * 131_073, b'{"format": "panpipe.plan/2"}',
            pickle.dumps({"a": 1}), random.randbytes(2000), b"\x1f\x8b", b"PK\x03\x04", b"\x7fELF",
            b"a" + b".a" * 100_000 + b" = 1", b"a = " + b"[" * 50_000, b"a = 1979-05-27", b"a = 0x" + b"f" * 3000,
        )
    )  # fmt: skip


_OF_BYTES = (
    _truncated, _flipped, _flipped, _inserted, _cut, _repeated, _with_token(NUMBER), _with_token(NUMBER),
    _with_token(NUMBER), _with_token(STRING), _with_token(STRING), _line, _line, _encoded, _other,
)  # fmt: skip


def mutated_tree(tree: Any, random: Random) -> Any:
    """The same plain data with one to three changes."""
    tree = deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return deepcopy(random.choice(OTHERS))
        holder, key = random.choice(places)
        _change(holder, key, places, random)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of plain data, as the object or list that holds it and its key."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _anything(random: Random) -> Any:
    return deepcopy(random.choice((*NUMBERS, *TEXTS, *OTHERS)))


def _change(holder: Any, key: Any, places: list[tuple[Any, Any]], random: Random) -> None:
    value = holder[key]
    kind = random.random()
    if kind < 0.15:
        holder[key] = _anything(random)
    elif kind < 0.25:
        del holder[key]
    elif kind < 0.33:
        other, at = random.choice(places)
        if at in other if isinstance(other, dict) else at < len(other):
            found = deepcopy(other[at])
            holder[key] = found if random.random() < 0.8 else [found]
    elif kind < 0.37:
        holder[key] = _nested(random.choice((3, 20, 31, 40, 200)), random)
    elif isinstance(value, list) and value:
        _change_list(value, random)
    elif isinstance(value, dict):
        value[random.choice((*TEXTS, "name", "format", "like", "value"))] = _anything(random)
    elif isinstance(value, str):
        holder[key] = _other_text(value, random)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = _other_number(value, random)
    else:
        holder[key] = _anything(random)


def _change_list(value: list[Any], random: Random) -> None:
    kind, at = random.randrange(7), random.randrange(len(value))
    if kind == 0:
        value.insert(at, value[at])
    elif kind == 1:
        del value[at]
    elif kind == 2:
        random.shuffle(value)
    elif kind == 3:
        value[at:at] = [value[at]] * random.choice((10, 300, 3000))
    elif kind == 4:
        value.clear()
    elif kind == 5:
        other = random.randrange(len(value))
        value[at], value[other] = value[other], value[at]
    else:
        value.append(_anything(random))


def _other_text(value: str, random: Random) -> str:
    kind = random.randrange(5)
    if kind == 0:
        return random.choice(TEXTS)
    if kind == 1:
        return re.sub(r"[0-9]+", lambda _: str(random.choice((0, 1, 2, 3, 9, 10**6))), value, count=1)
    if kind == 2 and len(value) > 1:
        return re.sub("[FBIW]", lambda _: random.choice("FBIW"), value, count=1)
    if kind == 3:
        return value[: random.randrange(len(value) + 1)]
    return value + random.choice(("x", "0", " ", "é", "\n"))


def _other_number(value: float, random: Random) -> float:
    factor = random.choice((0, -1, 2, 0.5, 10, 1000, 1e6, 1e9, 1e12, 1e-6, 1e-12))
    multiple = value * factor if abs(value) < 1e290 else -value  # an integer may be too large for a float
    changed = random.choice((value + 1, value - 1, multiple, random.choice(NUMBERS)))
    return int(changed) if isinstance(value, int) and abs(changed) < 1e18 else changed


def _nested(depth: int, random: Random) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def dumped(tree: Any) -> bytes:
    """Plain data as JSON, with integers of any length."""
    parts: list[str] = []
    _write(tree, parts)
    return "".join(parts).encode("utf-8", "surrogatepass")


def _write(value: Any, parts: list[str]) -> None:
    if isinstance(value, dict):
        parts.append("{")
        for number, (key, item) in enumerate(value.items()):
            parts.append(("," if number else "") + json.dumps(key) + ":")
            _write(item, parts)
        parts.append("}")
    elif isinstance(value, list):
        parts.append("[")
        for number, item in enumerate(value):
            parts.append("," if number else "")
            _write(item, parts)
        parts.append("]")
    elif isinstance(value, int) and not isinstance(value, bool):
        parts.append(_plain(value))
    else:
        parts.append(json.dumps(value))
