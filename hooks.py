"""How does the full matrix appear before it is used, and how does its gradient leave?

Before this file: partition.py (who owns which matrix). After it: hsdp.py, whose `SlotMesh` is this rank's place and its
communicators, whose `DedicatedParam` is a matrix's two parameters, `sharded` and `full`, and whose `TwoStageReduce`
takes a gradient to its owner: on a 1-D mesh, by one averaging reduce.

A hook boundary is a module, usually one transformer layer. Its dedicated matrices are grouped by the owner's shard
column, on a 1-D mesh by owner (and by dtype); each group has one packed buffer, a flat tensor whose views are the full
parameters. Between steps the buffer has no storage. The life of one buffer, with the numbers of the comments below:

  1 fill     the owner copies its weights (owned data) into a tensor beside the buffer, the landing tensor, which an
             asynchronous broadcast fills on the other ranks; with replicas, in each row the owner's peer does so
  2 view     the broadcast is waited for, the buffer's storage comes back, takes the bytes over, the landing tensor
             goes; the modules hold the buffer's views
  3 compute  the forward runs, while the next boundary's broadcast is in flight (prefetch)
  4 free     Z3: the storage goes; Z2: it stays for the backward. Either way the modules hold `sharded` again
  5 refill   Z3, before the boundary's backward: 1 and 2 again; what autograd saved are views, and valid again
  6 compute  the backward runs, while the previous boundary's broadcast is in flight
  7 free     the backward has come to what ran before the boundary, or has ended: the storage goes
  8 reduce   the gradients, which have memory of their own, are packed into another flat tensor and averaged to the
             owner (hsdp.py: first to its column); the reduce of two boundaries ago is waited for, which frees it

Under `dmuon.no_sync` 8 does not come: gradients wait beside `full` for a backward that reduces. Z2 then skips 7, too.

   layers.3 as three packed buffers:  owner 0 [ q_proj | k_proj ]   owner 1 [ up_proj ]   owner 2 [ down_proj ]

   what a module's `weight` is        owner                         other ranks
   between steps                      `sharded`: owned data         `sharded`: a placeholder (numel 0)
   in forward and backward            `full`: a view of the packed buffer, on every rank
   `sharded.grad` after a backward    the average over the ranks    None
   (on a 2-D mesh the owner's replicate peers hold owned data as well: hsdp.py)

   Z3  collective   b0 | b1   | b2   |      | b2   | b1   | r2 b0 | r1   | r0      b1, r1: broadcast and
       compute         | fwd0 | fwd1 | fwd2 | head | bwd2 | bwd1  | bwd0 |         reduce of layer 1; head: what
       buffers       1 |   2  |   2  |   1  |   1  |   2  |   2   |   1  | 0       follows, its backward asks for b2;
   Z2  collective   b0 | b1   | b2   |      |      |      |    r2 | r1   | r0      buffers: layers with storage or a
       buffers       1 |   2  |   3  |   3  |   3  |   3  |   2   |   1  | 0       landing tensor (weights only)

Bytes of one buffer of n elements on every rank: landing tensor and storage n each, in the dtype that is computed with;
both are there while one is copied into the other. A gradient has as many in that dtype, packed gradients in the dtype
of the reduce, those of two boundaries at most. Only owned data, `sharded.grad` and the momentum are where the owner is,
in the parameter's own dtype.

With P elements in dedicated matrices a rank passes 2 P to broadcasts and P to reduces per forward and backward in Z3,
P and P in Z2; on a ring of N it sends (N-1)/N of that, on average over the ranks.

The bytes below are those of storage and landing tensor together:
`torchrun --nproc_per_node=4 hooks.py` traces one layer of three through a step, on a rank that owns none of it:

  Z3  2 layer 1, forward     layer 1 UNSHARDED, its weight has 4096 elements; bytes of all layers: [0, 16384, 16384]
  Z3  4 after the forward    layer 1 SHARDED  , its weight has    0 elements; bytes of all layers: [0, 0, 0]
  Z3  6 layer 1, backward    layer 1 UNSHARDED, its weight has 4096 elements; bytes of all layers: [16384, 16384, 0]
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import record_function

from hsdp import (DedicatedParam, SlotMesh, TwoStageReduce, local, names, one_launch, replicate, replicate_broadcasts,
                  split, start_broadcast, wait)

PREFETCH = True  # issue the next boundary's broadcast while this one computes; off only to measure what it brings

# [Note: storage resize and the version counter]
# Autograd saves the full parameters, which are views of the packed buffer. Freeing the buffer is
# `untyped_storage().resize_(0)`: the saved views stay, without bytes. Filling it again writes in place, which would
# bump the version counter that the views share and make the backward raise 'modified by an inplace operation'. The
# bytes that come back are the same weights, so the fill runs under `_unsafe_preserve_version_counter`. It follows
# that weights must not change between a forward and its backward: plain PyTorch raises then, here nothing can. The
# storage comes back only when the bytes are there: a backward that comes to the views before its boundary's hook (by a
# tensor that the boundary did not return, say) finds none and stops, instead of computing with half a broadcast.

# [Note: the order of collectives is a contract between ranks]
# Ranks match collectives on one communicator by their order, not by their content, and NCCL asks for one order over
# all communicators, FSDP2's included. What is ready first depends on the data (a rank whose tokens never reach a matrix
# has no gradient for it) and on the clock, so 'launch what is ready' averages garbage or hangs. Here every rank issues
# one fixed sequence. The forward numbers the starts and ends of the boundaries' calls. Autograd runs the newest
# operation first: when it comes to the output of a call that ended at `end`, whatever started later is over. That
# moment issues the reduces of all boundaries whose first start is later, with zeros for what this rank's data did not
# use. A rank whose data lead to fewer such moments issues the same sequence, some of it later. So that it can, a wait
# concerns only what was issued before it: the rank that is furthest behind can always go on.


class BufferState(Enum):
    """Where the bytes of a boundary's packed buffers are. All buffers of one boundary change state together."""

    SHARDED = auto()  # no storage; the matrices exist in their owners' shard columns only
    IN_FLIGHT = auto()  # no storage yet; the broadcast into the landing tensor must be waited for
    UNSHARDED = auto()  # storage exists and holds the full matrices; `hide` may have taken them from the modules


