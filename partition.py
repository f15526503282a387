"""Who owns what? Every matrix has one owner slot, chosen so that all slots finish Newton-Schulz (NS) together.

An owner slot is the place of one rank in the data-parallel mesh (with tensor parallelism, of the ranks that cut each
matrix between them). It broadcasts its matrices, receives their gradients and runs NS on them alone, so a step waits
for the slot with the most NS work. Four rules, numbered in the code as here:

1. Units. The small matrices of one layer share an owner, and so a message, up to UNIT_NUMEL elements. Others are alone.
2. Longest processing time (LPT) first: the units in order of NS FLOPs, not of elements: GPT-2's mlp.up costs twice its
   attn.q and has four times the elements.
3. Each to the slots that hold fewest units of its layer (none, while there are such), and of these to the least
   loaded: the broadcasts of one layer leave from different ranks. With R replicas (HSDP, hsdp.py) slot s + G r is rank
   s of row r; a shard column is R slots, and the rule goes by columns first, because a row broadcasts from columns.
4. Exchanges. The fullest slot and another swap what they own of one layer, while both end below its load; rule 3
   holds on. LPT alone leaves the fullest of 8 slots 8 % above the mean for GPT-2, with the exchanges it has the mean.

GPT-2 on 4 slots, one a column. A cell says in how many layers the slot owns the row's matrix, the bars its NS FLOPs:

    slot (*: in its first layer)  0           1           2           3
    layers.*.attn.q 768x768       6           .           6*          .
    layers.*.attn.k 768x768       .           6           .           6*
    layers.*.attn.v 768x768       6*          .           6           .
    layers.*.attn.o 768x768       .           6*          .           6
    layers.*.mlp.up 3072x768      6*          .           6           .
    layers.*.mlp.down 768x3072    .           6*          .           6
    load, percent of the mean     100         100         100         100
                                  ##########  ##########  ##########  ##########

The slowest slot sets the time: it has at most 1 % more than the mean for Llama-3-8B on 8 and 16 slots, Llama-3-70B on
8, 16 and 64. Nothing here but names and shapes: the same on every rank, no process group, no torch, Llama-3-405B on
1,024 slots in half a second. `choose_matrices`, lower down, says which parameters of a model are such matrices, and in
which hook boundary. At the end the planner: what a known model costs on a mesh of any size.

    $ python partition.py --model=llama3-70b --shard=8 --replicate=16 --tp=8 --tokens=4194304

`newton_schulz.py` comes before this file, `hooks.py` after it. As a demonstration:

    $ python partition.py
    layers.*.attn.q 768x768       3         .         1*        .         5         .         3         .
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
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # planning needs no torch, and choosing goes by names and shapes, too
    import torch
    from torch import nn

UNIT_NUMEL = 65536  # elements; below it a broadcast costs its latency, so small matrices of a layer share one message
FLOAT32_PRICE = 15  # FLOPs of 16 bits that an H100 does in the time of one of float32, by its data sheet: 989 / 67


# ------------------------------------------------------------------------------------------ the assignment


def ns_flops(shape: Sequence[int], steps: int = 5) -> int:
    """NS FLOPs of a matrix (3072, 768) or a batch (..., 3072, 768): Gram with one restart, direct below n = 1.5 m."""
    if len(shape) < 2:
        raise ValueError(f"shape={tuple(shape)}: expected a matrix (m, n) or a batch (..., m, n)")
    *batch, m, n = *shape[:-2], *sorted(shape[-2:])
    if 2 * n < 3 * m:
        return prod(batch) * steps * (4 * m * m * n + 2 * m**3)
    restarts = 1 if steps > 2 else 0  # the restart stands before the third iteration
    return prod(batch) * (4 * (1 + restarts) * m * m * n + (2 * steps + 6 * (steps - 1 - restarts)) * m**3)


def assign_owners(
    shapes: Mapping[str, Sequence[int]],  # FQN -> shape, in model order: {"layers.0.attn.q.weight": (768, 768), ...}
    layers: Mapping[str, str],  # FQN -> name of its hook boundary: {"layers.0.attn.q.weight": "layers.0", ...}
    num_slots: int,  # G R: ranks that can own a matrix
    num_replicas: int = 1,  # R: slot s + G r is in shard column s
) -> dict[str, int]:
    """FQN -> owner slot, in model order; the same on every rank, because it depends on the arguments only.

    Raises ValueError for num_slots below 1 or no multiple of num_replicas, or when shapes and layers name different
    matrices.
    """
    if num_slots < 1 or num_replicas < 1 or num_slots % num_replicas:
        raise ValueError(f"num_slots={num_slots}: expected at least 1, the number of ranks that can own a matrix, and "
                         f"a multiple of num_replicas={num_replicas}")
    if shapes.keys() != layers.keys():
        names = sorted(shapes.keys() ^ layers.keys())
        raise ValueError(f"shapes and layers must name the same matrices; only one of them has {names[:5]}")
    # 1. Units: what has one owner and travels in one message.
    units = _pack_units(shapes, layers)
    # 2. Longest processing time (LPT) first, by NS FLOPs; the sort is stable and keeps model order among equals.
    costs = [sum(ns_flops(shapes[name]) for name in unit) for unit in units]
    # 3. Each to the column and slot that hold fewest units of its layer, and of these to the least loaded.
    num_shards = num_slots // num_replicas
    loads, column_loads = [0] * num_slots, [0] * num_shards
    held = {layer: [[] for _ in range(num_slots)] for layer in layers.values()}  # layer -> slot -> its (cost, unit)s
    for cost, unit in sorted(zip(costs, units), key=lambda pair: -pair[0]):
        slots = held[layers[unit[0]]]
        columns = [sum(map(len, slots[s::num_shards])) for s in range(num_shards)]
        fewest = min(columns)
        allowed = [s for s in range(num_slots) if columns[s % num_shards] == fewest]
        slot = min(allowed, key=lambda s: (len(slots[s]), loads[s], column_loads[s % num_shards]))
        loads[slot] += cost
        column_loads[slot % num_shards] += cost
        slots[slot].append((cost, unit))
    # 4. The fullest slot exchanges its part of a layer with that of another, while both end below its load.
    bound = max(sum(loads) / num_slots, max(costs, default=0))
    while max(loads) > bound and _exchange(held, loads, num_shards):
        pass
    owners = {name: s for slots in held.values() for s, part in enumerate(slots) for _, unit in part for name in unit}
    return {name: owners[name] for name in shapes}


def slot_coordinate(number: int, num_shards: int) -> tuple[int, int]:
    """(shard, replicate) of a slot."""
    return number % num_shards, number // num_shards


def slot_number(coordinate: tuple[int, int], num_shards: int) -> int:
    """The rank of a slot in (replicate, shard) order; `slot_coordinate` backwards."""
    return coordinate[0] + num_shards * coordinate[1]


def _exchange(held: dict[str, list[list[tuple]]], loads: list[int], num_shards: int) -> bool:
    """Lower the fullest slot by an exchange that keeps rule 3, with the emptiest slot that has one, or return False."""
    full = max(range(len(loads)), key=loads.__getitem__)
    for other in sorted(range(len(loads)), key=loads.__getitem__):
        for slots in held.values():
            give, take = slots[full], slots[other]
            moved = sum(cost for cost, _ in give) - sum(cost for cost, _ in take)
            if not 0 < moved < loads[full] - loads[other]:
                continue
            columns = [sum(map(len, slots[s % num_shards :: num_shards])) for s in (full, other)]
            if (full - other) % num_shards == 0 or len(give) - len(take) in (0, columns[0] - columns[1]):
                slots[full], slots[other] = take, give
                loads[full] -= moved
                loads[other] += moved
                return True
    return False


def _pack_units(shapes: Mapping[str, Sequence[int]], layers: Mapping[str, str]) -> list[list[str]]:
    """In order of their first matrix: large matrices alone, small ones of a layer together up to UNIT_NUMEL."""
    units = []
    open_units = {}  # layer -> the unit that takes its next small matrix, if there is room
    room = {}  # layer -> elements left in it
    for name, shape in shapes.items():
        layer, numel = layers[name], prod(shape)
        if numel <= room.get(layer, -1):
            open_units[layer].append(name)
            room[layer] -= numel
            continue
        units.append([name])
        if numel < UNIT_NUMEL:
            open_units[layer] = units[-1]
            room[layer] = UNIT_NUMEL - numel
    return units


# ------------------------------------------------------------------------------------------ the picture


def slot_loads(shapes: Mapping[str, Sequence[int]], owners: Mapping[str, int], num_slots: int) -> list[int]:
    """NS FLOPs of each slot in one optimizer step."""
    return _per_slot({name: ns_flops(shape) for name, shape in shapes.items()}, owners, num_slots)


def _per_slot(values: Mapping[str, float], owners: Mapping[str, int], num_slots: int) -> list[float]:
    """The sum over what each slot owns."""
    sums = [0] * num_slots
    for name, slot in owners.items():
        sums[slot] += values[name]
    return sums


def ownership_map(
    shapes: Mapping[str, Sequence[int]],
    layers: Mapping[str, str],
    owners: Mapping[str, int],
    num_slots: int,
    max_width: int = 110,  # characters in a line
    num_replicas: int = 1,  # with more than one, a slot is named by its coordinate: shard,replicate
) -> str:
    """A row a matrix of one layer, a column a slot, a cell in how many layers it owns the matrix; below, the loads.

    Where lines would exceed `max_width`, the rows say only how many matrices there are.
    """
    rows = defaultdict(list)
    for name, shape in shapes.items():
        kind = ".".join("*" if part.isdigit() else part for part in name.split(".")).removesuffix(".weight")
        rows[f"{kind} {'x'.join(map(str, shape))}"].append(name)
    loads = slot_loads(shapes, owners, num_slots)
    num_shards = num_slots // num_replicas
    coordinates = (slot_coordinate(number, num_shards) for number in range(num_slots))
    slots = [f"{shard},{replicate}" if num_replicas > 1 else str(shard) for shard, replicate in coordinates]
    head = [f"slot{': shard,replicate' * (num_replicas > 1)} (*: in its first layer)", *slots]
    lines = _columns(rows, layers, owners, loads, head, max_width)
    lines = lines or [f"{row}: {len(rows[row])} matrices" for row in rows]
    used = len(set(owners.values()))
    elements = _per_slot({name: prod(shape) for name, shape in shapes.items()}, owners, num_slots)
    idle = f", {num_slots - used} own nothing" if used < num_slots else ""
    lines.append(f"{len(owners)} matrices of {len(set(layers.values()))} layers on {used} of {num_slots} slots{idle}")
    lines.append(f"a slot's NS FLOPs: {_spread(loads)}; its elements: {_spread(elements)}")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    return f"mean {mean:.2e}, max/mean {max(values) / (mean or 1):.3f}"


def _columns(rows: Mapping[str, list[str]], layers: Mapping[str, str], owners: Mapping[str, int], loads: list[int],
             head: list[str], max_width: int) -> list[str]:
    """The lines of the table, or none where the columns would be too narrow."""
    table = [head]
    for row, names in rows.items():
        counts = Counter(owners[name] for name in names)
        first = {owners[name] for name in names if layers[name] == layers[names[0]]}
        table.append([row, *(f"{counts[s] or '.'}{'*' if s in first else ''}" for s in range(len(loads)))])
    mean = sum(loads) / len(loads)
    table.append(["load, percent of the mean", *(f"{100 * load / (mean or 1):.0f}" for load in loads)])
    label = max(len(line[0]) for line in table)
    width = min(10, (max_width - label) // len(loads) - 2)
    if width < max(len(text) for line in table for text in line[1:]):
        return []
    table.append(["", *("#" * round(width * load / max(*loads, 1)) for load in loads)])
    return ["  ".join([line[0].ljust(label), *(text.ljust(width) for text in line[1:])]).rstrip() for line in table]


# ------------------------------------------------------------------------------------------ which matrices of a model

LAYER_NAME = re.compile(r"(^|\.)(layers|layer|blocks|h)\.\d+$")  # Llama, BERT, ViT and GPT-2 name their blocks so
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")  # torch.compile, checkpoint_wrapper
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


def clean(name: str) -> str:
    """A name without the components that wrappers insert."""
    return WRAPPERS.sub("", name).lstrip(".")


def _ancestors(path: str) -> list[str]:
    """Paths of a module and of those that contain it, the lowest first, the root ("") last."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward.__name__ != "_forward_unimplemented"  # a ModuleList has none: its hooks never run


