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
  7 reduce   all gradients are in: they, which have memory of their own, are packed into another flat tensor and
             averaged to the owner (hsdp.py: first to its column)
  8 free     the next boundary's backward begins, or this was the last: the storage goes

Under `dmuon.no_sync` 7 does not come: gradients wait beside `full` for a backward that reduces. Z2 then skips 8, too.

   layers.3 as three packed buffers:  owner 0 [ q_proj | k_proj ]   owner 1 [ up_proj ]   owner 2 [ down_proj ]

   what a module's `weight` is        owner                         other ranks
   between steps                      `sharded`: owned data         `sharded`: a placeholder (numel 0)
   in forward and backward            `full`: a view of the packed buffer, on every rank
   `sharded.grad` after a backward    the average over the ranks    None
   (on a 2-D mesh the owner's replicate peers hold owned data as well: hsdp.py)

   Z3  collective   b0 | b1   | b2   |      | b2   | b1   | b0 r2 | r1   | r0      b1, r1: broadcast and
       compute         | fwd0 | fwd1 | fwd2 | head | bwd2 | bwd1  | bwd0 |         reduce of layer 1; head: what
       buffers       1 |   2  |   2  |   1  |   1  |   2  |   2   |   1  | 0       follows, its backward asks for b2;
   Z2  collective   b0 | b1   | b2   |      |      |      |    r2 | r1   | r0      buffers: layers with storage or a
       buffers       1 |   2  |   3  |   3  |   3  |   3  |   2   |   1  | 0       landing tensor (weights only)

Bytes of one buffer of n elements on every rank: landing tensor and storage n each, in the dtype that is computed with;
both are there while one is copied into the other. A gradient has as many in that dtype, packed gradients in the dtype
of the reduce. Only owned data, `sharded.grad` and the momentum are where the owner is, in the parameter's own dtype.

With P elements in dedicated matrices a rank passes 2 P to broadcasts and P to reduces per forward and backward in Z3,
P and P in Z2; on a ring of N it sends (N-1)/N of that, on average over the ranks.

Bytes are those of storage and landing tensor together where
`torchrun --nproc_per_node=4 hooks.py` traces one layer of three through a step, on a rank that owns none of it:

  Z3  2 layer 1, forward     layer 1 UNSHARDED, its weight has 4096 elements; bytes of all layers: [0, 16384, 16384]
  Z3  4 after the forward    layer 1 SHARDED  , its weight has    0 elements; bytes of all layers: [0, 0, 0]
  Z3  6 layer 1, backward    layer 1 UNSHARDED, its weight has 4096 elements; bytes of all layers: [16384, 16384, 0]
"""

from __future__ import annotations

import dataclasses
import gc
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

from hsdp import DedicatedParam, SlotMesh, TwoStageReduce, local, names, replicate, replicate_broadcasts, split
from hsdp import start_broadcast, wait

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
# Ranks match collectives on one communicator by their order, not by their content. The order in which gradients become
# ready depends on the data (a rank whose tokens never reach a matrix has no gradient for it), so 'launch what is ready'
# pairs one rank's layer 3 with another's layer 2 and averages garbage without a word. Every backward therefore walks
# two fixed lists that all ranks recorded in the forward, one a communicator, each with a cursor: a ready reduce waits
# for its turn, asking for a broadcast first issues every earlier one, and the end of the backward drives both to the
# end, with zeros for what had no gradient. Between those points nothing blocks on a reduce: a peer may be unable to
# launch its own before the end of its backward.


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
        on_gradient: called after autograd has accumulated a gradient into one of the full parameters.
    """

    def __init__(self, params: list[DedicatedParam], model: DedicatedModel, on_gradient: Callable):
        self.params, self.mesh = params, model.mesh
        dtype = model.mp_policy.param_dtype or params[0].sharded.dtype
        self.reduce_dtype = model.mp_policy.reduce_dtype or dtype
        self.landing: Tensor | None = None  # of a broadcast in flight
        with torch.inference_mode(False):  # a buffer born in inference mode could never be saved for a backward
            self.buffer = torch.empty(sum(p.numel for p in params), dtype=dtype, device=self.mesh.device)
            for p, view in zip(params, split(self.buffer, params)):
                p.full = nn.Parameter(p.wrap(view))
                p.full.register_post_accumulate_grad_hook(on_gradient)
        self.free()

    def fill(self) -> None:
        """The row's rank of the column packs its data beside the buffer, the broadcast is issued."""
        self.landing = torch.empty_like(self.buffer)
        if self.params[0].in_column:
            torch._foreach_copy_(split(self.landing, self.params), [local(p.sharded) for p in self.params])
        self.broadcasts = start_broadcast(self.landing, self.mesh.broadcast_group, self.params[0].slot[0])

    def land(self) -> None:
        """Wait, and give the buffer its bytes. See [Note: storage resize and the version counter]."""
        if self.landing is not None:
            wait(self.broadcasts, f"broadcast of {names(self.params)} from shard {self.params[0].slot[0]}")
            self.buffer.untyped_storage().resize_(self.buffer.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.buffer):
                self.buffer.copy_(self.landing)
            self.landing = None

    def free(self) -> None:
        self.land()  # a broadcast in flight must end first
        self.buffer.untyped_storage().resize_(0)


class Boundary:
    """A hook boundary: the module whose hooks unshard and reduce, and its packed buffers. The root may have none."""

    def __init__(self, name: str, module: nn.Module, params: list[DedicatedParam], model: DedicatedModel):
        self.name, self.module, self.params, self.model, self.state = name, module, params, model, BufferState.SHARDED
        self.buffers: list[PackedBuffer] = []
        self.arriving: list = []  # replicate broadcasts in flight since the last step

    def _build_buffers(self) -> None:
        """At the first unshard: a meta parameter has been materialised, `.to()` has been called."""
        groups: dict[tuple, list[DedicatedParam]] = {}
        for p in sorted(self.params, key=lambda p: p.slot[1]):
            if p.sharded.is_meta:
                raise RuntimeError(f"dedicated parameter '{p.fqn}' is on the meta device; materialise it first")
            groups.setdefault((p.slot[0], p.sharded.dtype), []).append(p)
        this = weakref.ref(self)  # autograd keeps hooks where the garbage collector does not see the cycle
        hook = lambda _: this().model.current_backward().on_gradient(this())
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
            for buffer in self.buffers:
                with record_function(f"dmuon.unshard {self.name}"):
                    buffer.fill()
            self.state = BufferState.IN_FLIGHT

    def finish_unshard(self) -> None:
        """2 view: wait for the broadcasts; the modules hold the full parameters, frozen or not as `sharded` is."""
        self.start_unshard()
        for buffer in self.buffers:
            buffer.land()
        for p in self.params:
            p.full.requires_grad_(p.sharded.requires_grad)
            p.hold(p.full)
        self.state = BufferState.UNSHARDED

    def hide(self) -> None:
        """The modules hold what they hold between steps; the bytes stay."""
        for p in self.params:
            p.hold(p.resting)

    def reshard(self) -> None:
        """4 and 8 free: the storage goes."""
        if self.state is not BufferState.SHARDED:
            self.hide()
            for buffer in self.buffers:
                buffer.free()
            self.state = BufferState.SHARDED

    def trained(self) -> list[DedicatedParam]:
        return [p for p in self.params if p.sharded.requires_grad]


class Backward:
    """One pass of the autograd engine: two cursors over the recorded order, one for each communicator.

    See [Note: the order of collectives is a contract between ranks].
    """

    def __init__(self, task_id: int, model: DedicatedModel):
        self.task_id, self.model, self.syncs = task_id, model, model.syncs
        self.broadcasts = list(reversed(model.completed))  # the last boundary to end is the first to be needed
        self.reduces = list(reversed(model.entered))  # the first boundary to start has its gradients last
        if self.syncs:  # what micro-batches under `no_sync` ran, and this one did not
            self.reduces += [boundary for boundary in model.unreduced if boundary not in model.entered]
            model.unreduced = {}
        self.broadcast_cursor = self.reduce_cursor = 0
        self.missing = {boundary: len(boundary.trained()) for boundary in self.reduces}  # gradients yet to come
        self.seen: set[Boundary] = set()
        self.done: list[Boundary] = []  # all gradients are in, the buffers are still here
        self.in_flight: list[TwoStageReduce] = []  # issued and not finished, in order

    def enter(self, boundary: Boundary) -> None:
        """Once a backward: unshard the boundary; every earlier broadcast is issued first, the next one right after."""
        if boundary in self.seen:
            return
        self.seen.add(boundary)
        while self.done:  # not when the last gradient came: the inputs' may have needed the matrix after that
            self.done.pop().reshard()
        if boundary not in self.broadcasts:  # the user kept this graph from before the last backward
            self.broadcasts.append(boundary)
        if boundary not in self.missing:
            self.reduces.append(boundary)
            self.missing[boundary] = len(boundary.trained())
        position = self.broadcasts.index(boundary)
        self._issue_broadcasts(position + 1)
        boundary.finish_unshard()
        if PREFETCH:
            self._issue_broadcasts(position + 2)

    def on_gradient(self, boundary: Boundary) -> None:
        """One more gradient is in. When all are: 7 reduce, in turn; 8 free comes with the next boundary."""
        self.enter(boundary)  # no output of it may have had a gradient: that of a loss kept in an attribute, say
        self.missing[boundary] -= 1
        if self.missing[boundary] == 0:
            if boundary.trained() == boundary.params and not self._keeps_buffers():
                self.done.append(boundary)  # a frozen matrix may be needed until the end
            while self.syncs and self._next_reduce_is_ready():
                self._issue_reduce()
            for reduction in self.in_flight:
                if not reduction.advance():
                    break  # in order: not past one that has to wait
            while self.in_flight and self.in_flight[0].is_completed():  # makes room
                self.in_flight.pop(0).finish()

    def finish(self, keep: bool = True) -> None:
        """The end of the backward: issue what is left on both communicators, and only then wait.

        `keep=False` after an exception: the collectives still pair with the peers', the gradients are dropped.
        """
        self._issue_broadcasts(len(self.broadcasts))
        while self.syncs and self.reduce_cursor < len(self.reduces):
            self._issue_reduce()
        self.model.invalidate(resident=keep and self._keeps_buffers())
        for reduction in self.in_flight:
            reduction.start_stage_two()
        for reduction in self.in_flight:
            reduction.finish(keep)
        if not self.syncs:  # instead of 7
            self.model.keep_gradients(self.reduces) if keep else self.model.drop_gradients()
        self.model.backward, self.model.spent = None, True

    def _keeps_buffers(self) -> bool:
        """Z2 under `no_sync`: the next micro-batch finds the weights there."""
        return not self.syncs and not self.model.reshard_after_forward

    def _next_reduce_is_ready(self) -> bool:
        return self.reduce_cursor < len(self.reduces) and self.missing[self.reduces[self.reduce_cursor]] == 0

    def _issue_broadcasts(self, end: int) -> None:
        """5 refill: those before position `end` of the order that have not been issued."""
        while self.broadcast_cursor < min(end, len(self.broadcasts)):
            self.broadcasts[self.broadcast_cursor].start_unshard()
            self.broadcast_cursor += 1

    def _issue_reduce(self) -> None:
        """7 reduce: one collective a buffer, without the frozen."""
        boundary = self.reduces[self.reduce_cursor]
        for buffer in boundary.buffers:
            trained = [p for p in buffer.params if p.full.requires_grad]  # as its graph was built
            for p in {*buffer.params} - {*trained}:
                p.waiting = None  # frozen since a micro-batch under `no_sync`
            if trained:
                with record_function(f"dmuon.reduce {boundary.name}"):
                    self.in_flight.append(TwoStageReduce(trained, buffer.reduce_dtype, self.model.mesh))
        self.reduce_cursor += 1


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
        self.entered: dict[Boundary, None] = {}  # boundaries that await a backward, by their first start
        self.completed: dict[Boundary, None] = {}  # the same, by their last end
        self.spent = False  # a backward has used the two orders: the next forward records new ones
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
            self.entered.setdefault(boundary)
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
            for tensor in _grad_tensors(output):
                tensor.register_hook(lambda gradient: self.current_backward().enter(boundary))
            self.completed.pop(boundary, None)
            self.completed[boundary] = None
        self._release(boundary)
        if boundary is self.forward_root:
            self.forward_root = None
            for unused in self.boundaries:  # a prefetch that nobody used would serve old weights after the step
                self._release(unused)

    def _release(self, boundary: Boundary) -> None:
        """Z3 frees the buffers; Z2 keeps those that a backward, or under `no_sync` a forward, will need."""
        needed = self.resident or boundary in self.entered and not self.spent
        boundary.hide() if needed and not self.reshard_after_forward else boundary.reshard()

    def _begin_forward(self, boundary: Boundary) -> None:
        """The outermost boundary starts. What an exception left behind, in forward or backward, ends here."""
        self.settle()
        if self.spent and torch.is_grad_enabled():  # an eval leaves the orders to a second graph's backward
            self.entered, self.completed, self.spent = {}, {}, False
        for stale in self.boundaries:
            self._release(stale)
        self.adopt()
        self.forward_root, self.expected, self.calls = boundary, self.calls, []

    def settle(self) -> None:
        """Before anything that all ranks do together: finish what a backward that raised has left in flight."""
        if self.backward is not None and torch._C._current_graph_task_id() == -1:
            self.backward.finish(keep=False)

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
        """After a backward under `no_sync`: they wait on this rank, in the dtype of the reduce."""
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
                boundary.arriving = replicate_broadcasts(boundary.trained(), self.mesh)

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
        tensors = [(b.buffers[0].buffer, b.buffers[0].landing) for b in boundaries]
        held.append([sum(t.untyped_storage().nbytes() for t in pair if t is not None) for pair in tensors])
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"Z{zero}  {moment:22} layer 1 {boundaries[1].state.name:9}, its weight has "
                  f"{layers[1][0].weight.numel():4} elements; bytes of all layers: {held[-1]}")

    layers[1][1].register_forward_hook(partial(look, "2 layer 1, forward"))
    layers[2][1].register_forward_hook(partial(look, "4 in layer 2's forward"))
    layers[1][1].register_full_backward_hook(partial(look, "6 layer 1, backward"))
    loss = model(torch.ones(1, 64)).sum()
    look("4 after the forward")
    loss.backward()
    look("8 after the backward")
    whole, kept = 64 * 64 * 4, 64 * 64 * 4 * (zero == 2)  # float32
    assert [layer_1 for _, layer_1, _ in held] == [whole, kept, kept, whole, 0], held


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _demonstrate(zero=3)
    _demonstrate(zero=2)
    gc.collect()  # frees our groups, and so ends their threads before the interpreter goes
    dist.destroy_process_group()
