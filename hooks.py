"""How does the full matrix appear before it is used, and how does its gradient leave?

Before this file: partition.py, who owns which matrix. After it: hsdp.py, what a second dimension of
the mesh adds to the classes below. Here the mesh has one dimension.

A hook boundary is a module, usually one transformer layer. Its matrices of one owner (and dtype)
share a packed buffer: a flat tensor whose views are the full parameters. Between steps the buffer
has no storage. The steps of its life have the numbers of the comments below:

  1 fill     the owner copies its weights into a landing tensor beside the buffer; an asynchronous
             broadcast fills the landing tensors of the other ranks
  2 view     the rank waits for the broadcast, the buffer's storage comes back and takes the bytes
             over, the landing tensor goes; the modules hold the buffer's views
  3 compute  the forward runs, while the next boundary's broadcast is in flight (prefetch, from the
             second forward on, in the order of the first)
  4 free     Z3: the storage goes. Z2: it stays for the backward. The modules hold `owned` again
  5 refill   Z3, before the boundary's backward: 1 and 2 again; what autograd saved is valid again
  6 compute  the backward runs, while the previous boundary's broadcast is in flight
  7 free     the backward is over with the boundary: the storage goes
  8 reduce   the gradients are packed into another flat tensor and averaged at the owner; before
             that the rank waits for the reduce of two boundaries ago, whose tensor goes

  Z3  collective  b0 | b1   | b2   |      | b2   | b1   | r2 b0 | r1   | r0    b1, r1: broadcast,
      compute        | fwd0 | fwd1 | fwd2 | head | bwd2 | bwd1  | bwd0 |       reduce of layer 1
      buffers      1 |   2  |   2  |   1  |   1  |   2  |   2   |   1  | 0     buffers: layers
  Z2  collective  b0 | b1   | b2   |      |      |      |    r2 | r1   | r0    whose weights take
      buffers      1 |   2  |   3  |   3  |   3  |   3  |   2   |   1  | 0     memory here

Under `dmuon.no_sync` 8 does not come: gradients wait for a backward that reduces. Z2 skips 7, too.

Cost: a buffer of n elements takes n in the dtype of the computation, twice while 2 copies it. With
P elements in matrices a rank passes 2 P to broadcasts and P to reduces in a step of Z3, P and P in
Z2. A layer on a rank that owns none of it, by `torchrun --nproc_per_node=4 hooks.py`:

  Z3  2 layer 1, forward    layer 1 FULL , its weight has 4096 elements; bytes: [0, 16384, 16384]
  Z3  4 after the forward   layer 1 EMPTY, its weight has    0 elements; bytes: [0, 0, 0]
  Z3  6 layer 1, backward   layer 1 FULL , its weight has 4096 elements; bytes: [16384, 16384, 0]
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from newton_schulz import local

# [Note: storage resize and the version counter]
# Autograd saves the full parameters, which are views of the packed buffer. Freeing the buffer is
# `untyped_storage().resize_(0)`: the saved views stay, without bytes. Filling it again writes in
# place, which would bump the version counter that the views share and make the backward raise
# 'modified by an inplace operation'. The bytes that come back are the same weights, so the fill
# runs under `_unsafe_preserve_version_counter`. It follows that weights must not change between a
# forward and its backward: plain PyTorch raises then, here nothing can. The storage comes back only
# when the bytes are there: a backward that comes to the views before its boundary's hook (by a
# tensor that the boundary did not return, say) finds none and stops, instead of computing with half
# a broadcast.

# [Note: the order of collectives is a contract between ranks]
# Ranks match collectives on one communicator by their order, not by their content, and NCCL asks
# for one order over all communicators, FSDP2's included. What is ready first depends on the data (a
# rank whose tokens never reach a matrix has no gradient for it) and on the clock, so 'launch what
# is ready' averages garbage or hangs. Here every rank issues one fixed sequence. The forward
# numbers the starts and ends of the boundaries' calls. Autograd runs the newest operation first:
# when it comes to the output of a call that ended at `end`, whatever started later is over. That
# moment issues the reduces of all boundaries whose first start is later, with zeros for what this
# rank's data did not use. A rank whose data lead to fewer such moments issues the same sequence,
# some of it later. So that it can, a wait concerns only what was issued before it: the rank that
# is furthest behind can always go on.

# [Note: Newton-Schulz hides a wrong divisor]
# A matrix's update does not change when its gradient is scaled, so a gradient that was summed
# instead of averaged, or averaged twice, trains alike. AdamW's update hides it, too. It shows in
# gradient norms, in momenta (linear in Muon's and in AdamW's first, squared in its second), and in
# when clipping sets in. The reduce is an average over all ranks, those with zeros included, as
# FSDP2's is: the loss must be the mean over the rank's own tokens. The tests compare gradients.


# -------------------------------------------------------------------- a rank's place and its groups


class ShardMesh:
    """This rank's place in a mesh of one dimension, and DMuon's own communicators over it.

    An owner slot is a number here: that of a rank in the mesh. hsdp.py's `ReplicaMesh` overrides
    what a second dimension changes.

    Args:
        groups: {"shard": the ranks that share the model}.
        device: this rank's, where matrices live and collectives take their tensors.
        tp_mesh: the ranks that share this slot, each with its part of every matrix; None without
            tensor parallelism.
    """

    num_replicas, replicate = 1, 0

    def __init__(self, groups: dict[str, dist.ProcessGroup], device: torch.device,
                 tp_mesh: DeviceMesh | None = None):
        self.device, self.tp_mesh = device, tp_mesh
        self.backend = dist.group.WORLD._get_backend(device)  # private: `get_backend` may name two
        self.on_nccl = self.backend.name() == "nccl"
        # Never FSDP2's groups: two libraries do not agree on one order of collectives
        equalise_group_counts(list(groups.values()), device)
        self.broadcast_group = self._own_group(groups["shard"], "dmuon_broadcast")
        self.reduce_group = self._own_group(groups["shard"], "dmuon_reduce")
        self.num_shards, self.shard = groups["shard"].size(), groups["shard"].rank()
        self.number = self.shard  # of this rank's slot

    def _own_group(self, group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
        """The same ranks as a group of our own, made by them alone."""
        how = dict(use_local_synchronization=True, group_desc=name)
        how["timeout"] = self.backend.options._timeout  # private: else it is torch's, half an hour
        if self.on_nccl:  # what is sent must not queue behind the kernels that it hides behind
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            how |= dict(backend="nccl", pg_options=options)
        own = dist.new_group(dist.get_process_group_ranks(group), **how)
        # The communicator is built by its first collective, which must not be one of a backward
        dist.all_reduce(torch.zeros(1, device=self.device), group=own)
        return own

    def __reduce__(self) -> None:
        """For `copy.deepcopy` and pickle, also of the model, whose hooks have this object."""
        raise RuntimeError("a dedicated model cannot be copied or pickled, like one that FSDP2 "
                           "shards: build another one and load dmuon.full_state_dict(model) into "
                           "it, or use dmuon.save_checkpoint")

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Those of more than one rank, for what all compute together outside of the schedule."""
        tp = [] if self.tp_mesh is None else [self.tp_mesh.get_group()]
        return [group for group in (self.reduce_group, *tp) if group.size() > 1]

    def source(self, owner: int) -> int:
        """The rank of this shard group that holds the owner's matrices: here the owner itself."""
        return owner

    def start_reduce(self, params: list[DedicatedParam], dtype: torch.dtype) -> Reduce:
        """The gradients of a packed buffer's matrices set out to their owner."""
        return Reduce(params, dtype, self)

    def start_replicate_broadcasts(self, name: str, params: list[DedicatedParam]) -> None:
        """After a step: the boundary's new weights set out to the replicas; here there are none."""

    def finish_replicate_broadcasts(self, params: Iterable[DedicatedParam]) -> None:
        """Wait for those of these matrices."""

    def copy_to_replicas(self, params: Iterable[DedicatedParam]) -> None:
        """The owners' weights become those of their replicas, now."""