def _is_a(module: nn.Module, *names: str) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _find_boundary(path: str, modules: dict[str, nn.Module], is_boundary: Callable | None) -> str | None:
    """The path of the lowest module around a matrix that is a hook boundary, by the user's predicate or by its name."""
    for candidate in _ancestors(path):
        module = modules[candidate]
        if is_boundary is None:
            if LAYER_NAME.search(clean(candidate)) and _has_forward(module):
                return candidate
        elif is_boundary(module):
            if not _has_forward(module):
                raise ValueError(f"hook_boundary_predicate is true for '{candidate}', a {type(module).__name__} "
                                 "without a forward: its hooks would never run; choose the modules in it, or the one "
                                 "around it")
            return candidate
    return None


def _common_boundary(fqn: str, places: list[tuple[str, str]], modules: dict[str, nn.Module],
                     is_boundary: Callable | None, strict: bool) -> str:
    """The path of the one boundary around all places that hold this parameter."""
    found = []
    for path, _ in places:
        boundary = _find_boundary(path, modules, is_boundary)
        if boundary is None and strict:
            raise ValueError(f"dedicate_params: no hook boundary around '{fqn}'. Pass a hook_boundary_predicate that "
                             f"is true for its layer, or hook_boundary_strict=False to let '{clean(path)}' be its own "
                             "boundary")
        found.append(path if boundary is None else boundary)
    if len({id(modules[path]) for path in found}) > 1:
        names = " and ".join(f"'{clean(f'{path}.{name}')}'" for path, name in places)
        raise ValueError(f"dedicate_params: one parameter is tied across hook boundaries, as {names}. Choose a hook "
                         "boundary that contains them all, or make the predicate leave it to FSDP2")
    return found[0]


