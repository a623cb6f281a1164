"""Places copies of experts so that devices have similar loads: DeepSeek's EPLB, in numpy.

From its description (github.com/deepseek-ai/EPLB): the experts with the most tokens get redundant
copies; copies are packed, heaviest first, onto the device with the least load that has room.
"""

from typing import NamedTuple

import numpy as np


class Placement(NamedTuple):
    """Copies of experts in their places, of each layer; device d has the d-th run of places."""

    expert: np.ndarray  # [layers, P], int32: whose copy lies at each place
    places: np.ndarray  # [layers, X, most copies], int32: of each expert's copies, -1 for none
    copies: np.ndarray  # [layers, X], int32


def place(
    loads: np.ndarray, num_places: int, num_devices: int, *, num_groups: int = 1, num_nodes: int = 1
) -> Placement:
    """Returns a placement for the tokens that each expert has computed, [layers, X].

    num_places: P, copies of all experts in a layer. num_groups: of experts, each of which is kept
    on a node where nodes divide them; else all experts are one group on one node.

    Raises:
      ValueError: places are fewer than experts, or devices do not divide them.
    """
    X = loads.shape[1]
    if num_places < X or num_places % num_devices:
        raise ValueError(
            f"{num_places} places of copies must be a multiple of {num_devices} devices, and {X} "
            "experts at least: change num_redundant_experts"
        )
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    made = [_place_layer(row, num_places, num_devices, num_groups, num_nodes) for row in loads]
    return of_experts(np.stack(made).astype(np.int32), X)


def of_experts(expert: np.ndarray, num_experts: int) -> Placement:
    """Returns the placement in which copies of the experts, [layers, P], lie in that order."""
    copies = np.stack([np.bincount(row, minlength=num_experts) for row in expert])
    places = np.full((*copies.shape, int(copies.max())), -1, np.int32)
    for y, row in enumerate(expert):
        order = np.argsort(row, kind="stable")
        first = np.cumsum(copies[y]) - copies[y]
        places[y, row[order], np.arange(len(row)) - first[row[order]]] = order
    return Placement(expert, places, copies.astype(np.int32))


def in_turn(num_layers: int, num_experts: int, num_places: int) -> Placement:
    """Returns the placement without loads: all experts in order, then the first ones again."""
    row = np.arange(num_places, dtype=np.int32) % num_experts
    return of_experts(np.tile(row, (num_layers, 1)), num_experts)


def imbalance(loads: np.ndarray, placement: Placement, num_devices: int) -> np.ndarray:
    """Returns, by layer, the largest load of a device over the mean; copies share loads."""
    share = loads / np.maximum(placement.copies, 1)
    each = np.take_along_axis(share, placement.expert, 1)
    of_device = each.reshape(len(loads), num_devices, -1).sum(-1)
    return of_device.max(-1) / np.maximum(of_device.mean(-1), 1e-9)


def _place_layer(
    load: np.ndarray, num_places: int, num_devices: int, num_groups: int, num_nodes: int
) -> np.ndarray:
    """Returns the expert of each place: groups onto nodes, then copies onto devices of each."""
    of_group = load.reshape(num_groups, -1)
    node_of = _pack(of_group.sum(1), num_nodes)
    made = []
    for node in range(num_nodes):
        groups = node_of[node]
        experts = np.arange(load.size).reshape(num_groups, -1)[groups].reshape(-1)
        own = load[experts]
        copied, copies = _replicate(own, num_places // num_nodes)
        packs = _pack((own / copies)[copied], num_devices // num_nodes)
        made += [experts[copied[pack]] for pack in packs]
    return np.concatenate(made)


def _pack(weights: np.ndarray, num_packs: int) -> list[list[int]]:
    """Deals items out to packs of as many each: by falling weight, to the lightest with room."""
    room = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = np.zeros(num_packs)
    for item in np.argsort(-weights, kind="stable").tolist():
        open_ = [p for p in range(num_packs) if len(packs[p]) < room]
        lightest = min(open_, key=lambda p: total[p])
        packs[lightest].append(item)
        total[lightest] += weights[item]
    return packs


def _replicate(load: np.ndarray, num_places: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the expert of each copy, and how many each has: the next goes where most is left."""
    copies, expert = np.ones(load.size, np.int64), [*range(load.size)]
    for _ in range(num_places - load.size):
        expert.append(int(np.argmax(load / copies)))
        copies[expert[-1]] += 1
    return np.array(expert), copies