class PackedBuffer:
    """One flat buffer for the matrices of one boundary, one shard column and one dtype; one broadcast fills it.

    Their gradients are packed alike, those of the frozen left out, but into another tensor: see `TwoStageReduce`.

    Args:
        params: the matrices, ordered by slot, which is their order in the buffer.
        model: has the mesh, and in `mp_policy.param_dtype`, if it is not None, the dtype that is computed with.
        on_gradient: called with (name, full parameter) after autograd has accumulated a gradient into the parameter.
    """

    def __init__(self, params: list[DedicatedParam], model: DedicatedModel, on_gradient: Callable):
        self.params, self.column = params, params[0].slot[0]
        dtype = model.mp_policy.param_dtype or params[0].sharded.dtype
        self.reduce_dtype = model.mp_policy.reduce_dtype or dtype
        with torch.inference_mode(False):  # a buffer born in inference mode could never be saved for a backward
            self.flat = torch.empty(sum(p.numel for p in params), dtype=dtype, device=model.mesh.device)
            for p, view in zip(params, split(self.flat, params)):
                p.full = nn.Parameter(p.wrap(view))
                p.full.register_post_accumulate_grad_hook(partial(on_gradient, p.fqn))
        self.flat.untyped_storage().resize_(0)


class Landing:
    """Broadcasts on their way into a tensor beside the packed buffers that they are for.

    Args:
        buffers: of one dtype and boundary: one, or on NCCL all, for which there is one launch and one copy then.
        mesh: this rank's place.
    """

    def __init__(self, buffers: list[PackedBuffer], mesh: SlotMesh):
        self.buffers, self.works = buffers, []
        numels = [buffer.flat.numel() for buffer in buffers]
        self.parts = torch.empty(sum(numels), dtype=buffers[0].flat.dtype, device=mesh.device).split(numels)
        for buffer, part in zip(buffers, self.parts):
            if buffer.params[0].in_column:
                torch._foreach_copy_(split(part, buffer.params), [local(p.sharded) for p in buffer.params])
        with one_launch(mesh, self.works):
            for buffer, part in zip(buffers, self.parts):
                self.works += start_broadcast(part, mesh.broadcast_group, buffer.column)

    def finish(self, keep: bool = True) -> None:
        """Wait, and give the buffers their bytes, unless nobody wants them (`keep=False`).

        See [Note: storage resize and the version counter].
        """
        for buffer in self.buffers:
            wait(self.works, f"broadcast of {names(buffer.params)} from shard {buffer.column}")
        if keep:
            flats = [buffer.flat for buffer in self.buffers]
            for flat in flats:
                flat.untyped_storage().resize_(flat.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(flats)):
                torch._foreach_copy_(flats, self.parts)


