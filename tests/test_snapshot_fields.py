"""Each attribute of an engine's objects is in a snapshot, or known not to be."""

from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import owners_of
from jaxrunner.models.llama import llama
from tests.support import tiny

# What follows from model and sizes, belongs to a process, or is an owner itself.
NOT_SAVED = dict(
    engine="_drafts _gained _in_flight _nan_error _recovered _unsampled balance config grammars "
    "model_config pools routes runner scheduler status waiting_since_s worker",
    scheduler="_most_drafts _most_tokens adaptive admission chunks max_model_len "
    "max_num_batched_tokens max_num_seqs num_drafts tables turns waiting",
    waiting="policy",
    admission="_max_tokens _most_of_one _tables adapters queue remote",
    tables="_caching _groups _max_model_len _share_starts _states checkpoint_interval give_back "
    "lookahead lora_versions whole_prompts",
    worker="_checkpoint _device _engine_plan _host_params _places _runner _staged _unmerged "
    "lora_users status",
    slots="_no_plan _packed _program",
    pool0="block_size enable_caching group null_block num_blocks",
)


def test_each_attribute_is_saved_or_known_not_to_be():
    """Who adds an attribute to one of these classes decides which of the two it is."""
    config, params = tiny.model_and_params()
    shared, _, of_rank = owners_of(Engine(llama, config, tiny.engine_config(), params))
    owners = shared | of_rank
    found = {name: {*vars(owner)} - {*owner.SAVED} for name, owner in owners.items()}
    assert found == {name: {*names.split()} for name, names in NOT_SAVED.items()}
    assert all(hasattr(owner, name) for owner in owners.values() for name in owner.SAVED)
