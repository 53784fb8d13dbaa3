"""Which connection gives way when a server has as many as it may have."""

from __future__ import annotations

from srv.server.http.places import IDLE_SECONDS, RESERVED, Place, Places


class Client:
    def __init__(self, address: str = "", idle_since: float | None = 0.0, served: bool = False) -> None:
        self.address, self.idle_since, self.served = address, idle_since, served
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def places(*clients: Client) -> Places:
    full = Places(len(clients))
    assert [full.take(each, 0) for each in clients] == [Place.ORDINARY] * len(clients)
    return full


def evicted(*clients: Client, now: float = 0) -> list[int]:
    """The numbers of those that give way to one more."""
    expected = places(*clients).take(Client(), now)
    gone = [number for number, each in enumerate(clients) if each.evicted]
    assert expected is (Place.ORDINARY if gone else Place.RESERVED)
    return gone


def test_a_client_without_a_request_gives_way() -> None:
    busy, silent, idle = (lambda: Client(idle_since=None)), Client, (lambda: Client(served=True))
    assert evicted(busy(), busy()) == []
    assert evicted(busy(), silent(), silent(), busy()) == [1]
    assert evicted(idle(), silent(), now=100) == [1]
    assert evicted(idle(), idle(), now=IDLE_SECONDS - 1) == []
    assert evicted(busy(), Client(idle_since=2, served=True), Client(idle_since=1, served=True), now=100) == [2]


def test_an_address_with_many_silent_connections_takes_the_places_of_no_other() -> None:
    assert evicted(Client("a"), Client("b"), Client("b"), Client("a"), Client("b")) == [1]


def test_a_few_places_are_reserved_and_what_occupies_them_gives_way_too() -> None:
    full = places(Client(idle_since=None))
    probes = [Client(idle_since=None if number % 2 else 0) for number in range(RESERVED)]
    assert {full.take(each, 0) for each in probes} == {Place.RESERVED}
    for number in range(0, RESERVED, 2):
        assert full.take(Client(idle_since=None), 0) is Place.RESERVED
        assert probes[number].evicted
    assert full.take(Client(), 0) is Place.NONE
    full.leave(probes[1])
    assert full.take(Client(), 0) is Place.RESERVED