class Boundary:
    """A hook boundary: the module whose hooks unshard and reduce, and its packed buffers. The root may have none."""

    def __init__(self, name: str, module: nn.Module, params: list[DedicatedParam], model: DedicatedModel):
        self.name, self.module, self.params, self.model, self.state = name, module, params, model, BufferState.SHARDED
        self.buffers: list[PackedBuffer] = []
        self.landings: list[Landing] = []  # broadcasts in flight
        self.arriving: list = []  # replicate broadcasts in flight since the last step

    def _build_buffers(self) -> None:
        """At the first unshard: a meta parameter has been materialised, `.to()` has been called."""
        groups: dict[tuple, list[DedicatedParam]] = {}
        for p in sorted(self.params, key=lambda p: p.slot[1]):
            if p.sharded.is_meta:
                raise RuntimeError(f"dedicated parameter '{p.fqn}' is on the meta device; materialise it first")
            groups.setdefault((p.slot[0], p.sharded.dtype), []).append(p)
        this = weakref.ref(self)  # autograd keeps hooks where the garbage collector does not see the cycle
        hook = lambda fqn, full: this().model.current_backward().on_gradient(this(), fqn, full)
        self.buffers = [PackedBuffer(params, self.model, hook) for params in groups.values()]

    def receive(self) -> None:
        """Wait for new weights, if they are on their way from their owners to this rank."""
        while self.arriving:
            self.arriving.pop(0).finish()

    def start_unshard(self) -> None:
        """1 fill (5 refill): issue the broadcasts, unless the matrices are here or on their way."""
        if self.state is BufferState.SHARDED:
            self.receive()
            if not self.buffers:
                self._build_buffers()
            alike: dict[object, list[PackedBuffer]] = {}  # what lands together: on gloo each alone, for fewer bytes
            mesh = self.model.mesh
            for buffer in self.buffers:
                alike.setdefault(buffer.flat.dtype if mesh.on_nccl else buffer, []).append(buffer)
            with record_function(f"dmuon.unshard {self.name}"):
                self.landings = [Landing(buffers, mesh) for buffers in alike.values()]
            self.state = BufferState.IN_FLIGHT

    def finish_unshard(self) -> None:
        """2 view: wait for the broadcasts; the modules hold the full parameters, frozen or not as `sharded` is."""
        self.start_unshard()
        while self.landings:
            self.landings.pop(0).finish()
        for p in self.params:
            p.full.requires_grad_(p.sharded.requires_grad)
            p.hold(p.full)
        self.state = BufferState.UNSHARDED

    def hide(self) -> None:
        """The modules hold what they hold between steps; the bytes stay."""
        for p in self.params:
            p.hold(p.resting)

    def reshard(self) -> None:
        """4 and 7 free: the storage goes."""
        if self.state is not BufferState.SHARDED:
            self.hide()
            while self.landings:  # nobody has used them, but they must end before their memory goes
                self.landings.pop(0).finish(keep=False)
            for buffer in self.buffers:
                buffer.flat.untyped_storage().resize_(0)
            self.state = BufferState.SHARDED


class Graph:
    """What the hooks in the graph of a forward hold, and so lives as long as the graph."""


@dataclasses.dataclass(eq=False)
class Record:
    """The boundaries' calls of one outermost forward, by the clock, while a backward may go through them."""

    graph: weakref.ref[Graph]
    started: dict[Boundary, int] = dataclasses.field(default_factory=dict)  # first starts, in order
    ended: dict[Boundary, int] = dataclasses.field(default_factory=dict)  # last ends, in order
    is_spent: bool = False  # a backward went through it that did not keep the graph


