"""Requests that wait for something remote: KV of another engine or a store, an encoder.

A `RemoteSource` fills blocks of the KV cache by itself, beside the steps. Knows no JAX.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from jaxrunner.scheduling.block_tables import BlockTables, Hit
from jaxrunner.scheduling.request import Request, Status


class RemoteSource(Protocol):
    """Where the KV of a request may come from, and go to, other than by steps of this engine.

    Blocks change owners in the order of launches, ahead of the device: steps up to the one that is
    planned during `start` may still use the blocks it is given, so it must write after them. So
    may steps use those of a request that has ended, when `release` is called.
    """

    def lookup(self, request: Request, num_computed: int) -> int | None:
        """Returns how many tokens behind the first `num_computed` could come from elsewhere.

        None: it is not known yet, or the request must wait for something else; those behind it go
        on, and it is asked again in the next step. More than can be of use is cut.
        """
        ...

    def start(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """Starts to fill tokens `num_computed` to `num_tokens - 1` in `request.blocks`.

        A null block stands where no later token looks: nothing is to be written there.
        """
        ...

    def poll(self, *, wait: bool) -> Iterable[tuple[Request, bool]]:
        """Returns those that have finished since the last call, and whether all went well.

        They are what was started, where False means that the request is computed here instead, and
        what `release` kept; nothing reads or writes their blocks any more. What was filled is there
        for each step launched from now on. wait: nothing else is to be done, so it may wait a
        little for one.
        """
        ...

    def release(self, request: Request) -> bool:
        """Takes note that a request has ended, in any state. Returns whether its blocks are free.

        False: they are read or written still, until `poll` returns the request.
        """
        ...

    def reset(self) -> None:
        """Gives up all that is under way: after this nothing reads or writes any block."""
        ...


class RemoteRequests:
    """Requests that hold blocks and no place in the running batch. Each is in one table."""

    def __init__(self, source: RemoteSource, tables: BlockTables):
        """Raises ValueError: layers have states, which no source fills."""
        if tables.has_states:
            raise ValueError(
                "remote fills blocks with keys, a cache group has states of whole prefixes: leave "
                "remote out"
            )
        self._source, self._tables = source, tables
        self._loading: dict[Request, Hit] = {}  # the prefix that each starts from once it is there
        self._loaded: dict[Request, Hit] = {}  # it is; they wait for a place
        self._ended: set[Request] = set()  # their blocks are in use all the same
        self._failed: set[Request] = set()  # to be computed here; hold nothing

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that hold blocks and do not run."""
        return len(self._loading) + len(self._loaded)

    @property
    def holders(self) -> Iterator[Request]:
        """Requests that hold blocks and do not run."""
        yield from (*self._loading, *self._loaded, *self._ended)

    @property
    def loaded(self) -> Iterable[Request]:
        """The requests that wait for nothing but a place."""
        return self._loaded.keys()

    def lookup(self, request: Request, hit: Hit) -> Hit | None:
        """Returns `hit`, or a longer one to be fetched; None: the request must wait."""
        if request in self._failed:
            return hit
        computed = self._tables.whole(hit).num_tokens
        found = self._source.lookup(request, computed)
        if found is None:
            return None
        end = min(computed + found, request.num_tokens - 1, request.cache_limit)
        return self._tables.lengthened(hit, end) if end > hit.num_tokens else hit

    def start(self, request: Request, cached: Hit, hit: Hit) -> None:
        """Takes a request with blocks; what `hit` has beyond `cached` is fetched into them."""
        request.status, self._loading[request] = Status.WAITING_FOR_REMOTE, hit
        self._source.start(request, self._tables.whole(cached).num_tokens, hit.num_tokens)

    def poll(self, *, wait: bool) -> tuple[list[Request], bool]:
        """Asks the source. Returns the requests it failed, without blocks; whether any were freed.

        wait: nothing else is to be done.
        """
        failed, any_freed = [], False
        for request, succeeded in self._source.poll(wait=wait and not self._loaded):
            if request in self._loading and succeeded:
                self._loaded[request] = self._loading.pop(request)
                continue
            if request in self._loading:
                del self._loading[request]
                self._failed.add(request)
                failed.append(request)
            elif request in self._ended:
                self._ended.remove(request)
            else:
                continue  # it ended, and its blocks were free
            self._tables.release(request)
            any_freed = True
        return failed, any_freed

    def take_loaded(self, request: Request) -> Hit:
        """Hands a request over to the running batch, with its blocks; returns what is in them."""
        return self._loaded.pop(request)

    def end(self, request: Request) -> None:
        """Frees the blocks of a request that has ended, now or when the source allows."""
        for table in (self._loading, self._loaded):
            table.pop(request, None)
        self._failed.discard(request)
        free = self._source.release(request)
        if request.blocks and free:
            self._tables.release(request)
        elif request.blocks:
            self._ended.add(request)

    def reset(self) -> list[Request]:
        """Stops all that is under way and frees all blocks; returns those that must start again."""
        self._source.reset()
        for request in self.holders:
            self._tables.release(request)
        again = [*self._loading, *self._loaded]
        for table in (self._loading, self._loaded, self._ended):
            table.clear()
        return again
