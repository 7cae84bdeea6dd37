"""Given a model and a machine alone, `auto` finds what people do by hand; it runs as one device."""

import pytest
import torch
from small_steps import (
    Chain,
    Classes,
    Experts,
    LongSequence,
    Mlp,
    Table,
    captured,
    draws,
    entries,
    machine,
    run_beside_one_device,
    signatures,
)

from sbp_core.graph import Phase
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.sbp import B, P, S
from sbp_planner.auto import AutoPlanner
from sbp_planner.search_configs import AutoConfig


def planned(step, cluster, **settings):
    """Plan a step with `auto`, and compare a run of it with one device."""
    mesh = Placement.grid((cluster.num_devices,), ("data",))
    asked = PlanRequest(graph=step.graph, mesh=mesh, cluster=cluster)
    strategy = AutoPlanner(AutoConfig(time_limit_s=120, **settings)).plan(asked)
    run_beside_one_device(step, strategy)
    return strategy


@pytest.mark.slow
def test_columns_and_rows_of_an_mlp_where_parameters_are_more_than_samples():
    step = captured(Mlp(64, 256), lambda n, seed: {"x": draws(seed, 4 * n, 64)})

    strategy = planned(step, machine(1e9))

    # Megatron's: the first by its output, the second by its input, one sum behind it.
    assert entries(strategy, "up.weight") == {S(0)}
    assert entries(strategy, "down.weight") == {S(1)}
    products = [s.signature for n, s in strategy.nodes.items() if n.startswith("down.addmm")]
    assert any(P("sum") in sbp for signature in products for sbp in signature.outputs)


@pytest.mark.slow
def test_classes_are_split_where_there_are_very_many():
    def batch(n, seed):
        labels = torch.randint(4096, (4 * n,), generator=torch.Generator().manual_seed(seed))
        return {"x": draws(seed, 4 * n, 16), "y": labels}

    strategy = planned(captured(Classes(16, 4096), batch), machine(1e9))

    assert entries(strategy, "head.weight") == {S(0)}
    made = [sbp for one in strategy.nodes.values() for sbp in one.signature.outputs]
    assert any(P("max") in sbp for sbp in made), "no rank has maxima of its classes"


@pytest.mark.slow
def test_a_large_table_is_split():
    def batch(n, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"i": torch.randint(8192, (8 * n,), generator=generator)}

    strategy = planned(captured(Table(8192, 16), batch), machine(1e9))

    assert entries(strategy, "table.weight") <= {S(0), S(1)}


@pytest.mark.slow
def test_experts_are_split_where_they_are_more_than_samples():
    step = captured(Experts(16, 64, 4), lambda n, seed: {"x": draws(seed, 4 * n, 16)})

    strategy = planned(step, machine(1e9))

    # Each rank stores, computes and updates experts of its own; their results are summed.
    assert entries(strategy, "up") == entries(strategy, "down") == {S(0)}
    assert entries(strategy, "router.weight") == {B}
    up, down, combined = signatures(step, strategy, "bmm")
    assert up == down == ((S(0), S(0)), (S(0),))
    assert combined[1] == (P("sum"),)


@pytest.mark.slow
def test_the_tokens_of_a_long_sequence_are_split():
    step = captured(LongSequence(32), lambda n, seed: {"x": draws(seed, n, 512, 32)})

    strategy = planned(step, machine(1e10))

    # Context parallelism: queries of a rank see the keys of all; all else is done token by token.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    (forward,) = signatures(step, strategy, attention)
    assert forward == ((S(2), B, B), (S(2), S(2)))
    (backward,) = signatures(step, strategy, f"{attention}_backward", Phase.BACKWARD)
    assert backward[1] == (S(2), P("sum"), P("sum"))
    assert set(signatures(step, strategy, "addmm")) == {((B, S(0), B), (S(0),))}


@pytest.mark.slow
def test_states_are_sharded_where_memory_is_short_and_links_are_fast():
    def batch(n, seed):
        return {"x": draws(seed, 64 * n, 64)}

    step = captured(Chain(64, 4), batch)
    # All states of AdamW in float64, whole, beside gradients: more than this.
    whole = 4 * sum(state.numel() * 8 for name, state in step.states.items() if "exp" not in name
                    and isinstance(state, torch.Tensor))  # fmt: skip

    strategy = planned(step, machine(1e12), memory_bytes=0.95 * whole)

    for at in range(4):
        assert entries(strategy, f"layers.{at}.weight.exp_avg") <= {S(0), S(1)}


@pytest.mark.slow
def test_a_pipeline_goes_across_slow_links():
    def batch(n, seed):
        return {"x": draws(seed, 4 * n, 128)}

    slow = machine(1e7, flop_per_s=1e9)
    strategy = planned(captured(Chain(128, 4), batch, num_micro_batches=8), slow)

    assert len(strategy.stages) == 2
    assert [strategy.storage[f"layers.{at}.weight"].stage for at in range(4)] == [0, 0, 1, 1]
