"""DMuon: the public API. `import dmuon`, two calls of it, and FSDP2 trains with Muon.

Before this file: newton_schulz.py, partition.py, hooks.py, hsdp.py. After it: train_gpt.py, which
uses it.

    import dmuon                                           # FSDP2 now leaves matrices alone
    dmuon.dedicate_params(model, mesh)                     # each matrix gets one owner
    for layer in model.layers: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)                          # everything else, as ever
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3)  # a torch optimizer for both families

The training loop does not change. Between steps `model.parameters()` holds, for a dedicated matrix,
the whole matrix on its owner (and the owner's replicas) and an empty placeholder elsewhere;
`owned_params(model)` names what this rank owns, `parameter_shapes(model)` the true shapes, and
`unshard(module)` shows whole matrices on every rank. For the loop there are `no_sync`,
`clip_grad_norm_` and `grad_norms`, beside it state dicts and checkpoints that know names and no
ranks: `full_state_dict`, `save_checkpoint`, `load_checkpoint`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, zeros
from torch.optim.optimizer import register_optimizer_step_post_hook

from hooks import DedicatedModel, DedicatedParam, ShardMesh, equalise_group_counts, in_backward
from hooks import start_broadcast, wait
from hsdp import ReplicaMesh
from newton_schulz import KELLER_COEFFICIENTS, POLAR_EXPRESS_COEFFICIENTS, YOU_COEFFICIENTS
from newton_schulz import AdjustLr, adjusted_lr, batches_by, equal_shapes, float64_norm
from newton_schulz import gram_newton_schulz, local, muon_direction, muon_update, newton_schulz
from newton_schulz import orthogonalise, sharded_dim, split_blocks, tensor_parallel_newton_schulz
from partition import Blocks, assign_homes, assign_matrices, block_shapes, choose_matrices, clean
from partition import ownership_map, slot_coordinate

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["dedicate_params", "Muon", "no_sync", "clip_grad_norm_", "unshard", "owned_params",
           "owners", "ownership_table", "parameter_shapes", "grad_norms", "full_state_dict",
           "save_checkpoint", "load_checkpoint", "newton_schulz", "gram_newton_schulz",
           "KELLER_COEFFICIENTS", "YOU_COEFFICIENTS", "POLAR_EXPRESS_COEFFICIENTS"]

CPU = torch.device("cpu")
Slot = tuple[int, int]  # (shard, replicate) coordinate of an owner; replicate is 0 on a 1-D mesh


# ------------------------------------------------------------------------------- patches of torch


def _patch_fsdp() -> None:
    """Make FSDP2 ignore dedicated parameters, as if each `fully_shard` call named them.

    Private, because `ignored_params` would have to be passed to every call, and a call that forgets
    it shards an owner's matrix. `_get_managed_states` is where `fully_shard` of torch 2.13 and 2.14
    collects parameters.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_init

        original = _fsdp_init._get_managed_states
        if "_get_managed_states" not in _fsdp_init._get_modules_and_states.__code__.co_names:
            raise AttributeError("_get_modules_and_states no longer calls _get_managed_states")
    except (ImportError, AttributeError) as error:
        raise ImportError(f"dmuon cannot patch FSDP2 of torch {torch.__version__} ({error}). Use "
                          "torch 2.13 or 2.14, or collect the parameters that have "
                          "'_dedicated_owner_rank' and pass them to every "
                          "fully_shard(..., ignored_params=...)") from error
    if hasattr(original, "_dmuon"):
        return

    @wraps(original)
    def get_managed_states(modules, ignored_params=None):
        for dedicated in {module._dmuon for module in modules if hasattr(module, "_dmuon")}:
            dedicated.adopt()  # a conversion may have replaced a parameter, or its mark
        params = (p for module in modules for p in module.parameters(recurse=False))
        matrices = {p for p in params if is_dedicated(p)}
        return original(modules, matrices | (ignored_params or set()))

    get_managed_states._dmuon = True
    _fsdp_init._get_managed_states = get_managed_states


def _patch_grad_scaler() -> None:
    """Let `torch.amp.GradScaler` unscale matrices' gradients; all ranks see what one has found.

    Private, because the stock scaler gives torch one list, which must not have tensors beside
    DTensors, and asks nobody whether a gradient that another rank owns has overflowed.
    """
    original = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if original is None:
        raise ImportError("dmuon cannot patch torch.amp.GradScaler of torch "
                          f"{torch.__version__}, which no longer has _unscale_grads_. Use torch "
                          "2.13 or 2.14")
    if hasattr(original, "_dmuon"):
        return

    @wraps(original)
    @torch.no_grad()
    def unscale_grads(scaler, optimizer, inv_scale, found_inf, allow_fp16):
        dedicated = _model_of(optimizer)
        if dedicated is None:
            return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        mesh = dedicated.mesh
        found, inverse = found_inf.to(mesh.device), inv_scale.to(mesh.device)
        params = _params_of(optimizer)
        if not allow_fp16 and any(p.dtype == torch.float16 for p in params):  # all ranks know this
            raise ValueError("Attempting to unscale FP16 gradients.")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                by_dtype.setdefault(p.grad.dtype, []).append(local(p.grad))
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        for group in mesh.process_groups():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return {found.device: found}

    unscale_grads._dmuon = True
    torch.amp.GradScaler._unscale_grads_ = unscale_grads


_patch_fsdp()
_patch_grad_scaler()


# -------------------------------------------------------------------------------- dedicate_params