def _is_default_matrix(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """What Muon is for: matrices and stacked matrices of linear maps; no embedding, norm, convolution or bias table."""
    usual = parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1 and parameter.is_floating_point()
    return usual and not _is_a(module, *NO_MATRICES) and not re.search("bias|embed", name)


def _check_matrix(fqn: str, parameter: nn.Parameter, module: nn.Module) -> None:
    """Refuse what the user's predicate chose and Newton-Schulz cannot take."""
    shape = tuple(parameter.shape)
    if any(type(p).__name__ not in ("Shard", "Replicate") for p in getattr(parameter, "placements", ())):
        problem = f"has placements {parameter.placements}; tensor parallelism may use Shard and Replicate only"
    elif parameter.ndim < 2:
        problem = f"has shape {shape}: a {'scalar' if parameter.ndim == 0 else 'vector'} has no singular vectors; " \
                  f"make the predicate leave it to AdamW"
    elif parameter.ndim > 3 or _is_a(module, CONVOLUTION):
        problem = f"has shape {shape}: a convolution kernel is not a matrix; make the predicate leave it to AdamW"
    elif parameter.numel() == 0:
        problem = f"has shape {shape}: an empty matrix looks like a placeholder; make the predicate leave it out"
    elif not parameter.is_floating_point():
        problem = f"has dtype {parameter.dtype}; only real floating-point matrices can be orthogonalised"
    else:
        return
    raise ValueError(f"dedicate_params: parameter '{fqn}' {problem}")


def choose_matrices(model: nn.Module, predicate: Callable | None, is_boundary: Callable | None,
                    strict: bool) -> list[Matrix]:
    """Every matrix that gets an owner, in model order, with its holders and its boundary.

    The arguments are those of `dmuon.dedicate_params`. Raises ValueError when nothing is chosen, and names a parameter
    that is no matrix, has no boundary or is tied across two.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    held: dict[nn.Parameter, list[tuple[str, str]]] = {}  # parameter -> its (module path, attribute name)s
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            held.setdefault(parameter, []).append((path, name))
    matrices, candidates = [], []
    for parameter, places in held.items():
        path, name = places[0]
        fqn = clean(f"{path}.{name}")
        usual = all(_is_default_matrix(n, parameter, modules[p]) for p, n in places)
        candidates += [fqn] if usual else []
        boundary = _find_boundary(path, modules, is_boundary) if predicate is None and usual else None
        chosen = boundary is not None if predicate is None else predicate(fqn, parameter)
        if not chosen or not parameter.requires_grad:
            continue  # a frozen parameter stays with FSDP2
        _check_matrix(fqn, parameter, modules[path])
        boundary = _common_boundary(fqn, places, modules, is_boundary, strict)
        holders = [*dict.fromkeys((modules[p], n) for p, n in places)]
        matrices.append(Matrix(fqn, parameter, holders, modules[boundary], clean(boundary)))
    if not matrices:
        raise ValueError("dedicate_params: no trainable matrix was chosen. By default that is every matrix inside "
                         "layers.N, layer.N, blocks.N or h.N; pass predicate and hook_boundary_predicate for other "
                         "names. Matrices in this model: "
                         f"{', '.join(candidates[:12]) or 'none'}{', ...' if len(candidates) > 12 else ''}")
    return matrices


# ------------------------------------------------------------------------------------------ a model's names


def named_state(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(name, holder, attribute, tensor) of what a state dict has, in its order; tied parameters once a name."""
    for path, holder in module.named_modules(prefix=prefix, remove_duplicate=False):
        for name, tensor in (*holder._parameters.items(), *holder._buffers.items()):
            if tensor is not None and name not in holder._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), holder, name, tensor


