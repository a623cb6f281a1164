"""Counts of tokens in steps that are launched and not yet read. Knows no JAX.

A step that computes a request's last token and k drafts samples 1 to k + 1 tokens. Until it is
read, the host counts the most (in `num_in_flight`, and in `num_computed`, for which there are
blocks), and how many fewer they may be (`num_drafts_in_flight`). The device has the exact counts. A
request that decodes always lacks the keys of one token there, so the next step is right whatever
was accepted.
"""

from collections.abc import Sequence

from jaxrunner.scheduling.block_tables import BlockTables
from jaxrunner.scheduling.request import Request, SchedulerOutput, Status


def num_plannable(request: Request, most: int, num_steps: int) -> int:
    """Returns the drafts, at most `most`, that each of a request's next `num_steps` may verify.

    If all are accepted, no step computes a position behind the request's last token.
    """
    if not (most and request.num_drafts):
        return 0
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
    """Plans at most `most` drafts of a request that decodes, for which there are free blocks.

    Returns the most tokens that the request gains, and the drafts of each step.
    """
    num_steps = output.num_steps
    num_drafts = num_plannable(request, most, num_steps)
    end = tables.end_of_drafts(request, request.num_computed + num_steps * (1 + num_drafts))
    # No request is preempted for drafts.
    if end > request.num_held and not tables.have_room([request], [end]):
        num_drafts = 0
    if num_drafts:
        output.num_drafts[request.request_id] = num_drafts
    return most_sampled(request, num_drafts, num_steps), num_drafts


def end_of(request: Request, most: int, num_steps: int, tables: BlockTables) -> int:
    """Returns the end of the keys that `num_steps` steps, with `most` drafts each, may write."""
    num_drafts = num_plannable(request, most, num_steps)
    end = min(request.num_computed + num_steps * (1 + num_drafts), request.max_len)
    return tables.end_of_drafts(request, end)


def have_room(
    running: Sequence[Request], num_steps: int, num_drafts: int, max_tokens: int,
    tables: BlockTables,
) -> bool:  # fmt: skip
    """Whether a request is due a token, and tokens and blocks suffice for `num_steps` in a launch.

    Each step verifies `num_drafts` of each request, as all steps of a launch have one size.
    """
    due = [request for request in running if request.num_missing]
    if not 0 < len(due) * (1 + num_drafts) <= max_tokens:
        return False
    return tables.have_room(due, [end_of(r, num_drafts, num_steps, tables) for r in due])


def count_planned(request: Request, n: int, tables: BlockTables) -> None:
    """Counts `n` tokens of a request as computed, once the step is sure to have them."""
    request.num_computed += n
    if request.num_computed >= request.num_known:
        request.num_in_flight = request.num_computed + 1 - request.num_tokens
    if request.num_tokens >= request.full_len:
        tables.publish(request, min(request.num_computed, request.num_tokens))


def count_step(output: SchedulerOutput, tables: BlockTables) -> None:
    """Counts the tokens of all requests of a planned step; see `count_planned`."""
    counts = output.num_scheduled_tokens.values()
    for request, n in zip(output.requests.values(), counts, strict=True):
        count_planned(request, n, tables)


def count_drafts(output: SchedulerOutput) -> None:
    """Counts the drafts that a planned step verifies, and those that it proposes."""
    for request_id, request in output.requests.items():
        request.num_drafts_in_flight += output.num_steps * output.num_drafts.get(request_id, 0)
        if request.num_in_flight:  # it samples
            request.num_drafts = output.num_proposed


def count_read(request: Request, output: SchedulerOutput, num_sampled: int) -> None:
    """Corrects the counts of a request with drafts by the tokens that a step sampled."""
    num_drafts = output.num_drafts[request.request_id]
    most = output.num_steps * (1 + num_drafts)
    request.num_in_flight -= most
    request.num_drafts_in_flight -= output.num_steps * num_drafts
    if request.status is Status.RUNNING:
        request.num_computed -= most - num_sampled


def forget(request: Request) -> None:
    """Resets the counts of a request in flight to 0."""
    request.num_in_flight = request.num_drafts_in_flight = 0