def dedicate_params(
    model: nn.Module, mesh: DeviceMesh,
    predicate: Callable[[str, nn.Parameter], bool] | None = None, *,
    blocks: Callable[[str, nn.Parameter], Blocks] | None = None,
    reshard_after_forward: bool = True, replicate_mesh: DeviceMesh | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True, mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> dict[str, Slot]:
    """Give each matrix of the model one owner. Call it before `fully_shard`, with the same mesh.

    Afterwards a dedicated matrix is whole on its owner (and the owner's replicas) and an empty
    placeholder elsewhere, and `fully_shard` leaves it alone. Weights are equal on all ranks: a
    matrix is its owner's, everything else (parameters that stay with FSDP2, buffers) is that of the
    mesh's first rank. Meta tensors are left alone. A parameter that `parallelize_module` has made a
    DTensor keeps its placement: the ranks of the tensor-parallel mesh own its parts together, and
    parameters that are no DTensors must start equal on them.

    Args:
        model: the root module, on any device; dedicated matrices move to the mesh's device.
        mesh: the mesh that `fully_shard` gets: (shard,) or, for HSDP, (replicate, shard). With HSDP
            (FSDP2 asks for it) or tensor parallelism it has dimension names.
        predicate: `(fqn, parameter) -> bool` chooses the matrices, (m, n) or stacked (E, m, n).
            None: every matrix of a linear map inside a hook boundary. Frozen parameters are never
            dedicated.
        blocks: `(fqn, parameter) -> (dim, sizes)` of a matrix that is several in one, q, k and v
            say: the sizes into which it falls along dim, -2 for the outputs of `nn.Linear`, -1 for
            weights stored as (in, out). Each is orthogonalised by itself and scaled by its own
            shape. None, or a callable that returns None: it is one matrix.
        reshard_after_forward: True (Z3) frees full matrices after the forward and broadcasts them
            again for the backward; False (Z2) keeps them. Match what `fully_shard` gets.
        replicate_mesh: the replicate dimension, if `mesh` is the 1-D shard mesh of a 2-D one.
        hook_boundary_predicate: `(module) -> bool`; the lowest module around a matrix where it is
            true unshards the matrix. None: modules named `layers.N`, `layer.N`, `blocks.N`, `h.N`.
        hook_boundary_strict: raise for a matrix without a boundary; False lets the module that
            holds it be its own.
        mp_policy: FSDP2's policy. Matrices are broadcast and computed with in `param_dtype`,
            gradients averaged in `reduce_dtype`; owned data keeps the parameter's dtype. Inputs and
            outputs are cast by `fully_shard`.

    Returns:
        {FQN: (shard, replicate) slot of its owner}, equal on every rank.

    Raises:
        TypeError, ValueError: on every rank, before the model is touched, when the mesh has another
            shape, the model was dedicated or sharded before, nothing is chosen, a chosen parameter
            is no matrix, has no hook boundary or is tied across two, does not fall into its blocks
            or has one that tensor parallelism cuts, is sharded over two tensor-parallel dimensions
            or a mesh without names, or the ranks' models differ in names, shapes, blocks or owners,
            or on a tensor-parallel mesh in the values of what is no DTensor.
    """
    _check_call(model, mesh, replicate_mesh, reshard_after_forward, mp_policy)
    groups, device = {"shard": mesh.get_group(mesh.ndim - 1)}, mesh_device(mesh)
    if mesh.ndim == 2 or replicate_mesh is not None:
        groups["replicate"] = (replicate_mesh or mesh).get_group(0)
    shards = groups["shard"].size()
    replicas = groups["replicate"].size() if "replicate" in groups else 1
    failure, matrices, owner_of, tp_mesh = None, [], {}, None
    try:
        _check_untouched(model)
        tp_mesh = _tensor_parallel_mesh(model, mesh, replicate_mesh)
        matrices = choose_matrices(model, predicate, blocks, hook_boundary_predicate,
                                   hook_boundary_strict)
        owner_of = assign_matrices(matrices, shards * replicas, replicas)
    except Exception as error:  # the peers are told first, or they would wait for this rank
        failure = error

    slots = {fqn: slot_coordinate(owner, shards) for fqn, owner in owner_of.items()}
    lines, checked = _signature(model, slots, {m.fqn: m.blocks for m in matrices}), groups
    agreed = dict.fromkeys(groups, lines)
    # Not of `tp_mesh`, which a rank that has failed may not know
    cut_by = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if cut_by is not None and cut_by.ndim == 1:
        agreed["tp"] = lines + _checksums(model.named_parameters(), "seed tp ranks alike")
        checked = {"tp": cut_by.get_group(), **groups}
    agree("dedicate_params", agreed, checked, failure)

    chosen = {matrix.parameter for matrix in matrices}
    others = [t for t in (*model.parameters(), *model.buffers()) if t not in chosen]
    synchronise(others, [*groups.values()], device)
    place = (ReplicaMesh if replicas > 1 else ShardMesh)(groups, device, tp_mesh)
    boundaries: dict[nn.Module, list[DedicatedParam]] = {}
    for matrix in matrices:
        owner = owner_of[matrix.fqn]
        p = DedicatedParam(matrix.fqn, matrix.holders, owner, place, matrix.blocks)
        boundaries.setdefault(matrix.boundary, []).append(p)
    dedicated = DedicatedModel(model, boundaries, place, reshard_after_forward, mp_policy)
    for module in {model, *boundaries, *(holder for holder, _ in dedicated.matrices)}:
        module._dmuon = dedicated
    _StateDicts(model, dedicated)
    place.copy_to_replicas(dedicated.params.values())
    _models.add(dedicated)
    return slots


def is_dedicated(p: nn.Parameter) -> bool:
    """Whether it is a dedicated matrix, or its placeholder."""
    return hasattr(p, "_dedicated_owner_rank")


_models: weakref.WeakSet[DedicatedModel] = weakref.WeakSet()


def _params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _model_of(optimizer: torch.optim.Optimizer) -> DedicatedModel | None:
    """The dedicated model of which an optimizer has matrices or their placeholders."""
    params = {*_params_of(optimizer)}
    for model in _models:
        if any(p.owned in params for p in model.params.values()):
            return model
    return None


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Another optimizer than `Muon` may have changed owned data: the replicas take it over."""
    dedicated = None if isinstance(optimizer, Muon) else _model_of(optimizer)
    if dedicated is None:
        return
    if not in_backward():
        dedicated.refresh()
    elif dedicated.mesh.num_replicas > 1:  # in a parameter's hook, on the owner alone
        raise RuntimeError("an optimizer has stepped a dedicated matrix inside a backward, and its "
                           "replicas cannot know: step it after the backward")


register_optimizer_step_post_hook(_after_step)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This rank's device in the mesh, as FSDP2 takes it."""
    if mesh.device_type == "cpu":
        return CPU
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _check_call(model: nn.Module, mesh: DeviceMesh, replicate_mesh: DeviceMesh | None,
                reshard_after_forward: bool, mp_policy: MixedPrecisionPolicy) -> None:
    """What is wrong with the call itself, the same on every rank."""
    for name, value, kind in (
        ("model", model, nn.Module), ("mesh", mesh, DeviceMesh),
        ("reshard_after_forward", reshard_after_forward, bool),
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"dedicate_params: {name} is a {type(value).__name__}; expected a "
                            f"{kind.__name__}")
    if mesh.ndim > (2 if replicate_mesh is None else 1):
        raise ValueError(f"dedicate_params: mesh has shape {tuple(mesh.shape)}; expected the mesh "
                         "that fully_shard gets, (shard,) or (replicate, shard), without tensor "
                         "parallelism's; with replicate_mesh the 1-D shard mesh")
    if replicate_mesh is None:
        return
    if not isinstance(replicate_mesh, DeviceMesh) or replicate_mesh.ndim != 1:
        raise ValueError(f"dedicate_params: replicate_mesh is {replicate_mesh!r}; expected a 1-D "
                         "DeviceMesh")
    common = {*mesh.mesh.tolist()} & {*replicate_mesh.mesh.tolist()}
    if common != {dist.get_rank()}:
        raise ValueError("dedicate_params: mesh and replicate_mesh share ranks "
                         f"{sorted(common)}; expected this rank only")


def _check_untouched(model: nn.Module) -> None:
    """Raise ValueError if `dedicate_params` or `fully_shard` was called on a part of the model."""
    for name, module in model.named_modules():
        what = f"'{name}'" if name else "'the model'"
        if hasattr(module, "_dmuon"):
            raise ValueError(f"dedicate_params: already called on {what}; call it once, on the "
                             "root")
        if isinstance(module, FSDPModule):
            raise ValueError(f"dedicate_params: fully_shard was already applied to {what}; call "
                             "dedicate_params before fully_shard")


def _tensor_parallel_mesh(model: nn.Module, *data_meshes: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of a model's DTensors: before `fully_shard` they are those of tensor parallelism.

    Raises:
        ValueError: names a parameter whose mesh has no names, a data-parallel dimension, two
            dimensions, or is another one than that of the parameters before it.
    """
    names = [mesh.mesh_dim_names or () for mesh in data_meshes if mesh is not None]
    data_names, found = {*itertools.chain(*names)}, None
    for fqn, parameter in model.named_parameters():
        tp_mesh = getattr(parameter, "device_mesh", None)
        if tp_mesh == found or tp_mesh is None:
            continue
        tp_names = tp_mesh.mesh_dim_names
        nameless = "tensor-parallel" if not tp_names else "" if data_names else "data-parallel"
        if nameless:
            problem = (f"but the {nameless} mesh has no names; pass slices of one "
                       "init_device_mesh(..., mesh_dim_names=...)")
        elif data_names & {*tp_names}:
            problem = (f"and the mesh has {sorted(data_names)}; pass data-parallel dimensions "
                       "only, before fully_shard")
        elif len(tp_names) > 1 or found is not None:
            problem = ("but only one tensor-parallel dimension is supported, the same for all "
                       "parameters")
        else:
            found = tp_mesh
            continue
        raise ValueError(f"dedicate_params: parameter '{clean(fqn)}' is a DTensor over "
                         f"{tp_names or 'a mesh'}, {problem}")
    return found


def _signature(model: nn.Module, slots: dict[str, Slot], blocks: dict[str, Blocks]) -> list[str]:
    """A line for each tensor of the model: what all ranks must agree on."""
    lines = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        placements, name = getattr(tensor, "placements", ""), clean(name)
        lines.append(f"{name} {tuple(tensor.shape)} {placements} {tensor.dtype} owner "
                     f"{slots.get(name)}")
        if blocks.get(name):
            lines[-1] += f" blocks {blocks[name]}"
    return lines


def _checksums(named: Iterable[tuple[str, Tensor]], advice: str) -> list[str]:
    """A line for each tensor that ranks should hold alike: one that is no DTensor."""
    lines = []
    for name, tensor in named:
        if isinstance(tensor, DTensor) or tensor.is_meta:
            continue
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        checksum = hashlib.sha256(data.numpy()).hexdigest()[:16]
        lines.append(f"{name} {tuple(tensor.shape)}, no DTensor, checksum {checksum}: {advice}")
    return lines


# ------------------------------------------------------------------------ what all ranks agree on


def gather_objects(value: object, group: dist.ProcessGroup) -> list:
    """Every rank's value, in the group's order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def agree(caller: str, lines: dict[str, list[str]], groups: dict[str, dist.ProcessGroup],
          failure: Exception | None = None) -> None:
    """Raise on every rank unless the ranks of each group have equal lines and none has failed.

    Args:
        caller: named in the error.
        lines: by dimension of the mesh, what must be equal along it.
        groups: by dimension; where all is well only a hash travels in each.
        failure: what this rank raises; its peers are told.

    Raises:
        ValueError: names the ranks and the first line that differs.
    """
    for dimension, group in groups.items():
        ours = lines[dimension] if failure is None else [f"failed: {failure}"]
        found = _disagreement(ours, group, dimension)
        if found and failure is None:  # raised at the end only: other dimensions must hear of it
            failure = ValueError(f"{caller}: {found}")
    if failure is not None:
        raise failure


def _disagreement(lines: list[str], group: dist.ProcessGroup, dimension: str) -> str | None:
    """What differs between the lines of a group's ranks, or nothing."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    if len({*gather_objects(digest, group)}) == 1:
        return None
    gathered = gather_objects(lines, group)
    for rank, theirs in enumerate(gathered):
        if theirs[:1] and theirs[0].startswith("failed: "):
            return f"rank {rank} of the {dimension} group {theirs[0]}"
    for rank, theirs in enumerate(gathered):
        for first, other in itertools.zip_longest(gathered[0], theirs, fillvalue="nothing"):
            if first != other:
                return (f"ranks disagree. Rank 0 of the {dimension} group has [{first}], rank "
                        f"{rank} has [{other}]; every rank must build the same model, in the same "
                        "order, and pass the same arguments")


@contextmanager
def together(caller: str, group: dist.ProcessGroup) -> Iterator[list[str]]:
    """If the block raises on one rank of the group, or the lists differ, it raises on all."""
    failure, said = None, []
    try:
        yield said
    except Exception as error:
        failure = error
    agree(caller, {"whole": said}, {"whole": group}, failure)


def union(lines: Iterable[str], groups: list[dist.ProcessGroup]) -> list[str]:
    """The lines that any rank has, each once, the same list on every rank."""
    found = list(lines)
    for group in groups:
        found = [*dict.fromkeys(itertools.chain(*gather_objects(found, group)))]
    return found


@torch.no_grad()
def synchronise(tensors: Iterable[Tensor], groups: list[dist.ProcessGroup],
                device: torch.device) -> None:
    """Make the tensors those of the mesh's first rank, meta tensors excepted.

    They travel as bytes, so that they may have any dtype.
    """
    for tensor in tensors:
        if tensor.is_meta or not tensor.numel():
            continue
        held = local(tensor)
        # An expanded dimension is sent and written to once
        held = held[tuple(slice(None) if stride else 0 for stride in held.stride())]
        data = held.to(device).contiguous()
        for group in reversed(groups):  # down every column, then along every row
            works = start_broadcast(data.view(-1).view(torch.uint8), group, 0)
            wait(works, "broadcast of what has no owner")
        held.copy_(data)


# ------------------------------------------------------------------ looking at a dedicated model


def _dedicated(module: nn.Module) -> DedicatedModel | None:
    """The record of the model whose dedicated matrices the module holds; None if it holds none."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got a {type(module).__name__}")
    records = {m._dmuon: None for m in module.modules() if hasattr(m, "_dmuon")}
    if len(records) > 1:
        raise ValueError(f"{type(module).__name__} holds {len(records)} models dedicated one by "
                         "one; pass one of them")
    return next(iter(records), None)


def _require_dedicated(model: nn.Module, caller: str) -> DedicatedModel:
    dedicated = _dedicated(model)
    if dedicated is None:
        raise ValueError(f"{caller}: {type(model).__name__} has no dedicated parameters; call "
                         "dmuon.dedicate_params first")
    return dedicated


def _place(mesh: ShardMesh) -> dict[str, tuple[int, int]]:
    """By dimension of the mesh, this rank's coordinate and how many there are."""
    tp_mesh = mesh.tp_mesh
    tp = (0, 1) if tp_mesh is None else (tp_mesh.get_local_rank(), tp_mesh.size())
    return {"shard": (mesh.shard, mesh.num_shards),
            "replicate": (mesh.replicate, mesh.num_replicas), "tp": tp}


def owners(model: nn.Module) -> dict[str, Slot]:
    """{FQN: (shard, replicate) slot of its owner} for every dedicated matrix.

    In model order, equal on every rank.
    """
    dedicated = _require_dedicated(model, "owners")
    shards = dedicated.mesh.num_shards
    return {p.fqn: slot_coordinate(p.owner, shards) for p in dedicated.params.values()}


def owned_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """{FQN: parameter} of the matrices that this rank owns.

    After a backward that reduces their `.grad` is the averaged gradient. To write to a weight enter
    `unshard`: on a 2-D mesh the owner's replicas have copies.
    """
    dedicated = _require_dedicated(model, "owned_params")
    dedicated.adopt()
    return {p.fqn: p.owned for p in dedicated.params.values() if p.is_owner}


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """{FQN: shape of the whole parameter} of both families, in model order, equal on every rank.

    `named_parameters` shows placeholders of 0 elements between steps; the number of parameters of
    the model is `sum(shape.numel() for shape in parameter_shapes(model).values())`.
    """
    dedicated = _dedicated(model)
    if dedicated:
        dedicated.adopt()
    matrices = {p.resting: p.shape for p in dedicated.params.values()} if dedicated else {}
    return {fqn: matrices.get(p, p.shape) for p, fqn in _names(model).items()}


def ownership_table(model: nn.Module) -> str:
    """The ownership map as text: matrices down, owner slots across, the load of each slot below."""
    dedicated = _require_dedicated(model, "ownership_table")
    mesh, params = dedicated.mesh, dedicated.params
    shapes = {fqn: tuple(p.shape) for fqn, p in params.items()}
    layers = {p.fqn: clean(each.name) for each in dedicated.boundaries for p in each.params}
    slots = {fqn: p.owner for fqn, p in params.items()}
    blocks = {fqn: p.blocks for fqn, p in params.items()}
    num_slots = mesh.num_shards * mesh.num_replicas
    return ownership_map(shapes, layers, slots, num_slots, num_replicas=mesh.num_replicas,
                         blocks=blocks)


@contextmanager
def unshard(module: nn.Module) -> Iterator[None]:
    """Inside, every dedicated matrix below `module` is whole on every rank, in its own dtype.

    Every rank of the mesh enters it. What the owner writes (in place) stays; what others write is
    dropped at the end. What FSDP2 shards stays sharded, and a matrix with tensor parallelism a
    DTensor. A module without dedicated matrices is left as it is.
    """
    dedicated, members = _dedicated(module), set(module.modules())
    params = dedicated.params.values() if dedicated else []
    with _unshard(dedicated, [p for p in params if any(m in members for m, _ in p.holders)]):
        yield


@contextmanager
def _unshard(dedicated: DedicatedModel | None, params: list[DedicatedParam]) -> Iterator[None]:
    works, before = [], []
    if dedicated:
        dedicated.settle()
        dedicated.receive_new_weights()
    for p in params:
        p.adopt()
        p.mesh.copy_to_replicas([p])  # the owner alone may have been written to
        whole = p.owned
        if not p.is_source:
            empty = p.wrap(local(whole).new_empty(p.local_shape))
            whole = nn.Parameter(empty, whole.requires_grad)
        works += start_broadcast(local(whole).contiguous(), p.mesh.broadcast_group, p.source)
        before.append((p, p.resting))  # not always `owned`: contexts nest
        p.resting = whole  # a forward inside the context restores it
        p.hold(whole)
    wait(works, "broadcast of unshard")
    try:
        yield
    finally:
        for p, resting in before:
            p.resting = resting
            p.hold(resting)
            p.mesh.copy_to_replicas([p])
        if dedicated:
            dedicated.reshard()


# --------------------------------------------------------------------------------------------- Muon


NS_OPTIONS = ("ns_coefficients", "ns_steps", "eps", "ns_dtype")  # as `newton_schulz` takes them


class Muon(torch.optim.Optimizer):
    """Muon for the dedicated matrices, `torch.optim.AdamW` for every other parameter: one `step`.

    Each owner updates its own matrices: momentum, Nesterov, Newton-Schulz, decoupled weight decay
    by the unadjusted rate, in the order and with the formulas of `torch.optim.Muon`. Other ranks do
    nothing for them. All parameters of the model are in a group on every rank, so that groups,
    schedulers and `zero_grad` behave alike everywhere.

    Args:
        model: a model that went through `dedicate_params` and `fully_shard`.
        lr: rate of the matrices, before `adjust_lr_fn`.
        momentum: coefficient of the exponential moving average, in [0, 1).
        nesterov: look one step ahead along the momentum.
        weight_decay: of the matrices, decoupled.
        adjust_lr_fn: "match_rms_adamw" (0.2 sqrt(max(m, n)), Moonlight), "original"
            (sqrt(max(1, m / n)), Jordan; None is the same, as in torch) or a callable
            `(lr, m, n) -> rate` of an (m, n) matrix. No state dict or checkpoint has a callable:
            loading keeps the group's own.
        ns_backend: "gram" or "direct"; the same result, "gram" needs fewer FLOPs on long matrices.
            It is not asked for a matrix that tensor parallelism has cut: see
            `newton_schulz.tensor_parallel_newton_schulz`.
        ns_steps: iterations; with a list of triples as coefficients, its length.
        ns_coefficients: one triple (a, b, c) or one per iteration.
        ns_dtype: dtype of the iteration; None: float64 for float64 weights, float32 on CPU, float16
            on CUDA. Summed Gram matrices are float32 at least.
        eps: smallest norm that Newton-Schulz divides by; a smaller one gives a smaller update.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: passed to `torch.optim.AdamW`.
        param_groups: groups in torch's form, {"params": [...], option: value}; a group with both
            families is split. None: one group for each family.
        replicate_async: HSDP: leave the new weights in flight to their replicate peers when `step`
            returns. They arrive there before a forward, a state dict or `unshard` needs them; a
            peer that reads `model.parameters()` itself sees the old ones until then. The numbers
            are the same either way.

    Raises:
        ValueError: a model without dedicated parameters or without FSDP2 on the rest, a negative
            rate, decay or eps, momentum outside [0, 1), an unknown `adjust_lr_fn` or `ns_backend`,
            steps that the coefficients do not have.
        TypeError: an `ns_dtype` that is no floating-point dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        ns_backend: str = "gram",
        ns_steps: int = 5,
        ns_coefficients: Sequence = POLAR_EXPRESS_COEFFICIENTS,
        ns_dtype: torch.dtype | None = None,
        eps: float = 1e-30,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        param_groups: list[dict] | None = None,
        replicate_async: bool = True,
    ):
        self._dedicated = _require_dedicated(model, "Muon")
        self._replicate_async = replicate_async
        # Groups must not have whole parameters, which an eval or an error left there
        _to_rest(model, self._dedicated)
        self._dedicated.reshard()
        self._dedicated.adopt()
        self._muon_defaults = dict(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            eps=eps,
            adjust_lr_fn=adjust_lr_fn,
            ns_backend=ns_backend,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
        )
        _check_muon_options(self._muon_defaults, [])
        self._adamw = torch.optim.AdamW(
            [{"params": []}], adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay
        )
        matrices, others = _families(list(model.parameters()))
        _check_sharded(others, self._dedicated.mesh)
        if param_groups is None:
            param_groups = [{"params": matrices}, {"params": others}]
        super().__init__(param_groups, defaults={"lr": lr})

    def add_param_group(self, param_group: dict) -> None:
        """As torch's; what the group does not name is its family's default.

        A group with both families becomes two.
        """
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError("Muon: params is a set, whose order differs between ranks; pass a list")
        params = [params] if isinstance(params, Tensor) else list(params)
        # torch takes (name, parameter) too
        params = [p[1] if isinstance(p, tuple) else p for p in params]
        matrices, others = _families(params)
        if matrices:
            group = {**self._muon_defaults, **param_group, "params": matrices, "family": "muon"}
            shapes = [shape for p in self._dedicated.params.values() if p.owned in {*matrices}
                      for shape in block_shapes(p.shape, p.blocks)]
            _check_muon_options(group, shapes)
            super().add_param_group(group)
        if others or not params:  # schedulers count empty groups, too
            group = {**self._adamw.defaults, **param_group, "params": others, "family": "adamw"}
            super().add_param_group(group)

    def __getstate__(self) -> None:
        """For `copy.deepcopy` and pickle, which would part the optimizer from its model."""
        raise RuntimeError(
            "dmuon.Muon cannot be copied or pickled; its state_dict can, and save_checkpoint has it"
        )

    def state_dict(self) -> dict:
        """As torch's, of what this rank has, for this rank of the same mesh.

        What `save_checkpoint` writes knows no ranks.
        """
        state = super().state_dict()
        groups = [{key: value for key, value in group.items() if not callable(value)}
                  for group in state["param_groups"]]
        return {**state, "param_groups": groups, "place": _place(self._dedicated.mesh)}

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's.

        Raises:
            ValueError: the state is another rank's, whose momenta are of other matrices.
        """
        here, there = _place(self._dedicated.mesh), state_dict.get("place")
        if here != there:
            raise ValueError(
                f"Muon.load_state_dict: the state is that of {there or 'another optimizer'}, this "
                f"rank is {here}; every rank loads its own, or use dmuon.save_checkpoint and "
                "load_checkpoint"
            )
        before = self.param_groups
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before):
            group.update({key: value for key, value in own.items()
                          if callable(value) or key == "adjust_lr_fn" and key not in group})

    # What it reads changes between steps in ways that a compiled graph does not ask about
    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step: matrices, then their replicate peers, then all that AdamW trains.

        Like torch's optimizers it does not look for NaN.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._dedicated.settle()
        # 1. Matrices that this rank owns; those of one shape are one batch
        self._blocks = {p.owned: p.blocks for p in self._dedicated.params.values()}
        cut = {}  # by tensor parallelism, so that no rank has all of a block; and the groups
        for group in self.param_groups:
            if group["family"] == "muon":
                trained = [p for p in group["params"] if p.grad is not None and p.requires_grad]
                cut |= {p: group for p in trained if any(
                    sharded_dim(block) is not None for block in self._split(p, p))}
                for batch in equal_shapes([p for p in trained if p not in cut]):
                    self.update_matrices(batch, group)
        if cut:  # on all ranks of the tensor-parallel mesh alike
            self._update_cut_matrices(cut)
        # 2. Their replicate peers
        self._dedicated.send_new_weights()
        # 3. AdamW, pointed anew at the objects that `load_state_dict` replaces
        self._adamw.state = self.state
        self._adamw.param_groups = []
        for group in self.param_groups:
            if group["family"] == "adamw":
                self._adamw.param_groups += _foreach_groups(group)
        self._adamw.step()
        self._dedicated.reshard()
        if not self._replicate_async:
            self._dedicated.receive_new_weights()
        return loss

    def momentum_of(self, p: nn.Parameter) -> Tensor:
        """The matrix's momentum, which starts at zero."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        return self.state[p]["momentum_buffer"]

    def _split(self, p: nn.Parameter, tensor: Tensor) -> Sequence[Tensor]:
        """The blocks of the parameter, or of what has its shape."""
        return split_blocks(tensor, self._blocks.get(p))

    def _update_cut_matrices(self, group_of: dict[nn.Parameter, dict]) -> None:
        """What `update_matrices` does, of matrices that no rank has whole, by all of them."""
        mesh = self._dedicated.mesh.tp_mesh
        blocks, groups, directions = [], [], []
        for p, group in group_of.items():
            gradient, momentum = p.grad, self.momentum_of(p)
            how = group["momentum"], group["nesterov"]
            muon_update([gradient], [momentum], *how)  # the direction is made again, by block
            local(p).mul_(1 - float(group["lr"]) * group["weight_decay"])
            for block, g, m in zip(*(self._split(p, t) for t in (p, gradient, momentum))):
                blocks.append(block)
                groups.append(group)
                directions.append(lambda g=g, m=m, how=how: muon_direction([g], [m], *how)[0])
        homes = assign_homes([(block.shape, sharded_dim(block)) for block in blocks], mesh.size())
        options = [[group[name] for name in NS_OPTIONS] for group in groups]
        for i, step in tensor_parallel_newton_schulz(directions, homes, mesh, options):
            weight, lr = local(blocks[i]), float(groups[i]["lr"])
            adjusted = adjusted_lr(lr, groups[i]["adjust_lr_fn"], *blocks[i].shape[-2:])
            weight.add_(step.view_as(weight), alpha=-adjusted)

    def update_matrices(self, batch: list[nn.Parameter], group: dict) -> None:
        """Owned matrices of one shape (..., m, n), e.g. (3072, 768), as in `torch.optim.Muon`.

        What a variant of Muon overrides; what tensor parallelism has cut does not come here.

        Args:
            batch: parameters with a gradient.
            group: theirs, of which `param_groups` has the options.
        """
        gradients = [p.grad for p in batch]
        momenta = [self.momentum_of(p) for p in batch]
        updates = muon_update(gradients, momenta, group["momentum"], group["nesterov"])
        lr, weight_of = float(group["lr"]), {}  # by block of an update
        for p, update in zip(batch, updates):
            # foreach on a CPU would round the factor to the weights' dtype
            local(p).mul_(1 - lr * group["weight_decay"])
            weight_of.update(zip(self._split(p, update), self._split(p, p)))
        options = [group[name] for name in NS_OPTIONS]
        for alike in equal_shapes(weight_of):
            steps = orthogonalise(alike, group["ns_backend"], *options)
            adjusted = adjusted_lr(lr, group["adjust_lr_fn"], *alike[0].shape[-2:])
            weights = [local(weight_of[update]) for update in alike]
            torch._foreach_add_(weights, steps, alpha=-adjusted)


def _families(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The dedicated matrices, and all others."""
    matrices = [p for p in parameters if is_dedicated(p)]
    return matrices, [p for p in parameters if not is_dedicated(p)]


