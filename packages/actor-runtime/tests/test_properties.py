"""Credit accounting, whatever the order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_actor_runtime.register import OutRegister


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    quota=st.integers(1, 4),
    events=st.lists(st.sampled_from(["fill", "a", "b", "c"]), max_size=60),
)
def test_live_fillings_are_bounded_by_the_quota_and_counted_exactly(
    quota: int, events: list[str]
) -> None:
    register = OutRegister("x#0", quota, dict.fromkeys("abc", (0, "compute")), ("x",))
    filled, read = 0, dict.fromkeys("abc", 0)

    for event in events:
        live = filled - min(read.values())
        if event == "fill" and live < quota:
            assert register.has_credit
            register.fill()
            filled += 1
        elif event == "fill":
            assert not register.has_credit
        elif read[event] < filled:
            register.acknowledge(event)
            read[event] += 1
        assert 0 <= register.filled - register.read <= quota
        assert read[register.slowest()] == min(read.values())
    assert register.has_credit == (filled - min(read.values()) < quota)