def equalise_group_counts(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Let all ranks of the mesh, whose groups these are, have made equally many process groups.

    `dist.new_group` among some ranks makes a name of them and of how many groups this rank has.
    Ranks that have made groups of their own would come with different names and wait for each other
    for ever. So those that have fewer make groups of themselves alone. Nobody outside of the mesh
    takes part.

    Raises:
        RuntimeError: torch counts in another way than 2.13 and 2.14.
    """
    c10d = dist.distributed_c10d  # private: groups held in torch 2.13, calls of `new_group` in 2.14

    def count() -> int:
        counts = {"pg_names": len(c10d._world.pg_names), "group_count": c10d._world.group_count}
        used = [name for name in c10d._hash_ranks_to_str.__code__.co_names if name in counts]
        if len(used) != 1:
            raise RuntimeError(f"dmuon does not know how torch {torch.__version__} names groups; "
                               "use 2.13 or 2.14")
        return counts[used[0]]

    most = torch.tensor(count(), device=device)
    for group in groups:  # along the row, then along the column
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while count() < most.item():
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


# -------------------------------------------------------------------------------------- one matrix


class DedicatedParam:
    """One matrix with one owner: its parameter objects and the modules that hold them.

        what a module's `weight` is     on the owner                    on other ranks
        between steps                   `owned`: the whole matrix       `owned`: a placeholder
        while its boundary runs         `full`: a view of the packed buffer, on every rank
        `owned.grad` after a backward   the average over the ranks      None

    `owned` is what optimizers hold. On the owner it has the parameter's own dtype, elsewhere it has
    no elements. Its attribute `_dedicated_owner_rank`, by which FSDP2's patch and the optimizer
    know it, is the owner's slot. With tensor parallelism (TP) all of this is about this TP rank's
    part of the matrix, and `owned` and `full` are DTensors.

    Args:
        fqn: fully qualified name, as in `model.named_parameters()`, without wrapper prefixes.
        holders: every (module, attribute name) that holds the parameter; several when it is tied.
        owner: number of the owner's slot.
        mesh: this rank's place; the matrix moves to its device, a meta parameter stays on meta.
        blocks: (dim, sizes) of the matrices that the parameter consists of; None: it is one.
    """

    def __init__(self, fqn: str, holders: list[tuple[nn.Module, str]], owner: int, mesh: ShardMesh,
                 blocks: tuple[int, tuple[int, ...]] | None = None):
        self.fqn, self.holders, self.owner, self.mesh = fqn, holders, owner, mesh
        self.blocks = blocks
        self.source = mesh.source(owner)
        self.is_source, self.is_owner = self.source == mesh.shard, owner == mesh.number
        held = self.held()
        self.shape, self.stride = held.shape, held.stride()
        self.placements = getattr(held, "placements", None)
        self.local_shape, self.numel = local(held).shape, local(held).numel()
        self.full: nn.Parameter | None = None  # made at the first unshard
        # What modules hold between steps: `owned`, but inside `dmuon.unshard` the whole matrix
        self.resting: nn.Parameter | None = None
        self.unreduced: Tensor | None = None  # gradients that `no_sync` has kept from the reduce
        self.adopt()

    def held(self) -> nn.Parameter:
        module, name = self.holders[0]
        return module._parameters[name]

    def hold(self, parameter: nn.Parameter) -> None:
        """Make this object the attribute of every holder, past a module's own `__setattr__`."""
        for module, name in self.holders:
            module._parameters[name] = parameter

    def wrap(self, part: Tensor) -> Tensor:
        """The like of `owned` or `full` from this rank's part of it: with TP a DTensor."""
        if self.placements is None:
            return part
        return DTensor.from_local(part, self.mesh.tp_mesh, self.placements, run_check=False,
                                  shape=self.shape, stride=self.stride)

    def adopt(self) -> None:
        """Take over what the module holds: at first, and when `to_empty` or the user replaced it.

        Raises:
            RuntimeError: it holds something else than a parameter of the old shape and placements.
        """
        held = self.held()
        if held is self.full or held is self.resting:
            # `.to()` and `to_empty` keep a DTensor, but not its mark
            self.resting._dedicated_owner_rank = self.owner
            return
        self._check(held)
        held._dedicated_owner_rank = self.owner
        device = held.device if held.is_meta else self.mesh.device
        if self.is_source:
            held.data = held.data.to(device)
        elif held.numel():
            empty = torch.empty(0, dtype=held.dtype, device=device)
            placeholder = nn.Parameter(empty, held.requires_grad)
            placeholder.__dict__.update(held.__dict__)  # marks that the user's code looks for; ours
            held = placeholder
        self.owned = self.resting = held
        self.hold(held)

    def _check(self, held: object) -> None:
        problem = (f"dedicated parameter '{self.fqn}' of shape {tuple(self.shape)} has become a "
                   f"{type(held).__name__}")
        if isinstance(held, DTensor) and held.device_mesh != self.mesh.tp_mesh:
            raise RuntimeError(f"{problem}: FSDP2 sharded it. Call dmuon.dedicate_params before "
                               "fully_shard")
        if isinstance(held, nn.Parameter):
            found = tuple(held.shape), getattr(held, "placements", None)
            is_placeholder = not self.is_source and held.numel() == 0
            if found == (self.shape, self.placements) or is_placeholder:
                return
            problem += f" {found}"
        raise RuntimeError(f"{problem}: assign an nn.Parameter of the old shape and placements")

    def take_gradient(self) -> Tensor | None:
        """This rank's part of what autograd has left in `full.grad`, which is None afterwards."""
        gradient, self.full.grad = self.full.grad, None
        if isinstance(gradient, DTensor):  # it may be a partial sum, or placed elsewhere
            gradient = gradient.redistribute(placements=self.placements)
        return None if gradient is None else local(gradient)

    def keep_gradient(self, dtype: torch.dtype) -> None:
        """Under `no_sync`: it joins those that wait for a reduce, in the reduce's dtype."""
        gradient = self.take_gradient()
        if gradient is not None and self.unreduced is None:
            self.unreduced = gradient.to(dtype)
        elif gradient is not None:
            self.unreduced.add_(gradient)

    def add_gradient(self, average: Tensor) -> None:
        """On the owner: to `owned.grad`, as autograd would, with the hooks on the parameter."""
        average = self.wrap(average.to(self.owned.dtype))
        for hook in (self.owned._backward_hooks or {}).values():  # of `register_hook`
            changed = hook(average)
            average = average if changed is None else changed
        grad = self.owned.grad
        self.owned.grad = average if grad is None else grad.add_(average)
        for hook in (self.owned._post_accumulate_grad_hooks or {}).values():
            hook(self.owned)


class Reduce:
    """8: the gradients of a boundary's matrices of one owner, on their way to `owned.grad` there.

    Args:
        params: the matrices.
        dtype: what they are averaged in.
        mesh: this rank's place.
    """

    def __init__(self, params: list[DedicatedParam], dtype: torch.dtype, mesh: ShardMesh):
        self.params, self.mesh = params, mesh
        self.flat = torch.zeros(sum(p.numel for p in params), dtype=dtype, device=mesh.device)
        for p, view in zip(params, split(self.flat, params)):
            for gradient in (p.unreduced, p.take_gradient()):
                if gradient is not None:  # else this rank's data have not used the matrix
                    view.add_(gradient)
            p.unreduced = None
        self.works = start_average(self.flat, mesh.reduce_group, params[0].source)
        self.what = f"reduce of {fqns(params)}"

    def start_stage_two(self) -> None:
        """Go on to the replicas; a mesh of one dimension has none."""

    def finish(self, drops: bool = False) -> None:
        """Wait; the owner takes its averages, or drops them."""
        wait(self.works, self.what)
        for p, average in zip(self.params, split(self.flat, self.params)):
            if p.is_owner and not drops:
                p.add_gradient(average)


# ------------------------------------------------------------------------------------ one boundary


class BufferState(Enum):
    """Where the bytes of a boundary's packed buffers are. They change state together."""

    EMPTY = auto()  # no storage; the matrices exist as owned data only
    IN_FLIGHT = auto()  # no storage yet; the broadcast into the landing tensor must be waited for
    FULL = auto()  # storage holds the full matrices; `hide` may have taken them from the modules


class PackedBuffer:
    """One flat buffer for a boundary's matrices of one source and dtype; one broadcast fills it.

    Their gradients are packed alike, those of the frozen left out, but into another tensor.

    Args:
        params: the matrices, in their order in the buffer; one rank of the shard group has them.
        model: has the mesh, and in `mp_policy` the dtypes of the computation and of the reduce.
        on_gradient: called with (name, full parameter) after autograd has accumulated a gradient.
    """

    def __init__(self, params: list[DedicatedParam], model: DedicatedModel, on_gradient: Callable):
        self.params, self.source = params, params[0].source
        dtype = model.mp_policy.param_dtype or params[0].owned.dtype
        self.reduce_dtype = model.mp_policy.reduce_dtype or dtype
        numel = sum(p.numel for p in params)
        with torch.inference_mode(False):  # else the buffer could never be saved for a backward
            self.flat = torch.empty(numel, dtype=dtype, device=model.mesh.device)
            for p, view in zip(params, split(self.flat, params)):
                p.full = nn.Parameter(p.wrap(view))
                p.full.register_post_accumulate_grad_hook(partial(on_gradient, p.fqn))
        self.flat.untyped_storage().resize_(0)

    def trainable(self) -> list[DedicatedParam]:
        """What a reduce is for: the matrices that are not frozen."""
        for p in self.params:
            if not p.full.requires_grad:
                p.unreduced = None  # frozen since a micro-batch under `no_sync`
        return [p for p in self.params if p.full.requires_grad]


class Landing:
    """Broadcasts on their way into a tensor beside the packed buffers that they are for.

    Args:
        buffers: of one dtype and boundary. On gloo one, for fewer bytes at once; on NCCL all, for
            which there is one launch and one copy then.
        mesh: this rank's place.
    """

    def __init__(self, buffers: list[PackedBuffer], mesh: ShardMesh):
        self.buffers, self.works = buffers, []
        flats = [buffer.flat for buffer in buffers]
        landing = torch.empty(sum(map(len, flats)), dtype=flats[0].dtype, device=mesh.device)
        self.parts = landing.split([*map(len, flats)])
        for buffer, part in zip(buffers, self.parts):
            if buffer.source == mesh.shard:
                weights = [local(p.owned) for p in buffer.params]
                torch._foreach_copy_(split(part, buffer.params), weights)
        with one_launch(mesh, self.works):
            for buffer, part in zip(buffers, self.parts):
                self.works += start_broadcast(part, mesh.broadcast_group, buffer.source)

    def finish(self, drops: bool = False) -> None:
        """Wait, and give the buffers their bytes, or drop these, which nobody has used.

        See [Note: storage resize and the version counter].
        """
        for buffer in self.buffers:
            wait(self.works, f"broadcast of {fqns(buffer.params)} from shard {buffer.source}")
        if not drops:
            flats = [buffer.flat for buffer in self.buffers]
            for flat in flats:
                flat.untyped_storage().resize_(flat.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(flats)):
                torch._foreach_copy_(flats, self.parts)


class Boundary:
    """A hook boundary: a module, whose hooks unshard and reduce, and its packed buffers.

    The root is one, too, even if it has no matrices.
    """

    def __init__(self, name: str, module: nn.Module, params: list[DedicatedParam],
                 model: DedicatedModel):
        self.name, self.module, self.params, self.model = name, module, params, model
        self.state = BufferState.EMPTY
        self.buffers: list[PackedBuffer] = []
        self.landings: list[Landing] = []  # broadcasts in flight

    def _build_buffers(self) -> None:
        """At the first unshard: meta parameters have been materialised, `.to()` has been called."""
        groups: dict[tuple, list[DedicatedParam]] = {}
        for p in self.params:
            if p.owned.is_meta:
                raise RuntimeError(f"dedicated parameter '{p.fqn}' is on the meta device; "
                                   "materialise it first")
            groups.setdefault((p.source, p.owned.dtype), []).append(p)
        this = weakref.ref(self)  # the garbage collector does not see a cycle through autograd

        def on_gradient(fqn: str, full: nn.Parameter) -> None:
            this().model.current_backward().on_gradient(this(), fqn, full)

        self.buffers = [PackedBuffer(sorted(params, key=lambda p: p.owner), self.model, on_gradient)
                        for params in groups.values()]

    def start_unshard(self) -> None:
        """1 fill (5 refill): issue the broadcasts, unless the matrices are here or on their way."""
        if self.state is not BufferState.EMPTY:
            return
        mesh = self.model.mesh
        mesh.finish_replicate_broadcasts(self.params)
        if not self.buffers:
            self._build_buffers()
        alike: dict[object, list[PackedBuffer]] = {}  # what lands together
        for buffer in self.buffers:
            alike.setdefault(buffer.flat.dtype if mesh.on_nccl else buffer, []).append(buffer)
        with record_function(f"dmuon.unshard {self.name}"):
            self.landings = [Landing(buffers, mesh) for buffers in alike.values()]
        self.state = BufferState.IN_FLIGHT

    def finish_unshard(self) -> None:
        """2 view: wait for the broadcasts; the modules hold the full parameters."""
        self.start_unshard()
        while self.landings:
            self.landings.pop(0).finish()
        for p in self.params:
            p.full.requires_grad_(p.owned.requires_grad)
            p.hold(p.full)
        self.state = BufferState.FULL

    def hide(self) -> None:
        """The modules hold what they hold between steps; the bytes stay."""
        for p in self.params:
            p.hold(p.resting)

    def reshard(self) -> None:
        """4 and 7 free: the storage goes."""
        if self.state is BufferState.EMPTY:
            return
        self.hide()
        while self.landings:  # nobody has used them, but they must end before their memory goes
            self.landings.pop(0).finish(drops=True)
        for buffer in self.buffers:
            buffer.flat.untyped_storage().resize_(0)
        self.state = BufferState.EMPTY


# --------------------------------------------------------------------------- forwards and backwards


class Graph:
    """What the hooks in the graph of a forward hold, and so lives as long as the graph."""


@dataclasses.dataclass(eq=False)
class Record:
    """The boundaries' calls of one outermost forward, while a backward may go through them."""

    graph: weakref.ref[Graph]
    started: dict[Boundary, int] = dataclasses.field(default_factory=dict)  # first start, by clock
    ended: dict[Boundary, int] = dataclasses.field(default_factory=dict)  # last end
    is_spent: bool = False  # a backward went through it that did not keep the graph


class Backward:
    """One pass of the autograd engine: two fixed lists, and how far this rank has come in each.

    A boundary is closed when the pass is over with it: its storage is freed, its reduce issued, or
    its gradients kept under `no_sync`. See [Note: the order of collectives is a contract between
    ranks].
    """

    def __init__(self, task_id: int, model: DedicatedModel):
        self.task_id, self.model, self.syncs = task_id, model, model.syncs
        self.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self.started: dict[Boundary, int] = {}  # over all forwards that this pass may go through
        self.ended: dict[Boundary, int] = {}
        for record in model.records_in_question():
            self.started = record.started | self.started
            self.ended |= record.ended
        # The last boundary to end is the first to be needed, and the first to start has its
        # gradients last
        self.broadcasts = sorted(self.ended, key=self.ended.get, reverse=True)
        self.reduces = sorted(self.started, key=self.started.get, reverse=True)
        if self.syncs:  # what micro-batches under `no_sync` ran, and this one did not
            self.reduces += [each for each in model.unreduced if each not in self.started]
            model.unreduced = {}
        self.issued = 0  # of the broadcasts
        self.closed: set[Boundary] = set()  # of the reduces
        self.unsharded: set[Boundary] = set()  # by this pass, and not closed
        self.walked: set[Record] = set()
        self.in_flight: list[list[Reduce]] = []  # by boundary, in order; two at most
        self.late: list[str] = []  # names of matrices
        self.raised = False  # an exception: gradients that are not there yet are dropped

    def enter(self, boundary: Boundary, end: int | None = None) -> None:
        """Unshard the boundary. `end` is that of its call, to whose output the pass has come.

        What started later than that is over. A recompute has no `end`: it may come to boundaries
        earlier on some ranks than on others.
        """
        while end is not None and end < self._next_start():
            self._close()
        # It is over already where an output of its call was an input, too
        is_over = end is not None and boundary in self.closed
        if is_over or boundary in self.unsharded:
            return
        self.unsharded.add(boundary)
        if boundary not in self.broadcasts:  # of no forward that the lists know
            self.broadcasts.append(boundary)
        position = self.broadcasts.index(boundary)
        self._issue_broadcasts(position + 1)
        boundary.finish_unshard()
        if end is not None:
            self._issue_broadcasts(position + 1 + self.model.prefetch)

    def on_gradient(self, boundary: Boundary, fqn: str, full: nn.Parameter) -> None:
        """A gradient is in. It must not come when its reduce has been issued."""
        if boundary not in self.reduces:  # of no forward that the lists know
            self.reduces.append(boundary)
        if self.syncs and boundary in self.closed:
            self.late.append(fqn)
            full.grad = None

    def finish(self) -> None:
        """The end of the pass: issue what is left of both lists, and only then wait.

        It comes after an exception, too: the collectives still pair with the peers'.
        """
        model = self.model
        self.reduces += [each for each in self.broadcasts if each not in self.reduces]
        while len(self.closed) < len(self.reduces):
            self._close()
        self._issue_broadcasts(len(self.broadcasts))
        model.reshard(buffers_stay=self._keeps_buffers() and not self.raised)
        while self.in_flight:
            self._finish_reduces()
        if not self.syncs and self.raised:
            model.drop_gradients()
        elif not self.syncs:
            model.keep_gradients(self.reduces)
        model.backward, model.spent = None, True
        if not self.keeps_graph:
            self._spend_records()
        if self.late and not self.raised:  # behind FSDP2's last callback, so that collectives pair
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._refuse_late_gradients)

    def _spend_records(self) -> None:
        for record in self.walked:
            record.is_spent = True
        if len(self.model.records) == 1:  # of several, ranks may have walked other ones
            self.model.records = []

    def _refuse_late_gradients(self) -> None:
        raise RuntimeError(f"the gradient of {self.late} came after its reduce was issued, and is "
                           "lost: the forward used the matrix before its layer ran. Use it where "
                           "its layer runs")

    def _keeps_buffers(self) -> bool:
        """Z2 under `no_sync`: the next micro-batch finds the weights there."""
        return not self.syncs and not self.model.reshard_after_forward

    def _next_start(self) -> int:
        """First start of the boundary that is closed next; 0 if it has none, or there is none."""
        following = self.reduces[len(self.closed) :]
        return self.started.get(following[0], 0) if following else 0

    def _issue_broadcasts(self, end: int) -> None:
        """5 refill: those before position `end` of the list that have not been issued."""
        while self.issued < min(end, len(self.broadcasts)):
            self.broadcasts[self.issued].start_unshard()
            self.issued += 1

    def _close(self) -> None:
        """7 free and 8 reduce: the next boundary of the list is over.

        First come the broadcasts that another rank, whose backward came to the outputs of all
        later calls, has issued by now.
        """
        boundary, start = self.reduces[len(self.closed)], self._next_start()
        self.closed.add(boundary)
        needed = [end for end in self.ended.values() if end > start]
        self._issue_broadcasts(len(needed) + self.model.prefetch)
        # What this pass has not unsharded keeps its broadcast: a recompute may need it yet
        if boundary in self.unsharded and not self._keeps_buffers():
            boundary.reshard()
        self.unsharded.discard(boundary)
        if self.syncs:
            self._reduce(boundary)
        else:
            self.model.keep_gradients([boundary])

    def _reduce(self, boundary: Boundary) -> None:
        """Packed gradients of two boundaries live at most: the last but one ends before."""
        trainable = {buffer: buffer.trainable() for buffer in boundary.buffers}
        if not any(trainable.values()):
            return
        while len(self.in_flight) > 1:
            self._finish_reduces()
        with record_function(f"dmuon.reduce {boundary.name}"):
            start_reduce = self.model.mesh.start_reduce
            self.in_flight.append([start_reduce(params, buffer.reduce_dtype)
                                   for buffer, params in trainable.items() if params])
        for reduction in itertools.chain(*self.in_flight[:-1]):
            reduction.start_stage_two()

    def _finish_reduces(self) -> None:
        for reduction in self.in_flight.pop(0):
            reduction.finish(drops=self.raised)


