"""The checks of the host's objects in a snapshot, before any of it is taken over.

Each object must be of the kind that the engine has, and all of them must agree, so that whatever is
restored can run, be aborted and be closed. Checksums detect accidents, these checks the rest.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import MAX_ID
from jaxrunner.engine.engine import Engine
from jaxrunner.errors import in_words
from jaxrunner.mixtures.given_routes import check_given
from jaxrunner.program.bucket import MAX_STOP_IDS
from jaxrunner.ranks.cache_blocks import Blocks, filled_blocks
from jaxrunner.runner.slot import Needs, PendingPromptLogprobs, Slot
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.request import FINISH_REASONS, Request, Status

COUNTS = (
    "num_tokens", "num_computed", "num_cached_tokens", "num_drafts", "num_held", "full_len",
    "arrival", "weights_version", "cache_limit", "prompt_logprobs_start",
)  # fmt: skip
MAX_COUNT = 2**62


def check(
    engine: Engine,
    own: Sequence[Mapping[str, Any]],
    told: Mapping[str, Any],
    requests: Sequence[Request],
) -> None:
    """Checks the objects that `serialization` read.

    own: fields by name, as `told["host"]` must have them: of the engine, of what deals requests out
        to data ranks, and of each rank.

    Raises:
      ValueError: it cannot be; says where.
    """
    live = [r for r in requests if getattr(r, "status", None) is not Status.FINISHED]
    _check_part("fields", _check_fields, told["host"], own)
    shared, dealing, *ranks = told["host"]
    for i, request in enumerate(requests):
        name = f"request {getattr(request, 'request_id', i)!r:.99}"
        _check_part(name, _check_request, engine, request, {*map(id, live)})
    _check_part("ranks", _check_ranks, dealing, ranks, live)
    for host in ranks:
        _check_part("queues", _check_queues, engine, host, live)
        _check_part("slots", _check_slots, engine, host)
    _check_part("adapters", _check_adapters, engine, shared, ranks, live)
    _check_part("blocks", _check_blocks, engine, ranks, told["filled"])


def _check_part(name: str, function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except Exception as error:  # objects of the wrong kind fail anywhere
        raise ValueError(
            f"the snapshot has {name} that cannot be: {in_words(error)}: save it again"
        ) from error


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _check_fields(host: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    for part, like in zip(host, own, strict=True):
        _must(part.keys() == like.keys(), f"others are {sorted(part.keys() ^ like.keys())[:3]}")
        for name, value in part.items():
            _must(type(value) is type(like[name]), f"{name}, a {type(value).__name__}")


def _check_request(engine: Engine, request: Request, live: set[int]) -> None:
    config, r = engine.model_config, request
    _must(vars(r).keys() == {field.name for field in fields(Request)}, "other fields")
    _must(type(r.request_id) is str and isinstance(r.params, SamplingParams), "no id or params")
    _must(type(r.status) is Status, "status")
    _must(type(r.publishes_prefix) is bool, "publishes_prefix")
    _must(r.finish_reason in (None, *FINISH_REASONS), "finish_reason")
    _must(r.prefix_from is None or isinstance(r.prefix_from, Request), "prefix_from")
    for name in COUNTS:
        value = getattr(r, name)
        _must(type(value) is int and 0 <= value <= MAX_COUNT, f"{name}={value!r:.99}")
    _must(type(r.seed) is int and 0 <= r.seed < 2**64, "seed")
    _must(type(r.priority) is int and abs(r.priority) <= MAX_COUNT, "priority")
    _must(type(r.cache_salt) is bytes, "cache_salt")
    for ids in (r.prompt_token_ids, r.output_token_ids, r.draft_token_ids):
        _must(type(ids) is list and all(type(i) is int for i in ids), "token ids")
    for ids in (r.prompt_token_ids, r.output_token_ids):
        _must(not ids or 0 <= min(ids) <= max(ids) < config.vocab_size, "token ids out of range")
    _must(type(r.block_hashes) is tuple, "hashes")
    _must(len(r.block_hashes) in (0, len(_pools(engine))), "hashes of other cache groups")
    _must(all(type(h) is bytes for hashes in r.block_hashes for h in hashes), "no hashes")
    _must(r.num_tokens == len(r.prompt_token_ids) + len(r.output_token_ids), "num_tokens")
    if id(r) not in live:
        return
    in_flight = r.num_in_flight, r.num_drafts_in_flight
    _must(r.finish_reason is None and in_flight == (0, 0), "an end, or tokens in flight")
    _must(type(r.max_len) is int and r.num_tokens < r.max_len, "max_len")
    r.check_lengths(engine.config.max_model_len)
    if r.given_routes is not None:
        check_given(r.given_routes, len(r.prompt_token_ids), config)
    r.params.check(config.vocab_size, extra_args=engine.runner.program.extra_args)
    _must(type(r.stop_ids) is frozenset, "stop_ids")
    _must(type(r.eos_token_ids) is tuple, "eos_token_ids")
    stops = [*r.stop_ids, *r.eos_token_ids]
    _must(all(type(i) is int and 0 <= i < MAX_ID for i in stops), "stop_ids out of range")
    _must(len(set(stops)) <= MAX_STOP_IDS, "too many stop_ids")
    seen = {id(r)}
    while r.prefix_from is not None and r.prefix_from.status is not Status.FINISHED:
        r = r.prefix_from
        _must(
            id(r) not in seen and id(r) in live, "a prefix of one that waits for it, or is nowhere"
        )
        seen.add(id(r))


def _check_ranks(
    dealing: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], live: Sequence[Request]
) -> None:
    """Checks that each request is on one data rank, and what is said of where it is."""
    _must(len(ranks) > 0, "there are none")
    rank_of = {r.request_id: i for i, host in enumerate(ranks) for r in _requests(host)}
    _must(len(rank_of) == sum(len(_requests(host)) for host in ranks), "requests on two ranks")
    _must(rank_of.keys() == {r.request_id for r in live}, "other requests on ranks")
    if len(ranks) == 1:
        return
    slots = {name: i for i, host in enumerate(ranks) for name in host["slots._slots"]}
    _must(dealing["ranks._rank"] == rank_of, "requests on other ranks")
    _must(dealing["slots_of_ranks._rank"] == slots, "slots on other ranks")
    work, left, known = (dealing[f"router.{name}"] for name in ("work", "_left", "_known"))
    _must({name: rank for name, (rank, _) in left.items()} == rank_of, "work of others")
    _must(all(type(tokens) is int for _, tokens in left.values()), "work of no number")
    sums = [sum(n for rank, n in left.values() if rank == i) for i in range(len(ranks))]
    _must(work == sums, "another sum of work")
    bits = known.values()
    _must(all(type(block) is bytes for block in known), "prompts without hashes")
    _must(all(type(n) is int and 0 < n < 2 ** len(ranks) for n in bits), "prompts on no rank")


def _requests(host: Mapping[str, Any]) -> Sequence[Request]:
    return [*host["scheduler.requests"].values()]


def _check_queues(engine: Engine, host: Mapping[str, Any], every: Sequence[Request]) -> None:
    here = {*map(id, _requests(host))}
    live = [request for request in every if id(request) in here]
    running, waiting = host["scheduler.running"], host["waiting._heap"]
    queued = [request for _, request in waiting]
    _must(all(type(a) is type(b) is int for (a, b), _ in waiting), "an order of no numbers")
    _must([key for key, _ in waiting] == _heap(waiting), "a queue out of order")
    by_id = {request.request_id: request for request in live}
    _must(len(by_id) == len(live) == len(running) + len(queued), "requests lost or twice")
    _must(host["scheduler.requests"] == by_id, "other requests")
    _must({*map(id, running), *map(id, queued)} == {*map(id, live)}, "requests in no queue")
    _must(len(running) <= engine.runner.program.dims["R"], "more requests than slots")
    for request in running:
        _must(request.status is Status.RUNNING, "one that does not run among those that do")
        _must(request.num_computed <= request.num_tokens, "tokens computed that are not there")
        _check_tables(engine, request)
    for request in queued:
        _must(request.status is Status.WAITING and not request.num_computed, "one that runs")
        _must(request.blocks == () and not request.num_held, "blocks of one that waits")
    _must(host["scheduler._num_added"] >= 0, "_num_added")
    ids = host["scheduler._finished"] | host["admission._preempted"]
    _must(all(type(request_id) is str for request_id in ids), "ids of no text")


def _heap(waiting: Sequence[Any]) -> list[Any]:
    """Returns the keys of a heap in its order; another list where it is none."""
    keys = [key for key, _ in waiting]
    good = all(keys[(i - 1) // 2] <= key for i, key in enumerate(keys) if i)
    return keys if good else []


def _check_tables(engine: Engine, request: Request) -> None:
    _must(type(request.blocks) is tuple and len(request.blocks) == len(_pools(engine)), "tables")
    for table, pool in zip(request.blocks, _pools(engine), strict=True):
        _must(type(table) is list and all(type(block) is int for block in table), "a table")
        _must(all(0 <= block <= pool.null_block for block in table), "a block out of range")
        longest = -(-engine.config.max_model_len // pool.block_size)
        _must(len(table) <= longest, "a table that is too long")
        held = pool.block_size * len(table)
        _must(request.num_computed <= request.num_held <= held, "tokens without room")


def _check_slots(engine: Engine, host: Mapping[str, Any]) -> None:
    slots, free = host["slots._slots"], host["slots._free"]
    ids = {request.request_id for request in host["scheduler.running"]}
    _must(all(type(slot) is Slot for slot in slots.values()), "a slot of another kind")
    taken = [slot.index for slot in slots.values()]
    _must(all(type(index) is int for index in (*free, *taken)), "a slot of no number")
    every = sorted((*free, *taken))
    _must(every == list(range(engine.runner.program.dims["R"])), "slots lost or twice")
    _must(ids <= slots.keys() <= ids | host["scheduler._finished"], "slots of others")
    _must(host["slots._unusual"] <= slots.keys(), "unusual ones of others")
    for slot in slots.values():
        needs, pending = slot.needs, slot.prompt_logprobs
        _must(type(needs) is Needs and set(map(type, needs)) <= {bool, int}, "needs")
        is_pending = type(pending) is PendingPromptLogprobs
        _must(is_pending and set(map(type, pending)) == {int}, "pending prompt logprobs")
    for request in host["scheduler.running"]:
        counts = [len(table) for table in request.blocks]
        _must(slots[request.request_id].num_blocks == counts, "other counts of blocks")


def _check_adapters(
    engine: Engine,
    host: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    live: Sequence[Request],
) -> None:
    """host: fields that all data ranks share."""
    adapters, running = engine.runner.adapters, [r for of in ranks for r in of["scheduler.running"]]
    _must(all(type(r.lora_id) is int and r.lora_id >= 0 for r in live), "lora_id")
    wanted, of_slots = {r.lora_id for r in live if r.lora_id}, dict[str, int]()
    for of in ranks:
        _must(of["slots.lora_ids"].keys() <= of["slots._slots"].keys(), "adapters of other slots")
        of_slots |= of["slots.lora_ids"]
    counts = host["worker.lora_versions"]
    _must(all(type(i) is type(n) is int for i, n in counts.items()), "versions of no numbers")
    if adapters is None:
        _must(not wanted and not of_slots, "requests with adapters")
        return
    _must(wanted <= adapters.known.keys(), f"adapters {sorted(wanted - adapters.known.keys())}")
    _must(adapters.check_placed(host["adapters.placed"]), "others on the device")
    here = {r.request_id: r.lora_id for r in running if r.lora_id}
    _must(here.items() <= of_slots.items(), "slots of other adapters")
    _must({*here.values()} <= {*host["adapters.placed"][0]}, "adapters that are not there")
    users = {i: {name for name, of in here.items() if of == i} for i in here.values()}
    _must(host["turns._users"] == users, "other users of adapters")
    _must(host["turns._draining"] in {0, *users}, "an adapter that nobody has")


def _check_blocks(engine: Engine, ranks: Sequence[Mapping[str, Any]], filled: list[Blocks]) -> None:
    pools = [_pool(host, own) for host in ranks for own in _pools(engine)]
    wanted = filled_blocks(pools, engine.model_config.cache_kinds)
    _must(filled == wanted, "others in the files than in use")


def _pools(engine: Engine) -> list[BlockPool]:
    """Returns the pools of one data rank; those of others are like them."""
    return engine.pools[: len(engine.runner.program.cache_groups)]


def _pool(host: Mapping[str, Any], own: BlockPool) -> BlockPool:
    """Returns a pool like one of the engine, with what is said of its blocks, all checked."""
    g = own.group
    pool = BlockPool(own.num_blocks, own.block_size, g, own.enable_caching)
    table = {name: host[f"pool{g}.{name}"] for name in BlockPool.SAVED}
    vars(pool).update(table)
    refs, free = table["_num_refs"], table["_free"]
    owned = Counter(b for request in host["scheduler.running"] for b in request.blocks[g])
    _must(all(type(count) is int for count in refs), "counts of no numbers")
    _must(refs == [owned[block] for block in range(own.num_blocks)], "other counts of owners")
    _must(sorted(free) == [b for b, n in enumerate(refs) if not n], "free ones that are owned")
    for tokens_of, blocks_of in (("_published", "_blocks_of"), ("_tails", "_tails_of")):
        listed = [(h, b) for h, blocks in table[blocks_of].items() for b in blocks]
        held = [(h, b) for b, (h, tokens) in table[tokens_of].items() if len(tokens)]
        _must(sorted(listed) == sorted(held), f"{blocks_of} unlike {tokens_of}")
        _must({b for _, b in held} <= set(range(own.num_blocks)), f"{tokens_of} of others")
        _must(all(type(h) is bytes for h, _ in held), f"{tokens_of} without hashes")
    return pool