def assign_matrices(matrices: list[Matrix], slots: int, replicas: int) -> dict[str, int]:
    """FQN -> owner slot, of a model's matrices; see `assign_owners`."""
    shapes = {matrix.fqn: tuple(matrix.parameter.shape) for matrix in matrices}
    layers = {matrix.fqn: matrix.boundary_name for matrix in matrices}
    return assign_owners(shapes, layers, slots, replicas)


# ------------------------------------------------------------------------------------------ the planner


def _gpt2(width: int) -> dict[str, tuple[int, ...]]:
    square, wide = (width, width), 4 * width
    attention = {f"attn.{name}": square for name in "qkvo"}
    return attention | {"mlp.up": (wide, width), "mlp.down": (width, wide)}


def _llama(width: int, q: int, kv: int, mlp: int, *experts: int) -> dict[str, tuple[int, ...]]:
    attention = {"attn.q": (q, width), "attn.k": (kv, width), "attn.v": (kv, width), "attn.o": (width, q)}
    router = {"mlp.router": (*experts, width)} if experts else {}
    up = (*experts, mlp, width)
    return attention | router | {"mlp.gate": up, "mlp.up": up, "mlp.down": (*experts, width, mlp)}


# name: (layers, elements outside of them and in their norms and biases, experts a token takes, a layer's matrices)
_MODELS = {
    "gpt2": (12, (50257 + 1024 + 2 + 12 * 13) * 768, 1, _gpt2(768)),
    "gpt2-xl": (48, (50257 + 1024 + 2 + 48 * 13) * 1600, 1, _gpt2(1600)),
    "llama3-8b": (32, (2 * 128256 + 1 + 32 * 2) * 4096, 1, _llama(4096, 4096, 1024, 14336)),
    "llama3-70b": (80, (2 * 128256 + 1 + 80 * 2) * 8192, 1, _llama(8192, 8192, 1024, 28672)),
    "llama3-405b": (126, (2 * 128256 + 1 + 126 * 2) * 16384, 1, _llama(16384, 16384, 1024, 53248)),
    "qwen3-30b-a3b": (48, (2 * 151936 + 1 + 48 * 2) * 2048 + 48 * 256, 8, _llama(2048, 4096, 512, 768, 128)),
}


