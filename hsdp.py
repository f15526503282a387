"""What does a second mesh dimension change? Owners get replicas: one average, one broadcast more.

Before this file: hooks.py, whose `ShardMesh` and `Reduce` are the case of one dimension. After it:
dmuon.py.

HSDP arranges the ranks as R rows of G: a row shards the model, the rows are replicas of each other,
and every rank has its own data. A matrix has one owner in all of it: slot s + G r is rank s of row
r. The ranks of the owner's shard column hold owned data too, because each row broadcasts from its
own rank of that column, the source; only the owner keeps a gradient and a momentum, and runs
Newton-Schulz (NS). On a 2 x 4 mesh, for up_proj with owner slot 6:

              shard 0      shard 1      shard 2      shard 3
           +------------+------------+------------+------------+  1 stage one: the average
 replicate | rank 0  -1-|-> rank 1 -1|-> rank 2 <-|-1-  rank 3 |    along each row
     0     |            |            |   HOLDS    |            |  2 stage two: the average
           +------------+------------+---|----^---+------------+    down the column
                                       2 |    | 3                 3 replicate broadcast,
           +------------+------------+---v----|---+------------+    after the step
 replicate | rank 4  -1-|-> rank 5 -1|-> rank 6 <-|-1-  rank 7 |  on a whole mesh a rank's
     1     |            |            |    OWNS    |            |  number is its slot
           +------------+------------+------------+------------+

1. Stage-one reduce, `hooks.Reduce`: the average over the shard group arrives at the row's source
   (one collective, not a chain: every rank of the row has a gradient).
2. Stage-two reduce: the average of these over the replicate group arrives at the owner: the divisor
   is G R in all. The backward starts it right after the next boundary's stage one, or at its end.
3. Replicate broadcast: after NS the owner sends the new weights to its R - 1 replicas, behind AdamW
   and the next forward. They land when somebody needs them: before a row broadcast, a state dict,
   `unshard`.

Cost, with P elements in matrices: a rank puts its column's share, on average P / G, into stage two
and as much into the replicate broadcast. It holds its column's share of the weights, once more
while they are in flight, and its slot's share, on average P / (G R), of gradients and momenta.

`torchrun --nproc_per_node=4 hsdp.py` shows a 2 x 2 mesh, and one matrix whose owner slot is 3:

  slot  gradient     1 stage one  2 stage two  after step   3 broadcast
  1     1            0.5          -            0.0          7.0
  3     3            2.5          1.5          7.0          7.0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import record_function

from hooks import DedicatedParam, Reduce, ShardMesh, fqns, split, start_average
from hooks import start_broadcast, wait
from newton_schulz import local

# [Note: the order on the replicate communicator]
# It carries two things, in an order that all ranks of a column share. In a backward these are the
# second stages: that of one boundary is issued right after the first stage of the next boundary, as
# the schedule of hooks.py says. After a step these are the replicate broadcasts, in model order.
# What users call in between (`unshard`, clipping) comes in program order, like the collectives of
# tensor parallelism, which its ranks issue alike: they have equal data.


class ReplicaMesh(ShardMesh):
    """This rank's place in the (replicate, shard) mesh.

    Args:
        groups: {"shard": the ranks of this row, "replicate": those of this column}.
        device, tp_mesh: as for `ShardMesh`.
    """

    def __init__(self, groups: dict[str, dist.ProcessGroup], device: torch.device,
                 tp_mesh: DeviceMesh | None = None):
        super().__init__(groups, device, tp_mesh)
        self.replicate_group = self._own_group(groups["replicate"], "dmuon_replicate")
        self.num_replicas, self.replicate = groups["replicate"].size(), groups["replicate"].rank()
        self.number = self.shard + self.num_shards * self.replicate
        self.arriving: list[ReplicateBroadcast] = []  # since the last step

    def process_groups(self) -> list[dist.ProcessGroup]:
        return [self.replicate_group, *super().process_groups()]

    def source(self, owner: int) -> int:
        """In each row the rank of the owner's column holds the owner's matrices, too."""
        return owner % self.num_shards

    def start_reduce(self, params: list[DedicatedParam], dtype: torch.dtype) -> TwoStageReduce:
        return TwoStageReduce(params, dtype, self)

    def start_replicate_broadcasts(self, name: str, params: list[DedicatedParam]) -> None:
        """3, for a boundary's matrices; `name` is the boundary's."""
        with record_function(f"dmuon.replicate_broadcast {name}"):
            self.arriving += self._broadcasts(params)

    def finish_replicate_broadcasts(self, params: Iterable[DedicatedParam]) -> None:
        """Wait for those that carry one of these matrices."""
        wanted = {*params}
        for broadcast in [*self.arriving]:
            if not wanted.isdisjoint(broadcast.params):
                self.arriving.remove(broadcast)
                broadcast.finish()

    @torch.no_grad()
    def copy_to_replicas(self, params: Iterable[DedicatedParam]) -> None:
        """3, one matrix after the other: for moments when bytes count, not time."""
        for p in params:
            for broadcast in [] if p.owned.is_meta else self._broadcasts([p]):
                broadcast.finish()

    def _broadcasts(self, params: Iterable[DedicatedParam]) -> list[ReplicateBroadcast]:
        """One a slot and dtype, of what this rank's column has of the matrices."""
        alike: dict[tuple, list[DedicatedParam]] = {}
        for p in params:
            if p.is_source:
                alike.setdefault((p.owner, p.owned.dtype), []).append(p)
        return [ReplicateBroadcast(params, self) for params in alike.values()]


