"""What does a second mesh dimension change? Every owner gets replicas: one more average in, one broadcast out.

Before this file: hooks.py, which calls it for every gradient and every new weight. After it: dmuon.py, which calls
`agree` and `synchronise` at setup, over all dimensions of the mesh.

HSDP arranges the ranks as R rows of G: a row shards the model, the rows are replicas of each other, and every rank has
its own data. A matrix has one owner in all of it, the *owner slot* (shard, replicate). The ranks of the owner's shard
column hold owned data too, because each row broadcasts from its own rank of that column; only the owner keeps a
gradient and a momentum, and runs Newton-Schulz (NS). On a 2 x 4 mesh, for up_proj with owner slot (2, 1):

                 shard 0      shard 1      shard 2      shard 3
              +------------+------------+------------+------------+
  replicate 0 |     0 -----|-----1 -----|--> 2 HOLDS <------ 3    |   1 stage one: AVG along each row
              +------------+------------+-----|--^---+------------+   2 stage two: AVG down the column
              |            |            |   2 |  | 3 |            |   3 replicate broadcast, after the step
              +------------+------------+-----v--|---+------------+
  replicate 1 |     4 -----|-----5 -----|--> 6 OWNS  <------ 7    |   a cell is a rank, named by its number
              +------------+------------+------------+------------+

1. Stage-one reduce: the average over the shard group arrives at the row's rank of the owner's column.
2. Stage-two reduce: the average of these over the replicate group arrives at the owner: the divisor is G R in all.
3. Replicate broadcast: after NS the owner sends the new weights to its R - 1 peers, behind AdamW and the next forward.
   They land when somebody needs them: before a row broadcast, a state dict, `unshard`.

Cost, with P elements in dedicated matrices: a rank puts its column's share, on average P / G, into stage two and as
much into the replicate broadcast; over all ranks (R - 1) P elements travel in each. A rank holds its column's share of
the weights, once more while they are in flight, and its slot's share, on average P / (G R), of gradients and momenta.
With R = 1 nothing is sent.

`torchrun --nproc_per_node=4 hsdp.py` shows a 2 x 2 mesh, where the gradient of rank r is r everywhere:

  rank 1, slot (1, 0): stage one  0.5, gradient at the owner None, weight 7.0
  rank 3, slot (1, 1): stage one  2.5, gradient at the owner  1.5, weight 7.0
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Slot = tuple[int, int]  # (shard, replicate) coordinate of an owner; replicate is 0 on a 1-D mesh

# [Note: Newton-Schulz hides a wrong divisor]
# A matrix's update does not change when its gradient is scaled, so a gradient that was summed instead of averaged, or
# averaged twice, trains alike; it shows only in the norm, in clipping and in AdamW's half. The reduce is an average
# over all ranks, those with zeros included, as FSDP2's is: the loss must be the mean over the rank's own tokens. The
# tests compare gradients, not losses.

# [Note: the order on the replicate communicator]
# It carries two things, in an order that all ranks of a column share. In a backward, second stages, in the order of the
# first ones: a reduce whose first stage is over waits until those before it are (ranks see them end at different
# times). Nothing waits for a second stage before the end of the backward, when every rank has issued all broadcasts and
# first stages. After a step, replicate broadcasts, in model order. What users call in between (`unshard`, clipping)
# comes in program order, like the collectives of tensor parallelism, which its ranks issue alike: they have equal data.


class SlotMesh:
    """This rank's place in the (replicate, shard) mesh, and DMuon's own communicators through it.

    Args:
        device: this rank's, where matrices live and collectives take their tensors.
        shard_group: the ranks of this row.
        replicate_group: the ranks of this column; None on a 1-D mesh.
        tp_mesh: the ranks that share this slot, each with its shard of every matrix; None without tensor parallelism.
    """

    def __init__(self, device: torch.device, shard_group: dist.ProcessGroup,
                 replicate_group: dist.ProcessGroup | None = None, tp_mesh: DeviceMesh | None = None):
        # Never FSDP2's groups: two libraries do not agree on one order of collectives, see hooks.py
        self.broadcast_group = _own_group(shard_group, "dmuon_broadcast")
        self.reduce_group = _own_group(shard_group, "dmuon_reduce")
        self.num_shards, self.num_replicas, replicate = shard_group.size(), 1, 0
        if replicate_group is not None:
            self.replicate_group = _own_group(replicate_group, "dmuon_replicate")
            self.num_replicas, replicate = replicate_group.size(), replicate_group.rank()
        self.slot: Slot = (shard_group.rank(), replicate)
        self.device, self.tp_mesh = device, tp_mesh

    def groups(self) -> list[dist.ProcessGroup]:
        """Of every dimension of more than one rank, for what all compute together between backward and step."""
        columns = [self.replicate_group] if self.num_replicas > 1 else []
        shards = [self.tp_mesh.get_group()] if self.tp_mesh is not None else []
        return [group for group in (self.reduce_group, *columns, *shards) if group.size() > 1]

    def counts(self, p: nn.Parameter) -> bool:
        """Whether this rank is the first of all that hold the same part of p's gradient: a norm counts it once."""
        mesh = p.grad.device_mesh if isinstance(p.grad, DTensor) else None
        coordinates = []
        if mesh is not None:
            where = zip(p.grad.placements, mesh.get_coordinate())
            coordinates += [coordinate for placement, coordinate in where if placement.is_replicate()]
        if mesh in (None, self.tp_mesh) and not hasattr(p, "_dedicated_owner_rank"):
            coordinates += self.slot  # what ignored_params left to the user is on every data-parallel rank
        if self.tp_mesh is not None and (mesh is None or self.tp_mesh.mesh_dim_names[0] not in mesh.mesh_dim_names):
            coordinates.append(self.tp_mesh.get_local_rank())
        return not any(coordinates)


