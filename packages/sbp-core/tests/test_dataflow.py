"""Networks of dataflow by hand: what the analyses say, with the numbers worked out in comments."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from sbp_core.dataflow import (
    FlowActor,
    FlowEdge,
    Network,
    check_live,
    critical_cycle,
    cycle_lines,
    dead_cycle,
    execute,
    latency,
    repetitions,
    sufficient_quotas,
)
from sbp_core.errors import SbpValueError


def _actors(**durations: int | float | Fraction) -> tuple[FlowActor, ...]:
    return tuple(FlowActor(name=name, duration_s=time) for name, time in durations.items())


def _edge(text: str, **parts: int) -> FlowEdge:
    """Return the edge `a 2>3 b`, called so; the rates are 1 if they are left out."""
    producer, rates, consumer = text.split(" ")
    produced, consumed = rates.split(">")
    return FlowEdge(
        name=text,
        producer=producer,
        consumer=consumer,
        produced=int(produced or 1),
        consumed=int(consumed or 1),
        **parts,
    )


def _pair(quota: int | None, **parts: int) -> Network:
    return Network(actors=_actors(a=3, b=2), edges=(_edge("a 2>3 b", quota=quota, **parts),))


def test_rates_between_micro_batch_and_step_are_numbers_on_edges() -> None:
    # Weights change every other micro-batch, the step ends after six: three rates.
    network = Network(
        actors=_actors(forward=1, update=1, report=1),
        edges=(_edge("forward 1>2 update"), _edge("update 1>3 report")),
    )

    assert repetitions(network) == {"forward": 6, "update": 3, "report": 1}


def test_repetitions_are_the_smallest_in_each_connected_part() -> None:
    network = Network(
        actors=_actors(a=1, b=1, c=1, d=1), edges=(_edge("a 4>6 b"), _edge("c 5>5 d"))
    )

    assert repetitions(network) == {"a": 3, "b": 2, "c": 1, "d": 1}


def test_a_part_fires_as_often_as_an_order_lists_its_actors() -> None:
    network = Network(
        actors=_actors(a=1, b=1, c=1),
        edges=(_edge("a > b"),),
        orders={"cpu": [("a", 0), ("c", 0), ("a", 1)]},
    )

    assert repetitions(network) == {"a": 2, "b": 2, "c": 1}


def test_rates_that_contradict_each_other_are_named_with_their_cycle() -> None:
    network = Network(
        actors=_actors(a=1, b=1, c=1, tail=1),
        edges=(_edge("a 2> b"), _edge("b > c"), _edge("a > c"), _edge("c > tail")),
    )

    with pytest.raises(SbpValueError, match="the rates contradict each other") as caught:
        repetitions(network)

    assert {line.split("'")[1] for line in caught.value.where} == {"a 2> b", "b > c", "a > c"}


def test_a_contradiction_is_worked_out_around_its_cycle() -> None:
    network = Network(actors=_actors(a=1, b=1), edges=(_edge("a 2>3 b"), _edge("b > a")))

    with pytest.raises(
        SbpValueError, match="one firing of 'b' it would have to fire 2/3 times"
    ) as e:
        repetitions(network)

    assert e.value.where == (
        "edge 'b > a': 'b' produces 1, 'a' consumes 1, so 'a' fires 1 times for one 'b'",
        "edge 'a 2>3 b': 'a' produces 2, 'b' consumes 3, so 'b' fires 2/3 times for one 'b'",
    )
    # The other way round the tree, against the edges.
    turned = Network(actors=network.actors, edges=(_edge("a 2>3 b"), _edge("a > b")))
    with pytest.raises(SbpValueError, match="one firing of 'a' it would have to fire 3/2 times"):
        repetitions(turned)


def test_an_iteration_that_explodes_is_refused() -> None:
    names = [f"a{i}" for i in range(20)]
    edges = tuple(_edge(f"{a} 3>1 {b}") for a, b in pairwise(names))

    with pytest.raises(SbpValueError, match="an iteration has 1743392200 firings"):
        repetitions(Network(actors=_actors(**dict.fromkeys(names, 1)), edges=edges))


def test_a_quota_below_what_rates_need_is_refused_with_the_least_that_is_enough() -> None:
    # The least quota of an edge with rates p and c is p + c - gcd(p, c) = 4.
    with pytest.raises(SbpValueError, match="would deadlock") as caught:
        check_live(_pair(3))

    assert caught.value.where == (
        "b[0] waits for data of a[1]",
        "a[1] waits for credit of a 2>3 b (quota 3), which b[0] gives back",
    )
    assert caught.value.todo == "raise the quota of 'a 2>3 b' to 4"
    check_live(_pair(4))


def test_a_cycle_without_tokens_is_not_blamed_on_quotas() -> None:
    network = Network(
        actors=_actors(a=1, b=1), edges=(_edge("a > b", quota=1), _edge("b > a", quota=1))
    )

    with pytest.raises(SbpValueError, match="would deadlock") as caught:
        check_live(network)

    assert sufficient_quotas(network) is None
    assert "put initial tokens on an edge" in caught.value.todo


def test_an_order_against_the_data_is_dead() -> None:
    orders = {"cpu": [("b", 0), ("a", 0)]}
    network = Network(actors=_actors(a=1, b=1), edges=(_edge("a > b", quota=1),), orders=orders)

    assert dead_cycle(network) is not None
    assert not execute(network, 1).is_done


def test_initial_tokens_let_iterations_overlap_around_a_cycle() -> None:
    # 5 s around, two iterations at once; and no actor takes longer than 3 s.
    network = Network(actors=_actors(a=3, b=2), edges=(_edge("a > b"), _edge("b > a", initial=2)))

    assert critical_cycle(network).period_s == 3
    assert latency(network) == 5
    one = Network(actors=network.actors, edges=(network.edges[0], _edge("b > a", initial=1)))
    assert critical_cycle(one).period_s == 5


def test_the_period_is_exact_and_a_fraction_where_durations_are() -> None:
    # 11/3 s around, with two tokens.
    network = Network(
        actors=_actors(a=Fraction(5, 3), b=2),
        edges=(_edge("a > b", quota=2), _edge("b > a", initial=2)),
    )
    slow = Network(
        actors=tuple(
            FlowActor(name=actor.name, duration_s=actor.duration_s, most_at_once=None)
            for actor in network.actors
        ),
        edges=network.edges,
    )

    assert critical_cycle(slow).period_s == Fraction(11, 6)
    assert critical_cycle(network).period_s == 2  # b alone, one firing after the other


def test_floats_give_the_same_period_to_rounding() -> None:
    # 0.1 and 0.2 are no sums of powers of two.
    network = Network(actors=_actors(a=0.1, b=0.2), edges=(_edge("a 2>3 b", quota=4),))
    exact = Network(actors=_actors(a=Fraction(1, 10), b=Fraction(1, 5)), edges=network.edges)

    assert critical_cycle(network).period_s == pytest.approx(float(critical_cycle(exact).period_s))


def test_a_critical_cycle_is_told_in_words() -> None:
    network = _pair(4)

    lines = cycle_lines(network, critical_cycle(network).waits)

    assert lines == [
        "a[0] waits for credit of a 2>3 b (quota 4), which b[1] of the iteration before gives back",
        "b[1] waits for data of a[2]",
        "a[2] waits for credit of a 2>3 b (quota 4), which b[0] gives back",
        "b[0] waits for data of a[1]",
        "a[1] waits for the end of a[0]",
    ]


def test_turns_of_a_processor_are_told_in_one_line() -> None:
    order = [("a", 0), ("b", 0), ("c", 0)]
    network = Network(actors=_actors(a=1, b=2, c=3), edges=(), orders={"cpu": order})

    found = critical_cycle(network)

    assert found.period_s == 6
    assert cycle_lines(network, found.waits, iteration="step") == [
        "cpu is never idle: 3 firings of each step follow without a pause, from a to c"
    ]


def test_a_processor_of_a_single_firing_is_told_by_what_it_does() -> None:
    network = Network(actors=_actors(a=1), edges=(), orders={"cpu": [("a", 0)]})

    found = critical_cycle(network)

    assert cycle_lines(network, found.waits, iteration="step") == [
        "cpu does nothing but a, step after step"
    ]


def test_what_may_run_ahead_for_ever_has_the_period_of_the_slowest() -> None:
    network = _pair(None, token_bytes=8)

    assert critical_cycle(network).period_s == 9  # three firings of a


def test_a_token_is_alive_from_the_start_of_its_making_to_the_end_of_its_use() -> None:
    # With a quota of 1, a cannot begin anew before b is through: they take turns.
    network = Network(actors=_actors(a=3, b=2), edges=(_edge("a > b", quota=1),))

    assert critical_cycle(network).period_s == 5
    assert execute(network, 9).most_tokens == {"a > b": 1}


def test_a_network_without_waits_takes_no_time_between_iterations() -> None:
    free = Network(actors=(FlowActor(name="a", duration_s=3, most_at_once=None),), edges=())

    assert critical_cycle(free).period_s == 0
    assert critical_cycle(free).waits == ()


def test_a_pipeline_of_many_firings_is_exact() -> None:
    # 40 stages pass 250 micro-batches on: 20,000 waits for data and credit a way. What a step of
    # this pipeline takes by itself is (m - 1) times the slowest and once all of them.
    names = [f"stage{i}" for i in range(40)]
    times = {name: 1 + number % 7 for number, name in enumerate(names)}
    edges = [_edge(f"{a} > {b}", quota=2) for a, b in pairwise(names)]
    begins = _edge(f"begin 250>1 {names[0]}")
    ends = _edge(f"{names[-1]} 1>250 end")
    again = _edge("end > begin", initial=1)
    network = Network(actors=_actors(begin=0, end=0, **times), edges=(*edges, begins, ends, again))

    assert latency(network) == 249 * 7 + sum(times.values())
    assert critical_cycle(network).period_s == latency(network)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FlowActor(name="a", duration_s=-1), "actor of -1 s"),
        (lambda: FlowActor(name="a", duration_s=float("nan")), "actor of nan s"),
        (lambda: FlowActor(name="a", duration_s=float("inf")), "actor of inf s"),
        (lambda: FlowActor(name="a", most_at_once=0), "0 firings at once"),
        (lambda: _edge("a 0>1 b"), "produces 0"),
        (lambda: _edge("a > b", initial=3, quota=2), "begins with 3, quota 2"),
        (lambda: _edge("a > b", token_bytes=-1), "-1 bytes a token"),
        (lambda: Network(actors=_actors(a=1) * 2, edges=()), "several actors are called"),
        (
            lambda: Network(actors=_actors(a=1), edges=(_edge("a > a"),) * 2),
            "several edges are called",
        ),
        (lambda: Network(actors=_actors(a=1), edges=(_edge("a > b"),)), "there is no actor"),
        (
            lambda: Network(actors=_actors(a=1), edges=(), orders={"cpu": [("a", 1)]}),
            "firing 1 of 'a' is not due there",
        ),
        (
            lambda: repetitions(
                Network(actors=_pair(4).actors, edges=_pair(4).edges, orders={"cpu": [("a", 0)]})
            ),
            "'a' has 1 firings in the order",
        ),
        (
            lambda: repetitions(
                Network(
                    actors=_actors(a=1, b=1),
                    edges=(_edge("a > b"),),
                    orders={"cpu": [("a", 0), ("a", 1), ("b", 0)]},
                )
            ),
            "'b' has 1 firings in the order",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, said: str) -> None:
    with pytest.raises(SbpValueError, match=said):
        make()
