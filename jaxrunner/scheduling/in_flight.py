"""What a request counts of steps that are launched and not yet read. Knows no JAX.

A step that computes the last token there is and k drafts samples 1 to k + 1 tokens. Until it is
read, the host counts all of them (`num_in_flight`, and `num_computed`, for which there are blocks),
and how many fewer they may be (`num_drafts_in_flight`). The device has the exact counts: of a
request that decodes it always misses one token, so the next step is right whatever was accepted.
"""

from collections.abc import Sequence

from jaxrunner.scheduling.block_tables import BlockTables
from jaxrunner.scheduling.request import Request, SchedulerOutput, Status


def num_plannable(request: Request, most: int, num_steps: int) -> int:
    """Returns how many drafts each of the next `num_steps` of a request may verify, `most` at most.

    If all are accepted, nothing is computed that comes behind its last token.
    """
    room = (request.max_len - request.num_known) // num_steps - 1
    return max(0, min(request.num_drafts, most, room))


def most_sampled(request: Request, num_drafts: int, num_steps: int) -> int:
    """Returns the most tokens that `num_steps` steps give a request that decodes."""
    if num_drafts:
        return num_steps * (1 + num_drafts)
    return min(num_steps, request.max_len - request.least_known)


def plan_drafts(
    request: Request, output: SchedulerOutput, most: int, tables: BlockTables
) -> tuple[int, int]:
    """Plans drafts of a request that decodes: `most` at most, and in free blocks.

    Returns the most tokens that it computes and keeps, and the drafts of each step.
    """
    num_steps = output.num_steps
    num_drafts = num_plannable(request, most, num_steps)
    end = tables.end_of_drafts(request, request.num_computed + num_steps * (1 + num_drafts))
    # Nobody gives way for a draft.
    if end > request.num_held and not tables.have_room([request], [end]):
        num_drafts = 0
    if num_drafts:
        output.num_drafts[request.request_id] = num_drafts
    return most_sampled(request, num_drafts, num_steps), num_drafts


def end_of(request: Request, most: int, num_steps: int, tables: BlockTables) -> int:
    """Returns how far `num_steps` steps, `most` drafts each, write keys of a request, at most."""
    num_drafts = num_plannable(request, most, num_steps)
    end = min(request.num_computed + num_steps * (1 + num_drafts), request.max_len)
    return tables.end_of_drafts(request, end)


def have_room(
    running: Sequence[Request], num_steps: int, num_drafts: int, max_tokens: int,
    tables: BlockTables,
) -> bool:  # fmt: skip
    """Whether a request is due a token, and `num_steps` at once have tokens and blocks for all.

    Each step verifies `num_drafts` of each request: all steps of a launch have one size.
    """
    due = [request for request in running if request.num_missing]
    if not 0 < len(due) * (1 + num_drafts) <= max_tokens:
        return False
    return tables.have_room(due, [end_of(r, num_drafts, num_steps, tables) for r in due])


def count_planned(request: Request, n: int, tables: BlockTables) -> None:
    """Counts tokens of a request as computed: from here on nothing takes them off the step."""
    request.num_computed += n
    if request.num_computed >= request.num_known:
        request.num_in_flight = request.num_computed + 1 - request.num_tokens
    if request.num_tokens >= request.full_len:
        tables.publish(request, min(request.num_computed, request.num_tokens))


def count_drafts(output: SchedulerOutput) -> None:
    """Counts the drafts of a step that is planned, and those that it proposes for the next."""
    for request_id, request in output.requests.items():
        request.num_drafts_in_flight += output.num_steps * output.num_drafts.get(request_id, 0)
        if request.num_in_flight:  # it samples
            request.num_drafts = output.num_proposed


def count_read(request: Request, output: SchedulerOutput, num_sampled: int) -> None:
    """Corrects the counts of a request with drafts by what a step really sampled."""
    num_drafts = output.num_drafts[request.request_id]
    most = output.num_steps * (1 + num_drafts)
    request.num_in_flight -= most
    request.num_drafts_in_flight -= output.num_steps * num_drafts
    if request.status is Status.RUNNING:
        request.num_computed -= most - num_sampled


def forget(request: Request) -> None:
    """Counts nothing in flight any more."""
    request.num_in_flight = request.num_drafts_in_flight = 0
