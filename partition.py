"""Who owns what? Every matrix has one owner slot; all slots finish Newton-Schulz (NS) together.

An owner slot is the place of one rank in the data-parallel mesh (with tensor parallelism, of the
ranks that cut each matrix between them). It broadcasts its matrices, receives their gradients and
runs NS on them alone, so a step waits for the slot with the most NS work. Four rules, numbered in
the code as here:

1. Units. The small matrices of one layer share an owner, and so a message, up to UNIT_NUMEL
   elements. Others are alone.
2. Longest processing time (LPT) first: the units in order of NS FLOPs, not of elements: GPT-2's
   mlp.up costs twice its attn.q and has four times the elements.
3. Each to the slots that hold fewest units of its layer, and of these to the least loaded: the
   broadcasts of one layer leave from different ranks.
4. Exchanges. The fullest slot and another swap what they own of one layer, while both end below its
   load; rule 3 holds on. LPT alone leaves the fullest of 8 slots 8 % above the mean for GPT-2.

With R replicas (HSDP, hsdp.py) slot s + G r is rank s of row r. Rules 2 to 4 go twice: over the G
shard columns, because a row broadcasts from columns, then over the R slots of each column.

GPT-2 on 4 slots. A cell says in how many layers the slot owns the row's matrix:

    slot (*: in its first layer)  0           1           2           3
    layers.*.attn.q 768x768       6           .           6*          .
    layers.*.attn.k 768x768       .           6           .           6*
    layers.*.attn.v 768x768       6*          .           6           .
    layers.*.attn.o 768x768       .           6*          .           6
    layers.*.mlp.up 3072x768      6*          .           6           .
    layers.*.mlp.down 768x3072    .           6*          .           6
    load, percent of the mean     100         100         100         100
                                  ##########  ##########  ##########  ##########

Nothing here but names and shapes, no process group, no torch: the same on every rank.
`choose_matrices`, lower down, says which parameters of a model are such matrices; the planner at
the end what a known model costs on any mesh. `newton_schulz.py` comes before this file, `hooks.py`
after it.

    $ python partition.py
    gpt2 on 8 ranks, a slot each: in how many layers does it own the matrix?
    72 matrices of 12 layers on 8 of 8 slots
    a slot's NS FLOPs: mean 1.63e+11, max/mean 1.000; its elements: mean 1.06e+07, max/mean 1.000
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Optional

if TYPE_CHECKING:  # planning needs no torch, and choosing goes by names and shapes, too
    from torch import nn

UNIT_NUMEL = 65536  # elements; below it a broadcast costs its latency
# FLOPs of 16 bits that an H100 does in the time of one of float32, by its data sheet: 989 / 67
FLOAT32_PRICE = 15

Shapes = Mapping[str, Sequence[int]]  # by FQN: {"layers.0.attn.q.weight": (768, 768), ...}
# A fused matrix falls along a dimension into matrices of these sizes: (-2, (768, 768, 768))
Blocks = Optional[tuple[int, tuple[int, ...]]]


# -------------------------------------------------------------------------------- the assignment


def ns_flops(shape: Sequence[int], steps: int = 5) -> int:
    """NS FLOPs of a matrix (3072, 768) or a batch (..., 3072, 768).

    By Gram with one restart, or by direct iterations below n = 1.5 m.
    """
    if len(shape) < 2:
        raise ValueError(f"shape={tuple(shape)}: expected a matrix (m, n) or a batch (..., m, n)")
    m, n = sorted(shape[-2:])
    if 2 * n < 3 * m:
        return prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
    restarts = 1 if steps > 2 else 0  # the restart stands before the third iteration
    squares = 2 * steps + 6 * (steps - 1 - restarts)  # m x m x m products' FLOPs over m^3
    return prod(shape[:-2]) * (4 * (1 + restarts) * m * m * n + squares * m**3)


def matrix_flops(shapes: Shapes, blocks: Mapping[str, Blocks]) -> dict[str, int]:
    """FQN -> NS FLOPs; of a fused matrix those of its blocks."""
    return {name: sum(map(ns_flops, block_shapes(shape, blocks.get(name))))
            for name, shape in shapes.items()}


def block_shapes(shape: Sequence[int], blocks: Blocks) -> list[tuple[int, ...]]:
    """(2304, 768) in blocks (-2, (768, 768, 768)) is three matrices of (768, 768)."""
    if blocks is None:
        return [tuple(shape)]
    dim, sizes = blocks
    return [(*shape[:-2], size, shape[-1]) if dim == -2 else (*shape[:-1], size) for size in sizes]


def assign_owners(
    shapes: Shapes,  # in model order
    layers: Mapping[str, str],  # FQN -> its hook boundary: {"layers.0.attn.q.weight": "layers.0"}
    num_slots: int,  # G R: ranks that can own a matrix
    num_replicas: int = 1,  # R: slot s + G r is in shard column s
    blocks: Mapping[str, Blocks] = {},  # of fused matrices
) -> dict[str, int]:
    """FQN -> owner slot, in model order; it depends on the arguments only.

    Raises ValueError for num_slots below 1 or no multiple of num_replicas, or when shapes and
    layers name different matrices.
    """
    if num_slots < 1 or num_replicas < 1 or num_slots % num_replicas:
        raise ValueError(f"num_slots={num_slots}: expected at least 1, the number of ranks that "
                         f"can own a matrix, and a multiple of num_replicas={num_replicas}")
    if shapes.keys() != layers.keys():
        names = sorted(shapes.keys() ^ layers.keys())
        raise ValueError("shapes and layers must name the same matrices; only one of them has "
                         f"{names[:5]}")
    # 1. Units: what has one owner and travels in one message.
    flops = matrix_flops(shapes, blocks)
    units = [Unit(sum(flops[name] for name in names), layers[names[0]], names)
             for names in _pack_units(shapes, layers)]
    owners = {}
    num_shards = num_slots // num_replicas
    for column, in_column in enumerate(_spread_units(units, num_shards)):
        for row, in_slot in enumerate(_spread_units(in_column, num_replicas)):
            slot = column + num_shards * row
            owners.update((name, slot) for unit in in_slot for name in unit.names)
    return {name: owners[name] for name in shapes}


class Unit(NamedTuple):
    """What has one owner."""

    cost: int  # NS FLOPs
    layer: str
    names: list[str]


def _spread_units(units: list[Unit], num_parts: int) -> list[list[Unit]]:
    """The units in parts."""
    # 2. Longest processing time (LPT) first; the sort keeps model order among equals.
    units = sorted(units, key=lambda unit: -unit.cost)
    loads = [0] * num_parts
    held = {unit.layer: [[] for _ in loads] for unit in units}  # by layer, by part
    # 3. Each to the part that holds fewest units of its layer, then to the least loaded.
    for unit in units:
        parts = held[unit.layer]
        part = min(range(num_parts), key=lambda part: (len(parts[part]), loads[part]))
        loads[part] += unit.cost
        parts[part].append(unit)
    # 4. The fullest exchanges what it holds of a layer, while both end below its load.
    bound = max(sum(loads) / num_parts, max((unit.cost for unit in units), default=0))
    while max(loads) > bound and _exchange(held, loads):
        pass
    return [[unit for parts in held.values() for unit in parts[part]] for part in range(num_parts)]


def slot_coordinate(slot: int, num_shards: int) -> tuple[int, int]:
    """(shard, replicate) of slot s + G r."""
    return slot % num_shards, slot // num_shards


def _exchange(held: dict[str, list[list[Unit]]], loads: list[int]) -> bool:
    """Lower the fullest part by an exchange within a layer, which keeps rule 3, or return False.

    The other part is the emptiest one that has such an exchange.
    """
    cost = lambda units: sum(unit.cost for unit in units)
    full = max(range(len(loads)), key=loads.__getitem__)
    for other in sorted(range(len(loads)), key=loads.__getitem__):
        for parts in held.values():
            moved = cost(parts[full]) - cost(parts[other])
            if 0 < moved < loads[full] - loads[other]:
                parts[full], parts[other] = parts[other], parts[full]
                loads[full] -= moved
                loads[other] += moved
                return True
    return False


def _pack_units(shapes: Shapes, layers: Mapping[str, str]) -> list[list[str]]:
    """Large matrices alone, small ones of a layer together; in order of their first matrix."""
    units = []
    unit_of = {}  # layer -> the unit that takes its next small matrix, if there is room
    room = {}  # layer -> elements left in it
    for name, shape in shapes.items():
        layer, numel = layers[name], prod(shape)
        if numel <= room.get(layer, -1):
            unit_of[layer].append(name)
            room[layer] -= numel
            continue
        units.append([name])
        if numel < UNIT_NUMEL:
            unit_of[layer] = units[-1]
            room[layer] = UNIT_NUMEL - numel
    return units


# ------------------------------------------------------------------------------------ the picture


def slot_loads(shapes: Shapes, owners: Mapping[str, int], num_slots: int,
               blocks: Mapping[str, Blocks] = {}) -> list[int]:
    """NS FLOPs of each slot in one optimizer step."""
    return _per_slot(matrix_flops(shapes, blocks), owners, num_slots)


def _per_slot(values: Mapping[str, float], owners: Mapping[str, int],
              num_slots: int) -> list[float]:
    """The sum over what each slot owns."""
    sums = [0] * num_slots
    for name, slot in owners.items():
        sums[slot] += values[name]
    return sums


def ownership_map(
    shapes: Shapes,
    layers: Mapping[str, str],
    owners: Mapping[str, int],
    num_slots: int,
    max_width: int = 110,  # characters in a line
    num_replicas: int = 1,  # with several, a slot is named by its coordinate: shard,replicate
    blocks: Mapping[str, Blocks] = {},
) -> str:
    """A row a matrix of one layer, a column a slot; below, the loads.

    A cell says in how many layers the slot owns the matrix. Where lines would exceed `max_width`,
    the rows say only how many matrices there are.
    """
    rows = defaultdict(list)
    for name, shape in shapes.items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", name).removesuffix(".weight")
        rows[f"{kind} {'x'.join(map(str, shape))}"].append(name)
    loads = slot_loads(shapes, owners, num_slots, blocks)
    head = ["slot (*: in its first layer)", *map(str, range(num_slots))]
    if num_replicas > 1:
        pairs = (slot_coordinate(slot, num_slots // num_replicas) for slot in range(num_slots))
        head = ["slot: shard,replicate (*: in its first layer)", *(f"{s},{r}" for s, r in pairs)]
    lines = _columns(rows, layers, owners, loads, head, max_width)
    lines = lines or [f"{row}: {len(names)} matrices" for row, names in rows.items()]
    used = len(set(owners.values()))
    numels = {name: prod(shape) for name, shape in shapes.items()}
    summary = (f"{len(owners)} matrices of {len(set(layers.values()))} layers on {used} of "
               f"{num_slots} slots")
    if used < num_slots:
        summary += f", {num_slots - used} own nothing"
    elements = _spread(_per_slot(numels, owners, num_slots))
    return "\n".join([*lines, summary, f"a slot's NS FLOPs: {_spread(loads)}; its elements: "
                      f"{elements}"])


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    return f"mean {mean:.2e}, max/mean {max(values) / (mean or 1):.3f}"


def _columns(rows: Mapping[str, list[str]], layers: Mapping[str, str], owners: Mapping[str, int],
             loads: list[int], head: list[str], max_width: int) -> list[str]:
    """The lines of the table, or none where the columns would be too narrow."""
    table = [head]
    for row, names in rows.items():
        counts = Counter(owners[name] for name in names)
        first = {owners[name] for name in names if layers[name] == layers[names[0]]}
        table.append([row, *(f"{counts[slot] or '.'}{'*' if slot in first else ''}"
                             for slot in range(len(loads)))])
    mean = sum(loads) / len(loads) or 1
    table.append(["load, percent of the mean", *(f"{100 * load / mean:.0f}" for load in loads)])
    label = max(len(line[0]) for line in table)
    width = min(10, (max_width - label) // len(loads) - 2)
    if width < max(len(text) for line in table for text in line[1:]):
        return []
    table.append(["", *("#" * round(width * load / max(*loads, 1)) for load in loads)])
    padded = ([line[0].ljust(label), *(text.ljust(width) for text in line[1:])] for line in table)
    return ["  ".join(line).rstrip() for line in padded]


# ---------------------------------------------------------------------- which matrices of a model

# Llama, BERT, ViT and GPT-2 name their blocks so
LAYER_NAME = re.compile(r"(^|\.)(layers|layer|blocks|h)\.\d+$")
# Of torch.compile and checkpoint_wrapper
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")
CONVOLUTION = "_ConvNd"  # torch's class above all convolutions
NO_MATRICES = ("Embedding", "EmbeddingBag", "LayerNorm", "RMSNorm", CONVOLUTION)


@dataclass
class Matrix:
    """A parameter that is to be dedicated: where it is held and which boundary unshards it."""

    fqn: str
    parameter: nn.Parameter
    holders: list[tuple[nn.Module, str]]
    boundary: nn.Module
    boundary_name: str
    blocks: Blocks


def clean(name: str) -> str:
    """A name without the components that wrappers insert."""
    return WRAPPERS.sub("", name).lstrip(".")


def _is_a(module: nn.Module, *names: str) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _has_forward(module: nn.Module) -> bool:
    # A ModuleList has none: its hooks never run
    return type(module).forward.__name__ != "_forward_unimplemented"


def _find_boundary(path: str, modules: dict[str, nn.Module],
                   is_boundary: Callable | None) -> str | None:
    """The path of the lowest hook boundary around a module, or None."""
    while True:
        module = modules[path]
        if is_boundary is None:
            found = LAYER_NAME.search(clean(path)) and _has_forward(module)
        else:
            found = is_boundary(module)
        if found and not _has_forward(module):
            raise ValueError(f"hook_boundary_predicate is true for '{path}', a "
                             f"{type(module).__name__} without a forward: its hooks would never "
                             "run; choose the modules in it, or the one around it")
        if found or not path:
            return path if found else None
        path = path.rpartition(".")[0]


def _common_boundary(fqn: str, places: list[tuple[str, str]], modules: dict[str, nn.Module],
                     is_boundary: Callable | None, strict: bool) -> str:
    """The path of the one boundary around all places that hold this parameter."""
    found = {}  # boundary module -> its path
    for path, _ in places:
        boundary = _find_boundary(path, modules, is_boundary)
        if boundary is None and strict:
            raise ValueError(f"dedicate_params: no hook boundary around '{fqn}'. Pass a "
                             "hook_boundary_predicate that is true for its layer, or "
                             f"hook_boundary_strict=False to let '{clean(path)}' be its own "
                             "boundary")
        boundary = path if boundary is None else boundary
        found.setdefault(modules[boundary], boundary)
    if len(found) > 1:
        names = " and ".join(f"'{clean(f'{path}.{name}')}'" for path, name in places)
        raise ValueError("dedicate_params: one parameter is tied across hook boundaries, as "
                         f"{names}. Choose a hook boundary that contains them all, or make the "
                         "predicate leave it to FSDP2")
    return next(iter(found.values()))


def _is_default_matrix(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """What Muon is for: (stacked) matrices of linear maps; no embedding, norm, bias table."""
    usual = parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
    usual = usual and parameter.is_floating_point() and not re.search("bias|embed", name)
    return usual and not _is_a(module, *NO_MATRICES)


def _check_matrix(fqn: str, parameter: nn.Parameter, module: nn.Module) -> None:
    """Refuse what the user's predicate chose and Newton-Schulz cannot take."""
    placements = getattr(parameter, "placements", ())
    shape, leave_it = f"has shape {tuple(parameter.shape)}:", "make the predicate leave it"
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in placements):
        problem = (f"has placements {placements}; tensor parallelism may use Shard and Replicate "
                   "only")
    elif parameter.ndim < 2:
        kind = "vector" if parameter.ndim else "scalar"
        problem = f"{shape} a {kind} has no singular vectors; {leave_it} to AdamW"
    elif parameter.ndim > 3 or _is_a(module, CONVOLUTION):
        problem = f"{shape} a convolution kernel is not a matrix; {leave_it} to AdamW"
    elif parameter.numel() == 0:
        problem = f"{shape} an empty matrix looks like a placeholder; {leave_it} out"
    elif not parameter.is_floating_point():
        problem = (f"has dtype {parameter.dtype}; only real floating-point matrices can be "
                   "orthogonalised")
    else:
        return
    raise ValueError(f"dedicate_params: parameter '{fqn}' {problem}")