def _check_muon_options(options: dict, shapes: list[tuple[int, ...]]) -> None:
    """Raise ValueError or TypeError for what `Muon` documents, naming the option.

    Here, on every rank: in a step only the owners would see a refusal.
    """
    for name in ("lr", "weight_decay", "eps"):
        if not options[name] >= 0:
            raise ValueError(f"Muon: {name} must be >= 0, not {options[name]}")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"Muon: momentum must be in [0, 1), not {options['momentum']}")
    newton_schulz(torch.ones(1, 1), *[options[name] for name in NS_OPTIONS])
    choices = {"ns_backend": ("gram", "direct")}
    if not callable(options["adjust_lr_fn"]):
        choices["adjust_lr_fn"] = (None, "original", "match_rms_adamw")
    for m, n in sorted({shape[-2:] for shape in shapes}):
        try:
            rate = adjusted_lr(float(options["lr"]), options["adjust_lr_fn"], m, n)
            is_number = math.isfinite(rate)
        except Exception as error:
            rate, is_number = error, False
        if not is_number:
            raise ValueError(f"Muon: adjust_lr_fn gives {rate!r} for a ({m}, {n}) matrix; expected "
                             "a finite number")
    for name, known in choices.items():
        if options[name] not in known:
            raise ValueError(f"Muon: {name} must be one of {known}, not {options[name]!r}")