def model_shapes(model: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes and layers of a known model, as `assign_owners` takes them."""
    if model not in _MODELS:
        raise ValueError(f"model={model!r}: expected one of {', '.join(_MODELS)}")
    num_layers, _, _, matrices = _MODELS[model]
    shapes = {f"layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in matrices.items()}
    return shapes, {name: ".".join(name.split(".")[:2]) for name in shapes}


def step_traffic(
    matrices: int,  # elements of the dedicated matrices; with tensor parallelism, of this rank's shards of them
    rest: int,  # elements that FSDP2 shards, each tensor's rows rounded up to a multiple of num_shards
    num_shards: int,
    num_replicas: int = 1,
    zero: int = 3,  # Z3 brings weights to the ranks twice a step, Z2 once
    naive: bool = False,  # FSDP2 alone, and every rank gathers every matrix for Newton-Schulz
) -> dict[str, float]:
    """Elements that a rank sends in a step of one micro-batch, on average over the ranks, by link.

    Dedicated matrices cost what FSDP2's parameters cost: a broadcast is an all-gather, and a reduce to the owner a
    reduce-scatter, with one rank's part being all of it. With HSDP stage two and the replicate broadcast send together
    what an all-reduce sends. On rings: an element that must reach N ranks is sent N - 1 times.
    """
    everything, others = matrices + rest, num_shards - 1
    return {
        "unshard": (zero - 1) * others * everything / num_shards,
        "reduce": others * everything / num_shards,
        "replicate": 2 * (num_replicas - 1) * everything / (num_shards * num_replicas),
        "gather": naive * others * matrices / num_shards,
    }


def tensor_parallel_cost(shape: Sequence[int], dim: int | None, ranks: int) -> tuple[float, float]:
    """NS FLOPs of a rank, and elements that it sends for them, for a matrix that tensor parallelism cuts along `dim`.

    dim is -2, -1 or None: not cut. The two ways are those of `newton_schulz.tensor_parallel_newton_schulz`.
    """
    share = (ranks - 1) / ranks
    if not _sums_grams(shape, dim, ranks):
        return ns_flops(shape), share * prod(shape) if dim else 0
    long, d, experts = shape[dim], shape[-3 - dim], prod(shape[:-2])
    return experts * (34 * d**3 + 4 * d * d * long / ranks), experts * 2 * share * (d * d + 1)  # Gram and norm


def _sums_grams(shape: Sequence[int], dim: int | None, ranks: int) -> bool:
    """Whether the ranks sum their Gram matrices, and then compute in float32: the cut dimension is the long one."""
    return dim is not None and ranks > 1 and shape[dim] >= shape[-3 - dim]


def plan(model: str, shard: int, replicate: int, tp: int, tokens: int) -> Iterator[str]:
    """What a step of a known model costs on a (replicate, shard, tp) mesh: the lines of the planner.

    tokens: of a step, over all ranks. Tensor parallelism cuts the matrices (o and down along their columns, the others
    along their rows, a router not at all), and nothing else. Weights, gradients and momenta are float32, full matrices
    bfloat16. Raises ValueError for an unknown model, a number below 1, a tp that does not divide what it cuts.
    """
    for name, value in (("shard", shard), ("replicate", replicate), ("tp", tp), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    (shapes, layers), (_, rest, experts, _) = model_shapes(model), _MODELS[model]
    slots = shard * replicate
    owners = assign_owners(shapes, layers, slots, replicate)
    yield f"{model}: {sum(map(prod, shapes.values())):,} elements in matrices, {rest:,} elsewhere"
    yield f"mesh: replicate {replicate} x shard {shard} x tp {tp} = {slots * tp:,} ranks; {tokens:,} tokens a step"
    yield ownership_map(shapes, layers, owners, slots, num_replicas=replicate)
    numel, costs, prices, sent, active = {}, {}, {}, 0, 0
    for name, shape in shapes.items():
        dim = None if "router" in name else -1 if name.endswith((".o.weight", ".down.weight")) else -2
        if dim and shape[dim] % tp:
            raise ValueError(f"tp={tp}: does not divide {shape[dim]}, a size of {name} {shape}")
        numel[name] = prod(shape) // (1 if dim is None else tp)
        costs[name], elements = tensor_parallel_cost(shape, dim, tp)
        prices[name] = costs[name] * (FLOAT32_PRICE if _sums_grams(shape, dim, tp) else 1)
        sent += elements / slots
        active += prod(shape) * (experts / shape[0] if len(shape) == 3 else 1)
    matrices = sum(numel.values())
    gathered = sum(prod(shape) for name, shape in shapes.items() if numel[name] < prod(shape)) * (tp - 1) / tp
    head = ("unshard", "reduce", "replicate", "gather", "tp (NS)")
    yield f"elements that a rank sends in a step, on average\n{'':10}" + "".join(f"{link:>16}" for link in head)
    for kind, zero, naive in (("Z2", 2, False), ("Z3", 3, False), ("naive Z3", 3, True)):
        links = step_traffic(matrices, -(-rest // shard) * shard, shard, replicate, zero, naive)
        columns = [*links.values(), gathered if naive else sent]
        yield f"  {kind:8}" + "".join(f"{elements:16,.0f}" for elements in columns)
    flops, in_slot, in_layer = _per_slot(costs, owners, slots), _per_slot(numel, owners, slots), Counter()
    for name, layer in layers.items():
        in_layer[layer] += numel[name]
    column, own = max(sum(in_slot[s::shard]) for s in range(shard)), -(-rest // shard)
    sizes = {"weights": 4 * (column + own), "gradients": 4 * (max(in_slot) + own), "momenta": 4 * max(in_slot),
             "AdamW's": 8 * own, "full matrices in Z2": 2 * matrices, "of two layers in Z3": 4 * max(in_layer.values())}
    yield "GiB of the fullest rank between steps (float32), and of full matrices within (bfloat16)"
    yield "  " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items())
    own_flops = 6 * active * tokens / (slots * tp)
    yield (f"a rank's NS FLOPs: {_spread(flops)}; the slowest: {max(flops) / own_flops:.2%} of its forward and "
           "backward (6 FLOPs a token and active matrix element)")
    if tp > 1:
        slowest = max(_per_slot(prices, owners, slots)) / own_flops
        yield (f"  and {slowest:.1%} of its time, if a float32 FLOP, as of summed Gram matrices, takes as long as "
               f"{FLOAT32_PRICE} of 16 bits")


def _demonstrate() -> None:
    for model, ranks in (("gpt2", 8), ("llama3-8b", 8)):
        shapes, layers = model_shapes(model)
        owners = assign_owners(shapes, layers, ranks)
        loads = slot_loads(shapes, owners, ranks)
        print(f"{model} on {ranks} ranks, a slot each: in how many layers does it own the matrix?")
        print(ownership_map(shapes, layers, owners, ranks) + "\n")
        assert owners.keys() == shapes.keys(), "every matrix has one owner"
        places = Counter((layers[name], slot) for name, slot in owners.items())
        assert max(places.values()) == 1, "no rank owns two matrices of one layer"
        assert max(loads) <= 1.03 * sum(loads) / ranks, "the loads are balanced"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="With --model its plan; without any option a demonstration.")
    parser.add_argument("--model", choices=_MODELS, required=len(sys.argv) > 1)
    for option, default, text in (("shard", 8, "ranks that share a replica of the model"), ("replicate", 1, "replicas"),
                                  ("tp", 1, "ranks that cut each matrix"), ("tokens", 524288, "of a step, all ranks")):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"{text} [{default}]")
    args = parser.parse_args()
    try:
        _demonstrate() if args.model is None else print("\n".join(plan(**vars(args))))
    except ValueError as error:
        parser.error(str(error))
