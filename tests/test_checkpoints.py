"""Checkpoints of states: where chunks end, what is found, what gives way; on small examples."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxrunner.caches.cache_group import PoolSizes, cache_groups
from jaxrunner.caches.encoder_only import EncoderOnly
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.nothing import Nothing
from jaxrunner.caches.state import RecurrentState
from jaxrunner.config import EngineConfig
from jaxrunner.scheduling.prefix import find_prefix
from jaxrunner.scheduling.state_pool import StatePool
from jaxrunner.worker.prefix_sizes import prefix_sizes
from tests.support import tiny
from tests.support.scheduling import cache_group, check, make, make_hybrid, new, state_group, step

STATE = RecurrentState(taps=3, channels=8)
PROMPT = list(range(30))


def hit(scheduler, name, prompt, **kwargs):
    """Admits a request; returns how many of its tokens need not be computed."""
    scheduler.add(request := new(name, prompt, max_tokens=1, **kwargs))
    (entered,) = step(scheduler).scheduled_new_reqs
    scheduler.finish([name], "abort")
    assert request.num_cached_tokens == entered.num_computed
    return entered.num_computed


def compute(scheduler, name, prompt, max_tokens=1):
    scheduler.add(new(name, prompt, max_tokens=max_tokens))
    outputs = []
    while scheduler.has_unfinished:
        outputs.append(step(scheduler))
    return outputs


def test_pools_have_blocks_for_checkpoints_where_there_are_any():
    sizes = PoolSizes(16, 1000, 4096, 12, 256)
    full, states = cache_groups([FullAttention(), STATE], sizes)
    assert (states.block_size, states.num_blocks, states.max_blocks(4096, 256)) == (4096, 13, 1)
    kept = sizes._replace(mamba_block_size=64, num_checkpoints=7)
    full, states = cache_groups([FullAttention(), STATE], kept)
    assert (full.block_size, full.num_blocks) == (16, 1000)
    assert (states.block_size, states.num_blocks, states.max_blocks(4096, 256)) == (64, 20, 2)
    assert cache_groups([STATE], kept._replace(mamba_block_size=4096))[0].num_blocks == 13


def test_a_request_owns_the_block_of_its_last_token_and_the_one_it_writes():
    group = state_group(8, 9)
    skipped = [group.num_skipped_tokens(n) // 8 for n in (0, 1, 8, 9, 16, 17)]
    assert skipped == [0, 0, 0, 1, 1, 2]
    assert max(-(-e // 8) - (e - 9) // 8 for e in range(9, 40)) <= group.max_blocks(40, 8)


@pytest.mark.parametrize(
    ("cached", "limit", "hit"), [({0, 2}, 40, 24), ({0, 2}, 23, 8), ({1}, 40, 16), ((), 40, 0)]
)
def test_the_last_checkpoint_counts_alone(cached, limit, hit):
    assert state_group(8, 9).longest_hit(set(cached).__contains__, limit) == hit
    groups = [cache_group(4), state_group(8, 9)]
    lookups = [lambda i: True, set(cached).__contains__]
    assert find_prefix(groups, lookups, limit) == hit


def test_chunks_end_at_checkpoints():
    scheduler, pools = make_hybrid()
    outputs = compute(scheduler, "a", PROMPT[:21], max_tokens=8)
    counts = [output.num_scheduled_tokens["a"] for output in outputs]
    assert counts == [8, 8, 5, *[1] * 7]
    assert pools[1].num_free == 9
    # Two requests fill a step that one does not.
    for name in "bc":
        scheduler.add(new(name, 21))
    assert step(scheduler).num_scheduled_tokens == {"b": 8, "c": 8}
    check(scheduler, pools)


def test_chunks_end_nowhere_else_without_states():
    scheduler, _ = make()
    scheduler.add(new("a", 15))
    assert step(scheduler).num_scheduled_tokens == {"a": 15}


@pytest.mark.parametrize(
    ("common", "found"), [(7, 0), (8, 8), (9, 8), (15, 8), (16, 16), (17, 16), (20, 16), (24, 24)]
)
def test_a_prefix_is_found_to_its_last_checkpoint(common, found):
    scheduler, pools = make_hybrid()
    compute(scheduler, "a", PROMPT[:25])
    assert hit(scheduler, "b", [*PROMPT[:common], 900, 901]) == found
    assert hit(scheduler, "c", PROMPT[:16]) == 8  # a token is left to compute
    check(scheduler, pools)


def test_a_request_reads_a_checkpoint_and_writes_another_block():
    scheduler, pools = make_hybrid()
    compute(scheduler, "a", PROMPT[:17])
    scheduler.add(second := new("b", PROMPT[:19]))
    scheduler.add(third := new("c", PROMPT[:21]))
    step(scheduler)
    null = pools[1].null_block
    shared = second.blocks[1][1]
    assert [request.blocks[1][:2] for request in (second, third)] == [[null, shared]] * 2
    assert len({shared, second.blocks[1][2], third.blocks[1][2]}) == 3
    step(scheduler)  # which needs it no more
    assert pools[1].is_free(shared) and pools[1].is_published(shared)
    assert second.blocks[1][:2] == [null] * 2
    check(scheduler, pools)


def test_nobody_goes_on_from_a_state_in_the_step_that_writes_it():
    """Unlike keys, which a layer writes before it reads any."""
    scheduler, pools = make_hybrid(max_num_batched_tokens=32)
    scheduler.add(new("a", PROMPT[:8]))
    scheduler.add(first := new("b", PROMPT[:12]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 8, "b": 8} and first.num_cached_tokens == 0
    scheduler.add(second := new("c", PROMPT[:12]))
    scheduler.schedule()  # the step before is launched, and not read
    assert second.num_cached_tokens == 8
    check(scheduler, pools)


def test_an_answer_has_checkpoints():
    scheduler, _ = make_hybrid()
    compute(scheduler, "a", PROMPT[:5], max_tokens=13)  # 17 tokens are computed, all of them 5
    assert hit(scheduler, "b", [*PROMPT[:5], *[5] * 20]) == 16


@pytest.mark.parametrize("salt", [b"", b"s"])
def test_states_are_shared_within_a_salt(salt):
    scheduler, _ = make_hybrid()
    compute(scheduler, "a", PROMPT[:20])
    assert hit(scheduler, "b", PROMPT[:20], cache_salt=salt) == (0 if salt else 16)


def test_states_of_other_weights_are_not_found():
    scheduler, _ = make_hybrid()
    compute(scheduler, "a", PROMPT[:20])
    scheduler.outdate_prefixes(1)
    assert hit(scheduler, "b", PROMPT[:20]) == 0
    assert scheduler.reset_prefix_cache()


def test_what_is_lost_in_one_pool_is_of_no_use_in_the_other():
    scheduler, pools = make_hybrid(num_states=4, max_num_seqs=1)
    compute(scheduler, "a", PROMPT[:25])
    assert hit(scheduler, "b", PROMPT[:25]) == 24
    # Another one takes the blocks without a hash, and the checkpoints that were used long ago.
    compute(scheduler, "c", 17)
    assert [hit(scheduler, "b", PROMPT[:n]) for n in (25, 17)] == [24, 0]
    pools[1].release(pools[1].take(4))
    assert pools[0].num_free == 40 and hit(scheduler, "b", PROMPT[:25]) == 0
    # The other way round: states are there, and keys are not.
    compute(scheduler, "d", PROMPT[:25])
    assert hit(scheduler, "e", PROMPT[:25]) == 24
    pools[0].release(pools[0].take(40))
    assert hit(scheduler, "f", PROMPT[:25]) == 0
    check(scheduler, pools)


def test_blocks_that_nobody_finds_are_taken_before_checkpoints():
    pool = StatePool(4, 8)
    kept, other = pool.take(2)
    pool.publish(kept, b"h", PROMPT[:8])
    assert pool.lookup(b"h", PROMPT[:8]) is None
    pool.begin_step()
    assert pool.lookup(b"h", PROMPT[:8]) == kept
    pool.release([kept])
    pool.release([other, pool.null_block])
    assert pool.take(3) == [other, 2, 3] and pool.lookup(b"h", PROMPT[:8]) == kept
    assert pool.take(1) == [kept] and pool.lookup(b"h", PROMPT[:8]) is None


def test_a_preempted_request_comes_back_from_its_last_checkpoint():
    scheduler, pools = make_hybrid(10, max_num_batched_tokens=32)
    scheduler.add(first := new("a", 19, max_tokens=12))
    scheduler.add(second := new("b", 15, max_tokens=12))
    while not (preempted := step(scheduler).preempted_req_ids):
        check(scheduler, pools)
    assert preempted == {"b"} and second.blocks == ()
    scheduler.finish(["a"], "abort")
    (resumed,) = step(scheduler).scheduled_new_reqs
    assert resumed.num_computed == (second.num_tokens - 1) // 8 * 8 == 16
    assert resumed.num_computed > 15 and first.finish_reason == "abort"
    check(scheduler, pools)


def test_few_states_make_requests_give_way():
    scheduler, pools = make_hybrid(num_states=3, max_num_seqs=3, max_num_batched_tokens=32)
    for name in "abc":
        scheduler.add(new(name, 7, max_tokens=9))
    told, seen = {}, 0
    while scheduler.has_unfinished:
        for request in [*scheduler.requests.values()]:
            told[request.request_id] = request
        seen = max(seen, scheduler.num_running)
        step(scheduler)
        check(scheduler, pools)
    assert scheduler.num_preemptions and seen == 3
    assert [len(request.output_token_ids) for request in told.values()] == [9] * 3


def test_a_prompt_s_chunks_fill_the_sizes_that_checkpoints_leave():
    """On a CPU: 20 tokens would be one step of 32, but 8 of them are a chunk."""
    scheduler, _ = make_hybrid(max_num_batched_tokens=32, step_sizes=(8, 32), step_cost=1)
    for name in "ab":
        scheduler.add(new(name, 15))
    assert step(scheduler).num_scheduled_tokens == {"a": 8}
    assert step(scheduler).num_scheduled_tokens == {"a": 7, "b": 1}
    scheduler, _ = make_hybrid(max_num_batched_tokens=32, step_sizes=(16, 32), step_cost=1)
    for name in "ab":
        scheduler.add(new(name, 15))
    assert step(scheduler).num_scheduled_tokens == {"a": 8, "b": 8}


def test_nothing_remote_fills_states():
    with pytest.raises(ValueError, match="remote fills blocks with keys, a cache group has states"):
        make_hybrid(remote=SimpleNamespace())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without prefixes": (
        dict(mamba_block_size=8, enable_prefix_caching=False),
        "mamba_block_size=8 needs prefix caching: set enable_prefix",
    ),
    "multiples": (
        dict(mamba_block_size=6),
        "mamba_block_size=6 must be a multiple of block_size=4",
    ),
    "alone": (
        dict(num_state_checkpoints=2),
        "num_state_checkpoints=2 needs mamba_block_size: set it too, or leave",
    ),
    "none": (dict(mamba_block_size=0), "mamba_block_size=0 is out of range"),
    "no number": (
        dict(mamba_block_size=8, num_state_checkpoints=0),
        "num_state_checkpoints=0 is out of range",
    ),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_checkpoints_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(max_model_len=64, num_blocks=9, block_size=4, **changes)


def of_kinds(*kinds: Any) -> Any:
    """Returns what a loader gives of a model with layers of some kinds, as far as that counts."""
    return SimpleNamespace(config=SimpleNamespace(architecture="Some", cache_kinds=kinds))


@pytest.mark.parametrize(
    ("kinds", "asked", "found"),
    [
        ([FullAttention()], {}, (True, None)),
        ([FullAttention()], dict(enable_prefix_caching=False), (False, None)),
        ([EncoderOnly()], {}, (False, None)),
        ([FullAttention(), STATE, Nothing()], {}, (False, None)),
        ([FullAttention(), STATE], dict(enable_prefix_caching=True), (True, 512)),
        ([STATE], dict(enable_prefix_caching=True, block_size=48), (True, 528)),
        ([STATE], dict(enable_prefix_caching=True, mamba_block_size=64), (True, 64)),
        ([STATE], dict(mamba_block_size=64), (False, 64)),  # which `EngineConfig` refuses
    ],
)
def test_states_are_kept_where_prefixes_are_asked_for(kinds, asked, found):
    assert tuple(prefix_sizes(of_kinds(*kinds), asked).values()) == found


def test_models_without_states_have_no_checkpoints():
    with pytest.raises(ValueError, match="mamba_block_size=8 is of layers with states, Llama"):
        prefix_sizes(tiny.loaded(), dict(mamba_block_size=8))
    text = "enable_prefix_caching=True wants caches .* Some has EncoderOnly: leave it out"
    with pytest.raises(ValueError, match=text):
        prefix_sizes(of_kinds(EncoderOnly()), dict(enable_prefix_caching=True))