class TwoStageReduce:
    """Gradients of one boundary and one shard column on their way from `full.grad` to `sharded.grad` at their owners.

    Args:
        params: the matrices, `DedicatedParam`s of hooks.py, ordered by slot.
        dtype: what they are averaged in.
        mesh: this rank's place.
    """

    def __init__(self, params: list, dtype: torch.dtype, mesh: SlotMesh):
        self.params, self.mesh = params, mesh
        self.flat = torch.zeros(sum(p.numel for p in params), dtype=dtype, device=mesh.device)
        for p, view in zip(params, split(self.flat, params)):
            gradient, p.full.grad = p.full.grad, None
            if gradient is not None:  # else zeros: this rank's data have not used the matrix
                if isinstance(gradient, DTensor):  # tensor parallelism may have left it partial, or placed elsewhere
                    gradient = gradient.redistribute(placements=p.full.placements)
                view.copy_(local(gradient))
        self.stage_one = start_average(self.flat, mesh.reduce_group, params[0].slot[0])
        self.stage_two: list[dist.Work] | None = None  # not yet

    def start_stage_two(self) -> None:
        """Wait for stage one; in the owners' column, one collective a slot."""
        if self.stage_two is None:
            wait(self.stage_one)
            self.stage_two = []
            if self.mesh.num_replicas > 1 and self.params[0].in_column:
                slots = [list(params) for _, params in itertools.groupby(self.params, lambda p: p.slot)]
                for params, part in zip(slots, self.flat.split([sum(p.numel for p in params) for params in slots])):
                    self.stage_two += start_average(part, self.mesh.replicate_group, params[0].slot[1])

    def advance(self) -> bool:
        """Start stage two if that needs no waiting; whether it has started, and the next reduce may follow.

        See [Note: the order on the replicate communicator].
        """
        if self.stage_two is None and all(work.is_completed() for work in self.stage_one):
            self.start_stage_two()
        return self.stage_two is not None

    def is_completed(self) -> bool:
        return self.stage_two is not None and all(work.is_completed() for work in self.stage_two)

    def finish(self, keep: bool = True) -> None:
        """Wait; at the owner add the averages to `.grad`, as autograd would; `keep=False` drops them."""
        self.start_stage_two()
        wait(self.stage_two)
        for p, average in zip(self.params, split(self.flat, self.params)):
            if p.is_owner and keep:
                if p.sharded.grad is None:  # a copy where `flat` holds other slots' gradients, too, and should go
                    average = average.to(p.sharded.dtype, copy=self.mesh.num_replicas > 1)
                    p.sharded.grad = p.wrap(average)
                else:
                    local(p.sharded.grad).add_(average)