def _blocks_of(fqn: str, parameter: nn.Parameter, blocks: Callable | None) -> Blocks:
    """What the user's `blocks` returns for a matrix, in one form; ValueError if it is wrong."""
    shape, found = tuple(parameter.shape), None
    try:
        found = blocks and blocks(fqn, parameter)
        if found is None:
            return None
        dim, sizes = found
        sizes = tuple(map(index, sizes))
        if dim not in (-2, -1) or min(sizes) < 1 or sum(sizes) != shape[dim]:
            raise ValueError("they do not fit")
    except Exception as error:
        raise ValueError(f"dedicate_params: blocks of '{fqn}' of shape {shape}: {found!r} "
                         f"({type(error).__name__}: {error}); expected None or (dim, sizes), dim "
                         "-2 or -1 and sizes that add up to the matrix's along dim") from error
    ends = {*accumulate(sizes)}
    for placement in getattr(parameter, "placements", ()):
        if placement.is_shard() and placement.dim - parameter.ndim == dim:
            part = -(-shape[dim] // parameter.device_mesh.size())  # as torch cuts
            cut = [end for end in range(part, shape[dim], part) if end not in ends]
            if cut:
                raise ValueError(f"dedicate_params: blocks of '{fqn}' of shape {shape}: tensor "
                                 f"parallelism cuts dim {dim} at {cut[0]}, within a block of "
                                 f"{sizes}; choose another tp, or cut the other dimension")
    return dim, sizes


def choose_matrices(model: nn.Module, predicate: Callable | None, blocks: Callable | None,
                    is_boundary: Callable | None, strict: bool) -> list[Matrix]:
    """Every matrix that gets an owner, in model order, with its holders and its boundary.

    The arguments are those of `dmuon.dedicate_params`. Raises ValueError when nothing is chosen,
    and names a parameter that is no matrix, has no boundary or is tied across two, or does not fall
    into its blocks.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    held: dict[nn.Parameter, list[tuple[str, str]]] = {}  # its (module path, attribute name)s
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            held.setdefault(parameter, []).append((path, name))
    matrices, candidates = [], []
    for parameter, places in held.items():
        path, name = places[0]
        fqn = clean(f"{path}.{name}")
        usual = all(_is_default_matrix(n, parameter, modules[p]) for p, n in places)
        if usual:
            candidates.append(fqn)
        if predicate is None:
            chosen = usual and _find_boundary(path, modules, is_boundary) is not None
        else:
            chosen = predicate(fqn, parameter)
        if not chosen or not parameter.requires_grad:
            continue  # a frozen parameter stays with FSDP2
        _check_matrix(fqn, parameter, modules[path])
        boundary = _common_boundary(fqn, places, modules, is_boundary, strict)
        holders = [*dict.fromkeys((modules[p], n) for p, n in places)]
        parts = _blocks_of(fqn, parameter, blocks)
        matrices.append(Matrix(fqn, parameter, holders, modules[boundary], clean(boundary), parts))
    if not matrices:
        names = ", ".join(candidates[:12]) or "none"
        more = ", ..." if len(candidates) > 12 else ""
        raise ValueError("dedicate_params: no trainable matrix was chosen. By default that is "
                         "every matrix inside layers.N, layer.N, blocks.N or h.N; pass predicate "
                         "and hook_boundary_predicate for other names. Matrices in this model: "
                         f"{names}{more}")
    return matrices


def assign_matrices(matrices: list[Matrix], num_slots: int, num_replicas: int) -> dict[str, int]:
    """FQN -> owner slot, of a model's matrices; see `assign_owners`."""
    shapes = {matrix.fqn: tuple(matrix.parameter.shape) for matrix in matrices}
    layers = {matrix.fqn: matrix.boundary_name for matrix in matrices}
    blocks = {matrix.fqn: matrix.blocks for matrix in matrices}
    return assign_owners(shapes, layers, num_slots, num_replicas, blocks)


# ------------------------------------------------------------------------------------ the planner


def _gpt2(width: int) -> Shapes:
    square, wide = (width, width), 4 * width
    attention = {f"attn.{name}": square for name in "qkvo"}
    return {**attention, "mlp.up": (wide, width), "mlp.down": (width, wide)}


def _llama(width: int, q: int, kv: int, mlp: int, *experts: int) -> Shapes:
    up = (*experts, mlp, width)
    shapes = {"attn.q": (q, width), "attn.k": (kv, width), "attn.v": (kv, width),
              "attn.o": (width, q)}
    if experts:
        shapes["mlp.router"] = (*experts, width)
    return {**shapes, "mlp.gate": up, "mlp.up": up, "mlp.down": (*experts, width, mlp)}


# name: (layers, elements outside of them and in their norms and biases, experts a token takes, a
# layer's matrices)
_MODELS = {
    "gpt2": (12, (50257 + 1024 + 2 + 12 * 13) * 768, 1, _gpt2(768)),
    "gpt2-xl": (48, (50257 + 1024 + 2 + 48 * 13) * 1600, 1, _gpt2(1600)),
    "llama3-8b": (32, (2 * 128256 + 1 + 32 * 2) * 4096, 1, _llama(4096, 4096, 1024, 14336)),
    "llama3-70b": (80, (2 * 128256 + 1 + 80 * 2) * 8192, 1, _llama(8192, 8192, 1024, 28672)),
    "llama3-405b": (126, (2 * 128256 + 1 + 126 * 2) * 16384, 1,
                    _llama(16384, 16384, 1024, 53248)),
    "qwen3-30b-a3b": (48, (2 * 151936 + 1 + 48 * 2) * 2048 + 48 * 256, 8,
                      _llama(2048, 4096, 512, 768, 128)),
}


def model_shapes(model: str) -> tuple[dict[str, Sequence[int]], dict[str, str]]:
    """The shapes and layers of a known model, as `assign_owners` takes them."""
    if model not in _MODELS:
        raise ValueError(f"model={model!r}: expected one of {', '.join(_MODELS)}")
    num_layers, _, _, matrices = _MODELS[model]
    shapes, layers = {}, {}
    for i in range(num_layers):
        for name, shape in matrices.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            layers[f"layers.{i}.{name}.weight"] = f"layers.{i}"
    return shapes, layers


def step_traffic(
    matrices: int,  # elements of dedicated matrices; with tensor parallelism, of this rank's parts
    rest: int,  # elements that FSDP2 shards, rows rounded up to a multiple of num_shards
    num_shards: int,
    num_replicas: int = 1,
    zero: int = 3,  # Z3 brings weights to the ranks twice a step, Z2 once
    naive: bool = False,  # FSDP2 alone, and every rank gathers every matrix for Newton-Schulz
) -> dict[str, float]:
    """Elements that a rank sends in a step of one micro-batch, on average over the ranks, by link.

    Dedicated matrices cost what FSDP2's parameters cost: a broadcast is an all-gather, and a reduce
    to the owner a reduce-scatter, with one rank's part being all of it. With HSDP stage two and the
    replicate broadcast send together what an all-reduce sends. On rings: an element that must reach
    N ranks is sent N - 1 times.
    """
    everything, others = matrices + rest, num_shards - 1
    return {
        "unshard": (zero - 1) * others * everything / num_shards,
        "reduce": others * everything / num_shards,
        "replicate": 2 * (num_replicas - 1) * everything / (num_shards * num_replicas),
        "gather": others * matrices / num_shards if naive else 0,
    }


def tensor_parallel_cost(shape: Sequence[int], dim: int | None,
                         ranks: int) -> tuple[float, float, float]:
    """NS FLOPs of the matrix's home, and of every rank; elements that a rank sends, on average.

    dim, along which the matrix is cut, is -2, -1 or None: not cut. The two ways are those of
    `newton_schulz.tensor_parallel_newton_schulz`.
    """
    if dim is None or ranks == 1:
        return 0, ns_flops(shape), 0
    long, d, experts, share = shape[dim], shape[-3 - dim], prod(shape[:-2]), (ranks - 1) / ranks
    if not _sums_grams(shape, dim, ranks):
        part = experts * d * -(-long // ranks)
        return ns_flops(shape), 0, 2 * share * (part + experts)
    everywhere = experts * 4 * d * d * long / ranks
    return experts * 34 * d**3, everywhere, 2 * share * experts * (d * d + 1)  # Gram matrix, norm


def _sums_grams(shape: Sequence[int], dim: int | None, ranks: int) -> bool:
    """Whether the ranks sum Gram matrices, in float32: the cut dimension is the long one."""
    return dim is not None and ranks > 1 and shape[dim] >= shape[-3 - dim]


def assign_homes(cut: Sequence[tuple[Sequence[int], int | None]], ranks: int) -> list[int]:
    """A tensor-parallel rank for each (shape, dim) of a slot: longest processing time first."""
    units = [Unit(tensor_parallel_cost(shape, dim, ranks)[0], str(i), [str(i)])
             for i, (shape, dim) in enumerate(cut)]
    parts = enumerate(_spread_units(units, ranks))
    home_of = {unit.layer: rank for rank, part in parts for unit in part}
    return [home_of[unit.layer] for unit in units]


def plan(model: str, shard: int, replicate: int, tp: int, tokens: int) -> Iterator[str]:
    """What a step of a known model costs on a (replicate, shard, tp) mesh: the planner's lines.

    tokens: of a step, over all ranks. Tensor parallelism cuts the matrices (o and down along their
    columns, the others along their rows, a router not at all), and nothing else. Weights, gradients
    and momenta are float32, full matrices bfloat16. Raises ValueError for an unknown model, a
    number below 1, a tp that does not divide what it cuts.
    """
    for name, value in dict(shard=shard, replicate=replicate, tp=tp, tokens=tokens).items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    (shapes, layers), (_, rest, experts, _) = model_shapes(model), _MODELS[model]
    slots = shard * replicate
    owners = assign_owners(shapes, layers, slots, replicate)
    yield f"{model}: {sum(map(prod, shapes.values())):,} elements in matrices, {rest:,} elsewhere"
    yield (f"mesh: replicate {replicate} x shard {shard} x tp {tp} = {slots * tp:,} ranks; "
           f"{tokens:,} tokens a step")
    yield ownership_map(shapes, layers, owners, slots, num_replicas=replicate)

    dims = {name: _cut_dim(name, shape, tp) for name, shape in shapes.items()}
    numel = {name: prod(shape) // (tp if dims[name] else 1) for name, shape in shapes.items()}
    yield from _plan_traffic(shapes, dims, numel, rest, (shard, replicate, tp))
    yield from _plan_memory(layers, owners, numel, rest, (shard, replicate))
    active = sum(prod(shape) * (experts / shape[0] if len(shape) == 3 else 1)
                 for shape in shapes.values())
    yield from _plan_flops(shapes, dims, owners, 6 * active * tokens / (slots * tp), slots, tp)


def _cut_dim(name: str, shape: Sequence[int], tp: int) -> int | None:
    """The dimension along which tensor parallelism cuts a matrix."""
    if "router" in name:
        return None
    dim = -1 if name.endswith((".o.weight", ".down.weight")) else -2
    if shape[dim] % tp:
        raise ValueError(f"tp={tp}: does not divide {shape[dim]}, a size of {name} {shape}")
    return dim


def _plan_traffic(shapes: Shapes, dims: dict, numel: dict, rest: int,
                  mesh: tuple[int, int, int]) -> Iterator[str]:
    shard, replicate, tp = mesh
    costs = [tensor_parallel_cost(shape, dims[name], tp) for name, shape in shapes.items()]
    sent = sum(elements for *_, elements in costs) / (shard * replicate)
    gathered = sum(prod(shape) for name, shape in shapes.items() if dims[name]) * (tp - 1) / tp
    head = ("unshard", "reduce", "replicate", "gather", "tp (NS)")
    yield "elements that a rank sends in a step, on average"
    yield f"{'':10}" + "".join(f"{link:>16}" for link in head)
    padded = -(-rest // shard) * shard
    for kind, zero, naive in (("Z2", 2, False), ("Z3", 3, False), ("naive Z3", 3, True)):
        links = step_traffic(sum(numel.values()), padded, shard, replicate, zero, naive)
        columns = [*links.values(), gathered if naive else sent]
        yield f"  {kind:8}" + "".join(f"{elements:16,.0f}" for elements in columns)


def _plan_memory(layers: Mapping[str, str], owners: Mapping[str, int], numel: dict, rest: int,
                 mesh: tuple[int, int]) -> Iterator[str]:
    shard, replicate = mesh
    in_slot, in_layer = _per_slot(numel, owners, shard * replicate), Counter()
    for name, layer in layers.items():
        in_layer[layer] += numel[name]
    column, own = max(sum(in_slot[s::shard]) for s in range(shard)), -(-rest // shard)
    sizes = {
        "weights": 4 * (column + own),
        "gradients": 4 * (max(in_slot) + own),
        "momenta": 4 * max(in_slot),
        "AdamW's": 8 * own,
        "full matrices in Z2": 2 * sum(numel.values()),
        "of two layers in Z3": 4 * max(in_layer.values()),
    }
    yield ("GiB of the fullest rank between steps (float32), and of full matrices within "
           "(bfloat16)")
    yield "  " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items())


def _plan_flops(shapes: Shapes, dims: dict, owners: Mapping[str, int], own_flops: float,
                slots: int, tp: int) -> Iterator[str]:
    """`own_flops` are those of a rank's forward and backward."""
    flops, prices = [0.0] * slots * tp, [0.0] * slots * tp
    for slot in range(slots):
        names = [name for name, owner in owners.items() if owner == slot]
        homes = assign_homes([(shapes[name], dims[name]) for name in names], tp)
        for name, home in zip(names, homes):
            at_home, everywhere, _ = tensor_parallel_cost(shapes[name], dims[name], tp)
            price = FLOAT32_PRICE if _sums_grams(shapes[name], dims[name], tp) else 1
            for rank in range(tp):
                own = everywhere + at_home if rank == home else everywhere
                flops[slot * tp + rank] += own
                prices[slot * tp + rank] += own * price
    yield (f"a rank's NS FLOPs: {_spread(flops)}; the slowest: {max(flops) / own_flops:.2%} of its "
           "forward and backward (6 FLOPs a token and active matrix element)")
    if tp > 1:
        yield (f"  and {max(prices) / own_flops:.1%} of its time, if a float32 FLOP, as of summed "
               f"Gram matrices, takes as long as {FLOAT32_PRICE} of 16 bits")


def _demonstrate() -> None:
    print("gpt2 on 8 ranks, a slot each: in how many layers does it own the matrix?")
    shapes, layers = model_shapes("gpt2")
    owners = assign_owners(shapes, layers, 8)
    print(ownership_map(shapes, layers, owners, 8))
    places = Counter((layers[name], slot) for name, slot in owners.items())
    assert max(places.values()) == 1, "no rank owns two matrices of one layer"
    loads = slot_loads(shapes, owners, 8)
    assert max(loads) <= 1.01 * sum(loads) / 8, "the loads are balanced"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="With --model its plan; without any option a demonstration.")
    parser.add_argument("--model", choices=_MODELS, required=len(sys.argv) > 1)
    for option, default, text in (
        ("shard", 8, "ranks that share a replica of the model"), ("replicate", 1, "replicas"),
        ("tp", 1, "ranks that cut each matrix"), ("tokens", 524288, "of a step, all ranks"),
    ):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"{text} [{default}]")
    args = parser.parse_args()
    try:
        _demonstrate() if args.model is None else print("\n".join(plan(**vars(args))))
    except ValueError as error:
        parser.error(str(error))
