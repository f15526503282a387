"""What does Muon compute? Nearly the semi-orthogonal matrix nearest to G, by a few matrix products.

Muon (Keller Jordan) steps along U V^T instead of G = U S V^T. An SVD would be exact and slow.
Newton-Schulz (NS) needs products only: x <- a x + b x^3 + c x^5, applied to a matrix X as
aX + b(XX^T)X + c(XX^T)^2 X, moves every singular value by that odd polynomial and leaves U and V
alone. A few steps bring them near 1; the triples (a, b, c) say how fast and how near. There are two
ways to order the products, with m <= n (else G is transposed):

    direct                            Gram (Jack Zhang, gram-newton-schulz)
    X = G / |G|                       X = G / |G|
    for a, b, c in triples:           for segment in triples, cut at each restart:
        A = X X^T                         R = X X^T;  Q = I
        B = bA + cA^2                     for a, b, c in segment:
        X = aX + BX                           Z = bR + cR^2
                                              Q = (aI + Z) Q
                                              R = (aI + Z) R (aI + Z)
                                          X = Q X

           +---------+         +-----+         +---------+
    direct | m  X  n | -XX^T-> | m A | --BX--> |    X    |      all of it 5 times
           +---------+         +-----+         +---------+
           +---------+         +-----+ 5 times +-----+         +---------+
    Gram   |    X    | -XX^T-> | m R | ------> | m Q | --QX--> |    X    |
           +---------+         +-----+         +-----+         +---------+

Cost in FLOPs, T = 5 steps, k restarts: direct 20 m^2 n + 10 m^3, Gram 4(1+k) m^2 n + (34-6k) m^3.
Gram costs less when n > 1.5 m, for every k < 4; below that `gram_newton_schulz` runs the direct
iterations. 16 bits need a restart: rounding gives R eigenvalues of -eps where XX^T has 0, and each
step multiplies them by a^2. Where every rank has a shard of G: `tensor_parallel_newton_schulz`.

Nothing comes before this file, and it imports nothing of the project; `partition.py` is next.

    $ python newton_schulz.py
    set          step  singular values  Gram differs by
    Polar Express   1   0.1430..1.1771            1e-07
    Polar Express   5   0.8543..1.1233            6e-06
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

Triples = Sequence[Sequence[float]]  # [(a, b, c), ...]
Coefficients = Sequence[float] | Triples
AdjustLr = str | Callable[[float, int, int], float] | None  # a callable: (lr, m, n) -> step size

# One triple for all steps; five take singular values from 0.003 on (of a matrix of norm 1) to
# 0.68..1.20.
KELLER_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# A triple a step, from 0.01 on to 0.97..1.04 (@YouJiacheng).
YOU_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# A triple a step, the best for the worst singular value: from 0.003 on to 0.84..1.13 (Polar
# Express, Amsel et al. 2025, arXiv 2505.16932). The factor 1.05 leaves room for singular values
# that rounding has pushed above 1.
POLAR_EXPRESS_COEFFICIENTS = tuple(
    (a / 1.05, b / 1.05**3, c / 1.05**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)

# Elements of a batch; scratch is a few times that, in the same blocks each time
BATCH_NUMEL = {"cpu": 2**18, "cuda": 2**27}
# From this d on a symmetric product is made by three of its quarters: 0.8 to 0.9 of the time on a
# CPU, where smaller ones gain nothing. Not measured on CUDA.
MIRROR_SIZE = 512
# Elements of which a norm has a float64 copy at a time
NORM_NUMEL = {"cpu": 2**16, "cuda": 2**22}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# ----------------------------------------------------------------------------- the public functions


def newton_schulz(
    G: Tensor,  # (768, 3072), or a batch (..., 768, 3072): each matrix by itself
    # One triple for all steps, or a triple a step
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-30,  # a matrix whose norm is below it comes out smaller, zero comes out zero
    # Of the iteration; None: float64 for float64, float32 on CPU, float16 on CUDA
    dtype: torch.dtype | None = None,
) -> Tensor:
    """U p(S/|G|) V^T of G = U S V^T, by direct iterations.

    The result is a new tensor of G's shape, dtype and device. Raises TypeError for a dtype that is
    not float16, bfloat16, float32 or float64; ValueError for a vector, an eps below 1.2e-38, steps
    below 1 or other than the number of triples.
    """
    return _iterate(direct_iterations, G, coefficients, steps, eps, dtype)


def gram_newton_schulz(
    G: Tensor,  # (768, 3072), or a batch (..., 768, 3072)
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-30,
    dtype: torch.dtype | None = None,
    # Iterations, from 0, before which R is made anew; None: by precision
    restarts: Sequence[int] | None = None,
) -> Tensor:
    """The same as `newton_schulz`, done on the m x m Gram matrix where that is cheaper.

    Raises what `newton_schulz` raises, and ValueError for restarts that do not ascend within
    1..steps - 1.
    """

    def iterations(X: Tensor, triples: Triples) -> Tensor:
        chosen = None if restarts is None else _checked_restarts(restarts, steps)
        m, n = X.shape[-2:]
        if 2 * n < 3 * m:
            return direct_iterations(X, triples)
        return gram_iterations(X, triples, chosen)

    return _iterate(iterations, G, coefficients, steps, eps, dtype)


# ------------------------------------------------------------------------------- tensor parallelism


def sharded_dim(G: Tensor) -> int | None:
    """The dimension of G's matrices that tensor parallelism has cut, -2 or -1; None if it has not.

    None, too, for a tensor that is no DTensor, for stacked experts that are sharded by expert, and
    for a mesh of one rank.
    """
    if not isinstance(G, DTensor) or G.device_mesh.size() == 1 or not G.placements[0].is_shard():
        return None
    dim = G.placements[0].dim - G.ndim
    return dim if dim >= -2 else None


def sums_grams(G: Tensor) -> bool:
    """The rule: the Gram way if the sharded dimension s is the long one (s >= d), else gather."""
    dim = sharded_dim(G)
    return dim is not None and G.shape[dim] == max(G.shape[-2:])


def tensor_parallel_norms(Gs: Iterable[DTensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The Frobenius norm of each whole matrix, (..., 1, 1) float64: one all-reduce for them all.

    The summed Gram matrix has it too, as its trace, but squares overflow float32 from 1e19 on.
    """
    squares = [float64_norm(G.to_local()).square() for G in Gs]
    flat = torch.cat([square.flatten() for square in squares])
    dist.all_reduce(flat, group=group)
    sums = flat.split([square.numel() for square in squares])
    return [total.sqrt().view_as(square) for total, square in zip(sums, squares)]


