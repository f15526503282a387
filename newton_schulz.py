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
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
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
    G: DTensor,  # (3072, 768) or (..., 3072, 768) on a 1-D mesh, with `sharded_dim(G)` not None
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-30,
    # float64, or None with a float64 G: all in float64; else R and Q in float32
    dtype: torch.dtype | None = None,
    # From `tensor_parallel_norms`, which makes those of many matrices at once
    norm: Tensor | None = None,
) -> DTensor:
    """`gram_newton_schulz` of the whole matrix, of which every rank has a shard; placed as G.

    All ranks of the mesh call it together, and the result is the same on any number of them. With s
    the sharded and d the other dimension, T ranks and f = (T - 1) / T:

        s >= d      rank 0          rank 1          The Gram matrix over the long dimension is
                +---------+     +---------+         the sum of the shards' own. One all-reduce
                | d X0 s/T|     | d X1 s/T|         gives every rank the factor Q, which it
                +---------+     +---------+         applies to its shard: G is never gathered.
                 X0 X0^T  +      X1 X1^T            A rank sends 2 f d^2 elements for each
                      all-reduce: R, d x d          segment between restarts and does
                      Q of R on both                34 d^3 + 4 d^2 s/T FLOPs (one segment,
                   Q X0            Q X1             T = 5 steps).

        s < d   R would be the large d x d one. All ranks gather the small matrix, run NS on all of
                it and keep their shard: f s d elements, 4 (1 + k) s^2 d + (34 - 6 k) s^3 FLOPs
                (direct if d is less than 1.5 s).

    The Gram way needs no restart, because R, Q and QX are float32 at least, also where the user
    allows TF32. 16 bits lose a long matrix (0.1 of its norm), and TF32 without a restart leaves
    singular values of 1.6 in hard ones; a restart would be another all-reduce. A step's norms
    travel in one float64 all-reduce more. Raises what `newton_schulz` raises.
    """
    mesh = G.device_mesh
    if not sums_grams(G):
        whole = gram_newton_schulz(G.full_tensor(), coefficients, steps, eps, dtype)
        # Each rank cuts its own shard
        return distribute_tensor(whole, mesh, G.placements, src_data_rank=None)
    group = mesh.get_group()
    if norm is None:
        (norm,) = tensor_parallel_norms([G], group)
    wide = torch.float64 if (dtype or G.dtype) == torch.float64 else torch.float32
    is_tall = sharded_dim(G) == -2
    iterations = partial(gram_iterations, group=group)
    with full_float32(G):
        own = _iterate(iterations, G.to_local(), coefficients, steps, eps, wide, norm, is_tall)
    return DTensor.from_local(own, mesh, G.placements, shape=G.shape, stride=G.stride())


# --------------------------------------------------------------------------------- in the optimizer


