"""What must hold of the pure step: inputs, lengths, drafts, padding."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import step
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.caches.interleave import Part
from jaxrunner.indexing import take
from jaxrunner.program.bucket import Bucket
from jaxrunner.types import Plan, Writes
from tests.support import tiny
from tests.support.request_table import table

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
# Else each operation is compiled.
prepare_inputs, advance = jax.jit(step.prepare_inputs, static_argnums=(2, 3)), jax.jit(step.advance)


def plan(slots, counts) -> Plan:
    none = Writes(*(jnp.zeros(0, jnp.int32),) * 3)
    return Plan(jnp.asarray(slots, jnp.int32), jnp.asarray(counts, jnp.int32), (none,))


def prepare(requests, plan_, tokens, num_drafts=0, query_len=0):
    bucket = Bucket(tokens, plan_.slot.size, query_len, num_drafts)
    return prepare_inputs(requests, plan_, bucket, ((32, 4),))


def test_after_a_step_one_token_is_not_yet_computed():
    runner = tiny.runner()
    request = tiny.new_request("a", PROMPT, blocks=range(8))
    runner.step(tiny.scheduled({"a": 4}, [request]))
    slot, requests = runner.requests["a"], runner.state.requests
    assert (requests.num_computed[slot], requests.total_len[slot]) == (4, 10)  # mid-prefill
    sampled = runner.step(tiny.scheduled({"a": 6})).get().sampled_token_ids[0]
    requests = runner.state.requests
    assert requests.total_len[slot] == requests.num_computed[slot] + 1 == 11
    assert requests.token_ids[slot, requests.num_computed[slot]] == sampled[0]


def test_rows_are_ordered_by_their_token_counts():
    runner = tiny.runner()
    counts = dict(A=5, B=1, C=3, D=1)
    new = [
        tiny.new_request(name, PROMPT[:n], blocks=range(4 * i, 4 * i + 4))
        for i, (name, n) in enumerate(counts.items())
    ]
    assert runner.step(tiny.scheduled(counts, new)).get().req_ids == ("B", "D", "C", "A")
    batch, _ = prepare(
        table(total_len=[5, 1, 3, 1]), plan([1, 3, 2, 0, 4, 4], [1, 1, 3, 5, 0, 0]), 16
    )
    assert batch.query_start.tolist() == [0, 1, 2, 5, 10, 10, 10]


def test_slots_are_a_stack():
    slots = tiny.runner(max_num_seqs=3, decode_buckets=(), token_buckets=()).requests
    x, y, z, w, v = (tiny.new_request(name, [1], blocks=[0]) for name in "xyzwv")
    assert [slots.add(request) for request in (x, y, z)] == [2, 1, 0]
    slots.remove("y")
    assert slots.add(w) == 1
    slots.remove("unknown")
    with pytest.raises(
        RuntimeError, match=r"the 3 slots \(max_num_seqs of each stage\) are all taken"
    ):
        slots.add(v)


def test_chunks_sample_only_when_the_prompt_ends():
    runner = tiny.runner()
    request = tiny.new_request("a", PROMPT, blocks=range(8))
    outputs = [runner.step(tiny.scheduled({"a": n}, new)).get() for n, new in
               ((4, [request]), (4, []), (2, []))]  # fmt: skip
    assert [len(o.sampled_token_ids[0]) for o in outputs] == [0, 0, 1]
    whole = tiny.generate(tiny.runner(), request, 1)
    assert list(outputs[-1].sampled_token_ids[0]) == whole
    requests = table(token_ids=jnp.zeros((4, 32), jnp.int32).at[1, :10].set(jnp.array(PROMPT)),
                     total_len=[0, 10, 0, 0])  # fmt: skip
    for computed, count in ((0, 4), (4, 4), (8, 2)):
        requests = replace(requests, num_computed=jnp.array([0, computed, 0, 0]))
        batch, rows = prepare(requests, plan([1], [count]), 8)
        assert batch.seq_lens.tolist() == [computed + count]
        assert batch.inputs.token_ids[:count].tolist() == PROMPT[computed : computed + count]
        assert rows.samples.tolist() == [computed + count == 10]


def test_a_cached_prefix_is_not_read_again():
    requests = table(total_len=[10, 0, 0, 0], num_computed=[8, 0, 0, 0])
    batch, _ = prepare(requests, plan([0], [2]), 8)
    assert batch.inputs.positions[:2].tolist() == [8, 9]
    assert batch.logits_indices.tolist() == [[1]]


def test_accepted_drafts_advance_the_request():
    ids = jnp.zeros((4, 32), jnp.int32).at[2, :24].set(jnp.arange(24))  # drafts 21, 22, 23
    requests = table(token_ids=ids, total_len=[0, 0, 21, 0], num_computed=[0, 0, 20, 0])
    batch, rows = prepare(requests, plan([2], [4]), 4, num_drafts=3, query_len=4)
    assert batch.slot.tolist() == [2] * 4
    assert batch.inputs.token_ids.tolist() == [20, 21, 22, 23]
    assert batch.inputs.positions.tolist() == [20, 21, 22, 23]
    assert (batch.logits_indices.tolist(), rows.num_drafts.tolist()) == ([[0, 1, 2, 3]], [3])
    sampled = jnp.array([[21, 22, 50, 51]])  # two drafts stand, then another token
    requests, num_sampled, *_ = advance(requests, rows, sampled)
    assert num_sampled.tolist() == [3]
    assert (requests.num_computed[2], requests.total_len[2]) == (23, 24)
    assert requests.token_ids[2, 21:24].tolist() == [21, 22, 50]
    # What a drafter reads of the three tokens that stand: each one's successor.
    assert take(requests.token_ids, (2, jnp.arange(20, 23) + 1)).tolist() == [21, 22, 50]


def test_rows_with_and_without_drafts_share_a_batch():
    ids = jnp.tile(jnp.arange(32, dtype=jnp.int32), (4, 1))
    requests = table(token_ids=ids, total_len=[9, 12, 10, 0], num_computed=[8, 11, 0, 0])
    plan_ = plan([0, 1, 2], [1, 4, 5])  # decode, decode with 3 drafts, mid-prefill of 5
    batch, rows = prepare(requests, plan_, 16, num_drafts=3)
    assert batch.query_start.tolist() == [0, 1, 5, 10]
    assert batch.slot.tolist() == [0] + [1] * 4 + [2] * 5 + [4] * 6
    assert rows.num_drafts.tolist() == [0, 3, 0]
    assert rows.samples.tolist() == [True, True, False]
    sampled = jnp.array([[40, 0, 0, 0], [12, 41, 0, 0], [42, 0, 0, 0]])
    after, num_sampled, *_ = advance(requests, rows, sampled)
    assert num_sampled.tolist() == [1, 2, 0]
    assert after.num_computed.tolist() == [9, 13, 5, 0]
    assert after.token_ids[2].tolist() == ids[2].tolist()
    drafter = take(after.token_ids, (2, jnp.arange(4) + 1))  # the prompt, shifted by one
    assert drafter.tolist() == [1, 2, 3, 4]


def test_a_reused_slot_keeps_nothing_of_its_last_request():
    strange = SamplingParams(temperature=2.0, top_k=3, min_tokens=9, stop_token_ids=[1, 2, 3])
    runner = tiny.runner()
    first = tiny.new_request("x", PROMPT, blocks=range(8), params=strange)
    second = tiny.new_request("y", PROMPT[:7], blocks=range(8, 16))
    runner.step(tiny.scheduled({"x": 10}, [first]))
    slot = runner.requests["x"]
    runner.step(tiny.scheduled({"y": 7}, [second], finished_req_ids={"x"}))
    assert runner.requests["y"] == slot
    got = [runner.step(tiny.scheduled({"y": 1})).get().sampled_token_ids[0][0] for _ in range(5)]
    alone = tiny.generate(tiny.runner(), second, 6)
    assert got == alone[1:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_request_goes_on_as_if_uninterrupted(temperature):
    params = SamplingParams(temperature=temperature)
    request = tiny.new_request("a", PROMPT[:6], blocks=range(8), params=params)
    whole = tiny.generate(tiny.runner(), request, 8)
    resumed = tiny.new_request(
        "a", PROMPT[:6] + whole[:3], blocks=range(20, 28), params=params, prompt_len=6
    )
    assert tiny.generate(tiny.runner(), resumed, 5) == whole[3:]


def test_adding_an_id_again_replaces_its_state():
    runner = tiny.runner()
    runner.step(tiny.scheduled({"a": 3}, [tiny.new_request("a", PROMPT[:3], blocks=range(4))]))
    longer = tiny.new_request("a", PROMPT, blocks=range(4, 12))
    assert tiny.generate(runner, longer, 5) == tiny.generate(tiny.runner(), longer, 5)
    assert len(runner.requests._free) == 5


def snapshot(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_padding_touches_nothing(temperature):
    params = SamplingParams(temperature=temperature)
    states, outputs = [], []
    for rows, tokens in ((2, 16), (5, 32)):
        runner = tiny.runner(decode_buckets=(rows,), token_buckets=(tokens,))
        poison = jax.tree.map(lambda x: jnp.full_like(x, 7.0), runner.state.kv)
        runner.state = replace(runner.state, kv=poison)
        new = [tiny.new_request(n, PROMPT[:k], blocks=range(4 * k, 4 * k + 4), params=params)
               for n, k in (("a", 5), ("b", 3))]  # fmt: skip
        out = [runner.step(tiny.scheduled({"a": 5, "b": 3}, new)).get()]
        out += [runner.step(tiny.scheduled({"a": 1, "b": 1})).get() for _ in range(4)]
        states.append(snapshot(runner.state))
        outputs.append(out)
    chex.assert_trees_all_equal(*outputs)
    chex.assert_trees_all_equal(*(state.requests for state in states))
    for state in states:  # rounding may differ from bucket to bucket, which cells are written not
        chex.assert_trees_all_close(state.kv, states[0].kv, atol=1e-5)
        for cache in state.kv:
            # a: 9 tokens in blocks 20 to 22; b: 7 tokens in blocks 12 and 13
            written = np.zeros((60, 4), bool)
            written[20:22], written[22, :1], written[12], written[13, :3] = True, True, True, True
            assert ((cache.k != 7.0).any((1, 3)) == written).all()


def test_a_finished_row_is_a_no_op():
    runner = tiny.runner(trusted=True)  # as it is told of more than `max_len`
    request = tiny.new_request("a", PROMPT, blocks=range(8), max_tokens=1)
    assert runner.step(tiny.scheduled({"a": 10}, [request])).get().finished == (True,)
    before = snapshot(runner.state)
    output = runner.step(tiny.scheduled({"a": 1})).get()  # launched before the end was known
    assert output.sampled_token_ids == ([],)
    chex.assert_trees_all_equal(snapshot(runner.state), before)


def test_an_empty_step_runs_nothing():
    runner = tiny.runner()
    runner.step(tiny.scheduled({"a": 3}, [tiny.new_request("a", PROMPT[:3], blocks=[0])]))
    before = snapshot(runner.state)
    output = runner.step(tiny.scheduled({}, finished_req_ids={"a"})).get()
    assert output.req_ids == () and len(runner.requests._free) == 5
    chex.assert_trees_all_equal(snapshot(runner.state), before)


def index_of(positions, table, shape, part=None):
    blocks, row = jnp.array([table]), jnp.zeros(len(positions), jnp.int32)
    N, S = shape
    tokens = S if part is None else S * part.parts
    index = step.cache_index(blocks, row, jnp.array(positions), (N, tokens))
    return (index if part is None else part.cache_index(index, shape)).tolist()


def test_positions_map_to_their_blocks():
    assert index_of(range(8), [7, 3], (9, 4)) == [28, 29, 30, 31, 12, 13, 14, 15]
    # A kernel may see a block of 4 as two of 2: the same cells.
    assert index_of(range(4), [10, 11], (18, 2)) == index_of(range(4), [5], (9, 4))


@pytest.mark.parametrize(
    "interleave,part,want",
    [
        (1, 0, [28, 36, 29, 36, 30, 36, 31, 36]),
        (1, 1, [36, 28, 36, 29, 36, 30, 36, 31]),
        (2, 0, [28, 29, 36, 36, 30, 31, 36, 36]),
        (2, 1, [36, 36, 28, 29, 36, 36, 30, 31]),
        (4, 0, [28, 29, 30, 31, 36, 36, 36, 36]),
        (4, 1, [36, 36, 36, 36, 28, 29, 30, 31]),
    ],
)
def test_context_parallel_devices_share_a_block(interleave, part, want):
    of = Part(2, interleave, part)
    assert index_of(range(8), [7, 3], (9, 4), of) == want
    # The next block of the table, laid out alike.
    after = [i if i == 36 else i - 28 + 12 for i in want]
    assert index_of(range(8, 16), [7, 3], (9, 4), of) == after


@pytest.mark.parametrize(
    "interleave,length,want", [(1, 5, (3, 2)), (4, 5, (4, 1)), (4, 13, (8, 5))]
)
def test_context_parallel_devices_know_their_lengths(interleave, length, want):
    parts = [Part(2, interleave, p) for p in (0, 1)]
    held = [index_of(range(length), [7, 3], (9, 4), part) for part in parts]
    assert tuple(sum(i < 36 for i in part) for part in held) == want
    assert tuple(int(part.num_local(jnp.array(length))) for part in parts) == want


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_context_parallel_devices_hold_every_token_once(interleave):
    for length in (1, 5, 13, 16):
        parts = [index_of(range(length), [7, 3], (9, 4), Part(2, interleave, p)) for p in (0, 1)]
        assert sum(i < 36 for part in parts for i in part) == length
        assert all(len({i for i in p if i < 36}) == sum(i < 36 for i in p) for p in parts)


def test_a_padded_token_writes_nowhere():
    batch, _ = prepare(table(total_len=[3, 0, 0, 0]), plan([0, 4], [3, 0]), 8)
    assert batch.cache_index[0].tolist() == [0, 1, 2] + [128] * 5
    assert batch.row.tolist() == [0, 0, 0] + [2] * 5
    assert batch.slot.tolist() == [0, 0, 0] + [4] * 5


def test_min_tokens_and_stop_ids_agree_with_the_length():
    requests = table(total_len=[5, 5, 5, 5], num_computed=[4, 4, 4, 4], prompt_len=[3] * 4,
                     min_len=[7, 6, 0, 0], max_len=[9, 9, 9, 6],
                     stop_ids=[[8, 61, 61]] * 4)  # fmt: skip
    plan_ = plan([0, 1, 2, 3], [1, 1, 1, 1])
    _, rows = prepare(requests, plan_, 4, query_len=1)
    after, *_, finished = advance(requests, rows, jnp.array([[8], [8], [8], [9]]))
    assert finished.tolist() == [False, True, True, True]
    assert after.done.tolist() == [False, True, True, True]


def test_several_steps_are_one_launch():
    runner = tiny.runner(num_decode_steps=3)
    new = tiny.new_request("a", PROMPT[:6], blocks=range(8))
    runner.step(tiny.scheduled({"a": 6}, [new]))
    with pytest.raises(ValueError, match="num_steps=3 steps are one launch: call step"):
        runner.execute_model(tiny.scheduled({"a": 3}, num_steps=3))
    got = runner.step(tiny.scheduled({"a": 3}, num_steps=3)).get().sampled_token_ids[0]
    assert got == tiny.generate(tiny.runner(), new, 4)[1:]