class ReplicateBroadcast:
    """New weights of one slot on their way from the owner to its replicate peers.

    They travel and arrive in a tensor of their own: the owner may write to its weights meanwhile, and a peer sees
    whole old weights until `finish` puts whole new ones in their place.

    Args:
        params: the matrices, of one dtype.
        mesh: this rank's place, in the slot's column.
    """

    def __init__(self, params: list, mesh: SlotMesh):
        self.params, self.is_owner = params, params[0].is_owner
        self.weights = [p.sharded for p in params]
        self.versions = [weight._version for weight in self.weights]
        self.flat = local(self.weights[0]).new_empty(sum(p.numel for p in params))
        if self.is_owner:
            torch._foreach_copy_(split(self.flat, params), [local(weight) for weight in self.weights])
        self.works = start_broadcast(self.flat, mesh.replicate_group, params[0].slot[1])

    def finish(self) -> None:
        """Wait; a peer takes the weights over.

        Raises:
            RuntimeError: the user has written to a peer's weights after the step: one of the two would be lost.
        """
        wait(self.works)
        if self.is_owner:
            return
        for p, weight, version in zip(self.params, self.weights, self.versions):
            if weight._version != version:
                raise RuntimeError(
                    f"dedicated parameter '{p.fqn}' was written to while its replicate broadcast was in flight; write "
                    f"inside dmuon.unshard(model), or pass replicate_async=False to dmuon.Muon"
                )
        torch._foreach_copy_([local(weight) for weight in self.weights], split(self.flat, self.params))


def replicate_broadcasts(params: Iterable, mesh: SlotMesh) -> list[ReplicateBroadcast]:
    """Issue the broadcasts of what this rank's column holds of the params, one a slot and dtype."""
    buckets: dict[tuple, list] = {}
    for p in params:
        if p.in_column and mesh.num_replicas > 1:
            buckets.setdefault((p.slot, p.sharded.dtype), []).append(p)
    return [ReplicateBroadcast(bucket, mesh) for bucket in buckets.values()]


@torch.no_grad()
def replicate(params: Iterable, mesh: SlotMesh) -> None:
    """The owners' weights become those of their replicate peers, one by one: for moments when bytes count, not time."""
    for p in params:
        for broadcast in [] if p.sharded.is_meta else replicate_broadcasts([p], mesh):
            broadcast.finish()


# ------------------------------------------------------------------------------------------ what all ranks agree on


def agree(texts: dict[str, str], groups: dict[str, dist.ProcessGroup], device: torch.device,
          failure: Exception | None) -> None:
    """Raise on every rank unless the ranks of each group hold the same text and none of the mesh has failed.

    Args:
        texts: by dimension of the mesh, what must be equal along it, line by line.
        groups: by dimension; a small collective in each.
        device: where collectives take their tensors.
        failure: what this rank raises; its peers are told.

    Raises:
        ValueError: names the ranks and the first line that differs.
    """
    for dimension, group in groups.items():
        found = _disagreement(f"failed: {failure}" if failure else texts[dimension], group, dimension, device)
        failure = failure or found  # raised at the end only: the other dimensions must hear of it
    if failure:
        raise failure


def _disagreement(text: str, group: dist.ProcessGroup, dimension: str, device: torch.device) -> ValueError | None:
    """What differs between the texts of a group's ranks, or nothing."""
    data = text.encode()
    mine = torch.tensor([int.from_bytes(hashlib.sha256(data).digest()[:7], "big"), len(data)], device=device)
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)
    if all(torch.equal(mine, other) for other in hashes):
        return None
    padded = torch.zeros(max(int(other[1]) for other in hashes), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in hashes]
    dist.all_gather(gathered, padded, group=group)
    texts = [bytes(other.tolist()).rstrip(b"\0").decode().split("\n") for other in gathered]
    for rank, theirs in enumerate(texts):
        if theirs[0].startswith("failed: "):
            return ValueError(f"dedicate_params: rank {rank} of the {dimension} group " + "\n".join(theirs))
        for i in range(max(len(theirs), len(texts[0]))):
            ours, other = ("".join(lines[i : i + 1]) or "nothing" for lines in (texts[0], theirs))
            if ours != other:
                return ValueError(
                    f"dedicate_params: ranks disagree about the model. Rank 0 of the {dimension} group has [{ours}], "
                    f"rank {rank} has [{other}]; build the same model, in the same order, on every rank"
                )