def _check_sharded(parameters: list[nn.Parameter], mesh: ShardMesh) -> None:
    """Raise ValueError unless FSDP2 averages gradients over as many ranks as DMuon does its own.

    See hooks.py, [Note: Newton-Schulz hides a wrong divisor].
    """
    trained = [p for p in parameters if p.requires_grad]
    sharded = [p for p in trained if hasattr(p, "device_mesh") and p.device_mesh != mesh.tp_mesh]
    ranks = mesh.num_shards * mesh.num_replicas
    if ranks > 1 and trained and not sharded:
        raise ValueError(
            "Muon: no parameter is sharded by FSDP2; call fully_shard on the model before "
            "dmuon.Muon"
        )
    tp_names = mesh.tp_mesh.mesh_dim_names if mesh.tp_mesh is not None else ()
    for p in sharded:
        names = p.device_mesh.mesh_dim_names or (None,) * p.device_mesh.ndim
        sizes = zip(names, p.device_mesh.shape)
        if math.prod(size for name, size in sizes if name not in tp_names) != ranks:
            raise ValueError(
                f"Muon: fully_shard averages a parameter of shape {tuple(p.shape)} over "
                f"{p.device_mesh}, dedicate_params its matrices over {ranks} ranks; give both the "
                "same mesh"
            )