def equal_shapes(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Matrices of one shape together, as `orthogonalise` takes them, up to BATCH_NUMEL elements.

    A larger matrix is alone, and so is one that tensor parallelism has cut. On CUDA a batch saves
    launches. On a CPU small matrices gain (of 16 x 64 thirteen times, of 64 x 256 a half) and large
    ones do not: a batch of them leaves the cache. The result has the same bits.
    """

    def kind(p: Tensor) -> Hashable:
        if sharded_dim(p) is not None:
            return id(p)
        return p.shape, p.dtype, getattr(p, "placements", None)

    return batches_by(parameters, kind)


def batches_by(parameters: Iterable[Tensor],
               kind: Callable[[Tensor], Hashable]) -> list[list[Tensor]]:
    """Parameters of one kind together, up to BATCH_NUMEL elements on this rank."""
    found = []
    last = {}  # by kind, the batch that takes the next one, and its elements
    for p in parameters:
        key = kind(p)
        batch, numel = last.get(key, ([], math.inf))
        numel += _own(p).numel()
        if numel > BATCH_NUMEL["cuda" if p.is_cuda else "cpu"]:
            batch, numel = [], _own(p).numel()
            found.append(batch)
        batch.append(p)
        last[key] = batch, numel
    return found


def orthogonalise(
    updates: Sequence[Tensor],  # of `equal_shapes`: [(768, 3072), ...], also DTensors on a 1-D mesh
    backend: str,  # "gram" or "direct"; not asked for a matrix that tensor parallelism has cut
    *options,  # of `newton_schulz`
    norm: Tensor | None = None,  # of a cut matrix
) -> Sequence[Tensor]:
    """NS by the way that fits; what this rank stores of the results."""
    first = updates[0]
    with record_function(f"dmuon.newton_schulz {len(updates)}x({','.join(map(str, first.shape))})"):
        if sharded_dim(first) is not None:
            return [tensor_parallel_newton_schulz(first, *options, norm=norm).to_local()]
        function = gram_newton_schulz if backend == "gram" else newton_schulz
        if len(updates) == 1:  # no copy of a large matrix
            return [function(_own(first), *options)]
        return function(torch.stack([_own(update) for update in updates]), *options).unbind()


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
    return torch._foreach_lerp(gradients, momenta, momentum) if nesterov else momenta


def split_blocks(tensor: Tensor, blocks: tuple[int, Sequence[int]] | None) -> Sequence[Tensor]:
    """Views of the matrices that a fused one consists of: (dim, sizes), dim -2 or -1.

    Where tensor parallelism has cut along dim these are this rank's, each whole and no DTensor;
    where it has cut the other dimension they are cut like the matrix.
    """
    if blocks is None:
        return [tensor]
    dim, sizes = blocks
    if sharded_dim(tensor) != dim:
        return tensor.split(sizes, dim)
    part = -(-tensor.shape[dim] // tensor.device_mesh.size())  # as torch cuts
    start = part * tensor.device_mesh.get_local_rank()
    own = [size for size, end in zip(sizes, itertools.accumulate(sizes))
           if start < end <= start + part]
    return tensor.to_local().split(own, dim)


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
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The same, with two products of X for each segment between restarts.

    With a group X is a shard (B, m, n / T), and the ranks sum their Gram matrices.
    """
    if restarts is None:
        restarts = default_restarts(X, len(triples))
    for start, end in zip((0, *restarts), (*restarts, len(triples))):
        R = symmetric_product(X, X.mT)  # (B, m, m)
        if group is not None:
            dist.all_reduce(R, group=group)
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

    A large one is made by its upper half and its lower right quarter, 3/4 of the products; the
    quarter that is left is the mirror image of its opposite.
    """
    d = A.shape[-2]
    if d < MIRROR_SIZE or A.requires_grad:  # autograd knows no `out`
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
    norm: Tensor | None = None,  # this one and the next are of the whole matrix, if G is a shard
    is_tall: bool = False,
) -> Tensor:
    """The iterations' result for X = G / |G|, which they get as (B, m, n) with m <= n."""
    triples = _checked_triples(coefficients, steps)
    dtype = _checked_dtype(G, eps, dtype)
    if norm is None:
        norm, is_tall = float64_norm(G), G.shape[-2] > G.shape[-1]
    X = normalize(G, norm, eps, dtype).reshape(G.shape[:-2].numel(), *G.shape[-2:])
    if is_tall:
        X = iterations(X.mT, triples).mT
    else:
        X = iterations(X, triples)
    # A transposed view would surprise view(-1) and collectives
    return X.reshape(G.shape).to(G.dtype).contiguous()


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
    """Why 16 bits need a restart: a matrix of four large directions and a floor."""
    U, V = torch.linalg.qr(torch.randn(128, 4)).Q, torch.linalg.qr(torch.randn(512, 4)).Q
    X = U @ V.T + 1e-4 * torch.randn(1, 128, 512)
    X = X / X.norm()

    def largest(dtype, restarts):
        O = gram_iterations(X.to(dtype), POLAR_EXPRESS_COEFFICIENTS, restarts)
        high = torch.linalg.svdvals(O.double()).max()
        print(f"{dtype}, restarts {restarts}: largest singular value {high:.3g}")
        return high

    print("Four directions and a floor of 1e-4, by Gram")
    assert largest(torch.float32, ()) < 1.6
    assert largest(torch.bfloat16, (2,)) < 1.6
    assert largest(torch.bfloat16, ()) > 500, "without a restart bfloat16 blows up"


def _demo_scale() -> None:
    """One answer at every scale, and zero for zero."""
    G = torch.randn(128, 512)
    for scale in (1e-20, 1e30):
        difference = (gram_newton_schulz(scale * G) - gram_newton_schulz(G)).abs().max()
        print(f"The matrix times {scale:.0e}: the result differs by {difference:.0e}")
        assert difference < 1e-4
    assert not gram_newton_schulz(0 * G).any()


if __name__ == "__main__":
    torch.manual_seed(0)
    _demo_convergence()
    _demo_restart()
    _demo_scale()
