"""Flat tables and arcs say the same as the tables of the edges."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.choice.compact import Compact, FlatTables, first_least, ragged


@st.composite
def graphs(draw):
    """Draw sizes of nodes, edges and their tables, about a third of the pairs forbidden."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = random.integers(1, 5, draw(st.integers(2, 6)))
    edges = [(int(u), int(v)) for u, v in random.integers(0, len(sizes), (6, 2)) if u != v]
    tables = [random.integers(0, 9, (sizes[u], sizes[v])).astype(float) for u, v in edges]
    for table in tables:
        table[random.random(table.shape) < 0.3] = inf
    return sizes, tuple(edges), tuple(tables), random


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_chosen_entries_and_columns_are_those_of_the_tables(graph):
    sizes, edges, tables, random = graph
    flat = FlatTables.of(edges, tables)
    values = random.integers(0, sizes)
    first = np.concatenate([[0], np.cumsum(sizes)])

    chosen = flat.entries[flat.chosen(values)].tolist()
    columns = [flat.columns(first, end).tolist() for end in (0, 1)]
    transposed = flat.entries[flat.transposed()].tolist()

    assert chosen == [t[values[u], values[v]] for (u, v), t in zip(edges, tables, strict=True)]
    assert columns[0] == [
        int(first[u]) + k for u, v in edges for k in range(sizes[u]) for _ in range(sizes[v])
    ]
    assert columns[1] == [
        int(first[v]) + k for u, v in edges for _ in range(sizes[u]) for k in range(sizes[v])
    ]
    assert transposed == [entry for table in tables for entry in table.T.ravel().tolist()]


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_messages_are_the_least_over_the_sender_for_each_strategy_of_the_receiver(graph):
    sizes, edges, tables, random = graph
    if not edges:
        return
    nothing = np.zeros(0, dtype=np.int64)
    compact = Compact(
        cost=np.full(sizes.sum(), 20.0),
        first=np.concatenate([[0], np.cumsum(sizes)]),
        edges=edges,
        tables=tables,
        capacity=nothing,
        held_column=nothing,
        held_first=nothing,
        held_end=nothing,
        held_bytes=nothing,
    )
    chosen = random.permutation(2 * len(edges))[: 1 + len(edges)]
    own = random.integers(0, 9, len(compact.cost)).astype(float)

    messages = compact.messages(chosen % len(edges), chosen >= len(edges))
    least = messages.least(own[messages.from_column])

    expected, columns = [], []
    for direction in chosen.tolist():
        back, edge = divmod(direction, len(edges))
        table = tables[edge].T if back else tables[edge]
        sender, receiver = edges[edge][::-1] if back else edges[edge]
        sent = own[compact.first[sender] : compact.first[sender + 1]]
        expected += (sent[:, None] + table).min(axis=0).tolist()
        columns += range(compact.first[receiver], compact.first[receiver + 1])
    forbidden = compact.arcs.forbidden
    assert all(
        e == a or (e == inf and a >= forbidden) for e, a in zip(expected, least, strict=True)
    )
    assert messages.to_column.tolist() == columns


def test_ragged_ranges_follow_one_another():
    assert ragged(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ragged(np.zeros(0, dtype=int), np.zeros(0, dtype=int)).tolist() == []


def test_of_equals_the_first_is_least():
    values = np.array([3.0, 1.0, 1.0, 7.0, 2.0, 2.0])

    assert first_least(values, np.array([0, 4]), np.array([4, 2])).tolist() == [1, 0]