class Backward:
    """One pass of the autograd engine: two fixed lists, and how far this rank has come in each.

    See [Note: the order of collectives is a contract between ranks].
    """

    def __init__(self, task_id: int, model: DedicatedModel):
        self.task_id, self.model, self.syncs = task_id, model, model.syncs
        self.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self.started: dict[Boundary, int] = {}  # over all forwards that this backward may go through
        self.ended: dict[Boundary, int] = {}
        for record in model.records_in_question():
            self.started = record.started | self.started
            self.ended |= record.ended
        by_clock = lambda clock: sorted(clock, key=clock.get, reverse=True)
        self.broadcasts = by_clock(self.ended)  # the last boundary to end is the first to be needed
        self.reduces = by_clock(self.started)  # the first boundary to start has its gradients last
        if self.syncs:  # what micro-batches under `no_sync` ran, and this one did not
            self.reduces += [boundary for boundary in model.unreduced if boundary not in self.started]
            model.unreduced = {}
        self.issued = 0  # of the broadcasts
        self.closed: set[Boundary] = set()  # of the reduces
        self.unsharded: set[Boundary] = set()  # by this backward, and not closed
        self.walked: set[Record] = set()
        self.in_flight: list[list[TwoStageReduce]] = []  # by boundary, in order; two at most
        self.late: list[str] = []  # matrices
        self.keep = True  # False after an exception: gradients whose reduce is not over are dropped

    def enter(self, boundary: Boundary, end: int | None = None) -> None:
        """Unshard the boundary. `end` is that of its call, to whose output the backward has come.

        What started later than that is over.
        """
        while end is not None and end < self._next_start():
            self._close()
        if boundary in self.unsharded or (end is not None and boundary in self.closed):  # an output that was an input
            return
        self.unsharded.add(boundary)
        if boundary not in self.broadcasts:  # of no forward that the lists know
            self.broadcasts.append(boundary)
        position = self.broadcasts.index(boundary)
        self._issue_broadcasts(position + 1)
        boundary.finish_unshard()
        if end is not None:  # not in a recompute, which may come to boundaries earlier on some ranks than on others
            self._issue_broadcasts(position + 1 + PREFETCH)

    def on_gradient(self, boundary: Boundary, fqn: str, full: nn.Parameter) -> None:
        """A gradient is in. It must not come when its reduce has been issued."""
        if boundary not in self.reduces:  # of no forward that the lists know
            self.reduces.append(boundary)
        if self.syncs and boundary in self.closed:
            self.late.append(fqn)
            full.grad = None

    def finish(self) -> None:
        """The end of the backward: issue what is left of both lists, and only then wait.

        After an exception, too: the collectives still pair with the peers'.
        """
        self.reduces += [boundary for boundary in self.broadcasts if boundary not in self.reduces]
        while len(self.closed) < len(self.reduces):
            self._close()
        self._issue_broadcasts(len(self.broadcasts))
        self.model.invalidate(resident=self.keep and self._keeps_buffers())
        while self.in_flight:
            self._finish_reduces()
        if not self.syncs:  # instead of 8
            self.model.keep_gradients(self.reduces) if self.keep else self.model.drop_gradients()
        self.model.backward, self.model.spent = None, True
        if not self.keeps_graph:
            for record in self.walked:
                record.is_spent = True
            if len(self.model.records) == 1:  # of several, ranks may have walked other ones: they agree the next time
                self.model.records = []
        if self.late and self.keep:  # raise behind FSDP2's own last callback, so that its collectives pair, too
            torch.autograd.Variable._execution_engine.queue_callback(self._refuse_late_gradients)

    def _refuse_late_gradients(self) -> None:
        raise RuntimeError(f"the gradient of {self.late} came after its reduce was issued, and is lost: the forward "
                           "used the matrix before its layer ran. Use it where its layer runs")

    def _keeps_buffers(self) -> bool:
        """Z2 under `no_sync`: the next micro-batch finds the weights there."""
        return not self.syncs and not self.model.reshard_after_forward

    def _next_start(self) -> int:
        """The first start of the boundary that is reduced next; 0 if it is not in the record, or there is none."""
        following = self.reduces[len(self.closed) :]
        return self.started.get(following[0], 0) if following else 0

    def _issue_broadcasts(self, end: int) -> None:
        """5 refill: those before position `end` of the list that have not been issued."""
        while self.issued < min(end, len(self.broadcasts)):
            self.broadcasts[self.issued].start_unshard()
            self.issued += 1

    def _close(self) -> None:
        """7 free and 8 reduce: the next boundary of the list is over.

        First come the broadcasts that a rank which came to every earlier moment would have issued by now.
        """
        start, boundary = self._next_start(), self.reduces[len(self.closed)]
        self.closed.add(boundary)
        self._issue_broadcasts(sum(end > start for end in self.ended.values()) + PREFETCH)
        if boundary in self.unsharded and not self._keeps_buffers():  # else a recompute may need the broadcast yet
            boundary.reshard()
        self.unsharded.discard(boundary)
        if self.syncs:
            self._reduce(boundary)
        else:
            self.model.keep_gradients([boundary])

    def _reduce(self, boundary: Boundary) -> None:
        """One collective a buffer, without the frozen; then the second stage of the boundary before.

        Packed gradients of two boundaries live at most: the last but one ends before these are packed.
        """
        trained = [(buffer, [p for p in buffer.params if p.full.requires_grad]) for buffer in boundary.buffers]
        for p in boundary.params:
            if not p.full.requires_grad:
                p.waiting = None  # frozen since a micro-batch under `no_sync`
        if not any(params for _, params in trained):
            return
        while len(self.in_flight) > 1:
            self._finish_reduces()
        with record_function(f"dmuon.reduce {boundary.name}"):
            self.in_flight.append([TwoStageReduce(params, buffer.reduce_dtype, self.model.mesh)
                                   for buffer, params in trained if params])
        if self.model.mesh.num_replicas > 1:  # else there is none, and nothing to wait for yet
            for reduction in itertools.chain(*self.in_flight[:-1]):
                reduction.start_stage_two()

    def _finish_reduces(self) -> None:
        for reduction in self.in_flight.pop(0):
            reduction.finish(self.keep)


