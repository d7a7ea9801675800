"""Clusters that run at once, or were left by a killed run, have ports of their own."""

import socket

import pytest

from tests.slurm import cluster
from tests.slurm.cluster import SlurmError, reserve_ports


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """Two parts of the ports that are free, in the order in which they are tried."""
    reserved = [reserve_ports() for _ in range(2)]
    for _, reservation in reserved:
        reservation.close()
    ports = [port for port, _ in reserved]
    monkeypatch.setattr(cluster.random, "sample", lambda parts, num: ports)
    return ports


def test_ports_are_one_clusters_until_it_ends(tried):
    first, second = reserve_ports(), reserve_ports()
    assert [first[0], second[0]] == tried
    with pytest.raises(SlurmError, match="ports 12000 to 18999: each part of 200 has one in use"):
        reserve_ports()
    first[1].close()
    port, again = reserve_ports()
    assert port == tried[0]
    for reservation in (second[1], again):
        reservation.close()


@pytest.mark.parametrize("used", [0, 1, 2], ids=["controller", "first node", "second node"])
def test_ports_of_a_cluster_that_was_left_are_passed_over(tried, used):
    with socket.socket() as daemon:
        daemon.bind(("", tried[0] + used))
        daemon.listen()
        port, reservation = reserve_ports()
        reservation.close()
    assert port == tried[1]
