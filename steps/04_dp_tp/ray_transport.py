"""An engine somewhere on a Ray cluster, behind the same frames as one on this machine.

    front end                             a node of the cluster
        Endpoint                              EngineActor, a process of Ray
          | inproc                              | ProcessTransport, as on one machine
        relay, a thread  === actor calls ==>  engine process, which starts its own workers

Ray chooses the node, keeps its GPUs for the engine, starts the actor, and tells when it is lost.
What the calls carry is bytes. Of our code Ray pickles what it makes of every actor class and no
more: the nodes have this project installed, in the same version, and import it.

The engine is not in the actor itself. A thread that answers calls would hold up its steps, and so
an engine ends in one way everywhere: exit status, last words, a lifeline that the kernel closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
import time
from typing import Any

from .config import ParallelConfig
from .online import online

transport = online("transport")
Transport: Any = transport.Transport

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# For a node with enough that is free; a cluster that grows on demand takes its time.
PLACEMENT_SECONDS = 120.0
# For a process of Ray's to start.
START_SECONDS = 60.0
# How long the actor waits for the engine to say something before it answers that there is nothing.
PULL_SECONDS = 1.0
# An actor that has not answered for so long is lost, whatever Ray still hopes for.
SILENCE_SECONDS = 8.0
# Between two attempts at sending what there was no room for.
RETRY_SECONDS = 0.01

Ending = tuple[bytes, str]
"""The engine's last words, and how its process ended."""


