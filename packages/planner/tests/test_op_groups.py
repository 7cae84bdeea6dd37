"""The operators of a step in groups, and how they depend on each other."""

from functools import cache
from itertools import pairwise

import pytest
from placed_models import Branches, Convolutions, captured, features, images
from plan_requests import cluster, gpt_step

from sbp_core.cost import op_time_s
from sbp_core.graph import Phase
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_core.signatures import OpCall
from sbp_core.strategy import Signature
from sbp_planner.op_groups import op_groups


@cache
def of_branches():
    return captured(Branches(), features).graph


@cache
def of_convolutions():
    return captured(Convolutions(), images).graph


def names(found):
    return [group.name for group in found.groups]


@pytest.mark.slow
def test_branches_are_apart_until_their_join():
    found = op_groups(of_branches(), cluster())

    at = {name: index for index, name in enumerate(names(found))}
    (join,) = [name for name in at if "." not in name and name not in ("stem", "head")]
    edges = {(flow.producer, flow.consumer) for flow in found.flows}
    chains = [["stem", f"{side}.0", f"{side}.1", f"{side}.2", join] for side in ("left", "right")]
    wanted = {(at[a], at[b]) for chain in chains for a, b in pairwise(chain)}
    assert edges == wanted | {(at[join], at["head"])}


def test_what_only_follows_a_module_belongs_to_it():
    found = op_groups(of_convolutions(), cluster())

    assert names(found) == ["convs.0", "convs.1", "wide", "head"]


@pytest.mark.parametrize("graph", [of_branches, of_convolutions, gpt_step])
def test_groups_follow_those_that_they_use_and_have_all_of_the_time(graph):
    step, one = graph(), Placement((0,), ("rank",))

    found = op_groups(step, cluster())

    assert all(flow.producer < flow.consumer for flow in found.flows)
    placed = {name for group in found.groups for name in group.nodes}
    wanted = 0.0
    for node in step.nodes:
        if node.is_host or not (node.name in placed or node.forward in placed):
            continue
        if node.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        call = OpCall.of(step, node)
        whole = Signature((NdSbp(B),) * len(call.inputs), (NdSbp(B),) * len(call.outputs))
        wanted += op_time_s(call, whole, one, cluster())
    assert sum(g.forward_s + g.backward_s for g in found.groups) == pytest.approx(wanted)


def test_parameters_belong_to_the_group_that_uses_them():
    found = op_groups(of_convolutions(), cluster())

    sizes = {group.name: group.parameter_bytes for group in found.groups}
    assert sizes["wide"] == (8 * 8 * 8 * 128 + 128) * 8
    assert sizes["convs.0"] == (3 * 8 * 9 + 8) * 8
    assert all(group.update_s > 0 for group in found.groups)


def test_neighbours_in_a_chain_are_joined_while_there_are_too_many():
    whole = op_groups(of_branches(), cluster())

    few = op_groups(of_branches(), cluster(), max_groups=5)

    assert len(few.groups) == 5
    seconds = [sum(g.forward_s for g in found.groups) for found in (whole, few)]
    assert seconds[1] == pytest.approx(seconds[0])
    # The branches stay apart.
    assert len({group.name.split(".")[0] for group in few.groups} & {"left", "right"}) == 2
