"""Collectives that look uneven and are not: a rank that were said to call another one would be a false alarm.

python healthy_collectives.py SECONDS FOLDER, as four ranks; FOLDER is for checkpoints.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore")
seconds, folder = float(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
halves = [dist.new_group(list(range(part, world, 2)), group_desc="half") for part in (0, 1)]


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x, use_b):
        x = self.norm(self.a(x))
        return self.b(x) if use_b else x


def uneven_inputs():
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    with model.join():
        for _ in range(3 + rank):
            model(torch.ones(4, 8)).sum().backward()


def uneven_with_zero():
    model = DDP(nn.Linear(8, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(2 + rank % 2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()


def unused_parameters():
    model = DDP(Sometimes(), find_unused_parameters=True)
    for step in range(4):
        model(torch.ones(4, 8), (step + rank) % 2 == 0).sum().backward()


def no_sync():
    model = DDP(nn.Linear(8, 8))
    for _ in range(2):
        with model.no_sync():
            model(torch.ones(4, 8)).sum().backward()
        model(torch.ones(4, 8)).sum().backward()


def objects():
    found = [None] * world
    dist.all_gather_object(found, "x" * (rank * 100 + 1))
    dist.broadcast_object_list(found if rank == 1 else [None] * world, src=1)
    dist.gather_object("y" * rank, found if rank == 0 else None, dst=0)
    dist.scatter_object_list([None], [*range(world)] if rank == 2 else None, src=2)


def lists():
    t = torch.full((4,), float(rank))
    dist.gather(t, [torch.empty(4) for _ in range(world)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(4), [torch.ones(4)] * world if rank == 1 else None, src=1)
    dist.reduce(t, dst=3, op=dist.ReduceOp.MAX)
    dist.reduce_scatter(torch.empty(4), [torch.ones(4) for _ in range(world)])
    sizes = [[1 + (a + b) % 3 for b in range(world)] for a in range(world)]
    theirs = [sizes[other][rank] for other in range(world)]
    dist.all_to_all_single(torch.empty(sum(theirs)), torch.ones(sum(sizes[rank])), theirs, sizes[rank])
    dist.all_gather_into_tensor(torch.empty(4 * world), t)
    with dist._coalescing_manager():
        for size in (3, 4, 5):
            dist.all_reduce(torch.ones(size))


def pairs():
    if rank % 2 == 0:
        dist.send(torch.ones(rank + 1), rank + 1)
    else:
        dist.recv(torch.empty(rank), rank - 1)
    other = (rank + 1) % world, (rank - 1) % world
    both = [dist.P2POp(dist.isend, torch.ones(2), other[0]), dist.P2POp(dist.irecv, torch.ones(2), other[1])]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def groups():
    half = halves[rank % 2]
    for _ in range(1 + rank % 2 * 3):  # each half at its own pace
        dist.all_reduce(torch.ones(2 + rank % 2), group=half)
    for name in ("dp", "tp"):
        dist.all_reduce(torch.ones(2), group=mesh.get_group(name))
    own = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(group=own)
        dist.destroy_process_group(own)
    dist.barrier()
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(rank + 1), group=alone)
    dist.destroy_process_group(alone)


def many_asynchronous():
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(200)]
    if rank == 1:
        time.sleep(0.3)
    for work in works:
        work.wait()


def sharded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")


def tensors():
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(1)])
    (x @ y).full_tensor()
    funcol.all_reduce(torch.ones(4), "max", dist.group.WORLD).sum()


trials = (
    *(uneven_inputs, uneven_with_zero, unused_parameters, no_sync, objects, lists, pairs, groups),
    *(many_asynchronous, sharded, tensors),
)
ends, done, rounds = time.monotonic() + seconds, torch.zeros(1), 0
while not done:
    for trial in trials:
        trial()
    rounds += 1
    done[0] = time.monotonic() > ends
    dist.all_reduce(done, op=dist.ReduceOp.MAX)
if rank == 0:
    print(f"{rounds} healthy rounds")
dist.destroy_process_group()
