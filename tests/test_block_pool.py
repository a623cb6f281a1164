"""Blocks: who owns them, in which order they are handed out, what can be found in them."""

import pytest

from jaxrunner.scheduling.block_pool import BlockPool, block_hashes, root_hash

TOKENS = (7, 8, 9)


def hashes(tokens, *, block_size=2, group=0, salt=b"", parent=None):
    return block_hashes(tokens, block_size, group=group, parent=parent or root_hash(salt))


def test_null_block_pads_tables_and_is_never_owned():
    pool = BlockPool(4, block_size=3)
    assert pool.null_block == 4
    assert pool.take(4) == [0, 1, 2, 3]
    pool.share([pool.null_block])
    pool.release([pool.null_block])
    assert pool.num_free == 0
    assert not pool.is_free(pool.null_block)
    pool.check([[0, 1, pool.null_block], [2, 3]])


def test_tail_of_a_freed_table_is_evicted_first():
    pool = BlockPool(6, block_size=3)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.release([1, 2, 3])
    assert pool.take(5) == [4, 5, 3, 2, 1]


def test_shared_block_is_free_once_all_users_are_gone():
    pool = BlockPool(5, block_size=3)
    table = pool.take(2)
    pool.share(table)
    pool.check([table, table])
    assert pool.num_free == 3
    pool.release(table)
    pool.check([table])
    assert pool.num_free == 3
    pool.release(table)
    pool.check([])
    assert pool.num_free == 5


def test_freed_block_is_found_until_it_is_handed_out():
    pool = BlockPool(3, block_size=3)
    (block,) = pool.take(1)
    for _ in range(2):  # the second time changes nothing
        pool.publish(block, b"h", TOKENS)
        pool.check([[block]])
    pool.release([block])
    assert pool.take(2) == [1, 2]
    assert pool.lookup(b"h", TOKENS) == block
    assert pool.take(1) == [block]
    assert pool.lookup(b"h", TOKENS) is None
    assert not pool.is_published(block)
    pool.check([[0, 1, 2]])


def test_hit_takes_a_block_off_the_free_list():
    pool = BlockPool(3, block_size=3)
    (block,) = pool.take(1)
    pool.publish(block, b"h", TOKENS)
    pool.release([block])
    pool.share([block])
    assert pool.take(2) == [1, 2]
    assert pool.num_free == 0
    pool.check([[block], [1, 2]])


def test_evicting_one_of_two_equal_blocks_leaves_the_other():
    pool = BlockPool(2, block_size=3)
    first, second = pool.take(2)
    pool.publish(first, b"h", TOKENS)
    pool.publish(second, b"h", TOKENS)
    pool.check([[first, second]])
    assert pool.lookup(b"h", TOKENS) in (first, second)
    pool.release([first])
    assert pool.take(1) == [first]
    assert pool.lookup(b"h", TOKENS) == second
    pool.check([[first, second]])


def test_equal_hashes_of_other_tokens_miss():
    pool = BlockPool(2, block_size=3)
    first, second = pool.take(2)
    pool.publish(first, b"h", TOKENS)
    assert pool.lookup(b"h", (7, 8, 8)) is None
    pool.publish(second, b"h", (7, 8, 8))
    assert pool.lookup(b"h", [7, 8, 8]) == second
    assert pool.lookup(b"h", list(TOKENS)) == first


def test_reset_waits_until_nothing_is_in_use():
    pool = BlockPool(2, block_size=3)
    (block,) = pool.take(1)
    pool.publish(block, b"h", TOKENS)
    assert not pool.reset()
    assert pool.lookup(b"h", TOKENS) == block
    pool.release([block])
    assert pool.reset()
    assert pool.lookup(b"h", TOKENS) is None
    pool.check([])


def test_without_caching_nothing_is_found():
    pool = BlockPool(2, block_size=3, enable_caching=False)
    (block,) = pool.take(1)
    pool.publish(block, b"h", TOKENS)
    assert pool.lookup(b"h", TOKENS) is None


@pytest.mark.parametrize(
    "owners", [[], [[0]], [[0, 1], [1]], [[0, 1, 2]]], ids=["none", "few", "many", "free"]
)
def test_check_notices_a_wrong_table(owners):
    pool = BlockPool(3, block_size=3)
    pool.take(2)
    pool.check([[0, 1]])
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check(owners)


def test_freeing_twice_is_noticed():
    pool = BlockPool(3, block_size=3)
    with pytest.raises(AssertionError, match="is free already"):
        pool.release([0])


def test_only_full_blocks_have_hashes():
    assert [len(hashes(range(n))) for n in range(6)] == [0, 0, 1, 1, 2, 2]


def test_hashes_extend_to_what_they_would_be_at_once():
    tokens = [5, 6, 7, 8, 9, 10, 11]
    whole = hashes(tokens)
    for n in range(1, len(whole)):
        first, rest = tokens[: 2 * n], tokens[2 * n :]
        assert hashes(first) + hashes(rest, parent=hashes(first)[-1]) == whole


@pytest.mark.parametrize(
    "other",
    [
        hashes([1, 2, 3, 5]),
        hashes([2, 1, 3, 4]),
        hashes([1, 2, 3, 4], salt=b"s"),
        hashes([1, 2, 3, 4], group=1),
    ],
    ids=["tokens", "parent", "salt", "group"],
)
def test_hash_stands_for_everything_that_the_keys_depend_on(other):
    assert hashes([1, 2, 3, 4])[-1] == hashes([1, 2, 3, 4])[-1]
    assert hashes([1, 2, 3, 4])[-1] != other[-1]
