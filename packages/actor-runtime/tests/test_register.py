from sbp_actor_runtime.register import InRegister, OutRegister

HERE, THERE = (0, "compute"), (0, "boxing")


def test_a_register_has_as_many_credits_as_its_quota() -> None:
    register = OutRegister("x#0", 2, {"reader": HERE}, ("x",))

    register.fill()
    assert register.has_credit
    register.fill()

    assert not register.has_credit


def test_an_acknowledgement_gives_a_credit_back() -> None:
    register = OutRegister("x#0", 1, {"reader": HERE}, ("x",))
    register.fill()

    register.acknowledge("reader")

    assert register.has_credit


def test_the_credit_comes_back_with_the_slowest_consumer() -> None:
    register = OutRegister("x#0", 1, {"quick": HERE, "slow": THERE}, ("x",))
    register.fill()

    register.acknowledge("quick")

    assert not register.has_credit
    assert register.slowest() == "slow"
    register.acknowledge("slow")
    assert register.has_credit


def test_consumers_come_with_their_threads_in_the_order_of_the_plan() -> None:
    register = OutRegister("x#0", 1, {"second": THERE, "first": HERE}, ("x",))

    assert register.consumers == (("second", THERE), ("first", HERE))


def test_an_acknowledgement_before_the_filling_still_counts() -> None:
    link = OutRegister("send x 0>1", 1, {"receive x": (1, "compute")})

    link.acknowledge("receive x")
    link.fill()

    assert link.has_credit


def test_fillings_are_read_in_the_order_in_which_they_came() -> None:
    register = InRegister("x#0", HERE)

    for value in (1, 2, 3):
        register.fillings.append({"x": value})

    assert [register.fillings.popleft()["x"] for _ in range(3)] == [1, 2, 3]
