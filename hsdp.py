"""What does a second mesh dimension change? Every owner gets replicas: one more average in, one broadcast out.

Before this file: hooks.py, which calls it for every gradient and every new weight. After it: dmuon.py. `SlotMesh` is a
rank's place in the mesh, and `DedicatedParam` what a rank keeps of one matrix there; a 1-D mesh is the case of one row.

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

1. Stage-one reduce: the average over the shard group arrives at the row's rank of the owner's column (one collective,
   not a chain: every rank of the row has a gradient).
2. Stage-two reduce: the average of these over the replicate group arrives at the owner: the divisor is G R in all.
3. Replicate broadcast: after NS the owner sends the new weights to its R - 1 peers, behind AdamW and the next forward.
   They land when somebody needs them: before a row broadcast, a state dict, `unshard`.

Cost, with P elements in dedicated matrices: a rank puts its column's share, on average P / G, into stage two and as
much into the replicate broadcast; over all ranks (R - 1) P elements travel in each. A rank holds its column's share of
the weights, once more while they are in flight, and its slot's share, on average P / (G R), of gradients and momenta.
With R = 1 nothing is sent.

`torchrun --nproc_per_node=4 hsdp.py` shows a 2 x 2 mesh, and one matrix whose owner slot is (1, 1):

  rank  slot    gradient     1 stage one  2 stage two  after step   3 broadcast
  1     (1, 0)  1.0          0.5          -            0.0          7.0
  3     (1, 1)  3.0          2.5          1.5          7.0          7.0
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

Slot = tuple[int, int]  # (shard, replicate) coordinate of an owner; replicate is 0 on a 1-D mesh

# [Note: Newton-Schulz hides a wrong divisor]
# A matrix's update does not change when its gradient is scaled, so a gradient that was summed instead of averaged, or
# averaged twice, trains alike. AdamW's update hides it, too. It shows in gradient norms, in momenta (linear in Muon's
# and in AdamW's first, squared in its second), and in when clipping sets in. The reduce is an average
# over all ranks, those with zeros included, as FSDP2's is: the loss must be the mean over the rank's own tokens. The
# tests compare gradients, not losses.

# [Note: the order on the replicate communicator]
# It carries two things, in an order that all ranks of a column share. In a backward these are the second stages: that
# of one boundary is issued right after the first stage of the next boundary, as hooks.py's schedule says. After a step
# these are the replicate broadcasts, in model order. What users call in between (`unshard`, clipping) comes in program
# order, like the collectives of tensor parallelism, which its ranks issue alike: they have equal data.


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
        self.device, self.tp_mesh = device, tp_mesh
        self.backend = dist.group.WORLD._get_backend(device)  # private: `dist.get_backend` may name several
        self.on_nccl = self.backend.name() == "nccl"
        # Never FSDP2's groups: two libraries do not agree on one order of collectives, see hooks.py
        equalise_group_counts([group for group in (shard_group, replicate_group) if group is not None], device)
        self.broadcast_group = self._own_group(shard_group, "dmuon_broadcast")
        self.reduce_group = self._own_group(shard_group, "dmuon_reduce")
        self.num_shards, self.num_replicas, row = shard_group.size(), 1, 0
        if replicate_group is not None:
            self.replicate_group = self._own_group(replicate_group, "dmuon_replicate")
            self.num_replicas, row = replicate_group.size(), replicate_group.rank()
        self.slot: Slot = (shard_group.rank(), row)

    def _own_group(self, group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
        """The same ranks as a group of our own, made by them alone, its communicator built now, not in a backward."""
        ranks = dist.get_process_group_ranks(group)
        how = dict(use_local_synchronization=True, group_desc=name)
        how["timeout"] = self.backend.options._timeout  # private: else it is torch's, half an hour
        if self.on_nccl:  # what is sent must not queue behind the kernels that it hides behind
            how |= dict(backend="nccl", pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
        own = dist.new_group(ranks, **how)
        dist.all_reduce(torch.zeros(1, device=self.device), group=own)
        return own

    def __reduce__(self) -> None:
        """For `copy.deepcopy` and pickle, of the model too, which has this object in its hooks."""
        raise RuntimeError("a dedicated model cannot be copied or pickled, like one that FSDP2 shards: build another "
                           "one and load dmuon.full_state_dict(model) into it, or use dmuon.save_checkpoint")

    def groups(self) -> list[dist.ProcessGroup]:
        """Of every dimension of more than one rank, for what all compute together between backward and step."""
        replicate = [self.replicate_group] if self.num_replicas > 1 else []
        tp = [self.tp_mesh.get_group()] if self.tp_mesh is not None else []
        return [group for group in (self.reduce_group, *replicate, *tp) if group.size() > 1]

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


class DedicatedParam:
    """One matrix with one owner: the two parameter objects that stand for it, and the modules that hold it.

    `sharded` is what modules and optimizers hold between steps: in the owner's shard column the whole matrix in the
    parameter's own dtype (owned data), elsewhere a placeholder without elements. Its attribute `_dedicated_owner_rank`,
    by which FSDP2's patch and the optimizer know it, is the owner's slot. `full` is a view of the packed buffer, on
    every rank. With tensor parallelism (TP) all of this is about this TP rank's shard, and both are DTensors.

    Args:
        fqn: fully qualified name, as in `model.named_parameters()`, without wrapper prefixes.
        holders: every (module, attribute name) that holds the parameter; more than one when it is tied.
        slot: the owner's.
        mesh: this rank's place in the mesh; its device is where the matrix lives, but meta parameters stay on meta.
    """

    def __init__(self, fqn: str, holders: list[tuple[nn.Module, str]], slot: Slot, mesh: SlotMesh):
        self.fqn, self.holders, self.slot, self.mesh = fqn, holders, slot, mesh
        self.in_column, self.is_owner = slot[0] == mesh.slot[0], slot == mesh.slot
        held = holders[0][0]._parameters[holders[0][1]]
        self.shape, self.stride, self.placements = held.shape, held.stride(), getattr(held, "placements", None)
        self.local_shape, self.numel = local(held).shape, local(held).numel()
        # `full` is made at the first unshard; `resting`, what modules hold else, is `sharded` but in `dmuon.unshard`
        self.full = self.resting = None
        self.waiting: Tensor | None = None  # gradients that `no_sync` has kept from the reduce, local to this rank
        self.adopt()

    def wrap(self, shard: Tensor) -> Tensor:
        """The like of `sharded` or `full` from what this rank has of it: with TP a DTensor, else the tensor itself."""
        how = dict(run_check=False, shape=self.shape, stride=self.stride)
        return DTensor.from_local(shard, self.mesh.tp_mesh, self.placements, **how) if self.placements else shard

    def hold(self, parameter: nn.Parameter) -> None:
        """Make this object the attribute of every holder, past a module's own `__setattr__`."""
        for module, name in self.holders:
            module._parameters[name] = parameter

    def adopt(self) -> None:
        """Take over what the module holds: at first, and when `to_empty` or an assignment replaced it."""
        held = self.holders[0][0]._parameters[self.holders[0][1]]
        if held is self.full or held is self.resting:
            self.resting._dedicated_owner_rank = self.slot  # `.to()`, `to_empty` keep a DTensor, but not its mark
            return
        problem = f"dedicated parameter '{self.fqn}' of shape {tuple(self.shape)} has become a {type(held).__name__}"
        if isinstance(held, DTensor) and held.device_mesh != self.mesh.tp_mesh:
            raise RuntimeError(f"{problem}: FSDP2 sharded it. Call dmuon.dedicate_params before fully_shard")
        like = isinstance(held, nn.Parameter) and (tuple(held.shape), getattr(held, "placements", None))
        if not like or like != (self.shape, self.placements) and (self.in_column or held.numel()):
            raise RuntimeError(f"{problem} {like or ''}: assign an nn.Parameter of the old shape and placements")
        held._dedicated_owner_rank = self.slot
        device = held.device if held.is_meta else self.mesh.device
        if self.in_column:
            held.data = held.data.to(device)
        elif held.numel():
            placeholder = nn.Parameter(torch.empty(0, dtype=held.dtype, device=device), held.requires_grad)
            placeholder.__dict__.update(held.__dict__)  # marks that the user's code may look for, and ours
            held = placeholder
        self.sharded = self.resting = held
        self.hold(held)

    def take_gradient(self) -> Tensor | None:
        """Take from `full` what autograd has left there, in the placements of `sharded`: this rank's part, or None."""
        gradient, self.full.grad = self.full.grad, None
        if isinstance(gradient, DTensor):  # tensor parallelism may have left it partial, or placed elsewhere
            gradient = gradient.redistribute(placements=self.placements)
        return None if gradient is None else local(gradient)

    def accumulate(self, dtype: torch.dtype) -> None:
        """The gradient joins those that `no_sync` has kept for a reduce, in its dtype."""
        gradient = self.take_gradient()
        if gradient is not None:
            self.waiting = gradient.to(dtype) if self.waiting is None else self.waiting.add_(gradient)