def tensor_parallel_newton_schulz(
    # Each makes a (3072, 768) or (B, 3072, 768) with `sharded_dim` not None, the same every time:
    # not all are there at once
    Gs: Sequence[Callable[[], DTensor]],
    homes: Sequence[int],  # a rank of the mesh for each
    mesh: DeviceMesh,  # the tensor-parallel one
    # For each (coefficients, steps, eps, dtype) of `newton_schulz`. The dtype is that of what is
    # gathered; R and Q are float64 if it, or None and G, is, else float32
    options: Sequence[tuple],
) -> Iterator[tuple[int, Tensor]]:
    """`gram_newton_schulz` of matrices of which every rank has a part: (index, this rank's part).

    The part of one matrix comes as a batch (1, m, n / T).

    Ownership once more: each matrix has a home among the ranks, which alone does what needs the
    whole. All ranks call this together. With s the cut and d the other dimension, T ranks, f =
    (T - 1) / T and X the parts of G / |G|:

        s >= d   rank 0        rank 1: home        The Gram matrix over the long dimension is the
              +---------+     +---------+          sum of the parts' own. It is reduced to the
              | d X0 s/T|     | d X1 s/T|          home, which makes the factor Q of it and
              +---------+     +---------+          broadcasts it; each rank applies it to its part.
               X0 X0^T  ------> X1 X1^T            G is never gathered. A rank sends 2 f d^2
                   reduce R, d x d                 elements, on average; the home does 34 d^3
              Q X0   <--- Q --- Q X1               FLOPs, and every rank 4 d^2 s/T (five steps).
                    broadcast

        s < d    R would be the large d x d one. The home gathers the small matrix, runs NS and
                 scatters the parts: 2 f s d / T elements, on average. So, too, with more than five
                 steps, which need restarts: each would be another reduce and broadcast.

    At most 2 T matrices are in flight: while the homes make the factors of T of them, those of the
    T before travel. The Gram way needs no restart, because R, Q and QX are float32 at least, also
    where the user allows TF32. 16 bits lose a long matrix (0.1 of its norm), and TF32 without a
    restart leaves singular values of 1.6 in hard ones. The norms travel in one float64 all-reduce
    before. Raises what `newton_schulz` raises.
    """
    group = mesh.get_group()
    norms = tensor_parallel_norms((make() for make in Gs), group)
    ways = [_by_summed_gram if steps <= 5 and sums_grams(make()) else _by_gather
            for make, (_, steps, *_) in zip(Gs, options)]
    queues = [[i for i, home in enumerate(homes) if home == rank] for rank in range(group.size())]
    before = []
    for turn in range(max(map(len, queues))):
        now = []
        for i in [queue[turn] for queue in queues if turn < len(queue)]:  # a matrix a home
            now.append((i, ways[i](Gs[i], norms[i], homes[i], group, *options[i])))
        for _ in ("to their homes", "and back"):
            for _, matrix in now:
                next(matrix)
        yield from ((i, next(matrix)) for i, matrix in before)
        before = now
    yield from ((i, next(matrix)) for i, matrix in before)