def _foreach_groups(group: dict) -> list[dict]:
    """An AdamW group in parts that one foreach operation takes: of one mesh, or of no DTensors.

    By itself torch would loop over DTensors, one operation a tensor. A part is as large as a batch
    of Newton-Schulz, because an operation makes temporaries as large as all that it takes. A rate
    that is a tensor becomes a number. What the user chose stays.
    """
    if group["foreach"] is not None or group["fused"] or group["differentiable"]:
        return [group]
    # On a CPU foreach rounds the betas to the weights' dtype
    precise = lambda p: p.is_cuda or p.dtype.itemsize >= 4
    parts = batches_by(group["params"], lambda p: (getattr(p, "device_mesh", None), precise(p)))
    lr = float(group["lr"])
    return [{**group, "lr": lr, "foreach": precise(part[0]), "params": part} for part in parts]


# ------------------------------------------------------------------------- accumulation, clipping


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside keep their gradients on this rank; the next one outside reduces the sum.

    This is gradient accumulation with one reduce a step, for both families; dividing the loss by
    the number of micro-batches is the caller's. What counts is where the backward runs, not where
    the forward did. In return every rank holds a whole gradient of every matrix, in the dtype of
    the reduce, and in Z2 also the whole matrices, which are then broadcast once a step. As in
    FSDP2, whose `set_requires_gradient_sync` it calls (at the end with True), `zero_grad` does not
    clear what waits.

    Args:
        model: a model that went through `dedicate_params` and `fully_shard`. Contexts nest.
    """
    dedicated = _require_dedicated(model, "no_sync")
    before = dedicated.syncs

    def set_sync(syncs: bool) -> None:
        dedicated.syncs = syncs
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(syncs, recurse=False)

    set_sync(False)
    try:
        yield
    finally:
        set_sync(before)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients of both families so that their total norm is at most `max_norm`.

    Mirrors `torch.nn.utils.clip_grad_norm_`, but leaves gradients as they are if the norm is not
    finite: so it can be seen which ones are not. The norm is that of the whole model's averaged
    gradient.

    Args:
        model: dedicated or not, sharded by FSDP2 or not; all its ranks call this.
        max_norm: the largest total norm that is left; infinity only measures.
        norm_type: order of the norm: 2.0, 1.0, infinity or any other positive number.
        error_if_nonfinite: raise instead of scaling by a norm that is infinite or NaN.

    Returns:
        The total norm before clipping, a 0-d tensor, float64 for a float64 model, else float32,
        with the same value on every rank; non-finite if a gradient is.

    Raises:
        RuntimeError: on every rank, if `error_if_nonfinite` and the norm is not finite.
        ValueError: a norm_type that is not positive.
    """
    norms = torch.stack([*grad_norms(model, norm_type).values()])
    norm = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the total norm is {norm.item()}, some gradient is "
                           "not finite")
    scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients:  # torch's clip_grads_with_norm_ takes no DTensors beside tensors
        torch._foreach_mul_(gradients, scale)
    return norm if any(p.dtype == torch.float64 for p in model.parameters()) else norm.float()


