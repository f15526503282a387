"""DMuon: the public API. `import dmuon`, three calls, and FSDP2 trains with Muon, each matrix orthogonalised once.

Before this file: newton_schulz.py, partition.py, hooks.py, hsdp.py. After it: train_gpt.py, which uses it.

    import dmuon                                           # FSDP2 now leaves dedicated matrices alone
    dmuon.dedicate_params(model, mesh)                     # each matrix gets one owner
    for layer in model.layers: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)                          # everything else, as ever
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3)  # a torch.optim.Optimizer for both families

The training loop does not change. Between steps `model.parameters()` holds, for a dedicated matrix, the whole matrix
on its owner and an empty placeholder elsewhere; `owned_params(model)` names what this rank owns, and `unshard(module)`
shows whole matrices on every rank.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from hooks import DedicatedModel, DedicatedParam
from hsdp import Slot, SlotMesh, agree, checksums, local, mesh_device, replicate, start_broadcast, synchronise
from hsdp import tensor_parallel_mesh, wait
from newton_schulz import (
    KELLER_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    gram_newton_schulz,
    newton_schulz,
    sharded_dim,
    sums_grams,
    tensor_parallel_newton_schulz,
    tensor_parallel_norms,
)
from partition import assign_owners, ownership_map

__all__ = [
    "dedicate_params", "Muon", "clip_grad_norm_", "unshard", "owned_params", "owners", "ownership_table",
    "newton_schulz", "gram_newton_schulz",
    "KELLER_COEFFICIENTS", "YOU_COEFFICIENTS", "POLAR_EXPRESS_COEFFICIENTS",
]

LAYER_NAME = re.compile(r"(^|\.)(layers|layer|blocks|h)\.\d+$")  # Llama, BERT, ViT and GPT-2 name their blocks so
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")  # torch.compile, checkpoint_wrapper
CONVOLUTIONS = (nn.modules.conv._ConvNd,)
NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, *CONVOLUTIONS)


# ------------------------------------------------------------------------------------------ the FSDP2 patch


def _patch_fsdp() -> None:
    """Make FSDP2 ignore dedicated parameters, as if each `fully_shard` call named them in `ignored_params`.

    Private, because `ignored_params` would have to be passed to every call, and a call that forgets it shards an
    owner's matrix. `_get_managed_states` is the one place that every version of `fully_shard` collects parameters in.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_init

        original = _fsdp_init._get_managed_states
        if "_get_managed_states" not in _fsdp_init._get_modules_and_states.__code__.co_names:
            raise AttributeError("_get_modules_and_states no longer calls _get_managed_states")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"dmuon cannot patch FSDP2 of torch {torch.__version__} ({error}). Use torch 2.13, or collect the "
            f"parameters that have '_dedicated_owner_rank' and pass them to every fully_shard(..., ignored_params=...)"
        ) from error
    if hasattr(original, "_dmuon"):
        return

    @functools.wraps(original)
    def get_managed_states(modules, ignored_params=None):
        for dedicated in {module._dmuon for module in modules if hasattr(module, "_dmuon")}:
            for p in dedicated.params.values():
                p.adopt()  # since `dedicate_params` a conversion may have replaced a parameter, or its mark
        params = (p for module in modules for p in module.parameters(recurse=False))
        dedicated = {p for p in params if hasattr(p, "_dedicated_owner_rank")}
        return original(modules, dedicated | (ignored_params or set()))

    get_managed_states._dmuon = True
    _fsdp_init._get_managed_states = get_managed_states


_patch_fsdp()


# ------------------------------------------------------------------------------------- choosing the matrices


@dataclass
class _Matrix:
    """A parameter that is to be dedicated: where it is held and which boundary unshards it."""

    fqn: str
    parameter: nn.Parameter
    holders: list[tuple[nn.Module, str]]
    boundary: nn.Module
    boundary_name: str


def _clean(name: str) -> str:
    """A name without the components that wrappers insert."""
    return WRAPPERS.sub("", name).lstrip(".")


