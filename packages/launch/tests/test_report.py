import re

from trainable import planned, row

from sbp_core.memory import predict_memory
from sbp_core.memory.kinds import MemoryKind
from sbp_core.units import format_bytes
from sbp_launch.report import counted, memory_lines, summary


def test_the_summary_says_what_was_proved_and_why_it_was_chosen():
    found = planned()
    report = {**found.strategy.report, "explanation": ["because"]}
    strategy = type(found.strategy)(
        **{field: getattr(found.strategy, field) for field in found.strategy.__slots__}
        | {"report": report}
    )

    lines = summary(found.plan, strategy, found.checked, found.rows)

    assert lines[0] == "planner even: 2 ranks, 1 stage (data 2), 1 micro-batch"
    assert any("proved live and bounded" in line for line in lines)
    assert lines[-1] == "because"


def test_the_summary_says_how_many_steps_of_the_table_travel_together():
    found = planned()
    rows = [row("a", moved=8)] * 1000

    merged = summary(found.plan, found.strategy, found.checked, rows)
    alone = summary(found.plan, found.strategy, found.checked, found.rows[:1])

    assert any(", merged from 1000; " in line for line in merged)
    assert not any("merged" in line for line in alone)


def test_the_memory_of_a_rank_is_one_figure_and_what_it_consists_of():
    found = planned()

    lines = "".join(memory_lines(found.plan, found.memory))

    total, parts = re.fullmatch(r"memory of a rank at its peak: (.*)  = (.*)", lines).groups()
    peak = max(predict_memory(found.plan).ranks.values(), key=lambda rank: rank.peak)
    assert total == format_bytes(peak.peak)
    large = [kind for kind, size in peak.kinds.items() if size >= peak.peak / 100]
    assert parts.count(" + ") == len(large) - 1 + (len(large) < len(peak.kinds))
    assert parts.endswith(" other") == (len(large) < len(peak.kinds))
    assert f"{format_bytes(peak.kinds[MemoryKind.PARAMETERS])} parameters" in parts


def test_memory_that_is_not_known_is_said_to_be_unchecked():
    found = planned()

    (line,) = memory_lines(found.plan, "it is too odd")

    assert line == "memory is not known, so no limit was checked: it is too odd"


def test_one_is_counted_without_a_plural():
    assert counted(1, "batch", "es") == "1 batch"
    assert counted(0, "step") == "0 steps"