class RayTransport(Transport):
    """The front end's side. Whatever is lost, the engine, its actor, or their node, shows within
    ten seconds as the end of the lifeline. So does, after PLACEMENT_SECONDS, that there is no room.

    The end of the front end, even by kill -9, ends the actor: Ray kills what its owner left.
    """

    def __init__(self, build: str, name: str, config: ParallelConfig) -> None:
        """`build` and `name` are those of ProcessTransport. Each rank gets a GPU of its own, all on
        one node; in a cluster without GPUs, or with device "cpu", a CPU. Raises what `connect`
        raises."""
        self._ray = connect()
        has_gpus = config.device == "cuda" or "GPU" in self._ray.cluster_resources()
        self._resource = "GPU" if has_gpus and config.device != "cpu" else "CPU"
        self._size = config.tensor_parallel_size
        self._engine = (build, name)
        self._how = "the relay to Ray failed"
        address = "inproc://engine"  # within a context of its own
        self._open(address)
        self._thread = threading.Thread(
            target=self._main, args=(address,), name="ray relay", daemon=True
        )
        self._thread.start()

    def connected(self) -> None:
        pass

    def _end(self, in_time: bool) -> str:
        self.lifeline.close()  # which the relay waits for, if it still waits for anything
        self._thread.join(transport.REAP_SECONDS)
        self._is_stuck = self._thread.is_alive()  # in a call of Ray's
        return self._how

    def _main(self, address: str) -> None:
        endpoint = transport.Endpoint(
            self._context, transport.MAX_EVENTS_IN_FLIGHT, transport.MAX_COMMANDS_IN_FLIGHT
        )
        endpoint.connect(address)
        try:
            last_words, self._how = asyncio.run(self._relay(endpoint))
            with contextlib.suppress(OSError):  # nobody listens
                self._their_lifeline.sendall(last_words)
        except OSError as error:
            self._how = str(error)
            online("engine_process").LastWords(self._their_lifeline).say(error)
        finally:
            endpoint.close()
            self._their_lifeline.close()

    async def _relay(self, endpoint: Any) -> Ending:
        """From the reservation of a place to the end of the engine, or of the front end's interest
        in it."""
        self._their_lifeline.setblocking(False)
        given_up = asyncio.create_task(
            asyncio.get_running_loop().sock_recv(self._their_lifeline, 1)
        )
        life = asyncio.create_task(self._life(_Port(endpoint)))
        await asyncio.wait([life, given_up], return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        if not life.done():
            life.cancel()
            await asyncio.wait([life])
            return b"", "the engine's Ray actor was ended by force"
        return life.result()

    async def _life(self, port: _Port) -> Ending:
        group = self._ray.util.placement_group([{self._resource: self._size}], "STRICT_PACK")
        try:
            await self._wait_for_place(group)
            try:
                return await self._serve(port, self._start_actor(group))
            except self._ray.exceptions.RayError as error:
                return b"", f"the engine's Ray actor is lost: {' '.join(str(error).split())}"
            except TimeoutError:
                return b"", "the engine's Ray actor does not answer"
        finally:
            self._ray.util.remove_placement_group(group)  # kills the actor, should it live

    async def _wait_for_place(self, group: Any) -> None:
        deadline = time.monotonic() + PLACEMENT_SECONDS
        is_late = False
        while not group.wait(1):
            if time.monotonic() > deadline:
                raise TimeoutError(self._what_is_lacking())
            if not is_late:
                is_late = True
                logger.warning("waiting for a place: %s", self._what_is_lacking())
            await asyncio.sleep(0)  # to hear of the front end

    def _what_is_lacking(self) -> str:
        name = self._resource
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        most = max((node.get(name, 0) for node in nodes), default=0)
        free = self._ray.available_resources().get(name, 0)
        return (
            f"the Ray cluster has no node with {self._size} free {name}s (tensor_parallel_size): "
            f"the largest of its {len(nodes)} nodes has {most:g} in all, and {free:g} are free on "
            "all nodes together"
        )

    def _start_actor(self, group: Any) -> Any:
        gpus, cpus = (self._size, 0) if self._resource == "GPU" else (0, self._size)
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        actor = self._ray.remote(EngineActor)
        options = actor.options(num_gpus=gpus, num_cpus=cpus, scheduling_strategy=place)
        return options.remote(*self._engine)

    async def _serve(self, port: _Port, actor: Any) -> Ending:
        async with asyncio.timeout(START_SECONDS):
            await actor.__ray_ready__.remote()
        pushing = asyncio.create_task(self._push(port, actor))
        try:
            return await self._pull(port, actor)
        finally:
            pushing.cancel()

    async def _push(self, port: _Port, actor: Any) -> None:
        """Commands, one call at a time, so that they stay in order."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # `_pull` hears of it
            while True:
                if frames := port.receive():
                    await actor.push.remote(frames)
                else:
                    await port.wait()

    async def _pull(self, port: _Port, actor: Any) -> Ending:
        """Events, until there are no more. While the front end takes none, none are asked for: the
        engine merges them."""
        unsent: list[bytes] = []
        while True:
            async with asyncio.timeout(SILENCE_SECONDS):
                frames, ending = await actor.pull.remote(not unsent)
            unsent += frames
            while unsent and port.send(unsent[0]):
                del unsent[0]
            if ending is not None:
                return ending


class EngineActor:
    """The node's side, in a process that Ray starts. If that process dies, the engine reads the end
    of its lifeline."""

    def __init__(self, build: str, name: str) -> None:
        self._engine = transport.ProcessTransport(build, name)
        self._port = _Port(self._engine.endpoint, self._engine.lifeline)
        self._last_words = b""

    async def push(self, frames: list[bytes]) -> None:
        """Returns when all have been sent, which a long step may delay."""
        for frame in frames:
            while not self._port.send(frame):
                await asyncio.sleep(RETRY_SECONDS)

    async def pull(self, has_room: bool) -> tuple[list[bytes], Ending | None]:
        """What has come, after a wait of at most PULL_SECONDS; nothing, if there is no room for it.
        The ending, once there is one."""
        frames: list[bytes] = []
        if not has_room:
            await asyncio.sleep(RETRY_SECONDS)
        elif not (frames := self._port.receive()):
            await self._port.wait(PULL_SECONDS)
            frames = self._port.receive()
        if frames:
            self._engine.connected()
        if not self._has_ended():
            return frames, None
        frames += self._port.receive()
        return frames, (self._last_words, self._engine.close())

    def _has_ended(self) -> bool:
        try:
            while data := self._engine.lifeline.recv(4096):
                self._last_words += data
        except BlockingIOError:
            return False
        except OSError:  # reset by its end
            pass
        return True


class _Port:
    """An endpoint in an event loop. One coroutine may wait."""

    def __init__(self, endpoint: Any, lifeline: socket.socket | None = None) -> None:
        self._endpoint = endpoint
        self._watched = [end.fileno() for end in (endpoint, lifeline) if end is not None]
        self._changed = asyncio.Event()

    def send(self, frame: bytes) -> bool:
        """As Endpoint.send."""
        self._changed.set()  # it may swallow the sign that something has come
        return bool(self._endpoint.send(frame))

    def receive(self) -> list[bytes]:
        """All that has come."""
        frames = []
        while (frame := self._endpoint.receive()) is not None:
            frames.append(frame)
        return frames

    async def wait(self, timeout: float | None = None) -> None:
        """After `receive` has found nothing: until it may find something, the lifeline has
        something to say, or `timeout` seconds are over."""
        loop = asyncio.get_running_loop()
        for descriptor in self._watched:
            loop.add_reader(descriptor, self._changed.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
        finally:
            self._changed.clear()
            for descriptor in self._watched:
                loop.remove_reader(descriptor)


def connect() -> Any:
    """The module `ray`, connected to the cluster of the environment's RAY_ADDRESS ("auto": the one
    that was started on this machine) or, without it, to a private one that is started here and
    ends with this process. Later calls find that connection.

    The first call belongs into the main thread: Ray's processes end with the thread that has
    started them, and only there can SIGTERM be taken back from Ray, which would end this process
    within seconds. Raises ValueError if Ray is not installed, and OSError if no cluster answers.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ValueError(
            "distributed_backend='ray' needs Ray: pip install -e '.[ray]' -c constraints.txt"
        ) from None
    importlib.import_module("ray.util.scheduling_strategies")
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        _check_reachable(address)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, include_dashboard=False)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself would try for ever."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise OSError(f"no Ray cluster at RAY_ADDRESS={address}: {error}") from error