class DedicatedModel:
    """All that DMuon keeps about one model: its matrices, its boundaries, and where forward and backward are.

    Args:
        model: the root module.
        boundaries: {module: its matrices}, for the modules whose hooks unshard and reduce.
        mesh: this rank's place in the data-parallel mesh.
        reshard_after_forward: True for Z3, False for Z2.
        mp_policy: FSDP2's policy; `param_dtype` is broadcast and computed with, `reduce_dtype` is averaged in.
    """

    def __init__(self, model: nn.Module, boundaries: dict[nn.Module, list[DedicatedParam]], mesh: SlotMesh,
                 reshard_after_forward: bool = True, mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()):
        self.mesh, self.reshard_after_forward, self.mp_policy = mesh, reshard_after_forward, mp_policy
        self.params = {p.fqn: p for params in boundaries.values() for p in params}
        self.matrices = {holder: p for p in self.params.values() for holder in p.holders}  # by (module, attribute)
        # The root's hooks tell when a forward begins and ends, and that a backward runs, even if it has no matrices
        paths = {module: name for name, module in model.named_modules()}
        self.boundaries = [Boundary(paths[m], m, params, self) for m, params in {model: [], **boundaries}.items()]
        self.forward_root: Boundary | None = None  # the outermost boundary that runs now
        self.calls: list[Boundary] = []  # this forward's boundaries, call by call
        self.expected: list[Boundary] = []  # the last forward's, which prefetch goes by
        self.clock = 0  # counts the starts and ends of the boundaries' calls that are recorded for a backward
        self.records: list[Record] = []  # of forwards that a backward may still go through
        self.graph: Graph | None = None  # of the forward that runs now
        self.spent = False  # no forward with a graph has begun since the last backward
        self.backward: Backward | None = None
        self.syncs = True  # a backward reduces; False inside `no_sync`
        self.unreduced: dict[Boundary, None] = {}  # boundaries whose gradients wait, since `no_sync`
        self.resident = False  # Z2: buffers are kept for the next micro-batch
        for boundary in self.boundaries:
            boundary.module.register_forward_pre_hook(partial(self.pre_forward, boundary))
            boundary.module.register_forward_hook(partial(self.post_forward, boundary), always_call=True)

    @torch.compiler.disable
    def pre_forward(self, boundary: Boundary, *_: Any) -> None:
        """1 fill, 2 view, and the next boundary's fill."""
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing recomputes with the backward's buffers
            return self.current_backward().enter(boundary)
        if boundary is self.boundaries[0] or self.forward_root is None:
            self._begin_forward(boundary)
        boundary.finish_unshard()
        if torch.is_grad_enabled():
            if self.graph is None:  # the first of this forward
                self.graph, self.spent = Graph(), False
                self.records.append(Record(weakref.ref(self.graph)))
            self.clock += 1
            self.records[-1].started.setdefault(boundary, self.clock)
        self.calls.append(boundary)
        now_and_next = self.expected[len(self.calls) - 1 : len(self.calls) + 1]
        if PREFETCH and len(now_and_next) == 2 and now_and_next[0] is boundary:
            now_and_next[1].start_unshard()

    @torch.compiler.disable
    def post_forward(self, boundary: Boundary, module: nn.Module, args: Any, output: Any) -> None:
        """4 free, or keep for the backward; also when the forward raised, not in a recompute."""
        if torch._C._current_graph_task_id() != -1:
            return
        if torch.is_grad_enabled():
            self.clock += 1
            self.records[-1].ended[boundary] = self.clock
            hook = partial(self._pre_backward, boundary, self.clock, self.records[-1], self.graph)
            for tensor in _grad_tensors(output):
                if not tensor.is_leaf:  # whose gradient comes as early as its last use lets it
                    tensor.register_hook(hook)
        self._release(boundary)
        if boundary is self.forward_root:
            self.forward_root = self.graph = None
            for unused in self.boundaries:  # a prefetch that nobody used would serve old weights after the step
                self._release(unused)

    def _pre_backward(self, boundary: Boundary, end: int, record: Record, graph: Graph, gradient: Tensor) -> None:
        """The backward has come to the output of a boundary's call."""
        backward = self.current_backward()
        backward.walked.add(record)
        backward.enter(boundary, None if record.is_spent else end)

    def records_in_question(self) -> list[Record]:
        """Those of all forwards that this backward may go through: usually one, and nothing is to be found out.

        After several forwards without a backward, or with graphs that were kept, all ranks agree on the oldest graph
        that is alive on any of them. What is older is forgotten: its graph is gone, or a backward has used it up.
        """
        if len(self.records) > 1:
            alive = [i for i, record in enumerate(self.records) if record.graph() and not record.is_spent]
            oldest = torch.tensor(min(alive, default=len(self.records) - 1), device=self.mesh.device)
            for group in self.mesh.groups():
                dist.all_reduce(oldest, dist.ReduceOp.MIN, group=group)
            self.records = self.records[oldest.item() :]
        return self.records

    def _release(self, boundary: Boundary) -> None:
        """Z3 frees the buffers; Z2 keeps those that a backward, or under `no_sync` a forward, will need."""
        awaited = not self.spent and any(boundary in record.started for record in self.records)
        needed = self.resident or awaited
        boundary.hide() if needed and not self.reshard_after_forward else boundary.reshard()

    def _begin_forward(self, boundary: Boundary) -> None:
        """The outermost boundary starts. What an exception left behind, in forward or backward, ends here."""
        self.settle()
        for stale in self.boundaries:
            self._release(stale)
        self.adopt()
        self.forward_root, self.expected, self.calls, self.graph = boundary, self.calls, [], None

    def settle(self) -> None:
        """Before anything that all ranks do together: finish what a backward that raised has left in flight."""
        if self.backward is not None and torch._C._current_graph_task_id() == -1:
            self.backward.keep = False
            self.backward.finish()

    def current_backward(self) -> Backward:
        """The state of the engine's current pass; made, and its end scheduled, at the first call in a pass."""
        task_id = torch._C._current_graph_task_id()
        if self.backward is not None and self.backward.task_id != task_id:
            raise RuntimeError("a backward runs inside another one, as torch.utils.checkpoint does with "
                               "use_reentrant=True (pass use_reentrant=False), or after one that raised, without a "
                               "forward in between (run a forward first)")
        if self.backward is None:
            self.backward = Backward(task_id, self)
            torch.autograd.Variable._execution_engine.queue_callback(self.backward.finish)
        return self.backward

    def invalidate(self, resident: bool = False) -> None:
        """Free every buffer: the backward is over, or the weights have changed. `resident`: only hide them."""
        self.resident = resident
        for boundary in self.boundaries:
            boundary.hide() if resident else boundary.reshard()

    def keep_gradients(self, boundaries: list[Boundary]) -> None:
        """In a backward under `no_sync`: they wait on this rank, in the dtype of the reduce."""
        self.unreduced.update(dict.fromkeys(boundaries))
        for buffer in (buffer for boundary in boundaries for buffer in boundary.buffers):
            for p in buffer.params:
                p.accumulate(buffer.reduce_dtype)

    def drop_gradients(self) -> None:
        """A backward under `no_sync` has raised: what it and those before it have gathered is spoilt."""
        self.unreduced = {}
        for p in (p for p in self.params.values() if p.full is not None):
            p.full.grad = p.waiting = None

    def adopt(self) -> None:
        """The modules may hold other parameters than before."""
        for p in self.params.values():
            p.adopt()

    def refresh(self) -> None:
        """Owned data were loaded: nothing that has copies of them may keep the old ones."""
        self.adopt()
        replicate(self.params.values(), self.mesh)
        self.invalidate()

    def start_replicate_broadcasts(self) -> None:
        """After a step: the owners' new weights set out to their replicate peers, in model order."""
        self.finish_replicate_broadcasts()
        for boundary in (boundary for boundary in self.boundaries if boundary.params and self.mesh.num_replicas > 1):
            with record_function(f"dmuon.replicate_broadcast {boundary.name}"):
                trained = [p for p in boundary.params if p.sharded.requires_grad]
                boundary.arriving = replicate_broadcasts(trained, self.mesh)

    def finish_replicate_broadcasts(self, *_: Any) -> None:
        """Before weights are read or written in another way than by a forward."""
        for boundary in self.boundaries:
            boundary.receive()