def _ancestors(path: str) -> Iterator[str]:
    """Paths of a module and of those that contain it, the lowest first, the root ("") last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # a ModuleList has none, so its hooks never run


def _find_boundary(path: str, modules: dict[str, nn.Module], is_boundary: Callable | None) -> str | None:
    """The path of the lowest module around a matrix that is a hook boundary, by the user's predicate or by its name."""
    for candidate in _ancestors(path):
        module = modules[candidate]
        if is_boundary is None:
            if LAYER_NAME.search(_clean(candidate)) and _has_forward(module):
                return candidate
        elif is_boundary(module):
            if not _has_forward(module):
                raise ValueError(
                    f"hook_boundary_predicate is true for '{candidate}', a {type(module).__name__} without a forward: "
                    f"its hooks would never run; choose the modules in it, or the one around it"
                )
            return candidate
    return None


def _is_default_matrix(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """What Muon is for: matrices and stacked matrices of linear maps; no embedding, norm, convolution or bias table."""
    return (
        parameter.ndim in (2, 3)
        and min(parameter.shape[-2:]) > 1
        and parameter.is_floating_point()
        and not isinstance(module, NO_MATRICES)
        and not re.search("bias|embed", name)
    )


def _check_matrix(fqn: str, parameter: nn.Parameter, module: nn.Module) -> None:
    """Refuse what the user's predicate chose and Newton-Schulz cannot take."""
    shape = tuple(parameter.shape)
    if any(type(placement) not in (Shard, Replicate) for placement in getattr(parameter, "placements", ())):
        problem = f"has placements {parameter.placements}; tensor parallelism may use Shard and Replicate only"
    elif parameter.ndim < 2:
        problem = f"has shape {shape}: a {'scalar' if parameter.ndim == 0 else 'vector'} has no singular vectors; " \
                  f"make the predicate leave it to AdamW"
    elif parameter.ndim > 3 or isinstance(module, CONVOLUTIONS):
        problem = f"has shape {shape}: a convolution kernel is not a matrix; make the predicate leave it to AdamW"
    elif parameter.numel() == 0:
        problem = f"has shape {shape}: an empty matrix looks like a placeholder; make the predicate leave it out"
    elif not parameter.is_floating_point():
        problem = f"has dtype {parameter.dtype}; only real floating-point matrices can be orthogonalised"
    else:
        return
    raise ValueError(f"dedicate_params: parameter '{fqn}' {problem}")


def _choose_matrices(model: nn.Module, predicate: Callable | None, is_boundary: Callable | None,
                     strict: bool) -> list[_Matrix]:
    """Every matrix that gets an owner, in model order, with its holders and its boundary."""
    modules = dict(model.named_modules(remove_duplicate=False))
    held: dict[nn.Parameter, list[tuple[str, str]]] = {}  # parameter -> its (module path, attribute name)s
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            held.setdefault(parameter, []).append((path, name))
    matrices, candidates = [], []
    for parameter, places in held.items():
        path, name = places[0]
        fqn = _clean(f"{path}.{name}")
        usual = all(_is_default_matrix(n, parameter, modules[p]) for p, n in places)
        candidates += [fqn] if usual else []
        boundary = _find_boundary(path, modules, is_boundary) if predicate is None and usual else None
        chosen = boundary is not None if predicate is None else predicate(fqn, parameter)
        if not chosen or not parameter.requires_grad:
            continue  # a frozen parameter stays with FSDP2
        _check_matrix(fqn, parameter, modules[path])
        boundary = _common_boundary(fqn, places, modules, is_boundary, strict)
        holders = [*dict.fromkeys((modules[p], n) for p, n in places)]
        matrices.append(_Matrix(fqn, parameter, holders, modules[boundary], _clean(boundary)))
    if not matrices:
        raise ValueError(
            f"dedicate_params: no trainable matrix was chosen. By default that is every matrix inside layers.N, "
            f"layer.N, blocks.N or h.N; pass predicate and hook_boundary_predicate for other names. "
            f"Matrices in this model: {', '.join(candidates[:12]) or 'none'}{', ...' if len(candidates) > 12 else ''}"
        )
    return matrices


def _common_boundary(fqn: str, places: list[tuple[str, str]], modules: dict[str, nn.Module],
                     is_boundary: Callable | None, strict: bool) -> str:
    """The path of the one boundary around all places that hold this parameter."""
    found = []
    for path, _ in places:
        boundary = _find_boundary(path, modules, is_boundary)
        if boundary is None and strict:
            raise ValueError(
                f"dedicate_params: no hook boundary around '{fqn}'. Pass a hook_boundary_predicate that is true "
                f"for its layer, or hook_boundary_strict=False to let '{_clean(path)}' be its own boundary"
            )
        found.append(path if boundary is None else boundary)
    if len({id(modules[path]) for path in found}) > 1:
        names = " and ".join(f"'{_clean(f'{path}.{name}')}'" for path, name in places)
        raise ValueError(
            f"dedicate_params: one parameter is tied across hook boundaries, as {names}. Choose a hook boundary that "
            f"contains them all, or make the predicate leave it to FSDP2"
        )
    return found[0]


# ------------------------------------------------------------------------------------------ dedicate_params


def _check_call(**given: object) -> None:
    """What is wrong with the call itself, the same on every rank."""
    kinds = {"model": nn.Module, "mesh": DeviceMesh, "reshard_after_forward": bool, "mp_policy": MixedPrecisionPolicy}
    for name, kind in kinds.items():
        if not isinstance(given[name], kind):
            raise TypeError(f"dedicate_params: {name} is a {type(given[name]).__name__}; expected a {kind.__name__}")
    mesh, replicate_mesh = given["mesh"], given["replicate_mesh"]
    if mesh.ndim > (2 if replicate_mesh is None else 1):
        raise ValueError(
            f"dedicate_params: mesh has shape {tuple(mesh.shape)}; expected the mesh that fully_shard gets, (shard,) "
            f"or (replicate, shard), without tensor parallelism's; with replicate_mesh the 1-D shard mesh"
        )
    if replicate_mesh is not None:
        if not isinstance(replicate_mesh, DeviceMesh) or replicate_mesh.ndim != 1:
            raise ValueError(f"dedicate_params: replicate_mesh is {replicate_mesh!r}; expected a 1-D DeviceMesh")
        common = {*mesh.mesh.tolist()} & {*replicate_mesh.mesh.tolist()}
        if common != {dist.get_rank()}:
            raise ValueError(
                f"dedicate_params: mesh and replicate_mesh share ranks {sorted(common)}; expected this rank only"
            )


def _check_untouched(model: nn.Module) -> None:
    """Neither call has been made on a part of the model before."""
    for name, module in model.named_modules():
        if hasattr(module, "_dmuon"):
            raise ValueError(f"dedicate_params: already called on '{name or 'the model'}'; call it once, on the root")
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"dedicate_params: fully_shard was already applied to '{name or 'the model'}'; call dedicate_params "
                f"before fully_shard"
            )


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    reshard_after_forward: bool = True,
    replicate_mesh: DeviceMesh | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> dict[str, Slot]:
    """Give each matrix of the model one owner. Call it before `fully_shard`, with the same mesh.

    Afterwards a dedicated matrix is whole on its owner (and the owner's replicate peers) and an empty placeholder
    elsewhere, and `fully_shard` leaves it alone. Weights are equal on all ranks: a matrix is its owner's, everything
    else (parameters that stay with FSDP2, buffers) is that of the mesh's first rank. Meta tensors are left alone. A
    parameter that `parallelize_module` has made a DTensor keeps its placement: the ranks of the tensor-parallel mesh
    own its shards together, and parameters that are no DTensors must start equal on them.

    Args:
        model: the root module, on any device; dedicated matrices move to the mesh's device.
        mesh: the mesh that `fully_shard` gets: (shard,) or, for HSDP, (replicate, shard). With HSDP (FSDP2 asks for
            it) or tensor parallelism it has dimension names.
        predicate: `(fqn, parameter) -> bool` chooses the matrices, (m, n) or stacked (E, m, n). None: every matrix of
            a linear map inside a hook boundary. Frozen parameters are never dedicated.
        reshard_after_forward: True (Z3) frees full matrices after the forward and broadcasts them again for the
            backward; False (Z2) keeps them. Match what `fully_shard` gets.
        replicate_mesh: the replicate dimension, if `mesh` is the 1-D shard mesh of a 2-D one.
        hook_boundary_predicate: `(module) -> bool`; the lowest module around a matrix where it is true unshards the
            matrix. None: modules named `layers.N`, `layer.N`, `blocks.N` or `h.N`.
        hook_boundary_strict: raise for a matrix without a boundary; False lets the module that holds it be its own.
        mp_policy: FSDP2's policy. Matrices are broadcast and computed with in `param_dtype`, gradients averaged in
            `reduce_dtype`; owned data keeps the parameter's dtype. Inputs and outputs are cast by `fully_shard`.

    Returns:
        {FQN: (shard, replicate) slot of its owner}, equal on every rank.

    Raises:
        TypeError, ValueError: on every rank, before the model is touched, when the mesh has another shape, the model
            was dedicated or sharded before, nothing is chosen, a chosen parameter is no matrix, has no hook boundary or
            is tied across two, is sharded over two tensor-parallel dimensions or a mesh without names, or the ranks'
            models differ in names, shapes or owners, or on a tensor-parallel mesh in the values of what is no DTensor.
    """
    _check_call(model=model, mesh=mesh, replicate_mesh=replicate_mesh, reshard_after_forward=reshard_after_forward,
                mp_policy=mp_policy)
    groups, device = {"shard": mesh.get_group(mesh.ndim - 1)}, mesh_device(mesh)
    if mesh.ndim == 2 or replicate_mesh is not None:
        groups["replicate"] = (replicate_mesh or mesh).get_group(0)
    failure, matrices, slots, tp_mesh = None, [], {}, None
    try:
        _check_untouched(model)
        named = ((_clean(fqn), parameter) for fqn, parameter in model.named_parameters())
        tp_mesh = tensor_parallel_mesh(named, mesh, replicate_mesh)
        matrices = _choose_matrices(model, predicate, hook_boundary_predicate, hook_boundary_strict)
        slots = _assign_slots(matrices, *(group.size() for group in groups.values()))
    except Exception as error:  # told to the peers before it is raised, or they would wait for this rank for ever
        failure = error
    texts = dict.fromkeys(groups, _describe(model, slots))
    tp_group = {} if tp_mesh is None else {"tp": tp_mesh.get_group()}
    if tp_mesh is not None:
        texts["tp"] = f"{texts['shard']}\n{checksums(model.named_parameters())}"
    agree(texts, {**tp_group, **groups}, device, failure)
    chosen = {matrix.parameter for matrix in matrices}
    synchronise([t for t in (*model.parameters(), *model.buffers()) if t not in chosen], [*groups.values()], device)
    slot_mesh, boundaries = SlotMesh(device, *groups.values(), tp_mesh=tp_mesh), {}
    for matrix in matrices:
        param = DedicatedParam(matrix.fqn, matrix.holders, slots[matrix.fqn], slot_mesh)
        boundaries.setdefault(matrix.boundary, []).append(param)
    dedicated = DedicatedModel(model, boundaries, slot_mesh, reshard_after_forward, mp_policy)
    holders = {module for matrix in matrices for module, _ in matrix.holders}
    for module in {model, *boundaries, *holders}:
        module._dmuon = dedicated
        module.register_state_dict_pre_hook(dedicated.finish_replicate_broadcasts)
        module.register_load_state_dict_pre_hook(dedicated.finish_replicate_broadcasts)
    replicate(dedicated.params.values(), slot_mesh)
    return owners(model)


