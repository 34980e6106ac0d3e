"""``torch.distributed.broadcast_object_list`` from a rank that may be lost.

torch makes the message on the rank that it comes from only, so the stand-in of a lost rank would send bytes that nobody
has written. Here the stand-in sends the objects that its own script passes, as in other collectives.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from .. import patching
from ..comm.calls.participants import surviving
from . import job as jobs

#: What a message begins with; else the rank that it comes from was lost before it has sent it.
_WRITTEN = 1


def patch() -> None:
    """Replaces torch's function, for scripts' calls between the operations of the engine; idempotent."""
    patching.patch(c10d, "broadcast_object_list", _wrapped)
    torch.distributed.broadcast_object_list = c10d.broadcast_object_list


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def broadcast_object_list(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, **more: Any
    ) -> None:
        job = jobs.job_of_main_thread()
        script = None if job is None else job.session.attachment.script
        outside = group is c10d.GroupMember.NON_GROUP_MEMBER
        ranks: list[int] = [] if outside else c10d.get_process_group_ranks(group)
        alone = job is not None and (job.channel.joiner if script is None else script.context == "replay")
        if alone and ranks:
            return  # what it passes is what it gets
        if job is None or script is None or script.context == "engine" or job.channel.rank not in ranks:
            original(object_list, src, group, device, **more)
            return
        source = more.get("group_src")
        root = src or 0 if source is None else ranks[source]
        while not _broadcast(job, script, object_list, root, ranks, group, device):
            pass  # the rank was lost meanwhile: now its stand-in sends

    return broadcast_object_list


def _broadcast(
    job: jobs.Job, script: Any, objects: list[Any], root: int, ranks: list[int], group: Any, device: Any
) -> bool:
    """Two collectives, as torch's: the sizes, then the objects. Returns on all ranks alike whether they have come."""
    plan, own = job.session.plan, job.channel.rank == root
    assert plan is not None
    lost = surviving(plan, ranks, script.absent).of_rank[ranks.index(root)] is None
    parts = [pickle.dumps(each) for each in objects] if own or lost else []
    device = device or c10d._get_object_coll_device(group)
    sizes = torch.tensor([len(part) for part in parts] or [0] * len(objects), dtype=torch.long, device=device)
    torch.distributed.broadcast(sizes, src=root, group=group)
    lengths = sizes.tolist()
    message = bytes([_WRITTEN]) + b"".join(parts)
    if [len(part) for part in parts] != lengths:
        message = bytes(1 + sum(lengths))
    data = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    torch.distributed.broadcast(data, src=root, group=group)
    if own:
        return True
    received = data.cpu().numpy().tobytes()
    if received[0] != _WRITTEN:
        return False
    begin = 1
    for position, length in enumerate(lengths):
        objects[position] = pickle.loads(received[begin : begin + length])
        begin += length
    return True