def _grad_tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor that requires a gradient in a forward's output, in the containers that FSDP2 looks into."""
    if isinstance(output, Tensor) and output.requires_grad:
        yield output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from _grad_tensors([getattr(output, field.name) for field in dataclasses.fields(output)])
    elif isinstance(output, (dict, list, tuple)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _grad_tensors(value)


def _demonstrate(zero: int) -> None:
    """One layer of three through one step: what the last rank, which owns none of it, holds at each moment."""
    layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)]
    model, mesh = nn.Sequential(*layers), SlotMesh(torch.device("cpu"), dist.group.WORLD)
    params = {x: [DedicatedParam(f"{i}.0.weight", [(x[0], "weight")], (0, 0), mesh)] for i, x in enumerate(layers)}
    dedicated = DedicatedModel(model, params, mesh, reshard_after_forward=zero == 3)
    model(torch.ones(1, 64)).sum().backward()  # records the order that prefetch goes by
    boundaries, held = dedicated.boundaries[1:], []

    def look(moment: str, *_: Any) -> None:
        tensors = [[b.buffers[0].flat, *(part for x in b.landings for part in x.parts)] for b in boundaries]
        held.append([sum(t.untyped_storage().nbytes() for t in of_layer) for of_layer in tensors])
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"Z{zero}  {moment:22} layer 1 {boundaries[1].state.name:9}, its weight has "
                  f"{layers[1][0].weight.numel():4} elements; bytes of all layers: {held[-1]}")

    layers[1][1].register_forward_hook(partial(look, "2 layer 1, forward"))
    layers[1][1].register_full_backward_hook(partial(look, "6 layer 1, backward"))
    loss = model(torch.ones(1, 64)).sum()
    look("4 after the forward")
    loss.backward()
    look("7 after the backward")
    whole = 64 * 64 * 4  # float32
    assert [layer_1 for _, layer_1, _ in held] == [whole, whole * (zero == 2), whole, 0], held


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _demonstrate(3)
    _demonstrate(2)
    gc.collect()  # frees our groups, and so ends their threads before the interpreter goes
    dist.destroy_process_group()