@torch.no_grad()
def synchronise(tensors: Iterable[Tensor], groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Make the tensors those of the mesh's first rank, meta tensors excepted; as bytes, so that any dtype travels."""
    for tensor in tensors:
        if not tensor.is_meta and tensor.numel():
            data = local(tensor).to(device).contiguous()
            for group in reversed(groups):  # down the first column, then along every row
                wait(start_broadcast(data.view(-1).view(torch.uint8), group, 0))
            local(tensor).copy_(data)


def tensor_parallel_mesh(parameters: Iterable, *data_meshes: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of a model's DTensors: before `fully_shard` they are those of tensor parallelism.

    Args:
        parameters: (FQN, parameter) pairs.
        data_meshes: the data-parallel meshes; their dimensions are not tensor-parallel ones.

    Raises:
        ValueError: names a parameter whose mesh has no names, a data-parallel dimension, two dimensions, or is another
            one than that of the parameters before it.
    """
    data_names = {name for mesh in data_meshes if mesh is not None for name in mesh.mesh_dim_names or ()}
    found = None
    for fqn, parameter in parameters:
        if not isinstance(parameter, DTensor) or parameter.device_mesh == found:
            continue
        names = parameter.device_mesh.mesh_dim_names
        if not names or not data_names:
            which = "data-parallel" if names else "tensor-parallel"
            problem = f"but the {which} mesh has no names; pass slices of one init_device_mesh(..., mesh_dim_names=...)"
        elif data_names & {*names}:
            problem = f"and the mesh has {sorted(data_names)}; pass data-parallel dimensions only, before fully_shard"
        elif len(names) > 1 or found is not None:
            problem = "but only one tensor-parallel dimension is supported, the same for all parameters"
        else:
            found = parameter.device_mesh
            continue
        raise ValueError(f"dedicate_params: parameter '{fqn}' is a DTensor over {names or 'a mesh'}, {problem}")
    return found


def checksums(named: Iterable[tuple[str, Tensor]]) -> str:
    """A line for each tensor that every rank of a tensor-parallel mesh should hold alike: one that is no DTensor."""
    lines = []
    for name, tensor in named:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            total = local(tensor).contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64).item()
            lines.append(f"{name} {tuple(tensor.shape)}, no DTensor, bytes adding up to {total}: seed tp ranks alike")
    return "\n".join(lines)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This rank's device in the mesh, as FSDP2 takes it."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# ------------------------------------------------------------------------------------------ small pieces


def start_broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> list[dist.Work]:
    """From the group's rank `source`, in place; no work in a group of one."""
    if group.size() == 1 or not tensor.numel():
        return []
    return [dist.broadcast(tensor, group=group, group_src=source, async_op=True)]


def start_average(tensor: Tensor, group: dist.ProcessGroup, target: int) -> list[dist.Work]:
    """The mean over the group, in place at the group's rank `target`, undefined elsewhere; no work in a group of one.

    See [Note: Newton-Schulz hides a wrong divisor].
    """
    if group.size() == 1 or not tensor.numel():
        return []
    return [dist.reduce(tensor, op=dist.ReduceOp.AVG, group=group, group_dst=target, async_op=True)]


def wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def split(flat: Tensor, params: list) -> list[Tensor]:
    """Views of a flat tensor, one in the shape of each matrix."""
    return [view.view(p.local_shape) for p, view in zip(params, flat.split([p.numel for p in params]))]


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of it, without a graph: with tensor parallelism a DTensor's local part."""
    with torch.no_grad():  # before detach, which inference mode refuses for a DTensor
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _own_group(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True, group_desc=name)


# ------------------------------------------------------------------------------------------ the demonstration


def _demonstrate() -> None:
    """One matrix with owner slot (1, 1) on a 2 x 2 mesh: both reduces of a gradient, and the broadcast of a weight."""
    rows = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh, rank = SlotMesh(torch.device("cpu"), *map(rows.get_group, ("shard", "replicate"))), dist.get_rank()
    weight = nn.Parameter(torch.zeros(2, 3))
    full = nn.Parameter(torch.zeros(2, 3))
    full.grad = torch.full_like(full, rank)
    p = SimpleNamespace(fqn="up_proj", slot=(1, 1), numel=6, local_shape=weight.shape, sharded=weight, full=full,
                        in_column=mesh.slot[0] == 1, is_owner=mesh.slot == (1, 1), wrap=lambda tensor: tensor)
    reduce = TwoStageReduce([p], torch.float32, mesh)
    wait(reduce.stage_one)
    stage_one = reduce.flat[0].item()
    reduce.finish()
    if p.is_owner:
        weight.data.fill_(7)  # what a step would do
    for broadcast in replicate_broadcasts([p], mesh):
        broadcast.finish()
    gradient = None if weight.grad is None else weight.grad[0, 0].item()
    if p.in_column:
        print(f"rank {rank}, slot {mesh.slot}: stage one {stage_one:4}, gradient at the owner {gradient!s:>4}, "
              f"weight {weight[0, 0].item()}")
        assert stage_one == {0: 0.5, 1: 2.5}[mesh.slot[1]] and (weight == 7).all()
    assert gradient == (1.5 if p.is_owner else None)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _demonstrate()
    dist.destroy_process_group()