class TwoStageReduce:
    """Gradients of one boundary and one shard column on their way from `full.grad` to `sharded.grad` at their owners.

    Args:
        params: the matrices, ordered by slot.
        dtype: what they are averaged in.
        mesh: this rank's place.
    """

    def __init__(self, params: list, dtype: torch.dtype, mesh: SlotMesh):
        self.params, self.mesh = params, mesh
        self.flat = torch.zeros(sum(p.numel for p in params), dtype=dtype, device=mesh.device)
        for p, view in zip(params, split(self.flat, params)):
            if p.waiting is not None:  # else `copy_` casts: no copy in the dtype of the reduce beside `flat`
                p.accumulate(dtype)
            gradient, p.waiting = p.take_gradient() if p.waiting is None else p.waiting, None
            if gradient is not None:  # else zeros: this rank's data have not used the matrix
                view.copy_(gradient)
        self.stage_one = start_average(self.flat, mesh.reduce_group, params[0].slot[0])
        self.stage_two: list[dist.Work] | None = None  # not yet

    def start_stage_two(self) -> None:
        """Wait for stage one; in the owners' column, one collective a slot."""
        if self.stage_two is None:
            wait(self.stage_one, f"reduce of {names(self.params)} to shard {self.params[0].slot[0]}")
            self.stage_two = []
            if self.mesh.num_replicas > 1 and self.params[0].in_column:
                slots = [list(params) for _, params in itertools.groupby(self.params, lambda p: p.slot)]
                for params, part in zip(slots, self.flat.split([sum(p.numel for p in params) for params in slots])):
                    self.stage_two += start_average(part, self.mesh.replicate_group, params[0].slot[1])

    def finish(self, keep: bool) -> None:
        """Wait; at the owner add the averages to `.grad` as autograd would, with its hooks; `keep=False` drops them."""
        self.start_stage_two()
        wait(self.stage_two, f"reduce of {names(self.params)} over the replicas")
        for p, average in zip(self.params, split(self.flat, self.params)):
            if p.is_owner and keep:
                # a copy where a view would keep other slots' parts of `flat` alive
                average = p.wrap(average.to(p.sharded.dtype, copy=self.mesh.num_replicas > 1))
                for hook in (p.sharded._backward_hooks or {}).values():  # of `register_hook`
                    changed = hook(average)
                    average = average if changed is None else changed
                p.sharded.grad = average if p.sharded.grad is None else p.sharded.grad.add_(average)
                for hook in (p.sharded._post_accumulate_grad_hooks or {}).values():
                    hook(p.sharded)


