"""Where scales of a window lie in shared memory, and which of them one copy takes."""

import itertools

import pytest

from jaxrunner.kernels_pallas.quantized.scale_window import LINE, Window

SIZES = list(itertools.product((1, 8, 128), (1, 2, 4), (1, 2), (1, 2, 4), (1, 3, 7, 16, 28, 64)))


@pytest.mark.parametrize(("run", "sums", "spans", "turns", "rounds"), SIZES)
def test_lines_of_scales_fill_rows_that_lie_in_banks_of_their_own(run, sums, spans, turns, rounds):
    window = Window(run, sums, spans, turns, rounds)
    line, stride, entries = window.line, window.stride, window.entries
    assert LINE % line == entries % line == stride % line == 0 and stride >= entries
    # A warp reads one number of eight rows at a time; memory has 32 banks of 4 bytes.
    assert len({row * stride % 32 for row in range(8)}) == 8
    for window_start in range(0, rounds, window.steps):
        for entry in range(0, entries, line):
            columns = [_column(window, window_start, entry + i) for i in range(line)]
            first = columns[0]
            assert first % line == 0 and columns == [first + i for i in range(line)]


def _column(window: Window, index: int, entry: int) -> int:
    """Returns the matrix's column of an entry of the window that starts with a step `index`.

    The warpgroup's first step is the second part's, or the one behind it.
    """
    start = window.rounds * window.turns + min(window.turns - 1, 1) + index * window.turns
    step = start + entry // window.sums * window.turns
    return step // window.spans * window.sums + entry % window.sums
