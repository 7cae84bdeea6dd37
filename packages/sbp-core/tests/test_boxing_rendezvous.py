from sbp_core.boxing.supervision.rendezvous import free_port


def test_ports_are_drawn_below_those_of_outgoing_connections() -> None:
    ports = {free_port() for _ in range(20)}

    assert len(ports) > 1
    assert all(1024 < port < 32_000 for port in ports)