@torch.no_grad()
def grad_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, Tensor]:
    """{FQN: norm of the averaged gradient} of every parameter, equal on every rank; for logs.

    Args:
        model: dedicated or not, sharded by FSDP2 or not; all its ranks call this, after the
            backward.
        norm_type: order of the norms: 2.0, 1.0, infinity or any other positive number.

    Returns:
        0-d float64 tensors, 0 for a parameter without a gradient; of a gradient that nobody
        averages (`ignored_params`) the mean over the ranks. `clip_grad_norm_` scales by the norm of
        these norms.

    Raises:
        ValueError: a norm_type that is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; expected 2.0, 1.0, infinity or another "
                         "positive order")
    dedicated = _dedicated(model)
    _to_rest(model, dedicated)  # after an eval FSDP2's parameters may be whole
    names, norms, (groups, _) = _names(model), [], _process_groups(model)
    ranks = math.prod(group.size() for group in groups)
    owner_ranks = _place(dedicated.mesh)["tp"][1] if dedicated else 1  # that own a matrix together
    for p in names:
        part = torch.zeros((), dtype=torch.float64, device=p.device)
        if p.grad is not None and local(p.grad).numel():
            part = float64_norm(local(p.grad).reshape(-1, 1), norm_type).squeeze()
            copies = _copies(p.grad, owner_ranks if is_dedicated(p) else ranks)
            part = part / copies ** (1 / norm_type)
        norms.append(part)
    norms = torch.stack(norms)
    for group in groups:  # no MAX reduce for the infinity norm: gloo's drops a NaN
        gathered = [torch.empty_like(norms) for _ in range(group.size())]
        dist.all_gather(gathered, norms, group=group)
        norms = torch.linalg.vector_norm(torch.stack(gathered), norm_type, dim=0)
    return dict(zip(names.values(), norms))


def _copies(gradient: Tensor, ranks: int) -> int:
    """How many of the ranks that have a part of the gradient have the same part, and count it."""
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements):
            ranks //= 1 if placement.is_replicate() else size
    return ranks


def _process_groups(model: nn.Module) -> tuple[list[dist.ProcessGroup], torch.device]:
    """For what all ranks of a model compute together: a group a dimension, and their device."""
    dedicated = _dedicated(model)
    if dedicated:
        return dedicated.mesh.process_groups(), dedicated.mesh.device
    meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    groups = dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups())
    return [*groups], mesh_device(next(iter(meshes))) if meshes else CPU


# ------------------------------------------------------------------------------------ state dicts


def _to_rest(model: nn.Module, dedicated: DedicatedModel | None) -> None:
    """The modules hold what they hold between steps.

    Also after a backward that raised, or, in FSDP2, after a forward without gradients.
    """
    if dedicated:
        dedicated.settle()
        dedicated.receive_new_weights()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _refuse_state_dict_helpers() -> None:
    raise RuntimeError("the helpers of torch.distributed.checkpoint.state_dict take every "
                       "parameter for a shard, and would lose the matrices that dmuon dedicated: "
                       "use model.state_dict and load_state_dict, dmuon.full_state_dict, "
                       "dmuon.save_checkpoint and load_checkpoint")


def _refuse_divide_factor(factor: float) -> None:
    raise RuntimeError("dmuon averages the gradients of matrices over all data-parallel ranks, and "
                       "FSDP2 must do so with the others: scale the loss instead")


class _StateDicts:
    """Hooks by which `state_dict` gives what this rank owns, and `load_state_dict` takes its part.

    In a state dict are the matrices that this rank owns and its shards of what FSDP2 has, by FQN
    without wrappers. `load_state_dict` is called by all ranks of the mesh: each is given what its
    own state dict has, or more, for example the whole of a plain model's. Names that are missing on
    the rank that needs them or that nobody knows are reported on every rank; a wrong shape is an
    error before anything is written.
    """

    def __init__(self, model: nn.Module, dedicated: DedicatedModel):
        self.model, self.dedicated, self.outermost = model, dedicated, None
        dedicated.shows_all = False  # True in `_all_entries`
        for module in model.modules():
            # Private: all of torch.distributed.checkpoint.state_dict asks it before anything else
            module._fqn_modifiers = _refuse_state_dict_helpers
            module.set_gradient_divide_factor = _refuse_divide_factor  # FSDP2's is for its half
            module.register_state_dict_pre_hook(dedicated.receive_new_weights)
            # torch marks this one, and cannot mark a bound method
            module.register_state_dict_post_hook(partial(self.after_state_dict))
            module.register_load_state_dict_pre_hook(self.before_load)
            module.register_load_state_dict_post_hook(self.after_load)

    def after_state_dict(self, module: nn.Module, state_dict: dict, prefix: str, _: dict) -> None:
        for name, held in module._parameters.items():
            p = self.dedicated.matrices.get((module, name))
            if p and not p.is_owner and not self.dedicated.shows_all:
                state_dict.pop(prefix + name, None)
            elif p and held is p.full:  # in a backward that has raised, say
                state_dict[prefix + name] = p.owned.detach()
        if not prefix:
            for entries in (state_dict, getattr(state_dict, "_metadata", {})):
                for key in [*entries]:  # all, to keep their order
                    entries[clean(key)] = entries.pop(key)

    def before_load(self, module: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
        """At the outermost module: bring all entries into the form that torch expects there."""
        if prefix and module is not self.model:
            return
        _to_rest(self.model, self.dedicated)
        self.outermost = module
        given, wrong = {clean(key): key for key in state_dict}, []
        for full_name, holder, name, tensor in _named_state(module, prefix.rstrip(".")):
            key = full_name.replace("_checkpoint_wrapped_module.", "")  # its own hook puts it in
            if clean(key) in given:
                state_dict[key] = state_dict.pop(given[clean(key)])
            value, p = state_dict.get(key), self.dedicated.matrices.get((holder, name))
            shape = (p or tensor).shape
            if not isinstance(value, Tensor):
                if p and not p.is_owner:
                    state_dict[key] = tensor  # the owner's value comes afterwards
            elif value.shape != shape:
                wrong.append(f"size mismatch for {clean(key)}: {tuple(value.shape)} in the state "
                             f"dict, {tuple(shape)} in the model")
            else:
                state_dict[key] = self._part(value, tensor, p)
        wrong = union(wrong, self.dedicated.mesh.process_groups())
        if wrong:
            lines = "\n\t".join(wrong)
            kind = type(module).__name__
            raise RuntimeError(f"Error(s) in loading state_dict for {kind}:\n\t{lines}")

    def _part(self, value: Tensor, tensor: Tensor, p: DedicatedParam | None) -> Tensor:
        """What this rank needs of a whole value to load it into the tensor."""
        device = self.dedicated.mesh.device
        if p and not p.is_owner and not p.is_source:  # the owner's value comes afterwards
            return torch.empty_like(tensor, dtype=value.dtype, device=device)
        if isinstance(value, DTensor) or not isinstance(tensor, DTensor):
            return value
        return distribute_tensor(value.to(device), tensor.device_mesh, tensor.placements,
                                 src_data_rank=None)  # each rank cuts its own part

    def after_load(self, module: nn.Module, incompatible_keys: tuple[list, list]) -> None:
        if module is self.outermost:
            self.outermost = None
            for keys in incompatible_keys:  # torch raises by them, or returns them
                keys[:] = union(map(clean, keys), self.dedicated.mesh.process_groups())
            self.dedicated.refresh()


def _named_state(module: nn.Module,
                 prefix: str) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, holder, attribute, tensor) of what a state dict has, in its order."""
    for path, holder in module.named_modules(prefix=prefix, remove_duplicate=False):
        for name, tensor in (*holder._parameters.items(), *holder._buffers.items()):
            if tensor is not None and name not in holder._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), holder, name, tensor


@torch.no_grad()
def full_state_dict(model: nn.Module, cpu_offload: bool = True,
                    rank0_only: bool = True) -> dict[str, object]:
    """What `state_dict` of the plain model would be: it loads there, and here.

    It has that one's keys in that one's order, extra state too. Every rank of the mesh calls it;
    one tensor at a time is whole on the ranks. `save_checkpoint` needs no gather.

    Args:
        model: a model that went through `dedicate_params` and `fully_shard`.
        cpu_offload: tensors of the result are on the CPU, else on the model's device.
        rank0_only: ranks other than the first of the mesh get an empty dict.

    Raises:
        RuntimeError: on every rank; a state-dict hook of the model's own makes new tensors of
            matrices.
    """
    dedicated = _require_dedicated(model, "full_state_dict")
    _to_rest(model, dedicated)
    state = _all_entries(model, dedicated)
    is_first = all(coordinate == 0 for coordinate, _ in _place(dedicated.mesh).values())
    keeps = is_first or not rank0_only
    matrices = {p.resting: p for p in dedicated.params.values()}
    own, held = {*model.parameters(), *model.buffers()}, {id(value) for value in state.values()}
    tensors = [key for key, value in state.items() if isinstance(value, Tensor)]
    made = [key for key in tensors if state[key] not in own]
    lost = [p.fqn for p in matrices.values() if id(p.resting) not in held]
    if lost and made:
        raise RuntimeError(f"full_state_dict: a state-dict hook has made {made[:3]} of what is an "
                           f"empty placeholder of {lost[:3]} on other ranks; apply it to the "
                           "result instead")
    for key in tensors:
        p = matrices.get(state[key])
        with _unshard(dedicated, [p]) if p else nullcontext():
            value = p.resting if p else state[key]
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if keeps:
                device = CPU if cpu_offload else value.device
                state[key] = value.detach().to(device, copy=True)
    for key in [*state]:  # all, to keep their order
        state[clean(key)] = state.pop(key)
    return state if keeps else {}


def _all_entries(model: nn.Module, dedicated: DedicatedModel | None) -> dict[str, object]:
    """The state dict with every matrix in it, the others' as placeholders."""
    if dedicated is None:
        return model.state_dict(keep_vars=True)
    dedicated.shows_all = True
    try:
        return model.state_dict(keep_vars=True)
    finally:
        dedicated.shows_all = False


# ------------------------------------------------------------------------------------ checkpoints