class ReplicateBroadcast:
    """New weights of one slot on their way from the owner to its replicate peers.

    They travel and arrive in a tensor of their own: the owner may write to its weights meanwhile, and a peer sees
    whole old weights until `finish` puts whole new ones in their place.

    Args:
        params: the matrices, of one slot and dtype.
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
        wait(self.works, f"replicate broadcast of {names(self.params)}")
        if self.is_owner:
            return
        for p, weight, version in zip(self.params, self.weights, self.versions):
            if weight._version != version:
                raise RuntimeError(f"dedicated parameter '{p.fqn}' was written to while its replicate broadcast was in "
                                   "flight; write inside dmuon.unshard(model), or pass replicate_async=False to "
                                   "dmuon.Muon")
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


# ------------------------------------------------------------------------------------------ the meshes of a model


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This rank's device in the mesh, as FSDP2 takes it."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# ------------------------------------------------------------------------------------------ what all ranks agree on


def gather_texts(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every rank's text, in the group's order; where all are equal only a hash travels.

    `dist.all_gather_object` would need numpy.
    """
    data = text.encode()
    mine = torch.tensor([int.from_bytes(hashlib.sha256(data).digest()[:7], "big"), len(data)], device=device)
    hashes = gather(mine, group)
    if all(torch.equal(mine, other) for other in hashes):
        return [text] * group.size()
    padded = torch.zeros(max(int(other[1]) for other in hashes), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return [bytes(other.tolist()).rstrip(b"\0").decode() for other in gather(padded, group)]


def union(lines: Iterable[str], groups: list[dist.ProcessGroup], device: torch.device) -> list[str]:
    """The lines that any rank has, each once, the same list on every rank."""
    lines = list(lines)
    for group in groups:
        lines = "\n".join(gather_texts("\n".join(lines), group, device)).split("\n")
    return [line for line in dict.fromkeys(lines) if line]


# ------------------------------------------------------------------------------------------ small pieces


def gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor of this shape, in the group's order."""
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


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


@contextmanager
def one_launch(mesh: SlotMesh, works: list[dist.Work]) -> Iterator[None]:
    """Broadcasts inside are one launch where the backend can do that, on NCCL; `works` is then what to wait for.

    gloo must not be asked: after the refusal its group silently does nothing any more.
    """
    if not mesh.on_nccl:
        yield
        return
    # Private: NCCL's group call, which torch has no other way to
    with dist._coalescing_manager(mesh.broadcast_group, mesh.device, async_ops=True) as launch:
        yield
    works[:] = [launch]


def wait(works: list[dist.Work], what: str) -> None:
    """Wait for the works and forget them: a work keeps its tensors alive, also when it is over.

    On gloo this blocks, and raises RuntimeError, naming the collective, when a rank has died or the group's timeout is
    over. On NCCL it makes the current stream wait and returns at once: it cannot raise, and after the timeout NCCL's
    watchdog ends the process with a message of its own.
    """
    while works:
        try:
            with record_function(f"dmuon.wait {what}"):
                works.pop(0).wait()
        except RuntimeError as error:
            raise RuntimeError(f"dmuon: the {what} did not end: another rank has died, hangs, or is elsewhere "
                               f"({error})") from error


def names(params: list[DedicatedParam]) -> str:
    return ", ".join(p.fqn for p in params)


def split(flat: Tensor, params: list) -> list[Tensor]:
    """Views of a flat tensor, one in the shape of each matrix."""
    return [view.view(p.local_shape) for p, view in zip(params, flat.split([p.numel for p in params]))]


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of it, without a graph: with tensor parallelism a DTensor's local part."""
    with torch.no_grad():  # before detach, which inference mode refuses for a DTensor
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def equalise_group_counts(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Let all ranks of the mesh, whose groups these are, have made equally many process groups.

    `dist.new_group` among some ranks makes a name of them and of how many groups this rank has. Ranks that have made
    groups of their own would come with different names and wait for each other for ever. So those that have fewer make
    groups of themselves alone. Nobody outside of the mesh takes part.

    Raises:
        RuntimeError: torch counts in another way than 2.13 and 2.14.
    """
    c10d = dist.distributed_c10d  # private: groups held in torch 2.13, calls of `new_group` in 2.14

    def count() -> int:
        counts = {"pg_names": len(c10d._world.pg_names), "group_count": c10d._world.group_count}
        used = [counts[name] for name in c10d._hash_ranks_to_str.__code__.co_names if name in counts]
        if len(used) != 1:
            raise RuntimeError(f"dmuon does not know how torch {torch.__version__} names groups; use 2.13 or 2.14")
        return used[0]

    most = torch.tensor(count(), device=device)
    for group in groups:  # along the row, then along the column
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while count() < most.item():
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


# ------------------------------------------------------------------------------------------ the demonstration


def _demonstrate() -> None:
    """One matrix with owner slot (1, 1) on a 2 x 2 mesh: both reduces of a gradient, and the broadcast of a weight."""
    rows = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh, rank = SlotMesh(torch.device("cpu"), *map(rows.get_group, ("shard", "replicate"))), dist.get_rank()
    p = DedicatedParam("up_proj", [(nn.ParameterDict({"weight": torch.zeros(2, 3)}), "weight")], (1, 1), mesh)
    p.full = nn.Parameter(torch.zeros(2, 3))
    p.full.grad = torch.full((2, 3), float(rank))
    reduce = TwoStageReduce([p], torch.float32, mesh)
    wait(reduce.stage_one, "stage one")
    held = [float(rank), reduce.flat[0].item() if p.in_column else "-"]
    reduce.finish(keep=True)
    held += [p.sharded.grad[0, 0].item() if p.is_owner else "-"]
    p.sharded.data.fill_(7 if p.is_owner else 0)  # what a step would do
    held += p.sharded.flatten()[:1].tolist()  # a placeholder has none
    replicate([p], mesh)
    held += p.sharded.flatten()[:1].tolist()
    assert held == {1: [1.0, 0.5, "-", 0.0, 7.0], 3: [3.0, 2.5, 1.5, 7.0, 7.0]}.get(rank, [rank, "-", "-"]), held
    line = f"{rank}     {mesh.slot}  " + "".join(f"{what:<13}" for what in held)
    table = [line.rstrip() for line in gather_texts(line, dist.group.WORLD, mesh.device)]
    if rank == 0:
        print("A matrix of zeros, owner slot (1, 1), on a 2 x 2 mesh; the gradient of rank r is r, a step writes 7:")
        print("rank  slot    gradient     1 stage one  2 stage two  after step   3 broadcast", *table, sep="\n")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _demonstrate()
    dist.destroy_process_group()
