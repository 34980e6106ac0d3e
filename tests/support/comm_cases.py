"""Calls of every collective and every send and receive, for any world size; all ranks call them in this order.

Each case returns the tensors (or objects) that the call produced on this rank, so that two backends can be
compared. ``victim`` cases are written so that rank 1's absence leaves somebody waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

Case = Callable[[int, int], list[Any]]
CASES: dict[str, Case] = {}
#: The rank that the failure tests take away; roots are chosen so that it matters.
VICTIM = 1


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def numbers(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator)


@case
def all_reduce(rank: int, world: int) -> list[Any]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = numbers(rank, 33, 7)
        dist.all_reduce(tensor, op)
        results.append(tensor)
    whole = torch.arange(5) + rank
    work = dist.all_reduce(whole, async_op=True)
    work.wait()
    half = numbers(rank, 11).to(torch.bfloat16)
    dist.all_reduce(half)
    return [*results, whole, half]


@case
def all_reduce_coalesced(rank: int, world: int) -> list[Any]:
    tensors = [numbers(rank, 5), numbers(rank, 3, 3, seed=1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def broadcast(rank: int, world: int) -> list[Any]:
    tensor = numbers(rank, 17)
    dist.broadcast(tensor, src=VICTIM)
    other = numbers(rank, 4, seed=3)
    dist.broadcast(other, src=world - 1)
    return [tensor, other]


@case
def all_gather(rank: int, world: int) -> list[Any]:
    outputs = [torch.zeros(3, 2) for _ in range(world)]
    dist.all_gather(outputs, numbers(rank, 3, 2))
    return outputs


@case
def all_gather_into_tensor(rank: int, world: int) -> list[Any]:
    output = torch.zeros(world * 6)
    dist.all_gather_into_tensor(output, numbers(rank, 6))
    return [output]


@case
def all_gather_coalesced(rank: int, world: int) -> list[Any]:
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(world)]
    dist.all_gather_coalesced(outputs, [numbers(rank, 2), numbers(rank, 3, seed=2)])
    return [tensor for row in outputs for tensor in row]


@case
def coalescing_manager(rank: int, world: int) -> list[Any]:
    from torch.distributed.distributed_c10d import _coalescing_manager

    outputs = [torch.zeros(world * 2), torch.zeros(world * 3)]
    with _coalescing_manager(group=dist.group.WORLD, async_ops=False):
        dist.all_gather_into_tensor(outputs[0], numbers(rank, 2))
        dist.all_gather_into_tensor(outputs[1], numbers(rank, 3))
    reduced = [numbers(rank, 2), numbers(rank, 5)]
    with _coalescing_manager(group=dist.group.WORLD, async_ops=True) as pending:
        for tensor in reduced:
            dist.all_reduce(tensor)
    pending.wait()
    return [*outputs, *reduced]


@case
def reduce(rank: int, world: int) -> list[Any]:
    tensor = numbers(rank, 9)
    dist.reduce(tensor, dst=0)
    other = numbers(rank, 2)
    dist.reduce(other, dst=VICTIM)
    return [tensor if rank == 0 else None, other if rank == VICTIM else None]


@case
def gather(rank: int, world: int) -> list[Any]:
    outputs = [torch.zeros(4) for _ in range(world)] if rank == 0 else None
    dist.gather(numbers(rank, 4), outputs, dst=0)
    return outputs or []


@case
def scatter(rank: int, world: int) -> list[Any]:
    output = torch.zeros(4)
    parts = [numbers(part, 4, seed=5) for part in range(world)] if rank == VICTIM else None
    dist.scatter(output, parts, src=VICTIM)
    return [output]


@case
def reduce_scatter(rank: int, world: int) -> list[Any]:
    output = torch.zeros(3)
    dist.reduce_scatter(output, [numbers(rank, 3, seed=part) for part in range(world)])
    return [output]


@case
def reduce_scatter_tensor(rank: int, world: int) -> list[Any]:
    output = torch.zeros(5)
    dist.reduce_scatter_tensor(output, numbers(rank, 5 * world))
    return [output]


@case
def all_to_all(rank: int, world: int) -> list[Any]:
    outputs = [torch.zeros(2) for _ in range(world)]
    dist.all_to_all(outputs, [numbers(rank, 2, seed=part) for part in range(world)])
    return outputs


@case
def all_to_all_single(rank: int, world: int) -> list[Any]:
    output = torch.zeros(world, 3)
    dist.all_to_all_single(output, numbers(rank, world, 3))
    splits = [part + 1 for part in range(world)]
    uneven = torch.zeros(world * (rank + 1))
    dist.all_to_all_single(uneven, numbers(rank, sum(splits)), [rank + 1] * world, splits)
    return [output, uneven]


@case
def barrier(rank: int, world: int) -> list[Any]:
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    return []


@case
def objects(rank: int, world: int) -> list[Any]:
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    told = [["a", rank], rank] if rank == VICTIM else [None, None]
    dist.broadcast_object_list(told, src=VICTIM)
    collected: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object((rank, "y"), collected, dst=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"to {part}" for part in range(world)], src=VICTIM)
    return [gathered, told, collected, scattered]


@case
def send_recv(rank: int, world: int) -> list[Any]:
    """Round and round, blocking: each rank sends what it got to the next."""
    tensor = numbers(rank, 8)
    if rank == 0:
        dist.send(tensor, 1, tag=3)
        dist.recv(tensor, world - 1, tag=3)
    else:
        got = dist.recv(tensor, rank - 1, tag=3)
        assert got == rank - 1
        dist.send(tensor, (rank + 1) % world, tag=3)
    return [tensor]


@case
def isend_irecv(rank: int, world: int) -> list[Any]:
    """Several messages per pair, received in another order than sent."""
    successor, predecessor = (rank + 1) % world, (rank - 1) % world
    sent = [numbers(rank, 10 + tag, seed=tag) for tag in range(3)]
    received = [torch.zeros(10 + tag) for tag in range(3)]
    works = [dist.isend(sent[tag], successor, tag=tag) for tag in range(3)]
    works += [dist.irecv(received[tag], predecessor, tag=tag) for tag in (2, 0, 1)]
    for work in works:
        work.wait()
    return received


@case
def batch_isend_irecv(rank: int, world: int) -> list[Any]:
    received = torch.zeros(6)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, numbers(rank, 6), (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
    )
    for work in works:
        work.wait()
    return [received]


@case
def recv_from_anybody(rank: int, world: int) -> list[Any]:
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), 0, tag=9)
        return []
    found = []
    for _ in range(world - 1):
        tensor = torch.zeros(3)
        source = dist.recv(tensor, tag=9)
        assert source == int(tensor[0])
        found.append((source, tensor))
    return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0])]


@case
def subgroup(rank: int, world: int) -> list[Any]:
    """Two groups with equal ranks, one more with only some of them, and group ranks unlike global ones."""
    some = dist.new_group([1, 0])
    everybody = dist.new_group(list(range(world)))
    again = dist.new_group(list(range(world)))
    results: list[Any] = []
    for index, group in enumerate((everybody, again)):
        tensor = numbers(rank, 3, seed=index)
        dist.all_reduce(tensor, group=group)
        results.append(tensor)
    if rank < 2:
        tensor = numbers(rank, 3)
        dist.broadcast(tensor, src=1, group=some)
        results += [tensor, dist.get_rank(some), dist.get_process_group_ranks(some)]
    for group in (again, everybody, *([some] if rank < 2 else [])):
        dist.destroy_process_group(group)
    return results


@case
def future(rank: int, world: int) -> list[Any]:
    tensor = numbers(rank, 3)
    value = dist.all_reduce(tensor, async_op=True).get_future().wait()
    return [tensor, value[0]]