def _assign_slots(matrices: list[_Matrix], num_shards: int, num_replicas: int = 1) -> dict[str, Slot]:
    shapes = {matrix.fqn: tuple(matrix.parameter.shape) for matrix in matrices}
    layers = {matrix.fqn: matrix.boundary_name for matrix in matrices}
    numbers = assign_owners(shapes, layers, num_shards * num_replicas, num_replicas)
    return {fqn: (number % num_shards, number // num_shards) for fqn, number in numbers.items()}


def _describe(model: nn.Module, slots: dict[str, Slot]) -> str:
    """One line a tensor of the model, with its owner if it has one: what all ranks must agree on."""
    lines = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        placed = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
        what = f"{_clean(name)} {tuple(tensor.shape)}{placed} {tensor.dtype}"
        lines.append(f"{what} owner {slots.get(_clean(name))}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------- looking at a dedicated model


def _dedicated(module: nn.Module) -> DedicatedModel | None:
    """DMuon's record of the model whose dedicated matrices the module holds; None when it holds none."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got a {type(module).__name__}")
    records = {m._dmuon: None for m in module.modules() if hasattr(m, "_dmuon")}
    if len(records) > 1:
        raise ValueError(f"{type(module).__name__} holds {len(records)} models dedicated one by one; pass one of them")
    return next(iter(records), None)


def _require_dedicated(model: nn.Module, caller: str) -> DedicatedModel:
    dedicated = _dedicated(model)
    if dedicated is None:
        raise ValueError(
            f"{caller}: {type(model).__name__} has no dedicated parameters; call dmuon.dedicate_params first"
        )
    return dedicated


def owners(model: nn.Module) -> dict[str, Slot]:
    """{FQN: (shard, replicate) slot of its owner} for every dedicated matrix, in model order, equal on every rank."""
    return {p.fqn: p.slot for p in _require_dedicated(model, "owners").params.values()}


def owned_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """{FQN: parameter} of the matrices that this rank owns; after a backward their `.grad` is the averaged gradient.

    To write to a weight enter `unshard`: on a 2-D mesh the owner's replicate peers have copies.
    """
    owned = [p for p in _require_dedicated(model, "owned_params").params.values() if p.is_owner]
    for p in owned:
        p.adopt()
    return {p.fqn: p.sharded for p in owned}


def ownership_table(model: nn.Module) -> str:
    """The ownership map as text: matrices down, owner slots across, the load of each slot below."""
    dedicated = _require_dedicated(model, "ownership_table")
    shapes = {fqn: tuple(p.shape) for fqn, p in dedicated.params.items()}
    names = {module: _clean(name) for name, module in model.named_modules()}
    layers = {p.fqn: names[boundary.module] for boundary in dedicated.boundaries for p in boundary.params}
    shards, replicas = dedicated.mesh.num_shards, dedicated.mesh.num_replicas
    slots = {fqn: p.slot[0] + shards * p.slot[1] for fqn, p in dedicated.params.items()}
    return ownership_map(shapes, layers, slots, shards * replicas, num_replicas=replicas)


@contextmanager
def unshard(module: nn.Module) -> Iterator[None]:
    """Inside the context, every dedicated matrix below `module` is whole on every rank, in its own dtype.

    Every rank of the mesh enters it. What the owner writes (in place) stays; what others write is dropped at the end.
    What FSDP2 shards stays sharded, and a matrix with tensor parallelism a DTensor. A module without dedicated matrices
    is left as it is.
    """
    dedicated, works, before = _dedicated(module), [], []
    members = set(module.modules())
    params = [p for p in dedicated.params.values() if any(m in members for m, _ in p.holders)] if dedicated else []
    if dedicated:
        dedicated.settle()
        dedicated.finish_replicate_broadcasts()
    for p in params:
        p.adopt()
        replicate([p], p.mesh)  # the owner alone may have been written to
        empty = local(p.sharded).new_empty(p.local_shape)
        whole = p.sharded if p.in_column else nn.Parameter(p.wrap(empty), p.sharded.requires_grad)
        works += start_broadcast(local(whole).contiguous(), p.mesh.broadcast_group, p.slot[0])
        before.append((p, p.resting))  # not always `sharded`: contexts nest
        p.resting = whole  # a forward inside the context restores it
        p.hold(whole)
    wait(works)
    try:
        yield
    finally:
        for p, resting in before:
            p.resting = resting
            p.hold(resting)
            replicate([p], p.mesh)
        if dedicated:
            dedicated.invalidate()


# -------------------------------------------------------------------------------------------------- Muon


def _adjusted_lr(lr: float, adjust_lr_fn: str | None, m: int, n: int) -> float:
    """The step size for an (m, n) matrix, as `torch.optim.Muon` adjusts it."""
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(m, n))
    return lr * math.sqrt(max(1, m / n))


class Muon(torch.optim.Optimizer):
    """Muon for the dedicated matrices, `torch.optim.AdamW` for every other parameter: one optimizer, one `step`.

    Each owner updates its own matrices: momentum, Nesterov, Newton-Schulz, decoupled weight decay by the unadjusted
    rate, in the order and with the formulas of `torch.optim.Muon`. Other ranks do nothing for them. All parameters of
    the model are in a group on every rank, so groups, schedulers and `zero_grad` behave alike everywhere.

    Args:
        model: a model that went through `dedicate_params` and `fully_shard`.
        lr: rate of the matrices, before `adjust_lr_fn`.
        momentum: coefficient of the exponential moving average, in [0, 1).
        nesterov: look one step ahead along the momentum.
        weight_decay: of the matrices, decoupled.
        adjust_lr_fn: "match_rms_adamw" (0.2 sqrt(max(m, n)), Moonlight) or "original" (sqrt(max(1, m / n)), Jordan;
            None is the same, as in torch).
        ns_backend: "gram" or "direct"; the same result, "gram" needs fewer FLOPs on long matrices. A matrix that tensor
            parallelism has cut takes neither: see `newton_schulz.tensor_parallel_newton_schulz`.
        ns_steps: iterations; with a list of triples as coefficients, its length.
        ns_coefficients: one triple (a, b, c) or one per iteration.
        ns_dtype: dtype of the iteration; None: float64 for float64 weights, float32 on CPU, float16 on CUDA. Summed
            Gram matrices are float32 at least.
        eps: smallest norm that a gradient is divided by.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: passed to `torch.optim.AdamW`.
        param_groups: groups in torch's form, {"params": [...], option: value}; a group with both families is split.
            None: one group for each family.
        replicate_async: HSDP: leave the new weights in flight to their replicate peers when `step` returns. They arrive
            there before a forward, a state dict or `unshard` needs them; a peer that reads `model.parameters()` itself
            sees the old ones until then. The numbers are the same either way.

    Raises:
        ValueError: a model without dedicated parameters or without FSDP2 on the rest, a negative rate, decay or eps,
            momentum outside [0, 1), an unknown `adjust_lr_fn` or `ns_backend`, steps that the coefficients do not have.
        TypeError: an `ns_dtype` that is no floating-point dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        adjust_lr_fn: str | None = "match_rms_adamw",
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
        self._dedicated, self._replicate_async = _require_dedicated(model, "Muon"), replicate_async
        self._dedicated.invalidate()  # a backward that raised may have left full matrices in the modules
        for p in self._dedicated.params.values():
            p.adopt()
        self._muon_defaults = dict(
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn,
            ns_backend=ns_backend, ns_steps=ns_steps, ns_coefficients=ns_coefficients, ns_dtype=ns_dtype, eps=eps,
        )
        _check_muon_options(self._muon_defaults)
        self._adamw = torch.optim.AdamW(
            [{"params": []}], lr=adamw_lr, betas=adamw_betas, eps=adamw_eps, weight_decay=adamw_weight_decay
        )
        matrices = [p for p in model.parameters() if hasattr(p, "_dedicated_owner_rank")]
        others = [p for p in model.parameters() if not hasattr(p, "_dedicated_owner_rank")]
        _check_sharded(others, self._dedicated)
        groups = [{"params": matrices}, {"params": others}] if param_groups is None else param_groups
        super().__init__(groups, defaults={"lr": lr})

    def add_param_group(self, param_group: dict) -> None:
        """As torch's; what the group does not name is its family's default. A group with both families becomes two."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        params = [p[1] if isinstance(p, tuple) else p for p in params]  # torch takes (name, parameter) too
        families = {
            "muon": [p for p in params if hasattr(p, "_dedicated_owner_rank")],
            "adamw": [p for p in params if not hasattr(p, "_dedicated_owner_rank")],
        }
        for family, members in families.items():
            if members:
                defaults = self._muon_defaults if family == "muon" else self._adamw.defaults
                group = {**defaults, **param_group, "params": members, "family": family}
                if family == "muon":
                    _check_muon_options(group)
                super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step of both families. Like torch's optimizers it does not look for NaN."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._dedicated.settle()
        muon_groups = [group for group in self.param_groups if group["family"] == "muon"]
        owned = [(p, g) for g in muon_groups for p in g["params"] if p.grad is not None and p.requires_grad]
        for p, group in owned:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        cut = [(p, group) for p, group in owned if sums_grams(p)]
        norms = {}
        if cut:  # the same matrices on all ranks of the tensor-parallel mesh
            tp_group = self._dedicated.mesh.tp_mesh.get_group()
            directions = (self._direction(p, group) for p, group in cut)
            norms = dict(zip((p for p, _ in cut), tensor_parallel_norms(directions, tp_group)))
        for p, group in owned:
            self._update(p, group, norms.get(p))
        self._dedicated.start_replicate_broadcasts()
        # `load_state_dict` replaces both objects, so AdamW is pointed at them anew
        self._adamw.param_groups = [group for group in self.param_groups if group["family"] == "adamw"]
        self._adamw.state = self.state
        self._adamw.step()
        self._dedicated.invalidate()
        if not self._replicate_async:
            self._dedicated.finish_replicate_broadcasts()
        return loss

    def _direction(self, p: nn.Parameter, group: dict) -> Tensor:
        """What is orthogonalised: the momentum, or one step ahead along it."""
        momentum = self.state[p]["momentum_buffer"]
        return p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _update(self, p: nn.Parameter, group: dict, norm: Tensor | None) -> None:
        """One owned matrix, by the formulas of `torch.optim.Muon`; p (..., m, n), e.g. (3072, 768)."""
        update = self._direction(p, group)
        options = (group["ns_coefficients"], group["ns_steps"], group["eps"], group["ns_dtype"])
        if sharded_dim(p) is not None:
            update = local(tensor_parallel_newton_schulz(update, *options, norm))
        else:
            orthogonalise = gram_newton_schulz if group["ns_backend"] == "gram" else newton_schulz
            update = orthogonalise(local(update), *options)
        lr = float(group["lr"])
        adjusted = _adjusted_lr(lr, group["adjust_lr_fn"], *p.shape[-2:])  # by the shape of the whole matrix
        local(p).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-adjusted)


def _check_muon_options(options: dict) -> None:
    for name in ("lr", "weight_decay", "eps"):
        if not options[name] >= 0:
            raise ValueError(f"Muon: {name} must be >= 0, not {options[name]}")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"Muon: momentum must be in [0, 1), not {options['momentum']}")
    newton_schulz(
        torch.ones(1, 1), options["ns_coefficients"], options["ns_steps"], options["eps"], options["ns_dtype"]
    )  # here, on every rank: in a step only the owners would see what it refuses
    choices = {"adjust_lr_fn": (None, "original", "match_rms_adamw"), "ns_backend": ("gram", "direct")}
    for name, known in choices.items():
        if options[name] not in known:
            raise ValueError(f"Muon: {name} must be one of {known}, not {options[name]!r}")


def _check_sharded(others: list[nn.Parameter], dedicated: DedicatedModel) -> None:
    """Without FSDP2 nobody averages these gradients, and the ranks would drift apart without a word."""
    trained = [p for p in others if p.requires_grad]
    mesh = dedicated.mesh
    ranks = mesh.num_shards * mesh.num_replicas
    sharded = [p for p in trained if isinstance(p, DTensor) and p.device_mesh != mesh.tp_mesh]
    if ranks > 1 and trained and not sharded:
        raise ValueError("Muon: no parameter is sharded by FSDP2; call fully_shard on the model before dmuon.Muon")
    tp_names = mesh.tp_mesh.mesh_dim_names if mesh.tp_mesh is not None else ()
    for p in sharded:
        sizes = zip(p.device_mesh.mesh_dim_names or (None,) * p.device_mesh.ndim, p.device_mesh.shape)
        if math.prod(size for name, size in sizes if name not in tp_names) != ranks:
            raise ValueError(f"Muon: fully_shard averages a parameter of shape {tuple(p.shape)} over {p.device_mesh}, "
                             f"dedicate_params its matrices over {ranks} ranks; give both the same mesh")


# ----------------------------------------------------------------------------------------------- clipping


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients of both families so that their total norm is at most `max_norm`.

    Mirrors `torch.nn.utils.clip_grad_norm_`; the norm is that of the whole model's averaged gradient.

    Args:
        model: a model that went through `dedicate_params` and `fully_shard`; every rank calls this.
        max_norm: the largest total norm that is left; infinity only measures.
        norm_type: order of the norm: 2.0, 1.0, infinity or any other positive number.
        error_if_nonfinite: raise instead of scaling by a norm that is infinite or NaN.

    Returns:
        The total norm before clipping, a 0-d tensor, float64 for a float64 model, else float32, with the same value on
        every rank; non-finite if a gradient is.

    Raises:
        RuntimeError: on every rank, if `error_if_nonfinite` and the norm is not finite.
    """
    dedicated = _require_dedicated(model, "clip_grad_norm_")
    dedicated.settle()
    norm_type = float(norm_type)
    if norm_type == 0:
        raise ValueError("clip_grad_norm_: norm_type is 0; expected 2.0, 1.0, infinity or another order")
    gradients, counted = [], []
    for p in (p for p in model.parameters() if p.grad is not None):
        gradients.append(local(p.grad))
        if gradients[-1].numel() and dedicated.mesh.counts(p):
            counted.append(gradients[-1])
    norm = torch.nn.utils.get_total_norm(counted, norm_type).to(dedicated.mesh.device, torch.float64)
    for group in dedicated.mesh.groups():
        norms = [torch.empty_like(norm) for _ in range(group.size())]
        dist.all_gather(norms, norm, group=group)  # no MAX reduce for the infinity norm: gloo's drops a NaN
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the total norm is {norm.item()}, some gradient is not finite")
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm if any(p.dtype == torch.float64 for p in model.parameters()) else norm.float()