def _by_summed_gram(make: Callable[[], DTensor], norm: Tensor, home: int, group: dist.ProcessGroup,
                    coefficients: Coefficients, steps: int, eps: float,
                    dtype: torch.dtype | None) -> Iterator[Tensor | None]:
    """Pauses while R, then Q travels, and yields this rank's part of the result."""
    triples, G = _checked_triples(coefficients, steps), make()
    dim, dtype = sharded_dim(G), torch.promote_types(dtype or G.dtype, torch.float32)
    del G

    def part() -> Tensor:  # of G / |G|: (B, d, s / T)
        X = _matrices(normalize(make().to_local(), norm, eps, dtype))
        return X if dim == -1 else X.mT

    X = part()
    with full_float32(X):
        R = symmetric_product(X, X.mT)  # (B, d, d), and in its place Q
    del X
    work = dist.reduce(R, group=group, group_dst=home, async_op=True)
    yield
    work.wait()
    if group.rank() == home:
        with full_float32(R), _range(1, R):
            R = gram_factor(R, triples)
    work = dist.broadcast(R, group=group, group_src=home, async_op=True)
    yield
    work.wait()
    with full_float32(R):
        X = torch.bmm(R, part())
    yield X if dim == -1 else X.mT


def _by_gather(make: Callable[[], DTensor], _: Tensor, home: int, group: dist.ProcessGroup,
               *options) -> Iterator[Tensor | None]:
    """Pauses while the parts travel, of the matrix, then of the result; yields this rank's."""
    G = make()
    dim, size, own = sharded_dim(G), G.shape[sharded_dim(G)], G.to_local().shape
    most = -(-size // group.size())  # collectives want parts of one size: that of torch's first
    sent = F.pad(G.to_local().movedim(dim, -1), (0, most - own[dim])).contiguous()  # (..., d, most)
    parts = [torch.empty_like(sent) for _ in range(group.size())] if group.rank() == home else None
    del G
    work = dist.gather(sent, parts, group=group, group_dst=home, async_op=True)
    yield
    work.wait()
    if parts:
        parts = torch.cat(parts, dim=-1)[..., :size]  # what was added is at the end
        with _range(1, parts):
            parts = gram_newton_schulz(parts, *options)
        parts = F.pad(parts, (0, group.size() * most - size)).split(most, dim=-1)
        parts = [part.contiguous() for part in parts]
    work = dist.scatter(sent, parts, group=group, group_src=home, async_op=True)
    yield
    work.wait()
    yield sent[..., : own[dim]].movedim(-1, dim)


# --------------------------------------------------------------------------------- in the optimizer


def equal_shapes(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Matrices of one shape together, as `orthogonalise` takes them, up to BATCH_NUMEL elements.

    A larger matrix is alone. On CUDA a batch saves launches. On a CPU small matrices gain (of 16 x
    64 thirteen times, of 64 x 256 a half) and large ones do not: a batch of them leaves the cache.
    The result has the same bits.
    """
    return batches_by(parameters, lambda p: (p.shape, p.dtype, getattr(p, "placements", None)))


def batches_by(parameters: Iterable[Tensor],
               kind: Callable[[Tensor], Hashable]) -> list[list[Tensor]]:
    """Parameters of one kind together, up to BATCH_NUMEL elements on this rank."""
    found = []
    last = {}  # by kind, the batch that takes the next one, and its elements
    for p in parameters:
        key = kind(p)
        batch, numel = last.get(key, ([], math.inf))
        numel += local(p).numel()
        if numel > BATCH_NUMEL["cuda" if p.is_cuda else "cpu"]:
            batch, numel = [], local(p).numel()
            found.append(batch)
        batch.append(p)
        last[key] = batch, numel
    return found


def orthogonalise(
    updates: Sequence[Tensor],  # of `equal_shapes`: [(768, 3072), ...]; also DTensors, not cut
    backend: str,  # "gram" or "direct"
    *options,  # of `newton_schulz`
) -> Sequence[Tensor]:
    """NS of each; of a DTensor what this rank stores of it."""
    first = updates[0]
    with _range(len(updates), first):
        function = gram_newton_schulz if backend == "gram" else newton_schulz
        if len(updates) == 1:  # no copy of a large matrix
            return [function(local(first), *options)]
        return function(torch.stack([local(update) for update in updates]), *options).unbind()


def _range(count: int, first: Tensor) -> record_function:
    """In a trace: so many matrices of this shape."""
    return record_function(f"dmuon.newton_schulz {count}x({','.join(map(str, first.shape))})")


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of it, without a graph: of a DTensor its local part."""
    with torch.no_grad():  # before detach, which inference mode refuses for a DTensor
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def muon_update(
    gradients: Sequence[Tensor],  # [(768, 3072), ...], all plain tensors or all DTensors
    momenta: Sequence[Tensor],  # as the gradients, whose moving averages they are; in place
    momentum: float,
    nesterov: bool,
) -> Sequence[Tensor]:
    """Fold the gradients into the momenta, and return what is orthogonalised next.

    With nesterov these are new tensors, one step ahead along the momenta; else the momenta.
    """
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    return muon_direction(gradients, momenta, momentum, nesterov)


def muon_direction(
    gradients: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, nesterov: bool
) -> Sequence[Tensor]:
    """What `muon_update` has returned, made again: the gradients are in the momenta already."""
    return torch._foreach_lerp(gradients, momenta, momentum) if nesterov else momenta


def split_blocks(tensor: Tensor, blocks: tuple[int, Sequence[int]] | None) -> Sequence[Tensor]:
    """Views of the matrices that a fused one consists of: (dim, sizes), dim -2 or -1.

    Where tensor parallelism has cut along dim these are this rank's, each whole and no DTensor;
    where it has cut the other dimension they are cut like the matrix.
    """
    if blocks is None:
        return [tensor]
    (dim, sizes), own, cut = blocks, local(tensor), sharded_dim(tensor)
    if cut is None:
        return own.split(sizes, dim)
    mesh = tensor.device_mesh
    if cut == dim:
        part = -(-tensor.shape[dim] // mesh.size())  # as torch cuts
        start = part * mesh.get_local_rank()
        ends = itertools.accumulate(sizes)
        return own.split([n for n, end in zip(sizes, ends) if start < end <= start + part], dim)
    # Not by DTensor's own split, which inference mode refuses
    wholes = torch.empty(tensor.shape, device="meta").split(sizes, dim)
    return [DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=whole.shape,
                               stride=whole.stride())
            for part, whole in zip(own.split(sizes, dim), wholes)]


def adjusted_lr(lr: float, adjust_lr_fn: AdjustLr, m: int, n: int) -> float:
    """The step size for an (m, n) matrix, as `torch.optim.Muon` adjusts it, or as a callable does.
    """
    if callable(adjust_lr_fn):
        return adjust_lr_fn(lr, m, n)
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(m, n))
    return lr * math.sqrt(max(1, m / n))


# ------------------------------------------------------------------------------- the two iterations


def direct_iterations(X: Tensor, triples: Triples) -> Tensor:
    """X (B, m, n) after one step for each triple."""
    for a, b, c in triples:
        A = symmetric_product(X, X.mT)  # (B, m, m)
        B = symmetric_product(A, A, A, beta=b, alpha=c)  # fused: one rounding instead of three
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def gram_iterations(
    X: Tensor,
    triples: Triples,
    restarts: Sequence[int] | None = None,  # None: by precision
) -> Tensor:
    """The same, with two products of X for each segment between restarts."""
    if restarts is None:
        restarts = default_restarts(X, len(triples))
    for start, end in zip((0, *restarts), (*restarts, len(triples))):
        R = symmetric_product(X, X.mT)  # (B, m, m)
        X = torch.bmm(gram_factor(R, triples[start:end]), X)  # (B, m, n)
    return X


def gram_factor(R: Tensor, triples: Triples) -> Tensor:
    """The Q, (B, m, m) like R = X X^T, for which QX is X after one step for each triple."""
    Q = None
    for t, (a, b, c) in enumerate(triples):
        Z = symmetric_product(R, R, R, beta=b, alpha=c)
        if Q is None:
            Q = Z.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            # a stays out of Z: a product with (aI + Z) is less accurate at low rank
            Q = symmetric_product(Z, Q, Q, beta=a)
        if t + 1 < len(triples):
            RZ = symmetric_product(R, Z, R, beta=a)
            R = symmetric_product(Z, RZ, RZ, beta=a)
    return Q


def symmetric_product(A: Tensor, B: Tensor, C: Tensor | None = None, **factors: float) -> Tensor:
    """A B, or beta C + alpha A B, (B, d, d), where the result is symmetric in exact arithmetic.

    Where autograd is off, as in an optimizer's step, a large one is made by its upper half and its
    lower right quarter, 3/4 of the products; the quarter that is left is the mirror image of its
    opposite.
    """
    d = A.shape[-2]
    if d < MIRROR_SIZE or torch.is_grad_enabled():  # which knows no `out`; nor do functorch's
        return torch.bmm(A, B) if C is None else torch.baddbmm(C, A, B, **factors)
    result, upper, lower = A.new_empty(len(A), d, d), slice(d // 2), slice(d // 2, None)
    for rows, columns in ((upper, slice(None)), (lower, lower)):
        operands, out = (A[:, rows], B[:, :, columns]), result[:, rows, columns]
        if C is None:
            torch.bmm(*operands, out=out)
        else:
            torch.baddbmm(C[:, rows, columns], *operands, **factors, out=out)
    result[:, lower, upper] = result[:, upper, lower].mT
    return result


@contextmanager
def full_float32(X: Tensor) -> Iterator[None]:
    """Products of float32 have all their bits inside, whatever TF32 or bfloat16 the user allows."""
    matmul = (torch.backends.cuda if X.is_cuda else torch.backends.mkldnn).matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        # torch's default, which takes over what is set for all operations
        matmul.fp32_precision = "none"
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before


def default_restarts(X: Tensor, steps: int) -> tuple[int, ...]:
    """() for five steps in full precision, else enough for the dtype that X is iterated in."""
    backend = torch.backends.cuda if X.is_cuda else torch.backends.mkldnn
    precise = [torch.float64]
    # Under TF32 a float32 product has 10 bits
    if backend.matmul.fp32_precision in ("ieee", "none"):
        precise.append(torch.float32)
    if steps <= 5 and X.dtype in precise:
        return ()
    return tuple(range(2, steps, 2 if steps > 5 else steps))


# --------------------------------------------------------------------------------------- in and out


def float64_norm(G: Tensor, order: float = 2.0) -> Tensor:
    """The norm of this order over the elements of each matrix, (..., 1, 1) in float64.

    Squares of float32 overflow from 1e19 on. torch makes a float64 copy of what it is given: given
    some rows at a time, it copies these only.
    """
    norm = partial(
        torch.linalg.vector_norm, ord=order, dim=(-2, -1), keepdim=True, dtype=torch.float64
    )
    most = NORM_NUMEL["cuda" if G.is_cuda else "cpu"]
    if G.dtype == torch.float64 or G.numel() <= most:
        return norm(G)
    rows = max(1, most * G.shape[-2] // G.numel())
    return norm(torch.cat([norm(part) for part in G.split(rows, dim=-2)], dim=-2))


def normalize(G: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """G / norm as a new tensor; cast last, because a gradient may exceed what 16 bits hold."""
    wide = torch.float64 if torch.float64 in (G.dtype, dtype) else torch.float32
    # clamp, unlike max(), lets NaN pass
    return (G.to(wide) / norm.clamp(min=eps).to(wide)).to(dtype)


def _iterate(
    iterations: Callable[[Tensor, Triples], Tensor],
    G: Tensor,
    coefficients: Coefficients,
    steps: int,
    eps: float,
    dtype: torch.dtype | None,
) -> Tensor:
    """The iterations' result for X = G / |G|, which they get as (B, m, n) with m <= n."""
    triples = _checked_triples(coefficients, steps)
    dtype = _checked_dtype(G, eps, dtype)
    X = _matrices(normalize(G, float64_norm(G), eps, dtype))
    if G.shape[-2] > G.shape[-1]:
        X = iterations(X.mT, triples).mT
    else:
        X = iterations(X, triples)
    # A transposed view would surprise view(-1) and collectives
    return X.reshape(G.shape).to(G.dtype).contiguous()


def _matrices(X: Tensor) -> Tensor:
    """(..., m, n) as (B, m, n)."""
    return X[None].flatten(0, -3)


def _checked_triples(coefficients: Coefficients, steps: int) -> Triples:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected an integer of at least 1")
    one = all(isinstance(c, (int, float)) for c in coefficients)
    triples = [tuple(coefficients)] * steps if one else [tuple(triple) for triple in coefficients]
    if any(len(triple) != 3 for triple in triples):
        raise ValueError(
            f"coefficients={coefficients!r}: expected one triple (a, b, c) or a sequence of triples"
        )
    if len(triples) != steps:
        raise ValueError(
            f"steps={steps} with {len(triples)} coefficient triples: a sequence of triples is made "
            f"as a whole and must be neither cut nor extended; pass steps={len(triples)}, or one "
            "triple such as KELLER_COEFFICIENTS"
        )
    return triples


def _checked_dtype(G: Tensor, eps: float, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the iteration."""
    if isinstance(G, DTensor):
        raise TypeError("G is a DTensor: pass its full_tensor()")
    if G.dtype not in DTYPES:
        raise TypeError(f"G has dtype {G.dtype}: expected one of {DTYPES}; cast it first")
    if G.ndim < 2:
        shape = tuple(G.shape)
        raise ValueError(f"G has shape {shape}: expected a matrix (m, n) or a batch (..., m, n)")
    if not eps >= torch.finfo(torch.float32).tiny:
        raise ValueError(
            f"eps={eps!r}: expected at least 1.2e-38: below it float32 may round to 0 and give NaN"
        )
    if dtype is None:
        usual = torch.float16 if G.is_cuda else torch.float32
        return torch.float64 if G.dtype == torch.float64 else usual
    if dtype not in DTYPES:
        raise TypeError(f"dtype={dtype!r}: expected None or one of {DTYPES}")
    return dtype


def _checked_restarts(restarts: Sequence[int], steps: int) -> list[int]:
    if isinstance(restarts, Sequence):
        given = list(restarts)
        ascending = [r for r in range(1, steps) if r in given]
        if given == ascending:
            return ascending
    raise ValueError(
        f"restarts={restarts!r} with steps={steps}: expected ascending iterations in "
        f"1..{steps - 1}, such as (2,), or () for no restart, or None to choose by precision"
    )


# -------------------------------------------------------------------------------- the demonstration


def _demo_convergence() -> None:
    """The singular values come near 1; direct and Gram iterations are the same polynomial."""
    X = torch.randn(1, 128, 192)
    X = X / X.norm()
    sets = {
        "Keller": [KELLER_COEFFICIENTS] * 5,
        "You": YOU_COEFFICIENTS,
        "Polar Express": POLAR_EXPRESS_COEFFICIENTS,
    }
    print("set          step  singular values  Gram differs by")
    for name, triples in sets.items():
        for step in range(1, 6):
            direct = direct_iterations(X, triples[:step])
            difference = (gram_iterations(X, triples[:step]) - direct).abs().max()
            S = torch.linalg.svdvals(direct)
            print(f"{name:<16}{step}   {S.min():.4f}..{S.max():.4f}            {difference:.0e}")
            assert difference < 5e-4
        assert 0.65 < S.min() < S.max() < 1.22, "the last step leaves every singular value near 1"


def _demo_restart() -> None:
    """Why 16 bits need a restart: a matrix of rank 1."""
    X = torch.outer(torch.randn(128), torch.randn(512))
    X = (X / X.norm()).bfloat16()[None]
    for restarts, low, high in (((2,), 0.8, 1.6), ((), 500, math.inf)):
        O = gram_iterations(X, POLAR_EXPRESS_COEFFICIENTS, restarts)
        largest = torch.linalg.svdvals(O.double()).max()
        print(f"rank 1 in bfloat16, restarts {restarts}: largest singular value {largest:.3g}")
        assert low < largest < high, "without a restart bfloat16 blows up"


if __name__ == "__main__":
    torch.manual_seed(0)
    _demo_convergence()
    _demo_restart()
