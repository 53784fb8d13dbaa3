"""Which connection gives way when a server has as many as it may have."""

from __future__ import annotations

from srv.server.http.places import IDLE_SECONDS, RESERVED, BytePlace, Places


class Client:
    """A connection. By default it is silent: open, without a request."""

    def __init__(self, address: str = "", since: float = 0.0, waiting: bool = True, accepted: bool = False) -> None:
        self.address, self.since, self.waiting, self.accepted = address, since, waiting, accepted
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def busy(address: str = "") -> Client:
    return Client(address, waiting=False, accepted=True)


def idle(address: str = "", since: float = 0.0) -> Client:
    return Client(address, since, accepted=True)


def refused(address: str = "", since: float = 0.0) -> Client:
    """One whose request has no valid key; the response may wait for its client."""
    return Client(address, since, waiting=False)


def places(*clients: Client) -> Places:
    full = Places(len(clients))
    assert [full.take(client, 0) for client in clients] == [BytePlace.ORDINARY] * len(clients)
    return full


def evicted(*clients: Client, now: float = 0, by: str = "") -> list[int]:
    """The numbers of those that give way to one more, of the address `by`."""
    expected = places(*clients).take(Client(by), now)
    gone = [number for number, client in enumerate(clients) if client.evicted]
    assert expected is (BytePlace.ORDINARY if gone else BytePlace.RESERVED)
    return gone


def test_a_client_without_a_request_gives_way() -> None:
    assert evicted(busy(), busy()) == []
    assert evicted(busy(), Client(), Client(), busy()) == [1]
    assert evicted(idle(), Client(), now=100) == [1]
    assert evicted(idle(), idle(), now=IDLE_SECONDS - 1) == []
    assert evicted(busy(), idle(since=2), idle(since=1), now=100) == [2]


def test_connections_without_an_accepted_request_give_way_first_whatever_they_do() -> None:
    assert evicted(idle(), refused(), refused(), idle(), now=100) == [1]
    assert evicted(busy(), refused(since=2), Client(since=1), refused(since=3)) == [2]
    assert evicted(busy(), Client(since=2), refused(since=1)) == [2]


def test_a_probe_is_answered_unless_its_address_has_other_connections_without_a_key() -> None:
    assert evicted(busy("a"), refused("b")) == []
    assert evicted(busy("a"), refused("b"), refused("c", 1), refused("c", 2)) == [2]


def test_an_address_with_many_connections_takes_the_places_of_no_other() -> None:
    assert evicted(Client("a"), Client("b"), Client("b"), Client("a"), Client("b")) == [1]
    assert evicted(refused("b", 9), refused("a"), refused("b", 8)) == [2]
    assert evicted(idle("a"), idle("b", 3), idle("b", 2), now=3, by="c") == [2]
    assert evicted(idle("a"), idle("b", 3), idle("b", 2), now=3, by="b") == []
    assert evicted(idle("a"), idle("b"), now=3, by="c") == []  # one for one: no address gains
    assert evicted(busy("a"), busy("a"), idle("b", 1), idle("b", 2), now=3, by="a") == [2]


def test_a_few_places_are_reserved_and_what_occupies_them_gives_way_too() -> None:
    full = places(busy())
    probes = [(busy() if number % 2 else Client()) for number in range(RESERVED)]
    assert {full.take(probe, 0) for probe in probes} == {BytePlace.RESERVED}
    for number in range(0, RESERVED, 2):
        assert full.take(busy(), 0) is BytePlace.RESERVED
        assert probes[number].evicted
    assert full.take(Client(), 0) is BytePlace.NONE
    full.leave(probes[1])
    assert full.take(Client(), 0) is BytePlace.RESERVED
