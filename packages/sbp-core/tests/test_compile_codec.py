from __future__ import annotations

import doctest
import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.compile import codec
from sbp_core.compile.codec import decode, encode
from sbp_core.errors import SbpTypeError, SbpValueError
from sbp_core.graph.ir import Node, Phase, Ref, Symbol, TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S


class Frame(NamedTuple):
    """A named tuple of ours."""

    offset: int
    parts: tuple[str, ...]


# Only classes of the package are written; this one stands for such.
Frame.__module__ = "sbp_core.compile.codec"

_ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([Phase.BACKWARD, NdSbp(S(1), B, P("max")), Ref("x"), Symbol("dtype", "int8")])
)
_VALUES = st.recursive(
    _ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_VALUES)
def test_what_is_read_is_what_was_written(value: object) -> None:
    made = decode(encode(value))

    assert repr(made) == repr(value)
    assert encode(made) == encode(value)


def test_numbers_that_are_equal_keep_their_types_and_signs() -> None:
    value = (1, 1.0, True, 0.0, -0.0, float("inf"), 2**70)

    made = decode(encode(value))

    assert [repr(part) for part in made] == [repr(part) for part in value]
    assert repr(decode(encode(float("nan")))) == "nan"


def test_frozen_sets_come_back_and_are_written_in_one_order() -> None:
    names = [f"name {index}" for index in range(20)]

    assert decode(encode(frozenset(names))) == frozenset(names)
    assert encode(frozenset(names)) == encode(frozenset(names[::-1]))


def test_dataclasses_with_and_without_slots_come_back_equal() -> None:
    node = Node(name="n", op="aten.mm.default", args=(Ref("x"), (1, 2.5)), outputs=("n",))
    value = (node, TensorType((2, 3), "float32"), Placement.grid((2, 2), ("a", "b")))

    made = decode(encode(value))

    assert made == value
    assert type(made[0].phase) is Phase
    assert hash(made[2]) == hash(value[2])


def test_named_tuples_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "Frame", Frame, raising=False)

    made = decode(encode(Frame(3, ("a",))))

    assert type(made) is Frame
    assert made.parts == ("a",)


def test_equal_parts_are_written_once() -> None:
    one = encode((Ref("some value"),))

    many = encode(tuple(Ref("some value") for _ in range(50)))

    assert len(many) < len(one) + 50 * 3


@dataclass(frozen=True)
class _Strange:
    x: int


@pytest.mark.parametrize("value", [_Strange(1), object(), {1, 2}, b"x", len])
def test_what_is_not_ours_is_refused(value: object) -> None:
    with pytest.raises(SbpTypeError, match="cannot be written"):
        encode((1, value))


def test_a_class_that_has_other_fields_now_is_refused() -> None:
    table = json.loads(encode(Ref("x")))
    table["classes"][0][3] = ["name", "since"]

    with pytest.raises(SbpValueError, match=r"Ref was written with the fields name, since"):
        decode(json.dumps(table).encode())


def test_a_class_of_somebody_else_is_not_imported() -> None:
    table = json.loads(encode(Ref("x")))
    table["classes"][0][:2] = ["subprocess", "Popen"]

    with pytest.raises(SbpValueError, match="a class of 'subprocess'"):
        decode(json.dumps(table).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format":1}', b"\xff", b'{"format":1,"classes":[["sbp_core"]]}']
)
def test_bytes_that_hold_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(SbpValueError, match="no value of ours"):
        decode(data)


def test_another_format_is_refused() -> None:
    with pytest.raises(SbpValueError, match="a value of format 7"):
        decode(b'{"format":7}')


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(codec)

    assert (failed, attempted) == (0, 2)


def _table(**parts: object) -> bytes:
    table = {"format": codec.FORMAT, "classes": [], "atoms": [], "records": [], "root": 0}
    return json.dumps({**table, **parts}).encode()


_LINK = ["sbp_core.placement", "Link", "fields", ["latency_s", "bytes_per_s"]]


@pytest.mark.parametrize(
    "data",
    [
        _table(records=[[0, 1], [0, -1]], atoms=["x"]),
        _table(records=[[-7]]),
        _table(records=[[0, 0]]),
        _table(atoms=[{"a": 1}], root=-1),
        _table(records=[[0]], root=1),
        _table(classes=[_LINK], atoms=["a"], records=[[4, -1, -1]]),
        _table(classes=[["sbp_torch.signatures.__main__", "X", "fields", []]]),
        b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=["later", "kind", "itself", "atom", "root", "not valid", "a program", "deep"],
)
def test_bytes_that_nobody_wrote_are_refused(data: bytes) -> None:
    with pytest.raises(SbpValueError):
        decode(data)