def save_checkpoint(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer,
                    step: int, keep: int | None = None) -> Path:
    """Write a training's state to `folder/step_00000120`, from all ranks.

    It has weights, optimizer state, step and random number generators. Each rank writes what it
    owns, without a gather, by `torch.distributed.checkpoint`. The entries are named by FQN and know
    nothing of ranks and owners: any other mesh loads them. They are written to
    `step_00000120.part`, which is renamed when all is on disk; `order.txt` then lists all
    checkpoints as they were written. `dcp_to_torch_save` makes an ordinary file of one, whose entry
    "model" a plain model loads.

    Args:
        folder: of all checkpoints of a run, on a disk that all ranks share. One model trains on one
            mesh there: another model, a pipeline stage say, needs a folder of its own.
        model, optimizer: any that FSDP2 has sharded, dedicated or not; the optimizer's parameters
            are the model's. All ranks of their mesh call this, and nobody else.
        step: how many steps are done.
        keep: at least 1: afterwards delete all but that many of the checkpoints written last; None:
            delete none.

    Returns:
        The checkpoint's folder.

    Raises:
        RuntimeError: on every rank, with the reason, if one cannot write, they do not share the
            disk, the last checkpoint there is of another model, another mesh that runs now has
            begun to write there, or the optimizer has state that would not come back; earlier
            checkpoints are as they were.
        ValueError: a negative step, keep below 1, a folder that is a URL.
    """
    if step < 0 or keep is not None and keep < 1:
        raise ValueError(f"save_checkpoint: step {step}, keep {keep}; expected step >= 0, and keep "
                         ">= 1 or None")
    final, group = _local_path(folder) / f"step_{step:08d}", _mesh_group(model)
    part, is_first, has_opened = final.with_suffix(".part"), group.rank() == 0, False
    try:
        with together("save_checkpoint", group) as said:
            said.append(str(final.resolve()))
            device = _parameters_device(model)
            weights, shapes = _model_entries(model)
            names = _names(model)
            placements, alike = _check_state(optimizer, names)
            said += alike
            state = {"model": weights, "step": step, "groups": _options(optimizer, names),
                     "optimizer": {names[p]: values for p, values in optimizer.state.items()}}
            if placements:
                state["placements"] = (placements,)  # in a tuple, which dcp saves as one object
            if is_first:
                _open_folder(part, shapes, {clean(name) for name, _ in model.named_buffers()})
                has_opened = True
        state["rng"] = {name: torch.stack(gather_objects(own, group))
                        for name, own in _random_states(device).items()}
        _call_dcp(dcp.save, state, part, group)
        with together("save_checkpoint", group):
            if is_first:
                _entries(part)  # on a disk that the ranks do not share the others' are missing
                _put_in_place(part, final, keep)
    except Exception as error:
        if has_opened:  # else it is another mesh's, which writes there now
            shutil.rmtree(part, ignore_errors=True)  # a full disk has room again
        raise RuntimeError(f"save_checkpoint: cannot write '{final}' ({error}); earlier ones are "
                           "intact") from error
    return final


@torch.no_grad()
def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take over what `save_checkpoint` wrote, on any number of ranks in any mesh; return its step.

    On the same mesh training goes on to the same bits. Groups of the optimizer get the options that
    they were saved with, rates included, as by torch's `load_state_dict`. Rank r takes the random
    state of rank r modulo their number. Load only what you trust: like torch's own loading of
    checkpoints it runs code that a file may hold.

    Args:
        path: a checkpoint, or a folder of checkpoints: then the last one written that is complete,
            whatever its step, by `order.txt`; others are skipped with a line to the logger "dmuon".
        model, optimizer: as for `save_checkpoint`, on a real device.

    Raises:
        FileNotFoundError: on every rank; there is no complete checkpoint.
        ValueError: on every rank and before anything is changed; the checkpoint is of another model
            or optimizer, ranks see different ones, gradients of `no_sync` have not been reduced, or
            the path is a URL.
    """
    dedicated, path, group = _dedicated(model), _local_path(path), _mesh_group(model)
    with together("load_checkpoint", group) as said:
        device = _parameters_device(model)
        weights, shapes = _model_entries(model)
        if dedicated and dedicated.unreduced:
            raise ValueError("load_checkpoint: gradients of no_sync wait for a backward outside of "
                             "it; they would be added to the next ones")
        names = _names(model)
        folder, saved, reasons = _find_checkpoint(path)
        said.append(str(folder and folder.resolve()))
        if folder:
            _check_names(folder, saved, shapes)
    if folder is None:
        raise FileNotFoundError("load_checkpoint: " + "; ".join(reasons))
    for reason in reasons if group.rank() == 0 else []:
        logging.getLogger("dmuon").warning("skipped: %s", reason)

    sizes = {name: saved[f"rng.{name}"].size for name in _random_states(device)
             if f"rng.{name}" in saved}
    rng = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    state = {"step": 0, "groups": (), "rng": rng}
    if "placements" in saved:
        state["placements"] = ()
    _call_dcp(dcp.load, state, folder, group)
    _check_groups(folder, optimizer, _options(optimizer, names), state["groups"])
    placements = dict(*state.get("placements", ()))
    values = _empty_state(saved, placements, optimizer, names, dedicated)
    _call_dcp(dcp.load, {"model": weights, "optimizer": values}, folder, group)  # in place

    # What is no tensor is set; and the hooks of this call refresh what has copies of the weights
    extra = [key for key in model.state_dict() if key.endswith("_extra_state")]
    model.load_state_dict({key: weights[clean(key)] for key in extra}, strict=False)
    optimizer.state.clear()
    optimizer.state.update({p: values[fqn] for p, fqn in names.items() if fqn in values})
    for options, saved_options in zip(optimizer.param_groups, state["groups"]):
        for key, value in saved_options.items():
            if isinstance(options.get(key), Tensor):
                options[key].fill_(value)
            elif key != "params" and not callable(options.get(key)):
                options[key] = value
    for name, states in rng.items():
        own = states[group.rank() % len(states)].clone()  # torch crashes on a view
        torch.set_rng_state(own) if name == "cpu" else torch.cuda.set_rng_state(own)
    _claimed.setdefault(folder.resolve().parent)
    return state["step"]


def _local_path(path: str | Path) -> Path:
    if re.match(r"[\w+.-]{2,}:/", str(path)):  # one letter is a disk; Path leaves one slash
        raise ValueError("checkpoints go to a disk that all ranks share, but "
                         f"'{path}' is a URL; copy the folder there")
    return Path(path)


def _mesh_group(model: nn.Module) -> dist.ProcessGroup:
    """All ranks that hold a part of the model, by a backend that sends CPU tensors.

    dcp sends objects, which NCCL would copy to the device first.
    """
    if model not in _mesh_groups:
        groups, device = _process_groups(model)
        ranks = sorted(union([dist.get_rank()], groups))
        is_plain = not groups and _dedicated(model) is None
        # private: what torch's object collectives go by
        sends_cpu_tensors = CPU in dist.group.WORLD._device_types
        if sends_cpu_tensors and (is_plain or len(ranks) == dist.get_world_size()):
            _mesh_groups[model] = dist.group.WORLD
        else:
            equalise_group_counts(groups, device)
            _mesh_groups[model] = dist.new_group(ranks, backend="gloo",
                                                 use_local_synchronization=True)
    return _mesh_groups[model]


# Kept: torch would make a second group of the same ranks by the name, and at the addresses, of one
# that was destroyed
_mesh_groups: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _call_dcp(function: Callable, state: dict, folder: Path, group: dist.ProcessGroup) -> None:
    """Call dcp, which tells every rank of the others' failures, but by a BaseException."""
    try:
        function(state, checkpoint_id=folder, process_group=group)
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure}"
                            for rank, (failure, _) in error.failures.items())
        raise RuntimeError(f"'{folder}': {reasons}") from error


def _parameters_device(model: nn.Module) -> torch.device:
    """Where the parameters are; ValueError if one is on the meta device still."""
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"parameter '{name}' is on the meta device; call "
                             "model.to_empty(device=...) first")
    return p.device


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """By kind of device, this rank's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


# ------------------------------------------------------------------- what a checkpoint consists of


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    """FQNs without wrappers, by parameter."""
    return {p: clean(fqn) for fqn, p in model.named_parameters()}


def _model_entries(model: nn.Module) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    """What this rank's state dict has; and {name: shape of the whole} of what all ranks have."""
    dedicated = _dedicated(model)
    _to_rest(model, dedicated)
    params = dedicated.params.values() if dedicated else []
    matrices, by_name = {p.resting: p for p in params}, {p.fqn: p for p in params}
    entries, shapes = {}, {}
    for key, value in _all_entries(model, dedicated).items():
        key, p = clean(key), None
        if isinstance(value, Tensor):
            p = matrices.get(value, by_name.get(key))  # by name where a hook has made a new tensor
            value = value.detach()
            if "_extra_state" not in key:
                shapes[key] = tuple((p or value).shape)
        if p is None or p.is_owner:
            entries[key] = value
    return entries, shapes


