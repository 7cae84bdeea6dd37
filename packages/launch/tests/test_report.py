import re
from dataclasses import replace

from test_rows import found_plan, plan_of
from trainable import run_config

from sbp_core.memory import predict_memory
from sbp_core.memory.memory_kinds import MemoryKind
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Signature
from sbp_core.units import format_bytes, format_count, format_seconds
from sbp_launch.explaining.report import arithmetic_lines, crowding, memory_lines, summary
from sbp_launch.planning.utilization import samples_of_step

B = NdSbp.parse("B")


def lines_of(found, strategy=None):
    strategy = strategy or found.strategy
    return summary(
        found.plan,
        found.graph,
        strategy,
        found.module_rows,
        found.num_steps,
        found.checked,
        found.simulation.step_s,
    )


def test_the_summary_says_what_was_proved_and_why_it_was_chosen():
    found = found_plan("replicated")
    strategy = replace(found.strategy, report={**found.strategy.report, "explanation": ["because"]})

    lines = lines_of(found, strategy)

    assert lines[0] == "planner even: 2 ranks, 1 micro-batch"
    assert any("cannot deadlock" in line for line in lines)
    assert lines[-1] == "because"


def test_planner_and_summary_predict_the_time_that_the_simulated_step_takes():
    found = found_plan("replicated")

    lines = lines_of(found)

    assert found.strategy.report["predicted_step_s"] == found.simulation.step_s > 0
    assert f"predicted time of a step: {format_seconds(found.simulation.step_s)}" in lines


def test_the_summary_says_what_a_rank_sends_and_how_many_tensors_travel_together():
    found = found_plan("replicated")
    as_sent = dict.fromkeys(found.num_steps, 2)

    lines = lines_of(found)
    alone = summary(
        found.plan,
        found.graph,
        found.strategy,
        found.module_rows,
        as_sent,
        found.checked,
        found.simulation.step_s,
    )

    # 104 gradients, the loss and what it is divided by, and that a rank is ready to commit.
    assert "boxing in a step: a rank sends 428 B, the 2 ranks together 856 B" in lines
    assert "5 all-reduces (sent as 2); small tensors are sent together" in " ".join(lines)
    assert "sent as" not in " ".join(alone)


def test_boxing_is_counted_once_for_each_micro_batch():
    text = " ".join(lines_of(found_plan("pipeline")))

    assert "9 transfers" in text  # 2 steps, 4 micro-batches, and the loss


def whole_on_every_rank(found):
    """Return a strategy by which every rank computes everything."""
    whole = {
        name: replace(
            node,
            signature=Signature(
                inputs=[B] * len(node.signature.inputs), outputs=[B] * len(node.signature.outputs)
            ),
        )
        for name, node in found.strategy.nodes.items()
    }
    return replace(found.strategy, nodes=whole)


def test_the_arithmetic_of_a_rank_is_told_as_a_share_of_the_step():
    found = found_plan("replicated")

    (line,) = arithmetic_lines(found.graph, found.strategy)
    alike = arithmetic_lines(found.graph, whole_on_every_rank(found))

    share = float(re.fullmatch(r"arithmetic: a rank does (.*)% of .* share is 50%", line)[1])
    assert 50 <= share < 90
    assert alike[0] == "arithmetic: a rank does 100% of the step's; an even share is 50%"
    assert "2 ranks gain nothing" in alike[1]


def test_samples_that_ranks_cannot_share_evenly_are_told():
    # 8 samples on 3 ranks: every rank computes all of them, and the size of the batch is why.
    found = found_plan("replicated")
    whole = whole_on_every_rank(found)
    three = replace(whole, stages=(Placement.grid((3,), ("data",)),))

    lines = arithmetic_lines(found.graph, three)
    even = arithmetic_lines(found.graph, whole)

    assert samples_of_step(found.graph) % 3
    assert "cannot be shared evenly by the 3 ranks of mesh axis 'data'" in lines[1]
    assert "take a batch size that is a multiple of 3" in lines[1]
    assert not any("evenly" in line for line in even)


def test_of_one_rank_no_share_is_told():
    alone = plan_of(run_config((1,)))

    assert arithmetic_lines(alone.graph, alone.strategy) == []


def test_a_plan_that_sends_nothing_says_so():
    found = found_plan("replicated")
    alone = plan_of(run_config((1,)))

    assert "boxing: nothing is sent between ranks" in lines_of(alone)
    assert not any("pipeline" in line for line in lines_of(found))


def test_the_memory_of_a_rank_is_one_figure_and_what_it_consists_of():
    found = found_plan("replicated")

    lines = "".join(memory_lines(found.plan, found.memory))

    total, parts = re.fullmatch(r"memory of a rank at its peak: (.*)  = (.*)", lines).groups()
    peak = max(predict_memory(found.plan).ranks.values(), key=lambda rank: rank.peak)
    assert total == format_bytes(peak.peak)
    large = [kind for kind, size in peak.kinds.items() if size >= peak.peak / 100]
    assert parts.count(" + ") == len(large) - 1 + (len(large) < len(peak.kinds))
    assert parts.endswith(" other") == (len(large) < len(peak.kinds))
    assert f"{format_bytes(peak.kinds[MemoryKind.PARAMETERS])} parameters" in parts


def test_memory_that_is_not_known_is_said_to_be_unchecked():
    found = found_plan("replicated")

    (line,) = memory_lines(found.plan, "it is too odd")

    assert line == "memory is not known, so no limit was checked: it is too odd"


def test_one_is_counted_without_a_plural():
    assert format_count(1, "batch", "es") == "1 batch"
    assert format_count(0, "step") == "0 steps"


def test_ranks_that_share_cores_are_warned_of_with_what_it_costs():
    assert crowding(64, 2) == [
        "warning: 64 ranks share 2 cores and take turns: a step takes about 32 times as long as "
        "with a core for each rank"
    ]
    assert "3 ranks share 1 core and take turns" in crowding(3, 1)[0]
    assert crowding(4, 4) == crowding(1, 8) == []
