"""How replicas that compute each step together agree on its shape, before any of them submits it.

A replica with work calls a round; the others, which may have none, answer it, and all submit a step of the agreed
shape. Every replica takes part in every round, so that their ranks meet in the same collective operations. Rounds cost
messages between hosts' processes, never work of a device. Must not know plans beyond their shape.

    replica 0   ── shape of round n ──►  ◄── shape of round n ──   replica 1
                  both: the largest of the two, then submit
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec
import zmq

from srv.dist.agreement import StepShape
from srv.errors import EngineDead

_POLL_MS = 100


class _Proposal(msgspec.Struct, frozen=True, array_like=True):
    round: int
    replica: int
    shape: StepShape


class Agreement:
    """The rounds of one of `count` replicas. `address(replica)`: of the socket of each.

    alive: whether the process is still there that would end all replicas if one were lost.
    """

    def __init__(self, replica: int, count: int, address: Callable[[int], str], alive: Callable[[], bool]) -> None:
        self._replica, self._count, self._alive = replica, count, alive
        self._round = 0
        self._shapes: defaultdict[int, dict[int, StepShape]] = defaultdict(dict)  # by round and replica
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address(replica))
        self._others = [self._connected(address(other)) for other in range(count) if other != replica]
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Proposal)

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return socket

    @property
    def called(self) -> bool:
        """Whether another replica has called the next round."""
        while self.socket.poll(0):
            self._receive()
        return bool(self._shapes.get(self._round))

    def agree(self, own: StepShape) -> StepShape:
        """The shape of the next step, from what each replica has to compute.

        Waits for all. Raises EngineDead if the process that started them has exited.
        """
        message = self._encoder.encode(_Proposal(self._round, self._replica, own))
        for other in self._others:
            other.send(message)
        shapes = self._shapes[self._round]
        shapes[self._replica] = own
        while len(shapes) < self._count:
            if self.socket.poll(_POLL_MS):
                self._receive()
            elif not self._alive():
                raise EngineDead("the API process has exited")
        del self._shapes[self._round]
        self._round += 1
        return StepShape.of_all(shapes.values())

    def _receive(self) -> None:
        proposal = self._decoder.decode(self.socket.recv())
        self._shapes[proposal.round][proposal.replica] = proposal.shape

    def close(self) -> None:
        self._context.destroy(linger=0)