def _options(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> tuple[dict, ...]:
    """The optimizer's groups, parameters by name; a tuple, which dcp saves as one object."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value.item() if isinstance(value, Tensor) else value
                   for key, value in group.items() if key != "params" and not callable(value)}
        groups.append({**options, "params": [names[p] for p in group["params"]]})
    return tuple(groups)


def _check_groups(folder: Path, optimizer: torch.optim.Optimizer, ours: tuple[dict, ...],
                  theirs: tuple[dict, ...]) -> None:
    """Raise ValueError unless the optimizer's groups are those of the checkpoint."""
    for one, other in itertools.zip_longest(ours, theirs, fillvalue={}):
        differs = any(one.get(key) != other.get(key) for key in ("params", "family"))
        # Schedulers add options, before or after; the optimizer's own are what both must have
        if differs or (optimizer.defaults.keys() & one.keys()) - other.keys():
            raise ValueError(f"load_checkpoint: '{folder}' has other groups of parameters, or is "
                             "of another optimizer")


def _check_state(optimizer: torch.optim.Optimizer,
                 names: dict[nn.Parameter, str]) -> tuple[dict, list[str]]:
    """What a checkpoint must know of an optimizer's state beside its values.

    Returns:
        {"FQN.key": placements} of what is not laid out as its parameter, e.g. one number a row,
        None for what is no DTensor; a line for each value that all ranks must hold alike.

    Raises:
        TypeError, ValueError: names a value that would not come back as it was.
    """
    placements, alike = {}, []
    values = [(p, key, value) for p, of_p in optimizer.state.items() for key, value in of_p.items()]
    for p, key, value in values:
        name = f"{names[p]}.{key}"
        if not isinstance(key, str) or "." in key:
            raise ValueError(f"optimizer state '{name}': expected a name without dots as key")
        if is_dedicated(p) and not local(p).numel():
            raise ValueError(f"optimizer state '{name}' is not on the matrix's owner alone; use "
                             "dmuon.Muon")
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                raise ValueError(f"optimizer state '{name}' is a sum that the ranks have not "
                                 "added up yet")
            if (value.shape, value.placements) != (p.shape, getattr(p, "placements", None)):
                placements[name] = value.placements
            continue
        is_number = isinstance(value, (int, float, complex, str)) or value is None
        if not is_number and not isinstance(value, Tensor):
            raise TypeError(f"optimizer state '{name}' is a {type(value).__name__}, no tensor or "
                            "number")
        if not is_number and isinstance(p, DTensor) and value.shape == p.shape:
            placements[name] = None
        if not is_dedicated(p) and is_number:
            alike.append(f"{name} {value!r}")
        elif not is_dedicated(p):
            alike += _checksums([(name, value)], "a rank's own part must be a DTensor")
    return placements, alike


def _empty_state(saved: dict, placements: dict, optimizer: torch.optim.Optimizer,
                 names: dict[nn.Parameter, str],
                 dedicated: DedicatedModel | None) -> dict[str, dict]:
    """{FQN: {key: value}} to load this rank's part of the optimizer's state into."""
    params = dedicated.params.values() if dedicated else []
    peers = {p.owned for p in params if not p.is_owner}
    groups = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]
              if p not in peers}
    state: dict[str, dict] = {}
    for name, entry in saved.items():
        fqn, _, key = name.removeprefix("optimizer.").rpartition(".")
        if not name.startswith("optimizer.") or fqn not in groups:
            continue
        p, group = groups[fqn]
        values = state.setdefault(fqn, {})
        if not hasattr(entry, "size"):  # no tensor
            values[key] = None
            continue
        # In another dtype than the weight's of old it stays; else it takes the weight's of now, as
        # torch casts it
        old_dtype = saved[f"model.{fqn}"].properties.dtype
        kept = key == "step" or entry.properties.dtype != old_dtype
        dtype = entry.properties.dtype if kept else p.dtype
        layout = placements.get(f"{fqn}.{key}")
        if layout and isinstance(p, DTensor):
            mesh = p.device_mesh
            if len(layout) != mesh.ndim:  # of another mesh: whole, which operations take as well
                layout = [Replicate()] * mesh.ndim
            values[key] = zeros(entry.size, dtype=dtype, device_mesh=mesh, placements=layout)
        elif entry.size == p.shape and f"{fqn}.{key}" not in placements:
            values[key] = torch.zeros_like(p, dtype=dtype).detach()
        else:  # a count of steps is where `Optimizer.load_state_dict` puts it for the kernel
            on_cpu = key == "step" and not group.get("fused") and not group.get("capturable")
            device = CPU if on_cpu else local(p).device
            values[key] = torch.zeros(entry.size, dtype=dtype, device=device)
    return state


# ------------------------------------------------------------------------ a folder of checkpoints


_claimed: dict[Path, int | None] = {}  # folders that this process may write to, and their locks


def _claim(folder: Path) -> None:
    """Lock the folder until this process ends, so that no other mesh starts to write there."""
    folder = folder.resolve()
    if _claimed.get(folder) or fcntl is None:
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        if folder in _claimed:  # it was loaded from: a run that resumes, on other ranks maybe
            return
        raise RuntimeError("another mesh writes its checkpoints there now; give each a folder of "
                           "its own, or load from it first to go on there") from None
    except OSError:  # a disk that has no locks
        pass
    _claimed[folder] = lock


def _open_folder(part: Path, shapes: dict[str, tuple], buffers: set[str]) -> None:
    """Make `part`, in a folder that has no other model's checkpoints."""
    part.parent.mkdir(parents=True, exist_ok=True)
    _claim(part.parent)
    newest, entries, _ = _find_checkpoint(part.parent)
    if newest:
        _check_names(newest, entries, shapes, buffers)  # buffers may have grown since
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while it wrote
    part.mkdir()


def _put_in_place(part: Path, final: Path, keep: int | None) -> None:
    """Rename a complete checkpoint, list it, and delete what is superfluous.

    At any moment a complete one is there.
    """
    folder, old = final.parent, final.with_suffix(".old")
    for path in _newest_first(folder):
        if path.suffix == ".old" and not path.with_suffix("").exists():
            path.rename(path.with_suffix(""))  # a run was killed between the two lines below
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    others = [path for path in _newest_first(folder) if not path.suffix]
    names = [path.name for path in reversed(others)]
    _write_order(folder, names)  # without this one, which is newer than all from the next line on
    part.rename(final)
    _write_order(folder, [*names, final.name])
    superfluous = [path for path in _newest_first(folder) if path.suffix]
    if keep:
        complete = [final, *(path for path in others if (path / ".metadata").exists())]
        superfluous += complete[keep:]
    for path in superfluous:
        shutil.rmtree(path)


def _write_order(folder: Path, names: list[str]) -> None:
    (folder / "order.part").write_text("".join(f"{name}\n" for name in names))
    os.replace(folder / "order.part", folder / "order.txt")


def _newest_first(folder: Path) -> list[Path]:
    """Checkpoints, torn ones too, in the order of writing that `order.txt` tells.

    Never by times, which a copy changes. One that is not listed is newer: the run was killed in
    between. So is one beside its own old copy, and among these, and without the file, the higher
    step.
    """
    found = {path for path in folder.glob("step_*")
             if re.fullmatch(r"step_\d{8,}(\.part|\.old)?", path.name) and path.is_dir()}
    file = folder / "order.txt"
    listed = file.read_text(errors="replace").split() if file.exists() else []

    def age(path: Path) -> tuple:
        position = -1 if path.suffix and listed else len(listed)
        is_replaced = not path.suffix and path.with_suffix(".old") in found
        if path.stem in listed and not is_replaced:
            position = listed.index(path.stem)
        return position, int(path.stem[5:]), not path.suffix

    return sorted(found, key=age, reverse=True)


def _entries(folder: Path) -> dict:
    """dcp's description of a checkpoint's entries, by name; an error if a file lacks some."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        if (folder / info.relative_path).stat().st_size < info.offset + info.length:
            raise ValueError(f"{info.relative_path} is too short")
    if "step" not in metadata.state_dict_metadata:
        raise ValueError("save_checkpoint has not written it")
    return metadata.state_dict_metadata


def _find_checkpoint(path: Path) -> tuple[Path | None, dict, list[str]]:
    """The newest complete checkpoint, or `path` itself; its entries; what is wrong with others."""
    reasons = []
    for candidate in _newest_first(path) or [path]:
        try:
            if not candidate.is_dir():
                raise ValueError("no such folder")
            if candidate.suffix == ".part":
                raise ValueError("the run ended while it was written")
            return candidate, _entries(candidate), reasons
        except Exception as error:
            reasons.append(f"'{candidate}' is no complete checkpoint: {error}")
    return None, {}, reasons


def _check_names(folder: Path, saved: dict, ours: dict[str, tuple],
                 of_any_shape: Iterable[str] = ()) -> None:
    """Raise ValueError unless the checkpoint has the model's names and shapes, and no others."""
    theirs = {}
    for name, entry in saved.items():
        if name.startswith("model.") and "_extra_state" not in name:
            name = name.removeprefix("model.")
            is_free = name in of_any_shape and name in ours
            theirs[name] = ours[name] if is_free else tuple(entry.size)
    problems = [f"{name}: {theirs.get(name, 'nothing')} in the checkpoint, "
                f"{ours.get(name, 'nothing')} in the model"
                for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"'{folder}' is of another model; {'; '.join(problems[:5])}{more}. Each "
                         "model needs a folder of its own")