class TwoStageReduce(Reduce):
    """Gradients of one boundary and one shard column, on their way to `owned.grad` at their owners.

    Args:
        params: the matrices, ordered by slot.
        dtype, mesh: as for `Reduce`, which is stage one.
    """

    is_in_stage_two = False

    def start_stage_two(self) -> None:
        """Wait for stage one; in the owners' column, one collective a slot."""
        if self.is_in_stage_two:
            return
        self.is_in_stage_two = True
        wait(self.works, self.what)
        slots = [list(params) for _, params in itertools.groupby(self.params, lambda p: p.owner)]
        parts = self.flat.split([sum(p.numel for p in params) for params in slots])
        self.params, self.flat = [], self.flat[:0]
        for params, part in zip(slots, parts):
            if params[0].is_source:
                row = params[0].owner // self.mesh.num_shards
                self.works += start_average(part, self.mesh.replicate_group, row)
            if params[0].is_owner:
                self.params, self.flat = params, part

    def finish(self, drops: bool = False) -> None:
        """Wait for both stages; the owner takes its averages, or drops them."""
        self.start_stage_two()
        wait(self.works, f"{self.what} over the replicas")
        self.flat = self.flat.clone()  # a view would keep the other slots' parts alive
        super().finish(drops)


class ReplicateBroadcast:
    """New weights of one slot on their way from the owner to its replicas.

    They travel and arrive in a tensor of their own: the owner may write to its weights meanwhile,
    and a replica sees whole old weights until `finish` puts whole new ones in their place.

    Args:
        params: the matrices, of one slot and dtype.
        mesh: this rank's place, in the slot's column.
    """

    def __init__(self, params: list[DedicatedParam], mesh: ReplicaMesh):
        self.params, self.weights = params, [p.owned for p in params]
        self.versions = [weight._version for weight in self.weights]
        self.flat = local(self.weights[0]).new_empty(sum(p.numel for p in params))
        if params[0].is_owner:
            torch._foreach_copy_(split(self.flat, params), [*map(local, self.weights)])
        row = params[0].owner // mesh.num_shards
        self.works = start_broadcast(self.flat, mesh.replicate_group, row)

    def finish(self) -> None:
        """Wait; a replica takes the weights over.

        Raises:
            RuntimeError: the user has written to a replica's weights since: one of the two would be
                lost.
        """
        wait(self.works, f"replicate broadcast of {fqns(self.params)}")
        if self.params[0].is_owner:
            return
        for p, weight, version in zip(self.params, self.weights, self.versions):
            if weight._version != version:
                raise RuntimeError(f"dedicated parameter '{p.fqn}' was written to while its "
                                   "replicate broadcast was in flight; write inside "
                                   "dmuon.unshard(model), or pass replicate_async=False to "
                                   "dmuon.Muon")
        torch._foreach_copy_([*map(local, self.weights)], split(self.flat, self.params))


def _demonstrate() -> None:
    """One matrix on a 2 x 2 mesh: two stages of its gradient, the broadcast of its weight."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = ReplicaMesh({name: rows[name].get_group() for name in ("shard", "replicate")},
                       torch.device("cpu"))
    holder, rank = nn.ParameterDict({"weight": torch.zeros(1, 1)}), dist.get_rank()
    p = DedicatedParam("up_proj", [(holder, "weight")], 3, mesh)
    p.full = nn.Parameter(torch.zeros(1, 1))
    p.full.grad = torch.full((1, 1), float(rank))
    reduce = mesh.start_reduce([p], torch.float32)
    wait(reduce.works, "stage one")
    held = [rank, reduce.flat.item() if p.is_source else "-"]
    reduce.finish()
    held.append(p.owned.grad.item() if p.is_owner else "-")
    p.owned.data.fill_(7 if p.is_owner else 0)  # what a step would do
    held += p.owned.flatten().tolist()  # a placeholder has none
    mesh.copy_to_replicas([p])
    held += p.owned.flatten().tolist()
    expected = {1: [1, 0.5, "-", 0, 7], 3: [3, 2.5, 1.5, 7, 7]}
    assert not p.is_source or held == expected[rank], held
    table = [None] * 4
    dist.all_gather_object(table, f"{rank}     " + "".join(f"{what:<13}" for what in held))
    if rank == 0:
        print("A matrix of zeros with owner slot 3; rank r has gradient r, a step writes 7:")
        print("slot  gradient     1 stage one  2 stage two  after step   3 broadcast")
        print(*map(str.rstrip, table), sep="\n")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _demonstrate()
    dist.destroy_process_group()
