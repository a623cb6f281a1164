"""The program tables of a pipeline's stages behind the interface of one `ProgramTable`."""

import abc
from collections.abc import Iterable, Sequence

from jaxrunner.device.program_key import Key
from jaxrunner.device.stage_entry_points import BEFORE
from jaxrunner.program.bucket import SampleSize
from jaxrunner.programs.program_table import Compilation, ProgramTable, Started

INSTEAD = dict(step="stage", forward="stage")  # programs of stages before the last, by the last's


class StageTables(abc.ABC):
    """Compiles the programs of all stages of this process; `__getitem__` launches them.

    tables: of the stages, in their order. last: the last stage's table, if it is among them.
    has_all: whether they are all stages of the pipeline.
    """

    def __init__(
        self, tables: Sequence[ProgramTable], *, last: ProgramTable | None, has_all: bool
    ) -> None:
        self._tables, self._last, self._has_all = tables, last, has_all

    def start(self, keys: Iterable[Key], first: Iterable[Key]) -> Started:
        """Has threads load or compile programs of all stages, as `ProgramTable.start` does."""
        keys, first, started = list(keys), list(first), Started()
        self._prepare_links({key.size.num_tokens for key in keys if key.name in INSTEAD})
        for i, table in enumerate(self._tables):
            found = table.start(self._of(table, keys), self._of(table, first))
            started |= {Key(f"stage {i}: {key.name}", key.size): of for key, of in found.items()}
        return started

    @abc.abstractmethod
    def _prepare_links(self, sizes: Iterable[int]) -> None:
        """Compiles the transfers between processes of hidden states of so many tokens."""

    def wait(self, started: Started, *, progress: bool = False) -> None:
        """Waits for programs; an error of one of them closes all tables."""
        try:
            for table in self._tables:
                table.wait(started if table is self._tables[-1] else {}, progress=progress)
        except BaseException:
            self.close()
            raise

    def _of(self, table: ProgramTable, keys: Iterable[Key]) -> list[Key]:
        """Returns the programs of a stage that run when the last stage runs `keys`."""
        if table is self._last:
            return list(keys)
        run = [Key(INSTEAD.get(key.name, key.name), key.size) for key in keys]
        rows = {(key.size.num_rows, key.size.num_drafts) for key in run if key.name == "stage"}
        run += [Key("receive", SampleSize(B, num_drafts=K)) for B, K in sorted(rows)]
        return [key for key in dict.fromkeys(run) if key.name in BEFORE]

    def ready(self) -> list[Key]:
        """Returns the compiled programs of the last stage; none if other processes have stages."""
        return self._last.ready() if self._last and self._has_all else []

    def is_pending(self, key: Key | None = None) -> bool:
        """Whether the program of `key`, or any if None, is still being compiled on a stage."""
        return any(
            any(map(table.is_pending, [None] if key is None else self._of(table, [key])))
            for table in self._tables
        )

    def close(self) -> None:
        """Stops compiling, without waiting."""
        for table in self._tables:
            table.close()

    def report(self) -> str:
        """Returns how many programs each stage has, and where they come from."""
        return "; ".join(f"stage {i}: {table.report()}" for i, table in enumerate(self._tables))

    def largest(self) -> tuple[Key, int] | None:
        """Returns the program with the most bytes beside its arguments, and these, if known."""
        found = [one for table in self._tables if (one := table.largest()) is not None]
        return max(found, key=lambda one: one[1], default=None)

    @property
    def ledger(self) -> list[Compilation]:
        """Compilations of all stages, stage by stage."""
        return [entry for table in self._tables for entry in table.ledger]

    @property
    def strict(self) -> bool:
        """Whether a compilation after warm-up raises."""
        return self._tables[0].strict

    @strict.setter
    def strict(self, value: bool) -> None:
        for table in self._tables:
            table.strict = value