class DedicatedModel:
    """All that DMuon keeps about one model: its matrices, its boundaries, and where a step is.

        what changes                   from                         to
        forward_root, calls, graph     the outermost call's start   its end, or the next one's start
        expected                       a forward's start            the next forward's start
        records                        a forward with a graph       a backward has used the graph up
        spent                          a backward's end             the next forward with a graph
        backward                       its first hook               its end, also after an exception
        syncs is False                 `no_sync` is entered         it is left
        unreduced                      a backward in `no_sync`      a backward outside of it
        buffers_stay (in Z2)           a backward in `no_sync`      one outside, or new weights

    Args:
        model: the root module.
        boundaries: {module: its matrices}, for the modules whose hooks unshard and reduce.
        mesh: this rank's place in the data-parallel mesh.
        reshard_after_forward: True for Z3, False for Z2.
        mp_policy: FSDP2's policy; the dtype of broadcasts and computation, and that of averages.
    """

    prefetch = 1  # boundaries ahead whose broadcasts are issued; 0 shows what that brings

    def __init__(self, model: nn.Module, boundaries: dict[nn.Module, list[DedicatedParam]],
                 mesh: ShardMesh, reshard_after_forward: bool = True,
                 mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()):
        self.mesh, self.mp_policy = mesh, mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.params = {p.fqn: p for params in boundaries.values() for p in params}
        self.matrices = {holder: p for p in self.params.values() for holder in p.holders}
        # The root's hooks tell when a forward begins and ends, even if it has no matrices
        paths = {module: name for name, module in model.named_modules()}
        self.boundaries = [Boundary(paths[module], module, params, self)
                           for module, params in {model: [], **boundaries}.items()]
        self.forward_root: Boundary | None = None  # the outermost boundary that runs now
        self.calls: list[Boundary] = []  # this forward's boundaries, call by call
        self.expected: list[Boundary] = []  # the last forward's, which prefetch goes by
        self.clock = 0  # counts starts and ends of calls that are recorded for a backward
        self.records: list[Record] = []  # of forwards that a backward may still go through
        self.graph: Graph | None = None  # of the forward that runs now
        self.spent = False  # no forward with a graph has begun since the last backward
        self.backward: Backward | None = None
        self.syncs = True  # a backward reduces
        self.unreduced: dict[Boundary, None] = {}  # boundaries whose gradients wait
        self.buffers_stay = False  # for the next micro-batch
        for boundary in self.boundaries:
            boundary.module.register_forward_pre_hook(partial(self.pre_forward, boundary))
            boundary.module.register_forward_hook(partial(self.post_forward, boundary),
                                                  always_call=True)

    @torch.compiler.disable
    def pre_forward(self, boundary: Boundary, *_: Any) -> None:
        """1 fill, 2 view, and the next boundary's fill."""
        if in_backward():  # activation checkpointing recomputes with the backward's buffers
            self.current_backward().enter(boundary)
            return
        if boundary is self.boundaries[0] or self.forward_root is None:
            self._begin_forward(boundary)
        boundary.finish_unshard()
        if torch.is_grad_enabled():
            self._record_start(boundary)
        self.calls.append(boundary)
        now_and_next = self.expected[len(self.calls) - 1 : len(self.calls) + self.prefetch]
        if len(now_and_next) == 2 and now_and_next[0] is boundary:
            now_and_next[1].start_unshard()

    @torch.compiler.disable
    def post_forward(self, boundary: Boundary, module: nn.Module, args: Any, output: Any) -> None:
        """4 free, or keep for the backward; also when the forward raised, not in a recompute."""
        if in_backward():
            return
        if torch.is_grad_enabled():
            self._record_end(boundary, output)
        self._release(boundary)
        if boundary is self.forward_root:
            self.forward_root = self.graph = None
            for unused in self.boundaries:  # a prefetch that nobody used would serve old weights
                self._release(unused)

    def _begin_forward(self, boundary: Boundary) -> None:
        """The outermost boundary starts; what an exception left behind ends here."""
        self.settle()
        for stale in self.boundaries:
            self._release(stale)
        self.adopt()
        self.forward_root, self.expected, self.calls, self.graph = boundary, self.calls, [], None

    def _record_start(self, boundary: Boundary) -> None:
        if self.graph is None:  # the first of this forward
            self.graph, self.spent = Graph(), False
            self.records.append(Record(weakref.ref(self.graph)))
        self.clock += 1
        self.records[-1].started.setdefault(boundary, self.clock)

    def _record_end(self, boundary: Boundary, output: Any) -> None:
        """The end of a call, of which the gradient of its output will tell the backward."""
        self.clock += 1
        self.records[-1].ended[boundary] = self.clock
        hook = partial(self._pre_backward, boundary, self.clock, self.records[-1], self.graph)
        for tensor in _grad_tensors(output):
            if not tensor.is_leaf:  # a leaf's gradient comes as early as its last use lets it
                tensor.register_hook(hook)

    def _pre_backward(self, boundary: Boundary, end: int, record: Record, graph: Graph,
                      gradient: Tensor) -> None:
        """The backward has come to the output of a boundary's call."""
        backward = self.current_backward()
        backward.walked.add(record)
        backward.enter(boundary, None if record.is_spent else end)

    def current_backward(self) -> Backward:
        """The state of the engine's current pass; made at the first call in it.

        Raises:
            RuntimeError: another pass has begun and not ended.
        """
        task_id = torch._C._current_graph_task_id()
        if self.backward is not None and self.backward.task_id != task_id:
            raise RuntimeError("a backward runs inside another one, as torch.utils.checkpoint does "
                               "with use_reentrant=True (pass use_reentrant=False), or after one "
                               "that raised, without a forward in between (run a forward first)")
        if self.backward is None:
            self.backward = Backward(task_id, self)
            torch.autograd.Variable._execution_engine.queue_callback(self.backward.finish)
        return self.backward

    def records_in_question(self) -> list[Record]:
        """Those of all forwards that this backward may go through, usually of one.

        After several forwards without a backward, or with graphs that were kept, all ranks agree on
        the oldest graph that is alive on any of them. What is older is forgotten: its graph is
        gone, or a backward has used it up.
        """
        if len(self.records) > 1:
            alive = [i for i, record in enumerate(self.records)
                     if record.graph() and not record.is_spent]
            oldest = min(alive, default=len(self.records) - 1)
            agreed = torch.tensor(oldest, device=self.mesh.device)
            for group in self.mesh.process_groups():
                dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
            self.records = self.records[agreed.item() :]
        return self.records

    def _release(self, boundary: Boundary) -> None:
        """Z3 frees the buffers; Z2 keeps those that a backward, or the next micro-batch, needs."""
        awaited = not self.spent and any(boundary in record.started for record in self.records)
        if (awaited or self.buffers_stay) and not self.reshard_after_forward:
            boundary.hide()
        else:
            boundary.reshard()

    def reshard(self, buffers_stay: bool = False) -> None:
        """A backward is over, or weights have changed: free every buffer, or only hide it."""
        self.buffers_stay = buffers_stay
        for boundary in self.boundaries:
            boundary.hide() if buffers_stay else boundary.reshard()

    def settle(self) -> None:
        """Before all ranks do something together: end what a backward that raised has left."""
        if self.backward is not None and not in_backward():
            self.backward.raised = True
            self.backward.finish()

    def keep_gradients(self, boundaries: list[Boundary]) -> None:
        """Instead of 8, under `no_sync`: they wait on this rank, in the dtype of the reduce."""
        for boundary in boundaries:
            self.unreduced[boundary] = None
            for buffer in boundary.buffers:
                for p in buffer.params:
                    p.keep_gradient(buffer.reduce_dtype)

    def drop_gradients(self) -> None:
        """A backward under `no_sync` has raised: what it and those before it gathered is spoilt."""
        self.unreduced = {}
        for p in self.params.values():
            p.unreduced = None
            if p.full is not None:
                p.full.grad = None

    def adopt(self) -> None:
        """The modules may hold other parameters than before."""
        for p in self.params.values():
            p.adopt()

    def refresh(self) -> None:
        """Owned data were loaded: nothing that has copies of them may keep the old ones."""
        self.adopt()
        self.mesh.copy_to_replicas(self.params.values())
        self.reshard()

    def send_new_weights(self) -> None:
        """After a step: the owners' new weights set out to their replicas, in model order."""
        self.receive_new_weights()
        for boundary in self.boundaries:
            trained = [p for p in boundary.params if p.owned.requires_grad]
            self.mesh.start_replicate_broadcasts(boundary.name, trained)

    def receive_new_weights(self, *_: Any) -> None:
        """Before weights are read or written in another way than by a forward."""
        self.mesh.finish_replicate_broadcasts(self.params.values())


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _grad_tensors(output: Any) -> Iterator[Tensor]:
    """Tensors with a gradient in a forward's output, in the containers that FSDP2 looks into."""
    if isinstance(output, Tensor) and output.requires_grad:
        yield output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = dataclasses.fields(output)
        yield from _grad_tensors([getattr(output, field.name) for field in fields])
    elif isinstance(output, (dict, list, tuple)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _grad_tensors(value)


# ------------------------------------------------------------------------------------ small pieces


def start_broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> list[dist.Work]:
    """From the group's rank `source`, in place; no work in a group of one."""
    if group.size() == 1 or not tensor.numel():
        return []
    return [dist.broadcast(tensor, group=group, group_src=source, async_op=True)]


def start_average(tensor: Tensor, group: dist.ProcessGroup, target: int) -> list[dist.Work]:
    """The mean over the group, in place at its rank `target`, undefined elsewhere.

    No work in a group of one. See [Note: Newton-Schulz hides a wrong divisor].
    """
    if group.size() == 1 or not tensor.numel():
        return []
    average = dist.ReduceOp.AVG
    return [dist.reduce(tensor, op=average, group=group, group_dst=target, async_op=True)]


@contextmanager
def one_launch(mesh: ShardMesh, works: list[dist.Work]) -> Iterator[None]:
    """On NCCL broadcasts inside are one launch; `works` is then what to wait for.

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

    On gloo this blocks, and raises RuntimeError, naming the collective, when a rank has died or the
    group's timeout is over. On NCCL it makes the current stream wait and returns at once: it cannot
    raise, and after the timeout NCCL's watchdog ends the process with a message of its own.
    """
    while works:
        try:
            with record_function(f"dmuon.wait {what}"):
                works.pop(0).wait()
        except RuntimeError as error:
            raise RuntimeError(f"dmuon: the {what} did not end: another rank has died, hangs, or "
                               f"is elsewhere ({error})") from error


def fqns(params: list[DedicatedParam]) -> str:
    return ", ".join(p.fqn for p in params)


def split(flat: Tensor, params: list[DedicatedParam]) -> list[Tensor]:
    """Views of a flat tensor, one in the shape of each matrix."""
    parts = flat.split([p.numel for p in params])
    return [part.view(p.local_shape) for p, part in zip(params, parts)]


# -------------------------------------------------------------------------------- the demonstration


def _demonstrate(zero: int) -> None:
    """One layer of three through a step: what the last rank, which owns none of it, holds."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    held = []

    def look(moment: str, *_: Any) -> None:
        held.append([sum(buffer.flat.untyped_storage().nbytes() for buffer in boundary.buffers)
                     + sum(landing.parts[0].nbytes for landing in boundary.landings)
                     for boundary in dedicated.boundaries[1:]])
        if mesh.number == mesh.num_shards - 1:
            state, numel = dedicated.boundaries[2].state.name, layers[1].weight.numel()
            print(f"Z{zero}  {moment:21} layer 1 {state:5}, its weight has {numel:4} elements; "
                  f"bytes: {held[-1]}")

    model = nn.Sequential(*layers)
    mesh = ShardMesh({"shard": dist.group.WORLD}, torch.device("cpu"))
    params = {layer: [DedicatedParam(f"{i}.weight", [(layer, "weight")], 0, mesh)]
              for i, layer in enumerate(layers)}
    dedicated = DedicatedModel(model, params, mesh, reshard_after_forward=zero == 3)
    model(torch.ones(1, 64)).sum().backward()  # records the order that prefetch goes by
    layers[1].register_forward_hook(partial(look, "2 layer 1, forward"), prepend=True)
    layers[1].register_full_backward_hook(partial(look, "6 layer 1, backward"))
    loss = model(torch.ones(1, 64)).sum()
    look("4 after the forward")
    loss.backward()
    look("7 after the backward")
    whole = 64 * 64 * 4  # bytes of float32
    kept = 0 if zero == 3 else whole
    assert [layer_1 for _, layer_1, _ in held] == [whole, kept, whole, 0], held


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _demonstrate(3)
    _demonstrate(2)
    gc.collect()  # frees our groups, and so ends their threads before the interpreter goes
    dist.destroy_process_group()
