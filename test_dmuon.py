"""The specification of DMuon, as laws that are run: `pytest test_dmuon.py`.

Each test states one law in the first line of its docstring. The reference is one process, float64, the whole
global batch; the ranks are real processes on gloo, each with its own data. Nothing is mocked.
"""

import ast
import collections
import contextlib
import copy
import dataclasses
import gc
import graphlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import lr_scheduler as scheduling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dmuon
import hooks
import hsdp
import newton_schulz as ns
import partition
import train_gpt
from newton_schulz import local

torch.set_num_threads(1)  # first of all: a child forked from a process with two threads hangs in its first matmul

TIMEOUT_S = 120
HERE = Path(__file__).resolve().parent
README = (HERE / "README.md").read_text()


# ---------------------------------------------------------------------------------------------- helpers


def _child(rank: int, ranks: int, folder: str, law: Callable, args: tuple) -> None:
    """Join the group, run the law, leave its return value or its traceback in the folder."""
    torch.set_num_threads(1)  # again: torch 2.14 forgets it in a forked child, and gloo's threads then abort
    try:
        store = dist.FileStore(os.path.join(folder, "rendezvous"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
        torch.save(law(rank, *args), os.path.join(folder, f"result{rank}"))
        dist.destroy_process_group()
    except BaseException:
        with open(os.path.join(folder, f"failure{rank}"), "w") as file:
            file.write(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)  # not exit: the group's destructor would wait for peers that hang


def run(ranks: int, law: Callable, *args, timeout_s: float = TIMEOUT_S, lost: int | None = None) -> list:
    """Run `law(rank, *args)` in `ranks` forked processes joined by gloo; return their results in rank order.

    A rank that raises, or the timeout, ends all of them and fails the test with every traceback there is. The rank
    `lost` may end as it likes, and has no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_child, args=(r, ranks, folder, law, args)) for r in range(ranks)]
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout_s
        while any(child.is_alive() for r, child in enumerate(children) if r != lost) and time.monotonic() < deadline:
            if any(child.exitcode not in (None, 0) for r, child in enumerate(children) if r != lost):
                deadline = min(deadline, time.monotonic() + 2)  # let the others write their tracebacks
            time.sleep(0.005)
        hung = [r for r, child in enumerate(children) if child.is_alive()]
        for child in children:
            child.kill()
            child.join()
        failures = []
        for r, child in enumerate(children):
            path = os.path.join(folder, f"failure{r}")
            if r == lost:
                continue
            if os.path.exists(path):
                failures.append(f"rank {r}:\n{open(path).read()}")
            elif r in hung or child.exitcode != 0:
                failures.append(f"rank {r}: {'still running at the end' if r in hung else f'exit {child.exitcode}'}")
        if failures:
            pytest.fail(f"{ranks} ranks, {timeout_s:.0f} s at most\n" + "\n".join(failures), pytrace=False)
        paths = [os.path.join(folder, f"result{r}") for r in range(ranks) if r != lost]
        return [torch.load(path, weights_only=False) for path in paths]


# ------------------------------------------------------------------------------------------ newton_schulz.py

SETS = {"keller": ns.KELLER_COEFFICIENTS, "you": ns.YOU_COEFFICIENTS, "polar_express": ns.POLAR_EXPRESS_COEFFICIENTS}
SHAPES = [(64, 64), (64, 256), (256, 64), (1, 64), (64, 1), (1, 1), (3, 32, 48), (2, 3, 32, 96)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polynomial(x: torch.Tensor, coefficients) -> torch.Tensor:
    """p(x) in float64: what five steps do to a singular value."""
    x = x.double()
    for a, b, c in [coefficients] * 5 if isinstance(coefficients[0], float) else coefficients:
        x = a * x + b * x**3 + c * x**5
    return x


def exact_ns(G: torch.Tensor, coefficients) -> torch.Tensor:
    """U p(S/|G|) V^T from an SVD in float64."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / torch.linalg.vector_norm(S, dim=-1, keepdim=True)
    return U @ (polynomial(S, coefficients)[..., None] * Vh)


def gram_at_any_shape(G: torch.Tensor, coefficients, restarts, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gram NS without the hand-over to direct iterations, to have it on square matrices, its hardest input."""
    iterations = partial(ns.gram_iterations, restarts=restarts)
    return ns._iterate(iterations, G, coefficients, 5, 1e-30, dtype)


def hard_input(kind: str, m: int, n: int, seed: int = 0) -> torch.Tensor:
    """Matrices whose Gram matrix has eigenvalues that rounding makes negative."""
    U, V = gaussian(m, min(m, n), seed=seed), gaussian(n, min(m, n), seed=seed + 1)
    if kind == "rank 1":
        return U[:, :1] @ V[:, :1].T
    if kind == "rank 8":
        return U[:, :8] @ V[:, :8].T
    if kind == "4 directions":
        U, V = torch.linalg.qr(U[:, :4]).Q, torch.linalg.qr(V[:, :4]).Q
        return U @ V.T + 1e-4 * gaussian(m, n, seed=seed + 2)
    assert kind == "cond 1e6", kind
    S = torch.logspace(0, -6, min(m, n))
    return torch.linalg.qr(U).Q * S @ torch.linalg.qr(V).Q.T


HARD = ("rank 1", "rank 8", "4 directions", "cond 1e6")


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def cosine(value: torch.Tensor, reference: torch.Tensor) -> float:
    return torch.cosine_similarity(value.double().flatten(), reference.double().flatten(), dim=0).item()


def largest(O: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(O.double(), 2).max().item()


@pytest.fixture(params=["whole products", "halves"])
def halves(request, monkeypatch):
    """Both ways of a symmetric product at every size."""
    monkeypatch.setattr(ns, "MIRROR_SIZE", 2 if request.param == "halves" else 10**9)
    with torch.no_grad():
        yield


def test_half_of_a_symmetric_product_is_computed():
    """From MIRROR_SIZE on 3/4 of the FLOPs of each product with a symmetric result, and no other result."""
    for shape, f, expected in (
        ((512, 768), ns.gram_newton_schulz, (1.5 + 2) * 512**2 * 768 + 0.75 * 34 * 512**3),
        ((512, 513), ns.gram_newton_schulz, 5 * ((1.5 + 2) * 512**2 * 513 + 1.5 * 512**3)),
        ((768, 512), ns.newton_schulz, 5 * ((1.5 + 2) * 512**2 * 768 + 1.5 * 512**3)),
        ((511, 768), ns.gram_newton_schulz, 4 * 511**2 * 768 + 34 * 511**3),
    ):
        G = gaussian(*shape, dtype=torch.float64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            O = f(G)
        assert counter.get_total_flops() == expected
        whole = f(G.requires_grad_())  # with autograd whole products, so that all of torch.func works
        torch.testing.assert_close(O, whole, rtol=0, atol=1e-12)
        assert whole.requires_grad
    batch = gaussian(2, 512, 520)
    torch.testing.assert_close(torch.func.vmap(ns.newton_schulz)(batch), ns.newton_schulz(batch), rtol=0, atol=1e-4)
    X = gaussian(2, 513, 520)
    with torch.no_grad():
        product = ns.symmetric_product(X, X.mT)
    assert torch.equal(product, product.mT)
    torch.testing.assert_close(product, X @ X.mT, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name, gain, at_one, low, high",
    [("keller", 485, 0.70, 0.682, 1.202), ("you", 493, 0.98, 0.978, 1.145), ("polar_express", 804, 1.02, 0.846, 1.124)],
)
def test_ns_coefficients(name, gain, at_one, low, high):
    """Each set maps singular values from 0.003 on into its published range, with its gain at 0 and its value at 1."""
    x = torch.cat([torch.tensor([1e-9], dtype=torch.float64), torch.linspace(0.003, 1, 100_001, dtype=torch.float64)])
    p = polynomial(x, SETS[name])
    assert (p[0] / x[0]).item() == pytest.approx(gain, abs=0.5)
    assert p[-1].item() == pytest.approx(at_one, abs=0.005)
    assert p[1:].min().item() == pytest.approx(low, abs=5e-4)
    assert p[1:].max().item() == pytest.approx(high, abs=5e-4)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.usefixtures("halves")
def test_ns_is_the_polynomial_of_the_singular_values(name):
    """NS of U S V^T is U p(S/|G|) V^T, direct and Gram, tall and wide, single and batched."""
    for shape in SHAPES:
        for dtype, direct, gram, restarted in (
            (torch.float64, 1e-12, 1e-12, 1e-12),
            (torch.float32, 2e-5, 5e-4, 1e-4),
        ):
            G = gaussian(*shape, dtype=dtype)
            exact = exact_ns(G, SETS[name]).to(dtype)
            torch.testing.assert_close(ns.newton_schulz(G, SETS[name]), exact, rtol=0, atol=direct)
            torch.testing.assert_close(ns.gram_newton_schulz(G, SETS[name]), exact, rtol=0, atol=gram)
            for restarts, atol in (((), gram), ((2,), restarted)):
                torch.testing.assert_close(gram_at_any_shape(G, SETS[name], restarts), exact, rtol=0, atol=atol)


@pytest.mark.usefixtures("halves")
def test_gram_is_direct_for_any_restarts():
    """Every choice of restarts, on every shape, gives the direct iterations' result."""
    choices = [c for k in range(5) for c in itertools.combinations(range(1, 5), k)]
    for shape in [(32, 32), *SHAPES]:
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 5e-4)):
            G = gaussian(*shape, seed=1, dtype=dtype)
            direct = ns.newton_schulz(G)
            for restarts in choices:
                gram = gram_at_any_shape(G, ns.POLAR_EXPRESS_COEFFICIENTS, restarts)
                torch.testing.assert_close(gram, direct, rtol=0, atol=atol, msg=lambda m: f"{shape} {restarts}: {m}")
                if shape[-1] >= 1.5 * shape[-2]:
                    assert torch.equal(ns.gram_newton_schulz(G, restarts=restarts), gram)


@pytest.mark.usefixtures("halves")
def test_gram_factor_needs_only_the_sum_of_the_shards_gram_matrices():
    """Q from the summed R of column shards, single or batched, applied to each shard is the whole matrix's NS."""
    X = gaussian(2, 24, 96, dtype=torch.float64)
    X = ns.normalize(X, ns.float64_norm(X), 1e-30, torch.float64)
    triples = ns.POLAR_EXPRESS_COEFFICIENTS
    shards = X.split([40, 0, 56], dim=-1)
    R = sum(shard @ shard.mT for shard in shards)
    before = R.clone()
    Q = ns.gram_factor(R, triples)
    assert torch.equal(R, before) and Q.shape == R.shape
    assert torch.equal(ns.gram_factor(R[:1], triples), Q[:1])
    whole = torch.cat([Q @ shard for shard in shards], dim=-1)
    torch.testing.assert_close(whole, ns.direct_iterations(X, triples), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 2e-2), (torch.bfloat16, 0.1)])
@pytest.mark.usefixtures("halves")
def test_sixteen_bit_gram_is_near_float32(dtype, bound):
    """Gram in 16 bits, with the restart that it picks itself, is the direct float32 result to 16-bit accuracy."""
    G = gaussian(64, 256)
    for coefficients in SETS.values():
        direct = ns.newton_schulz(G, coefficients)
        gram = ns.gram_newton_schulz(G, coefficients, dtype=dtype)
        assert gram.dtype == torch.float32
        assert torch.equal(gram, ns.gram_newton_schulz(G, coefficients, dtype=dtype, restarts=(2,)))
        assert relative(gram, direct) < bound
        assert cosine(gram, direct) > 0.99


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.usefixtures("halves")
def test_gram_is_stable_with_the_restarts_it_picks(kind):
    """On low-rank and ill-conditioned input no singular value leaves the polynomial's range, in float32 or bfloat16."""
    for shape in ((128, 512), (512, 128), (128, 192), (96, 96)):
        G = hard_input(kind, *shape)
        for name, coefficients in SETS.items():
            for dtype, restarts, bound in ((torch.float32, (), 1.25), (torch.bfloat16, (2,), 1.6)):
                O = gram_at_any_shape(G, coefficients, restarts, dtype)
                if shape != (96, 96):
                    assert torch.equal(O, ns.gram_newton_schulz(G, coefficients, dtype=dtype))
                assert O.isfinite().all() and largest(O) < bound, (kind, shape, name, dtype, largest(O))


@pytest.mark.usefixtures("halves")
def test_bfloat16_gram_without_a_restart_blows_up():
    """The restart is needed: without it bfloat16 throws singular values far beyond the range (negative control)."""
    # Worst of 6 shapes x 10 seeds: rank 1 gives 2e3 (Keller), 2e5 (You), 4e9 (Polar Express); 4 equal directions give
    # 56, 361 and 1e5.
    for kind, bounds in (("rank 1", (500, 500, 500)), ("4 directions", (10, 10, 500))):
        for shape in ((128, 512), (512, 128), (64, 256)):
            for (name, coefficients), bound in zip(SETS.items(), bounds):
                O = ns.gram_newton_schulz(hard_input(kind, *shape), coefficients, dtype=torch.bfloat16, restarts=())
                assert not O.isfinite().all() or largest(O) > bound, (kind, shape, name, largest(O))


@pytest.mark.parametrize(
    "name, low, high, least_cosine",
    [("keller", 0.65, 1.22, 0.97), ("you", 0.95, 1.05, 0.999), ("polar_express", 0.83, 1.14, 0.99)],
)
@pytest.mark.usefixtures("halves")
def test_ns_brings_singular_values_near_one(name, low, high, least_cosine):
    """After five steps on a well-conditioned matrix every singular value is near 1 and the direction is U V^T."""
    G = gaussian(64, 256)
    U, _, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    for f in (ns.newton_schulz, ns.gram_newton_schulz):
        for dtype, slack in ((torch.float32, 0.0), (torch.bfloat16, 0.05)):
            O = f(G, SETS[name], dtype=dtype)
            S = torch.linalg.svdvals(O.double())
            assert low - slack < S.min() and S.max() < high + slack, (f.__name__, dtype, S.min(), S.max())
        assert cosine(f(G, SETS[name]), U @ Vh) > least_cosine


@pytest.mark.parametrize("f", [ns.newton_schulz, ns.gram_newton_schulz])
@pytest.mark.usefixtures("halves")
def test_ns_invariances(f):
    """To the bit: sign is kept, powers of two are ignored, transposition commutes, a batch is its matrices alone."""
    for shape in SHAPES:
        G = gaussian(*shape, seed=2)
        O = f(G)
        assert torch.equal(f(-G), -O)
        assert torch.equal(f(2.0**20 * G), O) and torch.equal(f(2.0**-20 * G), O)
        if shape[-1] != shape[-2]:
            assert torch.equal(f(G.mT).mT, O)
        matrices = G.reshape(-1, *shape[-2:])
        assert torch.equal(torch.stack([f(matrix) for matrix in matrices]).reshape(shape), O)
        torch.testing.assert_close(f(3 * G), O, rtol=0, atol=1e-4)
    G = gaussian(64, 256, seed=3)
    rotation = torch.linalg.qr(gaussian(64, 64, seed=4)).Q
    torch.testing.assert_close(f(rotation @ G), rotation @ f(G), rtol=0, atol=1e-4)


@pytest.mark.parametrize("f", [ns.newton_schulz, ns.gram_newton_schulz])
@pytest.mark.usefixtures("halves")
def test_ns_ignores_scale(f):
    """Scales from 1e-20 to 1e30 give one answer, 16-bit iteration included; zero gives zero; below eps it shrinks."""
    G = gaussian(64, 256, seed=5)
    for dtype, atol in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        O = f(G, dtype=dtype)
        for scale in (1e-20, 1e-10, 1e10, 1e20, 1e30):
            torch.testing.assert_close(f(scale * G, dtype=dtype), O, rtol=0, atol=atol)
    assert torch.equal(f(0 * G), torch.zeros_like(G))
    small = f(G, eps=1e6)
    assert small.isfinite().all() and 0 < small.norm() < 0.2 * f(G).norm()
    batch = torch.stack([1e-20 * G, 0 * G, 1e30 * G])
    torch.testing.assert_close(f(batch), torch.stack([f(G), 0 * G, f(G)]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("f", [ns.newton_schulz, ns.gram_newton_schulz])
@pytest.mark.usefixtures("halves")
def test_nan_stays_in_its_matrix(f):
    """One NaN or Inf makes its whole matrix NaN, raises nothing and leaves every bit of the other matrices."""
    for shape in ((3, 16, 64), (3, 64, 16), (3, 16, 16)):
        G = gaussian(*shape, seed=6)
        O = f(G)
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoilt = G.clone()
            spoilt[1, 2, 3] = bad
            result = f(spoilt)
            assert result[1].isnan().all()
            assert torch.equal(result[0], O[0]) and torch.equal(result[2], O[2])


@pytest.mark.parametrize("f", [ns.newton_schulz, ns.gram_newton_schulz])
@pytest.mark.usefixtures("halves")
def test_ns_never_writes_to_its_input(f):
    """The input keeps every bit; the result is new memory, contiguous, of the input's shape and dtype."""
    for shape in ((16, 64), (64, 16), (16, 16), (2, 16, 64), (0, 5), (5, 0), (0, 4, 8), (2, 0, 8)):
        for dtype in ns.DTYPES:
            for iterated in (None, torch.float32, torch.bfloat16, torch.float64, dtype):
                G = gaussian(*shape, dtype=dtype)
                before = G.clone()
                O = f(G, dtype=iterated)
                assert torch.equal(G, before)
                assert O.shape == G.shape and O.dtype == dtype and O.is_contiguous()
                assert O.numel() == 0 or O.untyped_storage().data_ptr() != G.untyped_storage().data_ptr()
    strided = gaussian(4, 2, 32, 128)[:, 1, ::2, ::2]
    assert torch.equal(f(strided), f(strided.contiguous()))


def test_iteration_dtype_follows_the_input():
    """Float64 is iterated in float64, anything else in float32 on a CPU, and a named dtype is obeyed."""
    for f in (ns.newton_schulz, ns.gram_newton_schulz):
        for dtype in ns.DTYPES:
            G = gaussian(16, 64, dtype=dtype)
            default = torch.float64 if dtype == torch.float64 else torch.float32
            assert torch.equal(f(G), f(G, dtype=default))
            assert torch.equal(f(G), f(G.to(default)).to(dtype))
        G = gaussian(16, 64)
        assert relative(f(G, dtype=torch.float64), exact_ns(G, ns.POLAR_EXPRESS_COEFFICIENTS)) < 1e-6
        assert not torch.equal(f(G), f(G, dtype=torch.bfloat16))


def test_restarts_follow_the_precision():
    """Five steps in full precision take none, in 16 bits or TF32 one; more steps take every second from the third."""
    X = {dtype: torch.zeros(1, 2, 4, dtype=dtype) for dtype in ns.DTYPES}
    for dtype, five in ((torch.float64, ()), (torch.float32, ()), (torch.float16, (2,)), (torch.bfloat16, (2,))):
        assert ns.default_restarts(X[dtype], 5) == five
        assert ns.default_restarts(X[dtype], 2) == ()
        assert ns.default_restarts(X[dtype], 8) == (2, 4, 6)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        assert ns.default_restarts(X[torch.float32], 5) == (2,)
        assert ns.default_restarts(X[torch.float64], 5) == ()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.usefixtures("halves")
def test_many_steps_stay_stable():
    """Over eight steps the restarts that Gram picks keep bfloat16 and float32 in the polynomial's range."""
    for kind in HARD:
        G = hard_input(kind, 64, 256)
        for dtype in (torch.float32, torch.bfloat16):
            O = ns.gram_newton_schulz(G, ns.KELLER_COEFFICIENTS, steps=8, dtype=dtype)
            assert largest(O) < 1.6, (kind, dtype, largest(O))


def test_gram_hands_over_to_direct_below_one_and_a_half():
    """Below n = 1.5 m Gram NS is direct NS to the bit, whatever the restarts; from 1.5 m on it is not."""
    for shape, same in (((64, 64), True), ((64, 95), True), ((95, 64), True), ((64, 96), False), ((96, 64), False)):
        G = gaussian(*shape)
        for restarts in (None, (), (2,), (1, 3)):
            assert torch.equal(ns.gram_newton_schulz(G, restarts=restarts), ns.newton_schulz(G)) == same


MATRIX = torch.eye(4, 8)


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (ValueError, r"shape \(8,\): expected a matrix", dict(G=torch.ones(8))),
        (ValueError, r"shape \(\): expected a matrix", dict(G=torch.ones(()))),
        (TypeError, "dtype torch.int64: expected one of", dict(G=torch.ones(4, 8, dtype=torch.int64))),
        (TypeError, "dtype torch.complex64: expected one of", dict(G=torch.ones(4, 8, dtype=torch.complex64))),
        (TypeError, "dtype=torch.int8: expected None or one of", dict(dtype=torch.int8)),
        (ValueError, "eps=0: expected at least", dict(eps=0)),
        (ValueError, "eps=-1.0: expected at least", dict(eps=-1.0)),
        (ValueError, "eps=nan: expected at least", dict(eps=float("nan"))),
        (ValueError, "steps=0: expected an integer", dict(steps=0, coefficients=ns.KELLER_COEFFICIENTS)),
        (ValueError, "steps=2.5: expected an integer", dict(steps=2.5, coefficients=ns.KELLER_COEFFICIENTS)),
        (ValueError, "steps=3 with 5 coefficient triples.*neither cut nor extended; pass steps=5", dict(steps=3)),
        (ValueError, "steps=6 with 5 coefficient triples", dict(steps=6, coefficients=ns.YOU_COEFFICIENTS)),
        (ValueError, r"coefficients=\(1.0, 2.0\): expected one triple", dict(coefficients=(1.0, 2.0))),
        (ValueError, r"coefficients=\(\): expected one triple", dict(coefficients=())),
        (ValueError, "expected one triple", dict(coefficients=[(1.0, 2.0)] * 5)),
    ],
)
def test_ns_refuses_bad_input(error, message, arguments):
    """A wrong argument raises with its name, its value and what is expected."""
    for f in (ns.newton_schulz, ns.gram_newton_schulz):
        with pytest.raises(error, match=message):
            f(**{"G": MATRIX, **arguments})


@pytest.mark.parametrize("restarts", [(0,), (5,), (-1,), (2, 2), (3, 1), (1.5,), 2, "2"])
def test_ns_refuses_bad_restarts(restarts):
    """Restarts are ascending iterations after the first; the message says so, on matrices of any shape."""
    for G in (MATRIX, torch.eye(4)):
        with pytest.raises(ValueError, match=r"restarts=.* with steps=5: expected ascending iterations in 1\.\.4"):
            ns.gram_newton_schulz(G, restarts=restarts)


@pytest.mark.parametrize("limit", [1, 3 * 16 * 24, 2**18])
@pytest.mark.usefixtures("halves")
def test_equal_shapes_go_as_batches_with_the_same_bits(limit, monkeypatch):
    """Every matrix is in one batch, of one shape and dtype, in order, within the limit; a batch equals a loop."""
    monkeypatch.setitem(ns.BATCH_NUMEL, "cpu", limit)
    shapes = [(16, 24), (24, 16), (16, 24), (2, 16, 24), (16, 24), (16, 24), (8, 8), (16, 24), (2, 16, 24), (24, 16)]
    matrices = [gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes)] + [gaussian(16, 24).double()]
    found = ns.equal_shapes(matrices)
    assert sorted(id(m) for batch in found for m in batch) == sorted(map(id, matrices))
    for batch in found:
        assert len({(m.shape, m.dtype) for m in batch}) == 1
        assert len(batch) == 1 or sum(m.numel() for m in batch) <= limit
        for backend, alone in (("gram", ns.gram_newton_schulz), ("direct", ns.newton_schulz)):
            together = ns.orthogonalise(batch, backend, ns.YOU_COEFFICIENTS)
            assert all(torch.equal(a, alone(b, ns.YOU_COEFFICIENTS)) for a, b in zip(together, batch, strict=True))
    sizes = sorted(map(len, found))
    assert sizes == {1: [1] * 11, 3 * 16 * 24: [1, 1, 1, 1, 2, 2, 3], 2**18: [1, 1, 2, 2, 5]}[limit]


# ---------------------------------------------------------------------------- newton_schulz.py, tensor parallelism


class Collectives(TorchDispatchMode):
    """Records (name, elements of this rank's input) of every collective, DTensor's and ours."""

    def __init__(self):
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes it apart, and its collectives come here
        if operator.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", operator.__name__):
            name = operator.__name__.split(".")[0]
            tensors = args[name == "gather_"]  # that one names what it fills first
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            self.sent.append((name, sum(t.numel() for t in tensors)))
        return operator(*args, **(kwargs or {}))


def ns_of_cut(G: DTensor, coefficients=ns.POLAR_EXPRESS_COEFFICIENTS, steps: int = 5, home: int = 0) -> DTensor:
    """`tensor_parallel_newton_schulz` of one matrix, placed as G."""
    options = [(coefficients, steps, 1e-30, None)]
    ((_, part),) = ns.tensor_parallel_newton_schulz([lambda: G], [home], G.device_mesh, options)
    part = part.reshape(G.to_local().shape).to(G.dtype)
    return DTensor.from_local(part, G.device_mesh, G.placements, shape=G.shape, stride=G.stride())


CUT_SHAPES = {  # (shape, cut dimension): tall, wide, square, stacked; even, uneven, with empty shards
    "tall, long cut": ((64, 24), 0), "tall, short cut": ((64, 24), 1), "wide, long cut": ((24, 64), 1),
    "wide, short cut": ((24, 64), 0), "square, rows": ((32, 32), 0), "square, columns": ((32, 32), 1),
    "uneven rows": ((37, 10), 0), "uneven columns": ((10, 37), 1), "uneven, short cut": ((5, 64), 0),
    "empty shards": ((6, 2), 0), "empty shards, short cut": ((6, 9), 0),
    "experts, rows": ((3, 40, 16), 1), "experts, columns": ((3, 16, 40), 2), "experts, short cut": ((3, 16, 40), 1),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ns_of_a_cut_matrix_is_that_of_the_whole(ranks):
    """Both ways, by summed Gram matrices and by a gather, give the shards of the whole matrix's NS (C15)."""

    def law(rank):
        mesh, rule = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), ns.sums_grams
        for name, (shape, dim) in CUT_SHAPES.items():
            for dtype, atol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
                G = gaussian(*shape, dtype=dtype)
                cut = distribute_tensor(G, mesh, [Shard(dim)])
                before, expected = cut.to_local().clone(), ns.newton_schulz(G)
                assert rule(cut) == (G.shape[dim] >= G.shape[{-2: -1, -1: -2}[dim - G.ndim]])
                for gather, home in zip((None, True, False), (0, 1, ranks - 1)):
                    if gather is False and not rule(cut) and dtype == torch.float32:
                        continue  # the large Gram matrix has low rank: right, but to 1e-2 only
                    ns.sums_grams = rule if gather is None else lambda _: not gather  # both ways on every shape
                    O = ns_of_cut(cut, home=home)
                    assert O.placements == cut.placements and O.shape == G.shape and O.dtype == dtype
                    assert O.to_local().shape == before.shape and torch.equal(cut.to_local(), before)
                    message = lambda text: f"{name}, {gather}: {text}"
                    torch.testing.assert_close(O.full_tensor(), expected, rtol=0, atol=atol, msg=message)
        return True

    assert run(ranks, law) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_matrices_come_home_in_turns(ranks):
    """More matrices than ranks, of both kinds, with options and homes of their own: each as if alone.

    Home is where NS runs: of what is no rank's alone, nobody computes a factor twice. At most 2 T are in flight.
    """

    def law(rank):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        cut = [distribute_tensor(gaussian(*shape, seed=i, dtype=torch.float64), mesh, [Shard(dim)])
               for i, (shape, dim) in enumerate([*CUT_SHAPES.values()] * 2)]
        options = [(ns.YOU_COEFFICIENTS if i % 3 else ns.POLAR_EXPRESS_COEFFICIENTS, 5, 1e-30, None)
                   for i in range(len(cut))]
        homes = partition.assign_homes([(G.shape, ns.sharded_dim(G)) for G in cut], ranks)
        alive, most, made = weakref.WeakSet(), 0, []

        def make(i):
            nonlocal most
            most = max(most, len(alive))
            return cut[i]

        ways = {"_by_summed_gram": ns._by_summed_gram, "_by_gather": ns._by_gather}
        factor, gram = ns.gram_factor, ns.gram_newton_schulz

        class Counted:
            def __init__(self, stages):
                self.stages = stages
                alive.add(self)

            def __next__(self):
                return next(self.stages)

        for name, way in ways.items():
            setattr(ns, name, lambda *args, way=way: Counted(way(*args)))
        ns.gram_factor = lambda *args: made.append(1) or factor(*args)

        def whole(*args):
            before = len(made)
            result = gram(*args)
            made[before:] = [1]  # with the factors that it made
            return result

        ns.gram_newton_schulz = whole
        results = dict(ns.tensor_parallel_newton_schulz([partial(make, i) for i in range(len(cut))], homes, mesh,
                                                        options))
        ns.gram_factor, ns.gram_newton_schulz = factor, gram
        assert sorted(results) == [*range(len(cut))] and most <= 2 * ranks
        assert len(made) == homes.count(rank) and {*homes} == {*range(ranks)}
        for i, G in enumerate(cut):
            alone = ns_of_cut(G, options[i][0], home=(homes[i] + 1) % ranks).to_local()
            torch.testing.assert_close(results[i].reshape(alone.shape), alone, rtol=0, atol=1e-12)
        return True

    assert run(ranks, law) == [True] * ranks


def test_a_batch_mixes_no_placements():
    """Of one shape: whole DTensors, stacks cut by expert and plain tensors are apart."""

    def law(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plain = [gaussian(4, 16, 24, seed=seed) for seed in range(2)]
        placed = [[distribute_tensor(G, mesh, [placement]) for G in plain] for placement in (
            Replicate(), Shard(0))]
        matrices = [G for pair in zip(plain, *placed) for G in pair]
        found = ns.equal_shapes(matrices)
        assert sorted(map(len, found)) == [2, 2, 2]
        with pytest.raises(TypeError, match="G is a DTensor: pass its full_tensor"):
            ns.gram_newton_schulz(placed[1][0])
        for batch in found:
            for update, G in zip(ns.orthogonalise(batch, "gram"), batch, strict=True):
                whole = ns.gram_newton_schulz(G.full_tensor() if isinstance(G, DTensor) else G)
                expected = distribute_tensor(whole, mesh, G.placements).to_local() if isinstance(G, DTensor) else whole
                torch.testing.assert_close(update, expected, rtol=0, atol=1e-3)
        return True

    assert run(2, law) == [True] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_has_the_bits_of_lerp_whole_or_sharded(dtype):
    """Momenta move in place, gradients keep their bits, and nesterov looks one step ahead."""

    def law(rank):
        mesh = init_device_mesh("cpu", (2,))
        gradients = [gaussian(5, 8, seed=seed, dtype=dtype) for seed in range(2)]
        before = [gaussian(5, 8, seed=seed + 2, dtype=dtype) for seed in range(2)]
        for nesterov, cut in itertools.product((True, False), (False, True)):
            place = lambda t: distribute_tensor(t.clone(), mesh, [Shard(0)]) if cut else t.clone()
            whole_of = lambda t: t.full_tensor() if cut else t
            given, momenta = [*map(place, gradients)], [*map(place, before)]
            directions = ns.muon_update(given, momenta, 0.95, nesterov)
            for i, gradient in enumerate(gradients):
                momentum = before[i].lerp(gradient, 1 - 0.95)
                expected = gradient.lerp(momentum, 0.95) if nesterov else momentum
                assert torch.equal(whole_of(momenta[i]), momentum)
                assert torch.equal(whole_of(directions[i]), expected)
                assert torch.equal(whole_of(given[i]), gradient)
                assert (directions[i] is momenta[i]) == (not nesterov)
        return True

    assert run(2, law) == [True] * 2


def test_a_cut_matrix_keeps_the_properties_of_ns():
    """Scale is ignored, zero gives zero, a NaN on one rank is in all of the matrix, ten steps and bfloat16 too."""

    def law(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        G = gaussian(2, 64, 24)
        cut = lambda tensor: distribute_tensor(tensor, mesh, [Shard(1)])
        parallel = lambda tensor, *args, **options: ns_of_cut(cut(tensor), *args, **options)
        O = parallel(G).full_tensor()
        for scale in (1e-20, 1e20):
            torch.testing.assert_close(parallel(scale * G).full_tensor(), O, rtol=0, atol=1e-4)
        assert not parallel(0 * G).to_local().any()
        spoilt = G.clone()
        spoilt[1, 0, 0] = math.nan
        result = parallel(spoilt).to_local()
        assert result[1].isnan().all() and torch.equal(result[0], parallel(G).to_local()[0])
        assert relative(parallel(G.bfloat16()).full_tensor(), O) < 1e-2  # iterated in float32 all the same
        ten = ns.newton_schulz(G, ns.KELLER_COEFFICIENTS, 10)
        assert relative(parallel(G, ns.KELLER_COEFFICIENTS, 10).full_tensor(), ten) < 1e-2
        whole = distribute_tensor(G, mesh, [Replicate()])
        experts = distribute_tensor(G, mesh, [Shard(0)])
        assert [ns.sharded_dim(t) for t in (G, whole, experts, cut(G))] == [None, None, None, -2]
        with pytest.raises(ValueError, match="steps=3 with 5 coefficient triples"):
            parallel(G, steps=3)
        return True

    assert run(2, law) == [True] * 2


def test_a_cut_matrix_costs_collectives_of_the_sizes_that_the_docstring_says():
    """s >= d: a reduce and a broadcast of d x d; s < d: a gather and a scatter of parts; a number for the norm."""

    def law(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for shape, dim in CUT_SHAPES.values():
            cut = distribute_tensor(gaussian(*shape), mesh, [Shard(dim)])
            batch, (m, n) = prod(shape[:-2]), shape[-2:]
            with Collectives() as collectives:
                ns_of_cut(cut)
            numel, kinds = batch * min(m, n) ** 2, ("reduce_", "broadcast_")
            if not ns.sums_grams(cut):
                numel, kinds = batch * m * n // shape[dim] * -(-shape[dim] // 2), ("gather_", "scatter_")
            assert collectives.sent == [("allreduce_", batch), *((kind, numel) for kind in kinds)], shape
            planned = partition.tensor_parallel_cost(shape, dim - len(shape), 2)[2]
            assert planned == numel + batch  # T = 2: all of these send half of it on average, an all-reduce all
        with Collectives() as collectives:
            shards = [distribute_tensor(gaussian(8, 4), mesh, [Shard(0)], src_data_rank=None) for _ in range(7)]
            ns.tensor_parallel_norms(shards, mesh.get_group())
        return collectives.sent == [("allreduce_", 7)]

    assert run(2, law) == [True, True]


# ------------------------------------------------------------------------------------------ partition.py


def random_model(seed: int) -> tuple[dict[str, tuple[int, ...]], dict[str, str], int]:
    """Shapes, layers and a number of slots; small and large matrices, repeated layers that differ a little."""
    draw = random.Random(seed)
    sizes = (16, 64, 256, 512, 1024)
    kinds = [(draw.choice(sizes), draw.choice(sizes)) for _ in range(draw.randint(1, 10))]
    shapes = {
        f"layers.{i}.w{k}": shape if draw.random() < 0.9 else (128, 512)
        for i in range(draw.randint(1, 12))
        for k, shape in enumerate(kinds)
    }
    return shapes, {name: name.rsplit(".", 1)[0] for name in shapes}, draw.choice((1, 2, 3, 4, 8, 16))


def units_of(shapes, layers) -> list[list[str]]:
    units = partition._pack_units(shapes, layers)
    assert sorted(name for unit in units for name in unit) == sorted(shapes)
    return units


@pytest.mark.parametrize("shape", [(32, 32), (32, 47), (32, 48), (128, 32), (1, 64), (3, 32, 48), (2, 3, 16, 32)])
def test_ns_flops_are_what_newton_schulz_runs(shape):
    """ns_flops is, to the FLOP, what Gram NS with one restart (direct below n = 1.5 m) runs."""
    for steps in (1, 2, 3, 5, 7):
        with FlopCounterMode(display=False) as counter:
            ns.gram_newton_schulz(gaussian(*shape), ns.KELLER_COEFFICIENTS, steps, restarts=(2,) if steps > 2 else ())
        assert partition.ns_flops(shape, steps) == counter.get_total_flops()


def test_every_matrix_has_one_owner():
    """All matrices, in model order, have one owner among the slots; the loads add up to the work."""
    for seed in range(100):
        shapes, layers, num_slots = random_model(seed)
        owners = partition.assign_owners(shapes, layers, num_slots)
        assert list(owners) == list(shapes) and set(owners.values()) <= set(range(num_slots))
        loads = partition.slot_loads(shapes, owners, num_slots)
        assert len(loads) == num_slots and sum(loads) == sum(map(partition.ns_flops, shapes.values()))
    assert partition.assign_owners({}, {}, 3) == {}


def test_a_layer_spreads_over_the_slots():
    """No slot owns two units of a layer while another owns none: the counts differ by at most one."""
    models = [random_model(seed) for seed in range(100)]
    for model, num_slots in itertools.product(("gpt2", "llama3-8b"), (2, 4, 7, 8, 16, 64)):
        models.append((*partition.model_shapes(model), num_slots))
    for shapes, layers, num_slots in models:
        owners = partition.assign_owners(shapes, layers, num_slots)
        held = {layer: [0] * num_slots for layer in layers.values()}
        for unit in units_of(shapes, layers):
            held[layers[unit[0]]][owners[unit[0]]] += 1
        assert all(max(counts) - min(counts) <= 1 for counts in held.values())


def test_no_slot_exceeds_the_mean_by_more_than_a_unit():
    """The largest load is at most the mean and the costliest unit together."""
    for seed in range(300):
        shapes, layers, num_slots = random_model(seed)
        loads = partition.slot_loads(shapes, partition.assign_owners(shapes, layers, num_slots), num_slots)
        costliest = max(sum(partition.ns_flops(shapes[name]) for name in unit) for unit in units_of(shapes, layers))
        assert max(loads) <= sum(loads) / num_slots + costliest


@pytest.mark.parametrize(
    "model, num_slots, balance",
    [("gpt2", 4, 1.0), ("gpt2", 8, 1.0), ("gpt2", 16, 1.0), ("llama3-8b", 8, 1.001), ("llama3-8b", 16, 1.001),
     ("llama3-70b", 8, 1.001), ("llama3-70b", 16, 1.01), ("llama3-70b", 64, 1.01), ("llama3-405b", 64, 1.02)],
)
def test_balance_of_known_models(model, num_slots, balance):
    """The largest load is at most 1 % above the mean, or the largest matrix, and no layer has two on one slot."""
    shapes, layers = partition.model_shapes(model)
    owners = partition.assign_owners(shapes, layers, num_slots)
    loads, largest = partition.slot_loads(shapes, owners, num_slots), max(map(partition.ns_flops, shapes.values()))
    assert max(loads) <= balance * max(sum(loads) / num_slots, largest)
    if num_slots >= 7:
        assert max(Counter((layers[name], slot) for name, slot in owners.items()).values()) == 1


@pytest.mark.parametrize("num_shards, num_replicas", [(4, 2), (2, 4), (8, 4), (4, 1), (1, 4)])
def test_replicas_spread_a_layer_over_the_shard_columns_first(num_shards, num_replicas):
    """A layer's matrices are in different columns while there are columns, and columns and slots are balanced."""
    for model in ("gpt2", "llama3-8b"):
        shapes, layers = partition.model_shapes(model)
        num_slots = num_shards * num_replicas
        owners = partition.assign_owners(shapes, layers, num_slots, num_replicas)
        columns = Counter((layers[name], slot % num_shards) for name, slot in owners.items())
        per_layer = Counter(layers.values())["layers.0"]
        assert max(columns.values()) == -(-per_layer // num_shards)
        in_slots = Counter((layers[name], slot) for name, slot in owners.items())
        assert max(in_slots.values()) == -(-per_layer // num_slots)
        loads = partition.slot_loads(shapes, owners, num_slots)
        column_loads = [sum(loads[s::num_shards]) for s in range(num_shards)]
        assert max(column_loads) * num_shards <= 1.01 * sum(loads)
        assert max(loads) * num_slots <= 1.02 * sum(loads)
    picture = partition.ownership_map(shapes, layers, owners, num_slots, 300, num_replicas)
    last = f"{num_shards - 1},{num_replicas - 1}" if num_replicas > 1 else str(num_shards - 1)
    assert picture.splitlines()[0].split()[-1] == last


@pytest.mark.parametrize("model, num_shards, num_replicas", [("gpt2", 8, 4), ("llama3-8b", 8, 8), ("llama3-70b", 8, 8),
                                                             ("llama3-70b", 8, 16), ("llama3-405b", 16, 8)])
def test_two_dimensions_are_balanced_as_one_is(model, num_shards, num_replicas):
    """The largest slot is at most 5 % above the mean, or the largest matrix."""
    shapes, layers = partition.model_shapes(model)
    num_slots = num_shards * num_replicas
    owners = partition.assign_owners(shapes, layers, num_slots, num_replicas)
    loads, largest = partition.slot_loads(shapes, owners, num_slots), max(map(partition.ns_flops, shapes.values()))
    assert max(loads) <= 1.05 * max(sum(loads) / num_slots, largest)


def test_columns_are_balanced_where_slots_cannot_be():
    """A toy with fewer units than slots: no shard column has more work than the mean."""
    toy = {"q": (128, 128), "k": (128, 128), "v": (128, 128), "o": (128, 128), "up": (512, 128), "down": (128, 512)}
    shapes = {f"layers.{i}.{name}.weight": shape for i in range(4) for name, shape in toy.items()}
    for num_shards, num_replicas in ((8, 4), (8, 16)):
        owners = partition.assign_owners(shapes, {n: n[:8] for n in shapes}, num_shards * num_replicas, num_replicas)
        loads = partition.slot_loads(shapes, owners, num_shards * num_replicas)
        assert max(sum(loads[s::num_shards]) for s in range(num_shards)) * num_shards == sum(loads)


def test_known_models_have_their_published_sizes():
    """Matrices and the rest add up to the number of parameters that each model is published with."""
    published = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama3-8b": 8_030_261_248,
                 "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "qwen3-30b-a3b": 30_532_122_624}
    for model, total in published.items():
        shapes, layers = partition.model_shapes(model)
        assert sum(map(prod, shapes.values())) + partition._MODELS[model][1] == total
        assert shapes.keys() == layers.keys()


def test_small_matrices_of_a_layer_form_units():
    """Matrices below UNIT_NUMEL of one layer share an owner up to UNIT_NUMEL elements, in model order."""
    toy = {f"h.{i}.{name}": (128, 128) for i in range(2) for name in "qkvo"}
    layers = {name: name[:3] for name in toy}
    assert units_of(toy, layers) == [[f"h.{i}.{name}" for name in "qkvo"] for i in range(2)]
    owners = partition.assign_owners(toy, layers, 4)
    assert owners == {f"h.{i}.{name}": i for i in range(2) for name in "qkvo"}
    mixed = {"a": (128, 128), "big": (256, 256), "b": (128, 385), "c": (1, 129), "none": (0, 8), "d": (2, 8, 8)}
    assert units_of(mixed, dict.fromkeys(mixed, "")) == [["a"], ["big"], ["b", "c", "none", "d"]]
    for seed in range(100):
        shapes, layers, _ = random_model(seed)
        for unit in units_of(shapes, layers):
            assert len({layers[name] for name in unit}) == 1
            assert len(unit) == 1 or sum(prod(shapes[name]) for name in unit) <= partition.UNIT_NUMEL


def test_costliest_first_by_flops_and_model_order_among_equals():
    """Units go out by NS FLOPs, not by elements; equal ones in model order, to the lowest slot of equal load."""
    shapes = {"long": (512, 4096), "square": (1024, 1024)}
    assert partition.assign_owners(shapes, {"long": "0", "square": "1"}, 2) == {"long": 1, "square": 0}
    for names in ("abcd", "dcba"):
        owners = partition.assign_owners({name: (256, 256) for name in names}, {name: name for name in names}, 4)
        assert owners == {name: slot for slot, name in enumerate(names)}


def test_every_rank_finds_the_same_owners():
    """A fresh process with another hash seed finds the same owners, and needs no torch for it."""
    code = (
        "import sys, partition; assert 'torch' not in sys.modules; "
        "shapes, layers = partition.model_shapes('llama3-8b'); "
        "print(list(partition.assign_owners(shapes, layers, 16).items()))"
    )
    shapes, layers = partition.model_shapes("llama3-8b")
    here = str(list(partition.assign_owners(shapes, layers, 16).items()))
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        folder = os.path.dirname(os.path.abspath(partition.__file__))
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert there.stdout.strip() == here, there.stderr


def calls_of(function: Callable) -> int:
    """How many functions run, Python's own and those written in C: a measure of work that no other process changes."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_planning_grows_with_the_matrices_times_the_slots():
    """Twice the layers or twice the slots are about twice the work, so that 1,024 slots are planned in no time."""

    def work(num_layers, num_slots):
        shapes, layers = partition.model_shapes("llama3-405b")
        kept = {name: shape for name, shape in shapes.items() if int(layers[name].rpartition(".")[2]) < num_layers}
        return calls_of(lambda: partition.assign_owners(kept, {name: layers[name] for name in kept}, num_slots))

    once = work(32, 64)
    assert 1.5 * once < work(64, 64) < 2.5 * once
    assert 1.5 * once < work(32, 128) < 2.5 * once
    owners = partition.assign_owners(*partition.model_shapes("llama3-405b"), 1024)
    assert len(set(owners.values())) == len(owners) == 882


@pytest.mark.parametrize("num_slots", [1, 2, 8, 16, 64, 1024])
def test_ownership_map_counts_every_matrix(num_slots):
    """A row's cells count the matrices of its kind, a star marks the first layer's owner, no line is too long."""
    shapes, layers = partition.model_shapes("gpt2")
    owners = partition.assign_owners(shapes, layers, num_slots)
    lines = partition.ownership_map(shapes, layers, owners, num_slots).splitlines()
    assert max(map(len, lines)) <= 110
    rows = [line.split() for line in lines if line.startswith("layers.")]
    kinds = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    assert [row[0] for row in rows] == [f"layers.*.{kind}" for kind in kinds]
    used = len(set(owners.values()))
    idle = f", {num_slots - used} own nothing" if used < num_slots else ""
    assert lines[-2] == f"72 matrices of 12 layers on {used} of {num_slots} slots{idle}"
    loads, elements = partition.slot_loads(shapes, owners, num_slots), [0] * num_slots
    for name, slot in owners.items():
        elements[slot] += prod(shapes[name])
    spreads = [f"mean {sum(x) / num_slots:.2e}, max/mean {max(x) * num_slots / sum(x):.3f}" for x in (loads, elements)]
    assert lines[-1] == "a slot's NS FLOPs: {}; its elements: {}".format(*spreads)
    if num_slots > 16:
        assert all(row[2:] == ["12", "matrices"] for row in rows)
        return
    for row, kind in zip(rows, kinds):
        cells = [0 if cell == "." else int(cell.rstrip("*")) for cell in row[2:]]
        counts = Counter(owners[f"layers.{i}.{kind}.weight"] for i in range(12))
        assert cells == [counts[slot] for slot in range(num_slots)] and sum(cells) == 12
        assert [slot for slot, cell in enumerate(row[2:]) if cell.endswith("*")] == [owners[f"layers.0.{kind}.weight"]]


def test_ownership_map_takes_any_model():
    """Names without numbers or with several, stacked experts, a slot or a whole model without a matrix can be shown."""
    experts = [f"encoder.layer.3.experts.{e}.w" for e in range(2)]
    shapes = {"head": (8, 8), experts[0]: (8, 32), experts[1]: (8, 32), "moe": (4, 8, 32)}
    layers = {"head": "head", experts[0]: "encoder.layer.3", experts[1]: "encoder.layer.3", "moe": "moe"}
    owners = {"head": 0, experts[0]: 1, experts[1]: 2, "moe": 0}
    lines = partition.ownership_map(shapes, layers, owners, 4).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["head", "8x8", "1*", ".", ".", "."],
        ["encoder.layer.*.experts.*.w", "8x32", ".", "1*", "1*", "."],
        ["moe", "4x8x32", "1*", ".", ".", "."],
    ]
    assert lines[4].split()[-1] == "0", "the last slot owns nothing"
    assert "0 matrices of 0 layers on 0 of 2 slots" in partition.ownership_map({}, {}, {}, 2)


def test_tensor_parallel_costs_are_what_newton_schulz_runs():
    """The planner's FLOPs of the home and of every rank: to the FLOP, the gathered without a restart."""
    cases = [((64, 24), -2), ((64, 24), -1), ((24, 64), -1), ((32, 32), -1), ((3, 40, 16), -2), ((3, 16, 40), -2)]

    def law(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for shape, dim in cases:
            G = distribute_tensor(gaussian(*shape), mesh, [Shard(dim % len(shape))])
            with FlopCounterMode(display=False) as counter:
                ns_of_cut(G, home=1)
            at_home, everywhere, _ = partition.tensor_parallel_cost(shape, dim, 2)
            if not ns.sums_grams(G):
                with FlopCounterMode(display=False) as whole:  # a CPU needs no restart, which the planner has
                    ns.gram_newton_schulz(G.full_tensor())
                assert at_home == partition.ns_flops(shape)
                at_home = whole.get_total_flops()
            assert counter.get_total_flops() == everywhere + at_home * rank, (shape, dim)
        return True

    assert run(2, law) == [True] * 2


def test_the_plan_is_what_a_real_step_sends_and_holds():
    """GPT-2's matrices on 4 ranks: owners, elements sent and momenta held of the planner, counted in a run."""
    shapes, _ = partition.model_shapes("gpt2")
    names = {"q_proj": "attn.q", "k_proj": "attn.k", "v_proj": "attn.v", "o_proj": "attn.o", "up_proj": "mlp.up",
             "down_proj": "mlp.down"}

    def law(rank, zero):
        model = train_gpt.GPT(256, 12, 768, 12)
        rest = sum(p.numel() for p in model.parameters()) - sum(map(prod, shapes.values()))
        shard(model, zero)
        planned = {re.sub(r"\w+_proj", lambda match: names[match[0]], fqn): slot[0]
                   for fqn, slot in dmuon.owners(model).items()}
        assert planned == partition.assign_owners(shapes, {name: name.rsplit(".", 3)[0] for name in shapes}, 4)
        with train_gpt.Meter([]) as meter:
            train_gpt.loss_of(model, torch.full((1, 4), rank), torch.full((1, 4), 1)).backward()
        owned = dmuon.owned_params(model).values()
        flops = sum(partition.ns_flops(p.shape) for p in owned)
        return rest, meter.sent, sum(p.numel() for p in owned), flops

    lines = [*partition.plan("gpt2", 4, 1, 1, 4096)]
    for zero in (2, 3):
        results = run(4, law, zero)
        rest = results[0][0]
        links = partition.step_traffic(sum(map(prod, shapes.values())), rest, 4, zero=zero)
        assert sum(sent for _, sent, *_ in results) == 4 * sum(links.values())
        planned = partition.step_traffic(sum(map(prod, shapes.values())), 39_505_152, 4, zero=zero)
        line = next(line for line in lines if line.startswith(f"  Z{zero} "))
        assert line.split()[1:4] == [f"{planned[key]:,.0f}" for key in ("unshard", "reduce", "replicate")]
    most, slowest = max(r[2] for r in results), max(r[3] for r in results)
    mean = sum(r[3] for r in results) / 4
    assert f"momenta {4 * most / 2**30:.2f}" in lines[-2]
    assert f"NS FLOPs: mean {mean:.2e}, max/mean {slowest / mean:.3f}; " in lines[-1]
    share = slowest / (6 * sum(map(prod, shapes.values())) * 4096 / 4)
    assert f" {share:.2%} of its forward and backward" in lines[-1]


@pytest.mark.parametrize("model, shard, replicate, tp", [("llama3-8b", 4, 8, 2), ("qwen3-30b-a3b", 8, 2, 4),
                                                         ("gpt2", 4, 1, 1), ("llama3-70b", 8, 16, 8)])
def test_the_plan_adds_up_rank_by_rank(model, shard, replicate, tp):
    """Every printed figure equals one made here by going through all ranks and matrices, whatever the formulas are."""
    shapes, layers = partition.model_shapes(model)
    rest, owners = partition._MODELS[model][1], partition.assign_owners(shapes, layers, shard * replicate, replicate)
    slots, numel, sent, layer = range(shard * replicate), {}, Counter(), Counter()
    flops, price, at_home = Counter(), Counter(), collections.defaultdict(list)
    work = whole_elements = 0
    for name, shape in shapes.items():
        is_cut, kind = "router" not in name and tp > 1, name.split(".")[-2]
        *experts, m, n = shape
        E, s, d = prod(experts), *((n, m) if kind in ("o", "down") else (m, n))
        numel[name] = prod(shape) // (tp if is_cut else 1)
        whole_elements += prod(shape) if is_cut else 0
        layer[layers[name]] += numel[name]
        work += prod(shape) * (8 / 128 if experts and "router" not in name else 1)
        gathers = is_cut and s < d
        slot = owners[name]
        if is_cut and not gathers:
            sent[slot] += E * (2 * d * d + 2) * (tp - 1) / tp
            at_home[slot].append((E * 34 * d**3, 15))
            for rank in range(tp):
                flops[slot, rank] += E * 4 * d * d * s / tp
                price[slot, rank] += 15 * E * 4 * d * d * s / tp
        elif is_cut:
            sent[slot] += 2 * (prod(shape) / tp + E) * (tp - 1) / tp
            at_home[slot].append((partition.ns_flops(shape), 1))
        else:
            for rank in range(tp):
                flops[slot, rank] += partition.ns_flops(shape)
                price[slot, rank] += partition.ns_flops(shape)
    for slot, costs in at_home.items():  # longest first, to the rank with the least so far
        loads = [0] * tp
        for cost, factor in sorted(costs, key=lambda pair: -pair[0]):
            rank = loads.index(min(loads))
            loads[rank] += cost
            flops[slot, rank] += cost
            price[slot, rank] += factor * cost
    held = Counter()  # by (slot, what)
    for slot in slots:
        for name, owner in owners.items():
            held[slot, "weights"] += numel[name] * (owner % shard == slot % shard)
            held[slot, "momenta"] += numel[name] * (owner == slot)
    part = -(-rest // shard)
    total = sum(numel.values())
    most = {what: max(held[slot, what] for slot in slots) for what in ("weights", "momenta")}
    gib = {"weights": 4 * (most["weights"] + part), "gradients": 4 * (most["momenta"] + part),
           "momenta": 4 * most["momenta"], "AdamW's": 8 * part, "full matrices in Z2": 2 * total,
           "of two layers in Z3": 2 * 2 * max(layer.values())}
    everything = total + part * shard
    row, column = (shard - 1) / shard, 2 * (replicate - 1) / replicate / shard
    links = {"Z2": [row, row, column, 0], "Z3": [2 * row, row, column, 0], "naive Z3": [2 * row, row, column, 0]}
    lines = [*partition.plan(model, shard, replicate, tp, 10**6)]
    text = "\n".join(lines)
    for kind, (*factors, _) in links.items():
        numbers = [factor * everything for factor in factors] + [row * total * (kind == "naive Z3")]
        numbers.append(whole_elements * (tp - 1) / tp if kind == "naive Z3" else sum(sent.values()) / len(slots))
        line = next(line for line in lines if re.match(rf"  {kind} +[\d,]+ ", line))
        assert line[10:].split() == [f"{number:,.0f}" for number in numbers], kind
    assert "  " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in gib.items()) in text
    loads = [flops[slot, rank] for slot in slots for rank in range(tp)]
    share = max(loads) / (6 * work * 10**6 / (len(slots) * tp))
    assert f"max/mean {max(loads) * len(loads) / sum(loads):.3f}; the slowest: {share:.2%} of its forward" in text
    priced = max(price.values()) / (6 * work * 10**6 / (len(slots) * tp))
    assert (f"  and {priced:.1%} of its time" in text) == (tp > 1)


@pytest.mark.parametrize("model, idle", [("gpt2", 56), ("llama3-70b", 0), ("qwen3-30b-a3b", 0)])
def test_the_planner_runs_without_a_gpu(model, idle):
    """`python partition.py --model=...` names owners, idle slots, links, bytes and FLOPs; wrong numbers are refused."""
    command = [sys.executable, partition.__file__, f"--model={model}", "--shard=8", "--replicate=16", "--tp=8"]
    planned = subprocess.run([*command, "--tokens=4194304"], capture_output=True, text=True, timeout=60).stdout
    slots = f"{128 - idle} of 128 slots" + (f", {idle} own nothing" if idle else "") + "\n"
    for text in ("replicate 16 x shard 8 x tp 8 = 1,024 ranks", slots, "  Z2 ", "  Z3 ", "  naive Z3 ",
                 "GiB of the fullest rank", "; the slowest: ", "4,194,304 tokens"):
        assert text in planned, text
    for option, message in (("--tp=0", "tp=0: expected at least 1"), ("--tp=5", "tp=5: does not divide ")):
        wrong = subprocess.run([*command, option], capture_output=True, text=True, timeout=60)
        assert wrong.returncode == 2 and message in wrong.stderr and "Traceback" not in wrong.stderr
    wrong = subprocess.run([command[0], command[1], "--shard=4"], capture_output=True, text=True, timeout=60)
    assert "arguments are required: --model" in wrong.stderr


def test_partition_refuses_bad_input():
    """A wrong argument raises with its name, its value and what is expected."""
    with pytest.raises(ValueError, match="num_slots=6.*a multiple of num_replicas=4"):
        partition.assign_owners({}, {}, 6, 4)
    with pytest.raises(ValueError, match="num_slots=0: expected at least 1"):
        partition.assign_owners({"w": (8, 8)}, {"w": "0"}, 0)
    for shapes, layers in (({"w": (8, 8)}, {}), ({}, {"w": "0"}), ({"v": (8, 8), "w": (8, 8)}, {"v": "0"})):
        with pytest.raises(ValueError, match=r"shapes and layers must name the same matrices.*\['w'\]"):
            partition.assign_owners(shapes, layers, 2)
    with pytest.raises(ValueError, match=r"shape=\(8,\): expected a matrix"):
        partition.assign_owners({"w": (8,)}, {"w": "0"}, 2)
    with pytest.raises(ValueError, match="model='gpt5': expected one of gpt2, gpt2-xl, llama3-8b"):
        partition.model_shapes("gpt5")


def test_the_map_in_partitions_docstring_is_the_map():
    """The picture at the top of partition.py is what `ownership_map` prints of GPT-2 on four slots."""
    shapes, layers = partition.model_shapes("gpt2")
    picture = partition.ownership_map(shapes, layers, partition.assign_owners(shapes, layers, 4), 4).splitlines()[:-2]
    assert all(f"    {line}\n" in partition.__doc__ for line in picture)


# ------------------------------------------------------------------------- the reference: one process, one piece


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * self.weight * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Block(nn.Module):
    """A residual block whose matrices have unequal shapes, with a norm beside them."""

    def __init__(self, *widths: int):
        super().__init__()
        self.norm = RMSNorm(widths[0])
        self.maps = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in zip(widths, (*widths[1:], widths[0])))

    def forward(self, x):
        hidden = self.norm(x)
        for linear in self.maps:
            hidden = torch.tanh(linear(hidden))
        return x + hidden


class Net(nn.Module):
    """Embedding, blocks with matrices of 12x8, 20x12, 8x20, 16x8, 16x16, 8x16, a head."""

    def __init__(self, block: Callable = Block, widths: tuple = ((8, 12, 20), (8, 16, 16), (8, 12, 20))):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(block(*w) for w in widths)
        self.head = nn.Linear(8, 5, bias=True)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(dtype: torch.dtype = torch.float64, make: Callable = Net) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def batches(ranks: int, steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """[step][rank] -> tokens (B, T) and targets; every rank's are different, and their scale too."""
    generator = torch.Generator().manual_seed(7)
    steps = [[(torch.randint(11, (2, 6), generator=generator),
               torch.randn(2, 6, 5, generator=generator, dtype=torch.float64) * (1 + r)) for r in range(ranks)]
             for _ in range(steps)]
    for step in steps:
        for r, (tokens, _) in enumerate(step):
            tokens[0, 0] = r % 11  # tells a data-dependent model whose data it sees
    return steps


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    output = model(tokens)
    return (output - targets.to(output.dtype)).square().mean()


def is_matrix(name: str) -> bool:
    return "layers." in name and "norm" not in name


class PlainMuon:
    """Muon on whole matrices and torch's AdamW on the rest, in one process, written independently of dmuon.py."""

    def __init__(self, model, lr=0.02, momentum=0.95, weight_decay=0.1, adamw_lr=1e-2, blocks=None):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.blocks = blocks or (lambda name, p: None)
        self.matrices = {n: p for n, p in model.named_parameters() if is_matrix(n)}
        self.momenta = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        rest = [p for n, p in model.named_parameters() if not is_matrix(n)]
        self.adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self):
        self.adamw.step()
        for name, p in self.matrices.items():
            buffer = self.momenta[name]
            buffer.mul_(self.momentum).add_(p.grad, alpha=1 - self.momentum)
            direction = p.grad * (1 - self.momentum) + buffer * self.momentum
            dim, sizes = self.blocks(name, p) or (0, len(p))
            for x, part in zip(direction.split(sizes, dim), p.split(sizes, dim)):
                x = x / x.norm().clamp(min=1e-30)
                for a, b, c in dmuon.POLAR_EXPRESS_COEFFICIENTS:
                    gram = x @ x.mT
                    x = a * x + (b * gram + c * gram @ gram) @ x
                part.mul_(1 - self.lr * self.weight_decay)
                part.sub_(x, alpha=self.lr * 0.2 * max(part.shape) ** 0.5)


OPTIONS = dict(lr=0.02, momentum=0.95, weight_decay=0.1, adamw_lr=1e-2)


def reference(ranks: int, steps: int, make: Callable = Net, blocks: Callable | None = None) -> list[dict]:
    """Per step: the loss, and by name the gradient of the global mean loss, the momentum and the weight after it."""
    model = net(make=make)
    optimizer = PlainMuon(model, **OPTIONS, blocks=blocks)
    record = []
    for step in batches(ranks, steps):
        model.zero_grad()
        total = sum(loss_of(model, batch) for batch in step) / ranks
        total.backward()
        for p in optimizer.matrices.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # unused by all ranks: zero, by definition
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        record.append(dict(loss=total.item(), grads=grads, weights=weights,
                           momenta={n: m.clone() for n, m in optimizer.momenta.items()}))
    return record


LAYOUTS = {  # by name, the dimensions of the mesh; tp is the last one
    "1": dict(shard=1), "2": dict(shard=2), "4": dict(shard=4), "2x2": dict(replicate=2, shard=2),
    "4x1": dict(replicate=4, shard=1), "1x4": dict(replicate=1, shard=4), "tp2": dict(shard=1, tp=2),
    "2 tp1": dict(shard=2, tp=1), "2 tp2": dict(shard=2, tp=2), "tp4": dict(shard=1, tp=4),
    "2x1 tp2": dict(replicate=2, shard=1, tp=2), "2x2 tp2": dict(replicate=2, shard=2, tp=2),
}


def meshes(layout: str | None) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh that fully_shard gets, and that of tensor parallelism; None is a plain 1-D mesh over all ranks."""
    if layout is None:
        return init_device_mesh("cpu", (dist.get_world_size(),)), None
    dimensions = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    if "tp" not in dimensions:
        return mesh, None
    return mesh[tuple(name for name in dimensions if name != "tp")], mesh["tp"]


def tp_size(layout: str | None) -> int:
    return LAYOUTS[layout].get("tp", 1) if layout else 1


def shard(model: nn.Module, zero: int = 3, layout: str | None = None, **options) -> nn.Module:
    """Parallelise, dedicate and fully_shard as a user would. In a Block of three matrices the third stays whole."""
    mesh, tp_mesh = meshes(layout)
    if tp_mesh is not None:
        for layer in model.layers:  # DTensors in between: torch takes a local output for an even cut
            plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
            parallelize_module(layer.maps, tp_mesh, plan)
    dmuon.dedicate_params(model, mesh, reshard_after_forward=zero == 3, **options)
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """This rank's view by name: gradients and weights of what it owns or FSDP2 shards, momenta of what it owns."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # in Z2, FSDP2 keeps whole parameters after an eval
    model.state_dict()  # lets replicate broadcasts arrive
    owned = dmuon.owned_params(model)
    held = {n: p for n, p in model.named_parameters() if p.numel()}
    grads = {n: whole(p.grad) for n, p in held.items() if p.grad is not None}
    momenta = {n: whole(optimizer.state[p]["momentum_buffer"]) for n, p in owned.items()} if optimizer else {}
    return dict(grads=grads, weights={n: whole(p) for n, p in held.items()}, momenta=momenta)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> dict:
    """One step on this rank's data; what `reference` records."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    grads = snapshot(model)["grads"]
    optimizer.step()
    return {**snapshot(model, optimizer), "grads": grads, "loss": mean.item() / dist.get_world_size()}


def train(rank: int, zero: int, steps: int, make: Callable = Net, layout: str | None = None,
          blocks: Callable | None = None, **options) -> list[dict]:
    """The law most tests run: train `steps` steps on this rank's data, record what `reference` records."""
    tp = tp_size(layout)
    model = shard(net(make=make), zero, layout, blocks=blocks)
    optimizer = dmuon.Muon(model, **OPTIONS, **options)
    return [train_step(model, optimizer, step[rank // tp]) for step in batches(dist.get_world_size() // tp, steps)]


def merged(results: list[list[dict]]) -> list[dict]:
    """The ranks' views put together: every name once; where two ranks have one, they have the same bits (C13)."""
    steps = []
    for views in zip(*results):
        step = dict(loss=views[0]["loss"], grads={}, weights={}, momenta={})
        for key, view in itertools.product(("grads", "weights", "momenta"), views):
            for name, tensor in view[key].items():
                assert torch.equal(step[key].setdefault(name, tensor), tensor), (key, name)
        steps.append(step)
    return steps


def assert_same(got: list[dict], expected: list[dict], tolerance: float = 1e-10) -> None:
    """Losses, gradients, momenta and weights of every step agree, in absolute and relative terms."""
    assert len(got) == len(expected)
    for step, (a, b) in enumerate(zip(got, expected)):
        assert abs(a["loss"] - b["loss"]) <= tolerance * max(1, abs(b["loss"])), (step, a["loss"], b["loss"])
        for key in ("grads", "momenta", "weights"):
            assert a[key].keys() == b[key].keys(), (step, key, a[key].keys() ^ b[key].keys())
            for name in b[key]:
                close = torch.allclose(a[key][name], b[key][name], rtol=tolerance, atol=tolerance)
                assert close, (step, key, name, (a[key][name] - b[key][name]).abs().max().item())


def exact(ranks: int, law: Callable, *args, steps: int, data_ranks: int | None = None, **options) -> None:
    """Run the law on ranks and the reference in a child, and compare."""
    expected = run(1, lambda rank: reference(data_ranks or ranks, steps, **options))[0]
    assert_same(merged(run(ranks, law, *args)), expected)


def exact_layout(layout: str, zero: int, steps: int, make: Callable = Net, blocks: Callable | None = None,
                 **options) -> None:
    """Train in the layout and compare with one process."""
    ranks = prod(LAYOUTS[layout].values())
    law = partial(train, layout=layout, blocks=blocks, **options)
    exact(ranks, law, zero, steps, make, steps=steps, data_ranks=ranks // tp_size(layout), make=make, blocks=blocks)


@pytest.fixture
def spread(monkeypatch):
    """Every matrix is a unit of its own, however small: a layer's matrices have different owners."""
    monkeypatch.setattr(partition, "UNIT_NUMEL", 0)


# --------------------------------------------------------------------------------------------- hooks.py, exactness


@pytest.mark.parametrize("layout, zero", [*((layout, 3) for layout in LAYOUTS), ("1", 2), ("2", 2), ("4", 2),
                                          ("2x2", 2), ("2 tp2", 2), ("2x2 tp2", 2)])
def test_every_layout_trains_like_one_process(layout, zero, spread):
    """Ten float64 steps: losses, averaged gradients, momenta and weights equal one process to 1e-10 (C1, C13)."""
    exact_layout(layout, zero, 10)


def test_ranks_that_start_from_different_seeds_have_equal_weights():
    """Weights are equal after dedicate_params whatever each rank drew: the owner's value wins, else rank 0's."""

    def law(rank):
        torch.manual_seed(rank)
        model = Net().double()
        model.register_buffer("scale", torch.tensor([float(rank)]))
        model.register_buffer("mask", torch.tensor(rank == 0))
        mine = {n: p.detach().clone() for n, p in model.named_parameters()}
        shard(model)
        slots = dmuon.owners(model)
        with dmuon.unshard(model):
            seen = {n: whole(p) for n, p in model.named_parameters()}
        return slots, mine, seen, model.scale.item(), model.mask.item()

    results = run(4, law)
    slots = results[0][0]
    for _, _, seen, scale, mask in results:
        assert (scale, mask) == (0.0, True)
        for name, weight in seen.items():
            assert torch.equal(weight, results[slots[name][0] if name in slots else 0][1][name]), name


def test_modes_that_differ_only_in_when_they_communicate_are_bit_equal(spread, monkeypatch):
    """Z2 and Z3, with and without prefetch: the same bits in losses, gradients, momenta and weights."""
    records = [merged(run(4, train, 3, 5)), merged(run(4, train, 2, 5))]
    monkeypatch.setattr(hooks.DedicatedModel, "prefetch", 0)
    records += [merged(run(4, train, 3, 5)), merged(run(4, train, 2, 5))]
    for record in records[1:]:
        assert_same(record, records[0], tolerance=0.0)


@pytest.mark.parametrize("layout", ["4", "2x2", "4x1", "2 tp2"])
def test_the_gradient_is_that_of_the_global_mean_loss_also_over_four_micro_batches(layout, spread):
    """Four backwards of a quarter of the loss add up to the gradient of the global mean loss, in both families (C1)."""
    tp = tp_size(layout)

    def law(rank, ranks, steps):
        model = shard(net(), layout=layout)
        for step in batches(ranks, steps):
            (loss_of(model, step[rank // tp]) / steps).backward()
        return snapshot(model)["grads"]

    def one(rank, ranks, steps):
        model = net()
        sum(loss_of(model, batch) for step in batches(ranks, steps) for batch in step).div(ranks * steps).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    got = {n: g for grads in run(4, law, 4 // tp, 4) for n, g in grads.items()}
    expected = run(1, one, 4 // tp, 4)[0]
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(got[name], grad, rtol=1e-10, atol=1e-12), name


# ------------------------------------------------------------------------ hooks.py, matrices that a rank leaves unused


class SelectiveBlock(nn.Module):
    """Its `extra` matrix serves rank `source`'s data only; if that is nobody, `aux` feeds an output no loss reads."""

    def __init__(self, source: int):
        super().__init__()
        self.source = source
        self.up, self.extra = nn.Linear(8, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.aux = nn.Linear(8, 20, bias=False) if source == 99 else nn.Identity()

    def forward(self, x, rank):
        hidden = torch.tanh(self.up(x))
        if rank == self.source:
            hidden = hidden + self.extra(hidden)
        return x + self.down(hidden), self.aux(x)


class SelectiveNet(nn.Module):
    """Layer 0's extra serves rank 0, layer 1's rank 1, layer 2's nobody; only rank 0 uses layer 3's output at all."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(SelectiveBlock(source) for source in (0, 1, 99, 0))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        rank = tokens[0, 0].item()
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            y, _ = layer(x, rank)
            x = y if i < 3 or rank == 0 else x
        return self.head(x)


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("layout", ["2", "4", "2x2"])
def test_ranks_that_leave_a_matrix_unused_count_as_zero(layout, zero, spread):
    """No hang and exact gradients when only one rank's data uses a matrix; zero gradients where no rank does (C2)."""
    exact_layout(layout, zero, 4, SelectiveNet)


# --------------------------------------------------------------------------------------- hooks.py, unusual uses


class Looped(Net):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("zero", [3, 2])
def test_a_block_may_run_twice_before_one_backward(zero, spread):
    """Both uses of a matrix add up in one gradient, reduced once."""
    exact(2, train, zero, 3, Looped, steps=3, make=Looped)


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_may_precede_two_backwards(order, zero, spread):
    """Two graphs, two backwards in either order, an eval after each forward or backward: the gradients add up."""

    def law(rank, zero, order):
        model = shard(net(), zero)
        first, second = (step[rank] for step in batches(2, 2))
        losses = [loss_of(model, first)]
        with torch.no_grad():
            loss_of(model, second)
        losses.append(loss_of(model, second))
        losses[order[0]].backward()
        with torch.inference_mode():
            loss_of(model, first)
        losses[order[1]].backward()
        loss_of(model, first)
        return snapshot(model)["grads"]

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for step in batches(2, 2) for batch in step).div(2).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    got = {n: g for grads in run(2, law, zero, order) for n, g in grads.items()}
    for name, grad in run(1, one)[0].items():
        assert torch.allclose(got[name], grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("zero", [3, 2])
def test_an_eval_between_two_backwards_leaves_their_order(zero, spread):
    """Two graphs whose matrices only some ranks use, an eval after the first backward: the gradients add up."""

    def law(rank):
        model = shard(net(make=SelectiveNet), zero)
        losses = [loss_of(model, step[rank]) for step in batches(2, 2)]
        losses[0].backward()
        with torch.no_grad():
            loss_of(model, batches(2, 1)[0][rank])
        assert stored_bytes(model) == 0
        losses[1].backward()
        return snapshot(model)["grads"]

    def one(rank):
        model = net(make=SelectiveNet)
        sum(loss_of(model, batch) for step in batches(2, 2) for batch in step).div(2).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}

    got = {n: g for grads in run(2, law) for n, g in grads.items()}
    for name, grad in run(1, one)[0].items():
        assert torch.allclose(got[name], grad, rtol=1e-10, atol=1e-12), name


class Stopped(Net):
    """Uses each layer's first matrix once more without a gradient: its inputs need it after its gradient is in."""

    class StoppedBlock(Block):
        def forward(self, x):
            return super().forward(x + torch.tanh(F.linear(x, self.maps[0].weight.detach())[..., :8]))

    def __init__(self):
        super().__init__(Stopped.StoppedBlock)


@pytest.mark.parametrize("zero", [3, 2])
def test_a_matrix_may_be_used_without_a_gradient_too(zero, spread):
    """`weight.detach()` beside the usual use: the full matrix stays until its layer's backward is over."""
    exact(2, train, zero, 3, Stopped, steps=3, make=Stopped)


class Aside(Net):
    """A layer that leaves a second loss in an attribute, where no hook finds it."""

    class AsideBlock(Block):
        def forward(self, x):
            y = super().forward(x)
            self.aside = F.linear(x, self.maps[0].weight).square().mean()
            return y

    def __init__(self):
        super().__init__(Aside.AsideBlock)


def test_a_loss_that_a_layer_hides_is_exact_or_refused(spread):
    """Z2 has the matrices all along; in Z3 the backward finds no bytes and raises, it uses no half a broadcast."""

    def law(rank, zero):
        model = shard(net(make=Aside), zero)
        (loss_of(model, batches(2, 1)[0][rank]) + sum(layer.aside for layer in model.layers)).backward()
        return snapshot(model)["grads"]

    def one(rank):
        model = net(make=Aside)
        total = sum(loss_of(model, batch) + sum(layer.aside for layer in model.layers) for batch in batches(2, 1)[0])
        (total / 2).backward()
        return {n: p.grad for n, p in model.named_parameters() if is_matrix(n)}

    got = {n: g for grads in run(2, law, 2) for n, g in grads.items()}
    assert all(torch.allclose(got[n], grad, rtol=1e-10, atol=1e-12) for n, grad in run(1, one)[0].items())
    with pytest.raises(pytest.fail.Exception, match="storage of size 0|not allocated yet"):
        run(2, law, 3)


@pytest.mark.parametrize("zero", [3, 2])
def test_a_kept_graph_can_be_walked_again(zero, spread):
    """`retain_graph`, a forward of the first layer alone, and a second backward: twice the gradient."""

    def law(rank):
        model = shard(net(), zero)
        loss = loss_of(model, batches(2, 1)[0][rank])
        loss.backward(retain_graph=True)
        once = snapshot(model)["grads"]
        with torch.no_grad():
            model(batches(2, 1)[0][rank][0])
        loss.backward()
        return all(torch.allclose(twice, 2 * once[n]) for n, twice in snapshot(model)["grads"].items())

    assert run(2, law) == [True, True]


class EarlyExit(Net):
    depth = 3

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("zero", [3, 2])
def test_layers_may_be_skipped_by_all_ranks(zero, spread):
    """Depths 3, 1, 2, 3: an unused prefetch is freed, layers that ran have exact gradients, others have none."""

    def law(rank, parallel):
        model = shard(net(make=EarlyExit), zero) if parallel else net(make=EarlyExit)
        grads = []
        for model.depth, step in zip((3, 1, 2, 3), batches(2, 4)):
            model.zero_grad()
            if parallel:
                with torch.no_grad():
                    model(step[rank][0])
                assert stored_bytes(model) == 0
                loss_of(model, step[rank]).backward()
                grads.append({n: p.grad for n, p in dmuon.owned_params(model).items() if p.grad is not None})
            else:
                sum(loss_of(model, batch) for batch in step).div(2).backward()
                grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None and is_matrix(n)})
        return grads

    expected = run(1, law, False)[0]
    for step, both in enumerate(zip(*run(2, law, True))):
        got = both[0] | both[1]
        assert got.keys() == expected[step].keys(), step
        assert all(torch.allclose(got[n], expected[step][n], rtol=1e-10) for n in got), step


class InnerCheckpoint(Net):
    """Activation checkpointing of each block's body, inside the boundary."""

    class CheckpointBlock(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self):
        super().__init__(InnerCheckpoint.CheckpointBlock)


class OuterCheckpoint(Net):
    """Activation checkpointing around each boundary."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class WideCheckpoint(Net):
    """One checkpoint around all boundaries."""

    def forward(self, tokens):
        x = self.embed(tokens)
        x = checkpoint(lambda x: self.layers[2](self.layers[1](self.layers[0](x))), x, use_reentrant=False)
        return self.head(x)


# ------------------------------------------------------------------------- hooks.py, one order for all collectives


class Choosy(Net):
    """Every layer's third matrix serves one rank's data only; the outputs of all layers are used by all."""

    class ChoosyBlock(Block):
        source = rank = 0

        def forward(self, x):
            hidden = torch.tanh(self.maps[1](torch.tanh(self.maps[0](self.norm(x)))))
            return x + (self.maps[2](hidden) if self.rank == self.source else hidden[..., :8])

    def __init__(self):
        super().__init__(Choosy.ChoosyBlock)
        for i, layer in enumerate(self.layers):
            layer.source = i % 2

    def forward(self, tokens):
        for layer in self.layers:
            layer.rank = tokens[0, 0].item()
        return super().forward(tokens)


class Nested(Net):
    """A boundary with matrices inside each boundary with matrices; the inner one runs in the middle of the outer."""

    class NestedBlock(Block):
        def __init__(self, *widths: int):
            super().__init__(*widths)
            self.inner = Choosy.ChoosyBlock(8, 12, 16)

        def forward(self, x):
            return super().forward(self.inner(super().forward(x)))

    def __init__(self):
        super().__init__(Nested.NestedBlock)


class SelectiveLooped(SelectiveNet):
    """SelectiveNet whose first two layers run twice."""

    def forward(self, tokens):
        rank = tokens[0, 0].item()
        x = self.embed(tokens)
        for layer in (*self.layers, *self.layers[:2]):
            x, _ = layer(x, rank)
        return self.head(x)


class Parted(Net):
    """One checkpoint around two layers, of which even ranks use the second one's output, and odd ranks the first's."""

    class Plain(nn.Module):  # without parameters of FSDP2's, which cannot do this
        def __init__(self, *widths: int):
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in zip(widths, (*widths[1:], widths[0])))

        def forward(self, x):
            for linear in self.maps:
                x = torch.tanh(linear(x))
            return x

    def __init__(self):
        super().__init__(Parted.Plain)

    def forward(self, tokens):
        both = lambda x: (y := self.layers[1](x), self.layers[2](y))
        outputs = checkpoint(both, self.layers[0](self.embed(tokens)), use_reentrant=False)
        return self.head(outputs[1 - tokens[0, 0].item() % 2])


class Carried(Net):
    """Layers hand on a trained leaf beside their output; only the last one uses it."""

    class CarriedBlock(Block):
        def forward(self, x, leaf):
            return super().forward(x), leaf

    def __init__(self):
        super().__init__(Carried.CarriedBlock)
        self.leaf = nn.Parameter(torch.rand(8))

    def forward(self, tokens):
        x, leaf = self.embed(tokens), self.leaf
        for layer in self.layers:
            x, leaf = layer(x, leaf)
        return self.head(x * leaf)


class Launches(TorchDispatchMode):
    """The group of every collective that this rank issues, FSDP2's and DTensor's as well, in the order of issue."""

    def __init__(self):
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = operator.__name__.split(".")[0]
        if operator.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", name):
            groups = [dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject)
                      and "ProcessGroup" in str(arg._type())]
            group, = {group.group_name for group in groups} or {args[-1]}
            self.log.append((group, name))
        return operator(*args, **(kwargs or {}))


def assert_one_order(logs: list[list[tuple[str, str]]]) -> None:
    """There is one order of all launches on all communicators that every rank's own order is a part of.

    A node is a launch: a group, and how many there were before on it. An edge goes from each launch of a rank to its
    next one. NCCL may hang exactly if there is a cycle.
    """
    graph, kinds = graphlib.TopologicalSorter(), {}
    for log in logs:
        count, before = Counter(), None
        for group, kind in log:
            node = group, count[group]
            count[group] += 1
            assert kinds.setdefault(node, kind) == kind, (node, kind)
            graph.add(node, *([before] if before else []))
            before = node
    graph.prepare()  # raises CycleError


def recorded(rank: int, layout: str, zero: int, make: Callable, steps: int = 2, accumulate: bool = False) -> tuple:
    """Train and eval; the record of the steps, and the launches of each."""
    tp = tp_size(layout)
    options = {}
    if make is Nested:
        options["hook_boundary_predicate"] = lambda module: isinstance(module, Block)
    model = shard(net(make=make), zero, layout, **options)
    optimizer, record, log = dmuon.Muon(model, **OPTIONS), [], []
    for step in batches(dist.get_world_size() // tp, steps):
        batch = step[rank // tp]
        with Launches() as launches:
            optimizer.zero_grad()
            with dmuon.no_sync(model) if accumulate else contextlib.nullcontext():
                loss = loss_of(model, batch)
                loss.backward()
            if accumulate:
                loss_of(model, batch).backward()
            optimizer.step()
            with torch.no_grad():
                loss_of(model, batch)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        seen = snapshot(model, optimizer)
        record.append({**seen, "loss": mean.item() / dist.get_world_size()})
        log.append(launches.log)
    return record, log


ORDERS = [("4", Net, False), ("4", Choosy, False), ("4", SelectiveNet, False), ("2", Looped, False),
          ("4", SelectiveLooped, False), ("2", Nested, False), ("2", OuterCheckpoint, False), ("2", WideCheckpoint, False), ("2", Parted, False),
          ("4", Choosy, True), ("2x2", Net, False), ("2x2", Choosy, False), ("2x2", SelectiveNet, False),
          ("2x2", SelectiveLooped, False), ("2x2", Nested, False), ("2x2", Choosy, True), ("2x2", SelectiveNet, True),
          ("2 tp2", Net, False), ("2 tp2", Choosy, False), ("2 tp2", Choosy, True)]


@pytest.mark.parametrize("zero", [3, 2])
def test_all_ranks_issue_one_order_over_all_communicators(zero, spread):
    """Whatever a rank's data uses, and also under `no_sync`: no cycle in the launches of any step, FSDP2's included."""

    def law(rank):
        return [recorded(rank, layout, zero, make, accumulate=accumulate)[1] for layout, make, accumulate in cases]

    for ranks in (2, 4):
        cases = [case for case in ORDERS if prod(LAYOUTS[case[0]].values()) == ranks]
        for case, logs in zip(cases, zip(*run(ranks, law)), strict=True):
            for step in zip(*logs):
                assert_one_order(step)


@pytest.mark.parametrize("make", [Parted, Carried, Nested, Choosy])
@pytest.mark.parametrize("zero", [3, 2])
def test_parts_of_layers_may_be_used_by_some_ranks_only(make, zero, spread):
    """Recomputed or nested ones, and leaves handed on: averaged gradients are those of one process."""

    def law(rank):
        options = {"hook_boundary_predicate": lambda module: isinstance(module, Block)} if make is Nested else {}
        model = shard(net(make=make), zero, **options)
        for step in batches(2, 2):
            loss_of(model, step[rank]).backward()
        return snapshot(model)["grads"]

    def one(rank):
        model = net(make=make)
        sum(loss_of(model, batch) for step in batches(2, 2) for batch in step).div(2).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}

    got = {n: g for grads in run(2, law) for n, g in grads.items()}
    expected = run(1, one)[0]
    assert got.keys() == expected.keys()
    assert all(torch.allclose(got[n], grad, rtol=1e-10, atol=1e-12) for n, grad in expected.items())


@pytest.mark.parametrize("layout, make", [("4", Choosy), ("2x2", Choosy), ("2x2", SelectiveNet), ("2 tp2", Choosy)])
def test_packed_gradients_of_two_boundaries_at_most_are_alive(layout, make, spread, monkeypatch):
    """Of what this rank does not own; also where the last layer's matrix has no gradient on a rank."""

    def law(rank):
        counts, alive = [], weakref.WeakKeyDictionary()
        original = hooks.Reduce.__init__

        def counted(self, params, *args):
            original(self, params, *args)
            if not params[0].is_owner:  # whose `.grad` the packed tensor may become
                alive[self.flat.untyped_storage()] = params[0].fqn.split(".")[1]
            gc.collect()
            deadline = time.monotonic() + 5  # gloo's thread drops a tensor a moment after the wait for it is over
            while len({*alive.values()}) > 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            counts.append(len({*alive.values()}))

        monkeypatch.setattr(hooks.Reduce, "__init__", counted)
        tp = tp_size(layout)
        model = shard(net(make=make), layout=layout)
        for step in batches(4 // tp, 2):
            loss_of(model, step[rank // tp]).backward()
        return max(counts)

    assert max(run(4, law)) == 2


def test_stage_two_overlaps_the_backward(spread):
    """On 2x2 the second stage of a layer is issued right after the next layer's first stage, not at the end."""

    def law(rank):
        descriptions = {}
        model = shard(net(), layout="2x2")
        for group in model._dmuon.mesh.process_groups():
            descriptions[group.group_name] = group.group_desc
        loss_of(model, batches(4, 1)[0][rank]).backward()
        with Launches() as launches:
            loss_of(model, batches(4, 1)[0][rank]).backward()
        reduces = [descriptions[group] for group, name in launches.log if name == "reduce_"]
        return [stage for stage, _ in itertools.groupby(reduces)]

    for order in run(4, law):  # 2 1, second of 2, 0, second of 1 and 0
        assert order == ["dmuon_reduce", "dmuon_replicate"] * 2, order


class Late:
    """A collective whose result is NaN until it is waited for; nobody may ask whether it is over."""

    def __init__(self, collective: Callable, tensor: Tensor, *args, **options):
        self.tensor, self.result = tensor, tensor.clone()
        self.work = collective(self.result, *args, **options)
        tensor.fill_(math.nan)

    def is_completed(self) -> bool:
        raise AssertionError("what a poll says differs between ranks")

    def wait(self) -> None:
        self.work.wait()
        self.tensor.copy_(self.result)


class Delayed(Late):
    """The same, and both the issue and the wait take a while, another one on every rank."""

    def __init__(self, *args, **options):
        self.random = random.Random(os.getpid() + args[1].numel())
        time.sleep(0.004 * self.random.random())
        super().__init__(*args, **options)

    def wait(self) -> None:
        time.sleep(0.004 * self.random.random())
        super().wait()


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("layout, make", [("2", Net), ("2", Looped), ("2", WideCheckpoint), ("2", Nested),
                                          ("4", SelectiveNet), ("2x2", Choosy), ("2x2", SelectiveNet),
                                          ("2 tp2", Choosy)])
def test_when_a_collective_is_over_changes_neither_bits_nor_order(layout, make, zero, spread, monkeypatch):
    """Broadcasts and reduces that leave NaN until the last moment, or are late at random: the same bits (C12)."""

    def law(rank):
        results = [recorded(rank, layout, zero, make)]
        for double in (Late, Delayed):
            with pytest.MonkeyPatch.context() as patch:
                for name in ("broadcast", "reduce"):
                    def late(tensor, *args, _collective=getattr(dist, name), **options):
                        delay = options.get("async_op") and tensor.is_floating_point()
                        return (partial(double, _collective) if delay else _collective)(tensor, *args, **options)

                    patch.setattr(dist, name, late)
                results.append(recorded(rank, layout, zero, make))
        names = {}  # groups are new for every model
        orders = [[[(names.setdefault((i, group), len([n for n in names if n[0] == i])), kind) for group, kind in step]
                   for step in log] for i, (_, log) in enumerate(results)]
        assert orders[0] == orders[1] == orders[2]
        return [record for record, _ in results]

    for records in zip(*(merged(results) for results in zip(*run(prod(LAYOUTS[layout].values()), law)))):
        assert_same(list(records)[1:], [records[0]] * 2, tolerance=0.0)


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("make", [Net, SelectiveNet])
def test_graphs_may_be_walked_in_any_order(make, zero, spread):
    """A kept graph beside a new one; backwards some forwards behind, as in a pipeline: each gradient once."""

    def law(rank, parallel):
        model, seen = net(make=make), []
        if parallel:
            shard(model, zero)
        data = [step if not parallel else [step[rank]] for step in batches(2, 8)]
        loss = lambda i: sum(loss_of(model, batch) for batch in data[i]) / len(data[i])

        def look():
            own = dmuon.owned_params(model).items() if parallel else model.named_parameters()
            seen.append({n: p.grad.clone() for n, p in own if p.grad is not None and (parallel or is_matrix(n))})

        kept = loss(0)
        kept.backward(retain_graph=True)
        (kept + loss(1)).backward()
        look()
        losses = [loss(0), loss(1), loss(2)]
        losses[0].backward()
        losses.append(loss(3))
        for other in losses[1:]:
            other.backward()
        look()
        kept = loss(4)
        kept.backward(retain_graph=True)
        other = loss(5)
        kept.backward()
        other.backward()
        look()
        first, second = loss(6), loss(7)
        first.backward()
        (second + loss(0)).backward()  # one of before the last backward beside a new one
        look()
        return seen

    expected = run(1, law, False)[0]
    for step, both in enumerate(zip(*run(2, law, True))):
        got = both[0] | both[1]
        for name, grad in expected[step].items():
            assert torch.allclose(got[name], grad, rtol=1e-10, atol=1e-12), (step, name)


class Stashing(Net):
    """Its first layer uses the last one's whole matrix of an earlier forward, where the model says so."""

    stash = ()  # a tuple, lest it become a parameter of the model

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.layers[0](x)
        for weight in self.stash:
            y = y + F.linear(x.detach(), weight)[..., :8]
        for layer in self.layers[1:]:
            y = layer(y)
        return self.head(y)


def test_a_gradient_that_comes_after_its_reduce_is_an_error(spread):
    """It names the matrix, at the end of the backward of the rank that sees it; the others finish, and all train on."""

    def law(rank):
        model, batch = shard(net(make=Stashing), zero=2), batches(2, 1)[0][rank]
        handle = model.layers[2].maps[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
        kept = []
        with dmuon.no_sync(model):
            loss_of(model, batch).backward()
        handle.remove()
        model.stash = kept[:1] if rank == 0 else ()
        loss = loss_of(model, batch)
        model.stash = ()
        if rank == 0:
            with pytest.raises(RuntimeError, match="gradient of .'layers.2.maps.0.weight'. came after its reduce"):
                loss.backward()
        else:
            loss.backward()
        model.zero_grad()
        kept.clear()
        loss_of(model, batch).backward()
        return snapshot(model)["grads"]

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(2, 1)[0]).div(2).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    expected = run(1, one)[0]
    first, second = run(2, law)
    for name, grad in (first | second).items():
        if is_matrix(name):  # FSDP2's own have gone on adding up
            assert torch.allclose(grad, expected[name], rtol=1e-10, atol=1e-12), name


class Failure(Exception):
    pass


class Raising(SelectiveNet):
    """Raises in layer 1, forward or backward, while `fails` says so. Only matrices train: FSDP2 keeps what a failed
    backward left in its unsharded gradients."""

    fails = None

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_matrix(name))

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            handle = layer.up.register_forward_pre_hook(self._fail) if i == 1 and self.fails == "forward" else None
            try:
                x, _ = layer(x, tokens[0, 0].item())
            finally:
                if handle:
                    handle.remove()
            if i == 1 and self.fails == "backward":
                x.register_hook(self._fail)
        return self.head(x)

    def _fail(self, *_):
        raise Failure


@pytest.mark.parametrize("layout", ["2", "2x2"])
@pytest.mark.parametrize("zero, place, then", [(3, "forward", "eval"), (2, "forward", "eval"), (3, "backward", "eval"),
                                               (2, "backward", "eval"), (3, "backward", "clip"),
                                               (3, "backward", "unshard"), (3, "backward", "step")])
def test_an_exception_in_a_block_leaves_a_model_that_trains_on(place, then, zero, layout, spread):
    """After a step that raised, on every rank, training goes on as if the step had not been tried."""

    def law(rank):
        model = shard(net(make=Raising), zero, layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        record = []
        for i, step in enumerate(batches(dist.get_world_size(), 3)):
            if i == 1:
                model.fails = place
                with pytest.raises(Failure):
                    loss_of(model, step[rank]).backward()
                model.fails = None
                if (zero, place) == (3, "forward"):
                    assert stored_bytes(model) == 0
                    held = {n for n, p in model.named_parameters() if n in dmuon.owners(model) and p.numel()}
                    assert held == {n for n, slot in dmuon.owners(model).items() if slot[0] == rank % 2}
                model.reset_iter_state()  # FSDP2's own way out
                if then == "clip":
                    dmuon.clip_grad_norm_(model, 1.0)
                elif then == "unshard":
                    with dmuon.unshard(model):
                        pass
                elif then == "step":
                    optimizer.zero_grad()
                    optimizer.step()
                with torch.no_grad():
                    loss_of(model, step[rank])
            record.append(train_step(model, optimizer, step[rank]))
            assert stored_bytes(model) == 0
        return record

    exact(prod(LAYOUTS[layout].values()), law, steps=3, make=Raising)


def test_gradients_are_cleared_and_accumulated_as_in_torch(spread):
    """The same batch thrice: 1x 1x 1x with either zero_grad; 1x 2x 3x with neither (C5)."""

    def law(rank, clear, zero):
        model = shard(net(), zero)
        optimizer = dmuon.Muon(model, **{**OPTIONS, "lr": 0.0, "adamw_lr": 0.0})
        batch, grads = batches(2, 1)[0][rank], []
        for _ in range(3):
            model.zero_grad() if clear == "model" else None
            loss = loss_of(model, batch)
            optimizer.zero_grad() if clear == "optimizer" else None
            loss.backward()
            grads.append(snapshot(model)["grads"])
            optimizer.step()
        return grads

    for zero in (3, 2):
        for clear in ("optimizer", "model", None):
            for grads in run(2, law, clear, zero):
                for name, first in grads[0].items():
                    assert first.abs().max() > 0
                    for i in (1, 2):
                        factor = 1 if clear else i + 1
                        assert torch.allclose(grads[i][name], factor * first, rtol=1e-12), (clear, zero, name, i)


# ------------------------------------------------------------------------------------------- hooks.py, accumulation


@pytest.mark.parametrize("reduced", ["each time", "at the end", "twice"])
@pytest.mark.parametrize("layout, zero, make", [("2", 3, SelectiveNet), ("2", 2, SelectiveNet), ("4", 2, Net),
                                                ("2x2", 3, SelectiveNet), ("2x2", 2, Net), ("2 tp2", 2, Net)])
def test_micro_batches_add_up_however_they_are_reduced(layout, zero, make, reduced, spread, monkeypatch):
    """Four micro-batches, reduced each time, once by `no_sync`, or twice: gradients, steps of one process (C7).

    SelectiveNet has a matrix that only the first micro-batch uses, and one for the last. Newton-Schulz runs once a step
    and matrix.
    """
    calls = []
    for name in ("orthogonalise", "tensor_parallel_newton_schulz"):
        monkeypatch.setattr(dmuon, name, lambda batch, *args, original=getattr(dmuon, name): calls.extend(
            batch) or original(batch, *args))
    kept = {"each time": (), "at the end": (0, 1, 2), "twice": (0, 2)}[reduced]

    def law(rank):
        model, tp, record = shard(net(make=make), zero, layout), tp_size(layout), []
        optimizer = dmuon.Muon(model, **OPTIONS)
        for step in batches(4 * dist.get_world_size() // tp, 2):
            optimizer.zero_grad()
            mean = torch.zeros((), dtype=torch.float64)
            for i, micro in enumerate((0, 2, 3, 1)):
                loss = loss_of(model, step[4 * (rank // tp) + micro]) / 4  # outside: where the backward runs decides
                with dmuon.no_sync(model) if i in kept else contextlib.nullcontext():
                    loss.backward()
                mean += loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            grads = snapshot(model)["grads"]
            calls.clear()
            optimizer.step()
            assert len(calls) == len(dmuon.owned_params(model)) and stored_bytes(model) == 0
            record.append({**snapshot(model, optimizer), "grads": grads, "loss": mean.item()})
        return record

    ranks = prod(LAYOUTS[layout].values())
    exact(ranks, law, steps=2, data_ranks=4 * ranks // tp_size(layout), make=make)


def test_no_sync_reduces_once_a_step_and_z2_broadcasts_once(spread, traffic):
    """Over four micro-batches P_M elements are reduced; Z2 broadcasts P_M in all, Z3 2 P_M each time."""

    def law(rank, zero):
        model = shard(net(), zero)
        optimizer = dmuon.Muon(model, **OPTIONS)
        total = sum(p.numel() for n, p in net().named_parameters() if n in dmuon.owners(model))
        for step in batches(2, 3):
            traffic.clear()
            with dmuon.no_sync(model):
                for _ in range(3):
                    loss_of(model, step[rank]).backward()
                    with torch.no_grad():
                        model(step[rank][0])
            loss_of(model, step[rank]).backward()
            sent = Counter()
            for name, numel, _ in traffic:
                sent[name] += numel
            evals = 3 if zero == 3 else 0  # an eval between finds Z2's matrices there
            assert sent == {"reduce": total, "broadcast": total * (8 + evals if zero == 3 else 1)}, (zero, sent, total)
            optimizer.step()
        return True

    for zero in (3, 2):
        assert run(2, law, zero) == [True, True]


@pytest.mark.parametrize("zero", [3, 2])
def test_no_sync_nests_and_ends_with_an_exception(zero, spread):
    """Inside, also after an inner context or an exception: no gradient at all; outside, the sum, in both families."""

    def law(rank, parallel):
        model, batch = net(), batches(2, 1)[0]
        if not parallel:
            (3 * sum(loss_of(model, b) for b in batch) / 2).backward()
            return {n: p.grad for n, p in model.named_parameters()}
        shard(model, zero)
        with dmuon.no_sync(model):
            loss_of(model, batch[rank]).backward()
            with pytest.raises(Failure), dmuon.no_sync(model):
                raise Failure
            loss_of(model, batch[rank]).backward()
        assert all(p.grad is None for p in model.parameters())
        model.zero_grad()  # as in FSDP2, this is not what waits
        loss_of(model, batch[rank]).backward()
        return snapshot(model)["grads"]

    expected, got = run(1, law, False)[0], run(2, law, True)
    for name, grad in {**got[0], **got[1]}.items():
        assert torch.allclose(grad, expected[name], rtol=1e-10, atol=1e-12), name
    assert {*got[0], *got[1]} == {*expected}


@pytest.mark.parametrize("zero", [3, 2])
def test_a_layer_that_the_last_micro_batch_skips_is_reduced_too(zero, spread):
    """Depths 3, 2, 1, the first two under `no_sync`: the matrices' gradients are those of one process."""

    def law(rank, parallel):
        model, steps = net(make=EarlyExit), batches(2, 3)
        if parallel:
            shard(model, zero)
        for model.depth, step in zip((3, 2, 1), steps):
            if not parallel:
                sum(loss_of(model, batch) for batch in step).div(2).backward()
                continue
            with dmuon.no_sync(model) if model.depth > 1 else contextlib.nullcontext():
                loss_of(model, step[rank]).backward()
        params = dmuon.owned_params(model) if parallel else dict(model.named_parameters())
        return {n: p.grad for n, p in params.items() if is_matrix(n)}

    expected, (first, second) = run(1, law, False)[0], run(2, law, True)
    assert {*first, *second} == {*expected}
    assert all(torch.allclose(grad, expected[n], rtol=1e-10) for n, grad in {**first, **second}.items())


@pytest.mark.parametrize("zero", [3, 2])
def test_a_micro_batch_that_raised_leaves_nothing_behind(zero, spread):
    """A backward under `no_sync` that raises: what it and those before it have gathered for the matrices is dropped."""

    def fail(*_):
        raise Failure

    def law(rank, broken):
        model, batch = shard(net(), zero), batches(2, 1)[0][rank]
        if broken:
            with dmuon.no_sync(model):
                loss_of(model, batch).backward()
                handle = model.layers[0].register_full_backward_hook(fail)
                with pytest.raises(Failure):
                    loss_of(model, batch).backward()
                handle.remove()
        loss_of(model, batch).backward()
        return {n: p.grad for n, p in dmuon.owned_params(model).items()}

    for after, expected in zip(run(2, law, True), run(2, law, False)):
        assert after.keys() == expected.keys() and all(torch.equal(after[n], expected[n]) for n in expected)


# --------------------------------------------------------------------------------- hooks.py, what a boundary returns


@dataclasses.dataclass
class Record:
    main: Tensor
    rest: dict


Pair = collections.namedtuple("Pair", "left right")


class Container(nn.Module):
    """A block that returns its result in a container of the given kind and takes its input by keyword only."""

    kind: str = "tuple"

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(8), nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, *, x):
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        return {
            "tuple": lambda: (None, y), "list": lambda: [y, 3], "dict": lambda: {"a": {"b": y}, "c": None},
            "namedtuple": lambda: Pair(None, y), "dataclass": lambda: Record(None, {"y": [y]}),
        }[self.kind]()


def inside(output):
    """The tensor in a `Container`'s output."""
    return {tuple: lambda: output[1], list: lambda: output[0], dict: lambda: output["a"]["b"],
            Pair: lambda: output.right, Record: lambda: output.rest["y"][0]}[type(output)]()


class ContainerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList(Container() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = inside(layer(x=x))
        return self.head(x)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "namedtuple", "dataclass"])
def test_a_boundary_may_return_any_container(kind, spread, monkeypatch):
    """Its type is preserved (`inside` tells by exact type), gradients are right, no buffer is left (C8)."""
    monkeypatch.setattr(Container, "kind", kind)
    exact(2, train, 3, 2, ContainerNet, steps=2, make=ContainerNet)


class Sliced(Net):
    """Uses the first rows of a matrix, twice, next to the module that holds it."""

    class SlicedBlock(Block):
        def forward(self, x):
            hidden = F.linear(self.norm(x), self.maps[0].weight[:8])
            return x + F.linear(hidden, self.maps[0].weight[4:]) + F.linear(x, self.maps[1].weight[:8, :8])

    def __init__(self):
        super().__init__(Sliced.SlicedBlock, ((8, 12), (8, 12)))


def test_part_of_a_matrix_may_be_used(spread):
    """`F.linear(x, weight[:k])` inside the boundary trains exactly (C10)."""
    exact(2, train, 3, 3, Sliced, steps=3, make=Sliced)


def test_a_placeholder_cannot_be_mistaken_for_a_matrix():
    """Outside every boundary, a matrix product with a placeholder raises (C10)."""

    def law(rank):
        model = shard(net())
        weight = model.layers[0].maps[0].weight
        if weight.numel():
            return "owner"
        with pytest.raises(RuntimeError, match="size mismatch|shapes cannot be multiplied"):
            F.linear(torch.ones(2, 8, dtype=weight.dtype), weight)
        return "placeholder"

    assert sorted(run(2, law)) == ["owner", "placeholder"]


def plain_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same weights in a model that no parallelism has touched."""
    copy = Net()
    with dmuon.unshard(model):
        copy.load_state_dict({n: whole(p) for n, p in model.named_parameters()})
    return copy.to(dtype)


@pytest.mark.parametrize("layout, zero, dtype", [
    *itertools.product(["2"], [3, 2], [torch.float32, torch.bfloat16]), ("2x2", 3, torch.float32),
    ("2x2", 2, torch.bfloat16), ("2 tp2", 3, torch.bfloat16), ("2 tp2", 2, torch.float32)])
def test_every_eval_sees_the_newest_weights(zero, dtype, layout, spread):
    """Step, eval, eval, edit under unshard, eval: each output is that of a plain model with these weights (C11)."""

    def law(rank):
        rank = rank // tp_size(layout)
        policy = MixedPrecisionPolicy(param_dtype=dtype if dtype is torch.bfloat16 else None)
        model = shard(net(dtype=torch.float32), zero, layout, mp_policy=policy)
        optimizer = dmuon.Muon(model, **{**OPTIONS, "lr": 0.1})
        for step in batches(4 // tp_size(layout), 10):
            optimizer.zero_grad()
            loss_of(model, step[rank]).backward()
            model(step[rank][0])  # with a graph that nobody walks: Z2 keeps its buffers, which the step makes stale
            optimizer.step()
            assert all(p.dtype == torch.float32 for p in dmuon.owned_params(model).values())
            for edit in (False, True):
                if edit:
                    with dmuon.unshard(model.layers[1]), torch.no_grad():
                        model.layers[1].maps[0].weight.mul_(0.5)
                with torch.no_grad():
                    tokens = step[rank][0]
                    outputs = [model(tokens), model(tokens)]  # before plain_copy, whose unshard refreshes buffers
                    expected = plain_copy(model, dtype)(tokens)
                for output in outputs:
                    rounding = dict(rtol=2e-2, atol=2e-2) if dtype is torch.bfloat16 else dict(rtol=1e-5, atol=1e-6)
                    assert torch.allclose(output, expected, **rounding)
        return True

    ranks = prod(LAYOUTS[layout].values())
    assert run(ranks, law) == [True] * ranks


def test_unshard_shows_the_owners_matrix_on_every_rank():
    """Matrix i filled with i at its owner is i everywhere under unshard; others' edits are dropped (C3)."""

    def law(rank):
        model = shard(net())
        for i, name in enumerate(dmuon.owners(model)):
            if name in dmuon.owned_params(model):
                dmuon.owned_params(model)[name].data.fill_(i)
        seen = []
        for part in (model, model.layers[0], model.layers[0].maps[0], model.head):
            with dmuon.unshard(part):
                named = dict(model.named_parameters())
                for i, name in enumerate(dmuon.owners(model)):
                    if named[name].numel():
                        assert torch.equal(named[name], torch.full_like(net().get_parameter(name), i))
                        seen.append(name)
                        if rank and name not in dmuon.owned_params(model):
                            named[name].data.fill_(99)
        assert all(not p.numel() or n in dmuon.owned_params(model) or isinstance(p, DTensor)
                   for n, p in model.named_parameters())
        return len(seen) >= len(dmuon.owners(model)) + 4

    assert run(4, law) == [True] * 4


@pytest.mark.parametrize("layout", ["2", "2x2"])
def test_freezing_and_unfreezing_a_dedicated_matrix(layout, spread, traffic):
    """Frozen, a matrix is broadcast but neither reduced, decayed nor stepped; unfrozen, it trains again."""
    ranks = prod(LAYOUTS[layout].values())

    def law(rank):
        model = shard(net(), layout=layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        record = []
        for i, step in enumerate(batches(ranks, 3)):
            model.layers[0].maps[1].weight.requires_grad_(i != 1)
            optimizer.zero_grad()
            loss_of(model, step[rank]).backward()
            grad = snapshot(model)["grads"].get("layers.0.maps.1.weight")
            traffic.clear()
            optimizer.step()
            record.append((None if grad is None else grad.norm().item(),
                           snapshot(model)["weights"].get("layers.0.maps.1.weight"), sum(n for _, n, _ in traffic)))
        return record

    def one(rank):
        model = net()
        optimizer = PlainMuon(model, **OPTIONS)
        for i, step in enumerate(batches(ranks, 3)):
            frozen = model.layers[0].maps[1].weight.detach().clone()
            model.zero_grad()
            sum(loss_of(model, batch) for batch in step).div(ranks).backward()
            kept = optimizer.momenta["layers.0.maps.1.weight"].clone()
            optimizer.step()
            if i == 1:
                model.layers[0].maps[1].weight.data.copy_(frozen)
                optimizer.momenta["layers.0.maps.1.weight"].copy_(kept)
        return model.layers[0].maps[1].weight.detach()

    results = run(ranks, law)
    [owner] = [r for r in results if r[0][0] is not None]
    assert owner[1][0] is None and torch.equal(owner[1][1], owner[0][1])
    assert torch.allclose(owner[2][1], run(1, one)[0], rtol=1e-10)
    holders = [r for r in results if r[0][1] is not None]
    replicas = LAYOUTS[layout].get("replicate", 1)
    assert all(r[0][2] - r[1][2] == 20 * 12 * (replicas > 1) and r[0][2] == r[2][2] for r in holders)
    assert len(holders) == replicas and all(torch.equal(r[i][1], owner[i][1]) for r in holders for i in range(3))


def test_what_the_user_assigns_is_adopted(spread):
    """`model.to(dtype)` and an assigned nn.Parameter take the old one's place; a plain tensor is refused by name."""

    def law(rank):
        model, tokens = shard(net()), batches(2, 1)[0][rank][0]
        model.to(torch.float32)
        first = model.layers[0].maps[0]
        first.weight = assigned = nn.Parameter(torch.full((12, 8), 0.25))
        optimizer = dmuon.Muon(model)
        owned = dmuon.owned_params(model)
        assert all(p.dtype == torch.float32 for p in owned.values()) and (assigned == 0.25).all()
        assert first.weight is owned.get("layers.0.maps.0.weight") or first.weight.numel() == 0
        with torch.no_grad():
            output = model(tokens)
            plain = plain_copy(model, torch.float32)
            assert (plain.layers[0].maps[0].weight == 0.25).all()
            assert torch.allclose(output, plain(tokens), rtol=1e-6)
        loss_of(model, batches(2, 1)[0][rank]).backward()
        optimizer.step()
        first._parameters["weight"] = torch.ones(12, 8)
        with pytest.raises(RuntimeError, match=r"'layers.0.maps.0.weight' of shape \(12, 8\) has become a Tensor"):
            model(tokens)
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("inside", [True, False])
def test_reentrant_checkpointing_is_refused(inside):
    """`use_reentrant=True` runs a backward inside the backward: an error that names the way out, no wrong gradient."""

    class Reentrant(Net):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x) if inside else checkpoint(layer, x, use_reentrant=True)
            return self.head(x)

    class ReentrantBlock(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    def law(rank):
        model = shard(net(make=lambda: Net(ReentrantBlock) if inside else Reentrant()))
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss_of(model, batches(2, 1)[0][rank]).backward()
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("make", [InnerCheckpoint, OuterCheckpoint, WideCheckpoint])
def test_activation_checkpointing_trains_exactly(make, zero, spread):
    """Recomputed forwards use the backward's buffers (C9): the numbers of one process."""
    exact(2, train, zero, 3, make, steps=3, make=make)


class Tied(Net):
    """One matrix held twice inside one boundary."""

    class TiedBlock(Block):
        def __init__(self, *widths):
            super().__init__(*widths)
            self.maps[1].weight = self.maps[0].weight

    def __init__(self):
        super().__init__(Tied.TiedBlock, ((8, 8), (8, 8)))


def test_a_matrix_tied_inside_one_boundary_is_one_matrix(spread):
    """One owner, one buffer slice, one gradient for both holders."""
    exact(2, train, 3, 3, Tied, steps=3, make=Tied)


# ------------------------------------------------------------------------------ hooks.py, bytes held and elements sent


def test_a_model_that_is_dropped_is_freed(spread):
    """After a step, nothing but the user refers to the model: no cycle that the garbage collector cannot see."""

    def law(rank):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        train_step(model, optimizer, batches(2, 1)[0][rank])
        gone = weakref.ref(model)
        del model, optimizer
        gc.collect()
        return gone() is None

    assert run(2, law) == [True, True]


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all packed buffers, broadcasts and reduces in flight that have storage now."""
    boundaries = model._dmuon.boundaries
    tensors = [buffer.flat for boundary in boundaries for buffer in boundary.buffers]
    tensors += [part for boundary in boundaries for landing in boundary.landings for part in landing.parts]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def live_bytes() -> int:
    """Bytes of the storages of all live tensors of this process: it does not know who made them or who holds them."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    tensors = [local(t) for t in tensors if not t.is_meta]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def settles(bytes_of: Callable[[], int], most: float) -> int:
    """The bytes, after at most five seconds: gloo's thread drops a tensor a moment after the wait for it is over."""
    deadline = time.monotonic() + 5
    while bytes_of() > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return bytes_of()


class Wide(Net):
    """Wide enough for one per cent to be less than a matrix, float32."""

    def __init__(self):
        super().__init__(Block, ((8, 96, 160), (8, 160, 96), (8, 96, 160)))


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("layout", ["4", "2x2", "2 tp2"])
def test_a_rank_holds_its_share_and_nothing_else(layout, zero, spread, tmp_path):
    """All live tensors of the process together are what the owners say, to within 1 %, whatever came before.

    At rest: weights of the rank's shard column, momenta of its slot, FSDP2's padded shards and AdamW's two states and
    step. Under `no_sync`, beside that whole gradients, and in Z2 whole weights; in `unshard`, what the rank lacks.
    """
    size = lambda tensors: sum(4 * local(t).numel() for t in tensors)

    def law(rank):
        tp, failing = tp_size(layout), [False]
        batch = [t.float() if t.is_floating_point() else t for t in batches(4 // tp, 1)[0][rank // tp]]
        gc.freeze()  # what is there already is not looked at again
        before = live_bytes()
        model = net(torch.float32, Wide)
        shapes = {n: p.shape for n, p in model.named_parameters()}
        model = shard(model, zero, layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        slots, slot = dmuon.owners(model), (model._dmuon.mesh.shard, model._dmuon.mesh.replicate)
        matrix = {n: 4 * shapes[n].numel() // (1 if "maps.2" in n else tp) for n in slots}  # `shard` cuts the others
        rows = LAYOUTS[layout]["shard"]
        rest = [(n, p) for n, p in model.named_parameters() if n not in slots]
        share = sum(matrix[n] * ((slots[n][0] == slot[0]) + (slots[n] == slot)) for n in slots)  # weights and momenta
        share += sum(4 * -(-shapes[n][0] // rows) * shapes[n][1:].numel() for n, _ in rest)  # FSDP2 pads
        share += 2 * size(p for _, p in rest) + 4 * len(rest)

        def fail(*_):
            if failing[0]:
                raise Failure

        model.layers[1].maps[0].register_full_backward_hook(fail)

        def step():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        def rest_now():
            optimizer.zero_grad()
            model.state_dict()  # lets replicate broadcasts arrive
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

        def is_share(extra=0, when=""):
            expected = share + extra
            held = settles(lambda: live_bytes() - before, 1.01 * expected)
            assert abs(held - expected) <= 0.01 * expected, (when, held, share, extra)

        for _ in range(2):
            step()
        rest_now()
        is_share(when="after steps")
        with torch.no_grad():
            loss_of(model, batch)
        rest_now()
        is_share(when="after an eval")
        failing[0] = True
        with pytest.raises(Failure):
            loss_of(model, batch).backward()
        failing[0] = False
        model.reset_iter_state()  # FSDP2's own way out
        step()
        rest_now()
        is_share(when="after a step that raised")
        with dmuon.no_sync(model):
            loss_of(model, batch).backward()
            gradients = sum(matrix.values()) + sum(4 * shapes[n].numel() for n, _ in rest)
            weights = sum(matrix.values()) if zero == 2 else 0
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            is_share(gradients + weights, "under no_sync")
        step()
        rest_now()
        is_share(when="after no_sync")
        dmuon.save_checkpoint(tmp_path, model, optimizer, 1)
        is_share(when="after a save")
        dmuon.load_checkpoint(tmp_path, model, optimizer)
        is_share(when="after a load")
        lacking = sum(matrix[n] for n in slots if slots[n][0] != slot[0])
        with dmuon.unshard(model):
            is_share(lacking, "in unshard")
        is_share(when="after unshard")
        dmuon.full_state_dict(model)
        dmuon.grad_norms(model)
        is_share(when="after full_state_dict")
        return sum(matrix[n] for n in slots if slots[n] == slot), sum(matrix.values())

    results = run(4, law)
    assert sum(own for own, _ in results) == results[0][1] * tp_size(layout)


@pytest.mark.parametrize("replicate, model, rows", [(1, "512,6,256,2", ["unused"]), (1, "256,6,16,1", ["muon"]),
                                                    (2, "256,6,16,1", ["muon", "unused"])])
def test_the_peak_is_at_most_that_of_fsdp2_and_adamw(replicate, model, rows, spread, tmp_path):
    """In the same mode, model and batch; also where rank 0's data leave matrices of the last layer unused.

    FSDP2 cannot do the latter itself: its figure is that of the usual model. All live storages, on the fullest rank.
    """

    def law(rank):
        given = ["--bench", f"--bench_model={model}", f"--replicate={replicate}", f"--out={tmp_path}"]
        args = train_gpt.resolve(train_gpt.parse(given), 4)
        corpus, mesh = train_gpt.load_corpus(args), train_gpt.init_distributed(args)
        original = train_gpt.Block.forward

        def peak(name, zero):
            optimizer = "adamw" if name == "adamw" else "muon"
            row = train_gpt.BenchRow(name, corpus, mesh, args, optimizer=optimizer, zero=zero)
            skipped = row.model.layers[-1] if name == "unused" and rank == 0 else None

            def forward(self, x):
                if self is not skipped:
                    return original(self, x)
                return x + self.attention(self.attention_norm(x)) + 0 * self.mlp_norm(x)

            train_gpt.Block.forward = forward
            row.step()  # makes the optimizer's state, and the order that prefetch goes by
            return row.count()["peak_bytes"]

        peaks = {zero: [peak(name, zero) for name in ("adamw", *rows)] for zero in (2, 3)}
        return [bytes_ / adamw for adamw, *others in peaks.values() for bytes_ in others]

    ratios = run(4, law)[0]
    assert 0.5 < min(ratios) and max(ratios) <= 1, ratios


@pytest.mark.parametrize("before", ["nothing", "a forward that nobody walks", "a graph that is kept"])
def test_z3_holds_the_buffers_of_two_boundaries_at_most(before):
    """During forward and backward, this layer's and the next one's; Z2 holds all at the end of the forward.

    Of gradients that no reduce has taken yet a rank holds those of one layer. Both whatever forwards came before.
    """

    def law(rank, zero):
        model = shard(net(make=lambda: Net(Block, ((8, 16),) * 6)), zero)
        most = [0, 0]
        params = {layer: [p for p in model._dmuon.params.values() if p.holders[0][0] in layer.maps]
                  for layer in model.layers}

        def look(*_):
            states = [boundary.state for boundary in model._dmuon.boundaries if boundary.params]
            most[0] = max(most[0], sum(state is not hooks.BufferState.EMPTY for state in states))
            gradients = [any(p.full is not None and p.full.grad is not None for p in params[layer]) for layer in params]
            most[1] = max(most[1], sum(gradients))

        for layer in model.layers:
            for linear in layer.maps:
                linear.register_forward_hook(look)
                linear.register_full_backward_hook(look)
        for step in batches(2, 4):
            if before == "a forward that nobody walks":
                loss_of(model, step[rank]).item()
            loss = loss_of(model, step[rank])
            loss.backward(retain_graph=before == "a graph that is kept")
        return most

    assert run(2, law, 3) == [[2, 1], [2, 1]]
    assert run(2, law, 2) == [[6, 1], [6, 1]]


@pytest.fixture
def traffic(monkeypatch):
    """(collective, elements, group) of every broadcast and reduce that DMuon issues, in a rank's own list."""
    sent: list[tuple[str, int, str]] = []
    for name in ("broadcast", "reduce"):
        def counted(tensor, *args, _name=name, _original=getattr(dist, name), **options):
            sent.append((_name, tensor.numel(), options["group"].group_desc))
            return _original(tensor, *args, **options)

        monkeypatch.setattr(dist, name, counted)
    return sent


@pytest.mark.parametrize("make", [Net, SelectiveNet, Looped, InnerCheckpoint, OuterCheckpoint])
def test_a_step_sends_what_the_formula_says(make, spread, traffic):
    """Z3 broadcasts 2 P_M and reduces P_M, Z2 P_M and P_M, one collective a bucket; also where a matrix is unused."""

    def law(rank, zero):
        model = shard(net(make=make), zero)
        total = sum(p.numel() for n, p in net(make=make).named_parameters() if n in dmuon.owners(model))
        buckets = {(n.split(".maps")[0].rpartition(".")[0] if make is SelectiveNet else n.split(".maps")[0], slot)
                   for n, slot in dmuon.owners(model).items()}
        for step in batches(4, 3):
            traffic.clear()
            loss_of(model, step[rank]).backward()
            counts = {name: [n for kind, n, _ in traffic if kind == name] for name in ("broadcast", "reduce")}
        return total, len(buckets), {name: (sum(sizes), len(sizes)) for name, sizes in counts.items()}

    for zero in (3, 2):
        for total, buckets, counts in run(4, law, zero):
            times = {3: 3 if make is Looped else 2, 2: 1}[zero]  # Z3 frees a looped block between its two forwards
            assert counts["broadcast"] == (times * total, times * buckets), (zero, counts, total, buckets)
            assert counts["reduce"] == (total, buckets)


# --------------------------------------------------------------------------------------- hooks.py, mixed precision


class Casting(Net):
    """A head that takes any dtype: the layers may hand on what `output_dtype` says."""

    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    def __init__(self, block: Callable = Block):
        super().__init__(block)
        self.head = Casting.Head(8, 5)


class Bare(Casting):
    """Layers whose parameters are all dedicated: FSDP2 has nothing in them, but casts what goes in and out."""

    class BareBlock(Block):
        def __init__(self, *widths):
            super().__init__(*widths)
            self.norm = nn.Identity()

    def __init__(self):
        super().__init__(Bare.BareBlock)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("layout, zero, make, policy", [
    ("2", 3, Net, MixedPrecisionPolicy(BF16)),
    ("2", 2, Net, MixedPrecisionPolicy(BF16, FP32)),
    ("2", 3, Net, MixedPrecisionPolicy(None, BF16)),
    ("2", 3, Net, MixedPrecisionPolicy(BF16, BF16, cast_forward_inputs=False)),
    ("2", 3, Casting, MixedPrecisionPolicy(output_dtype=BF16)),
    ("2", 3, Casting, MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)),
    ("2", 2, Bare, MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)),
    ("2x2", 3, Net, MixedPrecisionPolicy(BF16, FP32)),
    ("2x2", 3, Net, MixedPrecisionPolicy(BF16)),
    ("2 tp2", 3, Net, MixedPrecisionPolicy(BF16, FP32)),
])
def test_a_mixed_precision_policy_means_what_it_means_in_fsdp(layout, zero, make, policy, spread, monkeypatch):
    """Outputs, and the averaged gradients of two micro-batches, have the bits that FSDP2 alone gives, and its dtypes.

    Also where `no_sync` keeps the first one's gradients: they wait in `reduce_dtype`. Broadcasts carry `param_dtype`,
    reduces `reduce_dtype`; owned data, `.grad` and momentum keep the parameter's dtype.
    """
    # To the bit, because a sum of two does not depend on the order, and halving is exact: groups are of two ranks here
    sent: set[tuple[str, torch.dtype]] = set()
    for name in ("broadcast", "reduce"):
        def seen(tensor, *args, _name=name, _original=getattr(dist, name), **options):
            sent.add((_name, tensor.dtype))
            return _original(tensor, *args, **options)

        monkeypatch.setattr(dist, name, seen)

    def law(rank):
        ours = shard(net(FP32, make), zero, layout, mp_policy=policy)
        with monkeypatch.context() as without:
            without.setattr(dmuon, "dedicate_params", lambda *_, **__: None)
            theirs = shard(net(FP32, make), zero, layout, mp_policy=policy)
        for kept in (0, 1):
            [model.zero_grad() for model in (ours, theirs)]
            sent.clear()
            for i, step in enumerate(batches(dist.get_world_size() // tp_size(layout), 2)):
                batch = step[rank // tp_size(layout)]
                outputs = [model(batch[0]) for model in (ours, theirs)]
                assert outputs[0].dtype == outputs[1].dtype and torch.equal(*outputs)
                theirs.set_requires_gradient_sync(i >= kept)
                with dmuon.no_sync(ours) if i < kept else contextlib.nullcontext():
                    for output in outputs:
                        (output - batch[1].to(output.dtype)).square().mean().backward()
            computed = policy.param_dtype or FP32
            assert sent == {("broadcast", computed), ("reduce", policy.reduce_dtype or computed)}
            got = snapshot(ours)["grads"]
            for name, p in theirs.named_parameters():
                gradient = whole(p.grad)  # of all ranks together: also where this one does not own it
                if name in got:
                    assert got[name].dtype == gradient.dtype and torch.equal(got[name], gradient), (name, kept)
        optimizer = dmuon.Muon(ours, **OPTIONS)
        optimizer.step()
        for p in dmuon.owned_params(ours).values():
            assert p.dtype == p.grad.dtype == optimizer.state[p]["momentum_buffer"].dtype == FP32
        return {*got}

    names = set().union(*run(prod(LAYOUTS[layout].values()), law))
    assert names == {name for name, _ in net(make=make).named_parameters()}


# ------------------------------------------------------------------------------------------------------ hsdp.py


def test_when_and_how_replicas_hear_of_a_step_does_not_change_a_bit(spread, monkeypatch):
    """Replicate broadcasts in flight or waited for, Z3 or Z2, prefetch or not, replicate_mesh= or a 2-D mesh."""
    record = merged(run(4, partial(train, layout="2x2"), 3, 5))
    others = [run(4, partial(train, layout="2x2", replicate_async=False), 3, 5),
              run(4, partial(train, layout="2x2"), 2, 5)]
    monkeypatch.setattr(hooks.DedicatedModel, "prefetch", 0)
    others.append(run(4, partial(train, layout="2x2"), 3, 5))
    dedicate = dmuon.dedicate_params

    def with_replicate_mesh(model, mesh, **options):
        return dedicate(model, mesh["shard"], replicate_mesh=mesh["replicate"], **options)

    monkeypatch.setattr(dmuon, "dedicate_params", with_replicate_mesh)
    others.append(run(4, partial(train, layout="2x2"), 3, 5))
    for other in others:
        assert_same(merged(other), record, tolerance=0.0)


@pytest.mark.parametrize("layout", ["2x2", "4x1", "1x4"])
def test_a_matrix_reaches_every_rank_of_the_mesh(layout, spread):
    """Matrix i, filled with i by its owner alone, is i under unshard in every row and column, and stays (C3)."""

    def law(rank):
        model = shard(net(), layout=layout)
        for i, name in enumerate(dmuon.owners(model)):
            if name in dmuon.owned_params(model):
                dmuon.owned_params(model)[name].data.fill_(i)
        for part in (model, model.layers[2]):
            with dmuon.unshard(part):
                for i, name in enumerate(dmuon.owners(model)):
                    weight = model.get_parameter(name)
                    assert torch.equal(weight, torch.full_like(net().get_parameter(name), i)) or part is not model
                    if part is not model and name.startswith("layers.2"):
                        weight.data.add_(1 if name in dmuon.owned_params(model) else 99)  # the owner's edit counts
        held = {n: p for n, p in model.named_parameters() if n in dmuon.owners(model) and p.numel()}
        shards = LAYOUTS[layout]["shard"]
        assert held.keys() == {n for n, slot in dmuon.owners(model).items() if slot[0] == rank % shards}
        assert dmuon.owned_params(model).keys() == {
            n for n, slot in dmuon.owners(model).items() if slot == (rank % shards, rank // shards)}
        for i, name in enumerate(dmuon.owners(model)):
            if name in held:
                assert (held[name] == i + name.startswith("layers.2")).all(), name
        return True

    assert run(4, law) == [True] * 4


def test_every_rank_of_an_hsdp_mesh_starts_from_the_owners_weights():
    """Whatever each rank drew, a matrix is its owner's on all four ranks, everything else the first rank's."""

    def law(rank):
        torch.manual_seed(rank)
        model = Net().double()
        mine = {n: p.detach().clone() for n, p in model.named_parameters()}
        shard(model, layout="2x2")
        with torch.no_grad():
            output = model(torch.arange(6)[None])  # before `unshard`, which would make up for replicas that differ
        with dmuon.unshard(model):
            return dmuon.owners(model), mine, {n: whole(p) for n, p in model.named_parameters()}, output

    results = run(4, law)
    slots = results[0][0]
    assert len(set(slots.values())) > 2
    for _, _, seen, output in results:
        assert torch.equal(output, results[0][3])
        for name, weight in seen.items():
            shard_index, replicate = slots.get(name, (0, 0))
            assert torch.equal(weight, results[shard_index + 2 * replicate][1][name]), name


def test_a_rank_of_an_hsdp_mesh_holds_its_columns_weights_and_its_slots_state(spread):
    """Weights of the shard column; gradients and momenta of the owner slot only; no buffer after a step."""

    def law(rank):
        model = shard(net(), layout="2x2")
        optimizer = dmuon.Muon(model, **OPTIONS)
        for step in batches(4, 2):
            train_step(model, optimizer, step[rank])
        assert stored_bytes(model) == 0
        held = {n: p for n, p in model.named_parameters() if n in dmuon.owners(model)}
        sizes = {n: p.numel() for n, p in net().named_parameters()}
        for tensors, owned in (
            (held.values(), [n for n, slot in dmuon.owners(model).items() if slot[0] == rank % 2]),
            ([p.grad for p in held.values() if p.grad is not None], dmuon.owned_params(model)),
            ([optimizer.state[p]["momentum_buffer"] for p in held.values() if p in optimizer.state],
             dmuon.owned_params(model)),
        ):
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            assert sum(storages.values()) == sum(8 * sizes[n] for n in owned)
        return len(dmuon.owned_params(model))

    assert sum(run(4, law)) == sum(is_matrix(n) for n, _ in net().named_parameters())


@pytest.mark.parametrize("layout", ["2x2", "4x1", "1x4", "4"])
def test_a_step_sends_along_columns_what_the_formula_says(layout, spread, traffic):
    """Stage two and the replicate broadcast: the column's share of P_M each, one collective a slot and boundary.

    Over all ranks that is R P_M put into each, of which the R - 1 peers of an owner send or receive (R - 1) P_M. A
    dimension of size 1 has no collective at all.
    """

    def law(rank):
        model = shard(net(), layout=layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        shards, replicas = LAYOUTS[layout]["shard"], LAYOUTS[layout].get("replicate", 1)
        sizes = {n: p.numel() for n, p in net().named_parameters()}
        mine = [n for n, slot in dmuon.owners(model).items() if slot[0] == rank % shards and replicas > 1]
        buckets = {(n.split(".maps")[0], dmuon.owners(model)[n]) for n in mine}
        for step in batches(4, 2):
            traffic.clear()
            loss_of(model, step[rank]).backward()
            optimizer.step()
            with torch.no_grad():
                model(step[rank][0])
            for kind in ("reduce", "broadcast"):
                column = [n for name, n, group in traffic if name == kind and group == "dmuon_replicate"]
                assert (sum(column), len(column)) == (sum(sizes[n] for n in mine), len(buckets)), kind
            row = {name: sum(n for kind, n, group in traffic if kind == name and group == f"dmuon_{name}")
                   for name in ("broadcast", "reduce")}
            total = sum(sizes[n] for n in dmuon.owners(model)) * (shards > 1)
            assert row == {"broadcast": 3 * total, "reduce": total}
        return sum(sizes[n] for n in mine), sum(sizes[n] for n in dmuon.owners(model))

    results = run(4, law)
    replicas = LAYOUTS[layout].get("replicate", 1)
    assert sum(mine for mine, _ in results) == (replicas * results[0][1] if replicas > 1 else 0)


@pytest.mark.parametrize("layout", ["2x2", "2x1 tp2"])
def test_weights_written_to_before_they_have_arrived_are_refused(layout, spread):
    """A peer's edit that a broadcast in flight would overwrite raises; loads, conversions, new parameters are safe."""

    def law(rank):
        model = shard(net(), layout=layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        tp = tp_size(layout)
        loss_of(model, batches(4 // tp, 1)[0][rank // tp]).backward()
        old = {n: whole(p) for n, p in model.state_dict().items()}
        saved = {n: p.detach().clone() for n, p in model.state_dict().items()}
        optimizer.step()
        model.load_state_dict(saved)  # waits, and then loads
        assert all(torch.equal(whole(p), old[n]) for n, p in model.state_dict().items())
        optimizer.step()
        optimizer.step()  # waits, too
        peers = {n: p for n, p in model.named_parameters() if p.numel() and n in dmuon.owners(model)
                 and n not in dmuon.owned_params(model)}
        name, peer = next(iter(peers.items()))
        module = model.get_submodule(name.rpartition(".")[0])
        module.weight = nn.Parameter(peer.detach().clone())
        model.state_dict()
        assert not torch.equal(local(module.weight), local(peer))  # the old object took what was in flight
        with dmuon.unshard(model):
            assert torch.equal(local(module.weight), local(peer))
        optimizer.step()
        if layout == "2x2":  # a DTensor's conversion counts as a write
            model.float()  # keeps the parameters, moves their data
        held = {n: local(p).clone() for n, p in model.state_dict().items() if n in dmuon.owners(model)}
        with dmuon.unshard(model):
            assert all(torch.equal(local(p), held[n]) for n, p in model.named_parameters()
                       if n in held and held[n].numel())
        model.double()
        optimizer.step()
        with torch.no_grad():
            module.weight.mul_(2)
        message = f"'{name}' was written to while its replicate broadcast was in flight; write inside dmuon.unshard"
        with pytest.raises(RuntimeError, match=message):
            model.state_dict()
        dist.barrier()  # what this rank has sent may not have arrived: one that leaves now would cut it off
        return True

    assert run(4, law) == [True] * 4


def test_a_refused_broadcast_keeps_no_other_from_arriving(spread):
    """After the error for a matrix that a replica has written to, all others have their new weights."""

    def law(rank):
        model = shard(net(), layout="2x2")
        optimizer = dmuon.Muon(model, **OPTIONS)
        loss_of(model, batches(4, 1)[0][rank]).backward()
        optimizer.step()
        own = dmuon.owned_params(model)
        held = {n: p for n, p in model.named_parameters() if n in dmuon.owners(model) and p.numel()}
        peers = [n for n in held if n not in own]
        with torch.no_grad():
            held[peers[0]].mul_(2)
        with pytest.raises(RuntimeError, match="was written to while"):
            model.state_dict()
        model.state_dict()
        dist.barrier()
        spoilt = [None] * 4
        dist.all_gather_object(spoilt, peers[0])
        return {n: p.detach() for n, p in held.items() if n not in spoilt}

    results = run(4, law)
    for column in (0, 1):
        one, other = results[column], results[column + 2]
        assert one.keys() == other.keys() and len(one) > 1
        assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_step_before_any_forward_reaches_the_replicas(spread):
    """Gradients set by hand, one step, then a forward: the same output on every rank, as in one process."""

    def law(rank):
        model = shard(net(), layout="2x2")
        optimizer = dmuon.Muon(model, **OPTIONS)
        for p in dmuon.owned_params(model).values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            return model(torch.arange(6)[None])

    def one(rank):
        model = net()
        optimizer = PlainMuon(model, **OPTIONS)
        for p in optimizer.matrices.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return model(torch.arange(6)[None]).detach()

    for output in run(4, law):
        assert torch.allclose(output, run(1, one)[0], rtol=1e-10)


def test_two_meshes_that_average_over_other_ranks_are_refused():
    """HSDP for one family and one row for the other would let the rows drift apart: Muon says so, on every rank."""

    def law(rank, whole_mesh_first):
        mesh, _ = meshes("2x2")
        given = (mesh, mesh["shard"]) if whole_mesh_first else (mesh["shard"], mesh)
        model = net()
        dmuon.dedicate_params(model, given[0])
        fully_shard(model, mesh=given[1])
        ranks = 4 if whole_mesh_first else 2
        with pytest.raises(ValueError, match=f"dedicate_params its matrices over {ranks} ranks; give both the same"):
            dmuon.Muon(model)
        return True

    assert run(4, law, True) == run(4, law, False) == [True] * 4


def members_only(rank: int, zero: int = 3, steps: int = 2, tidy: Callable = lambda: None) -> list[dict]:
    """Two rows of a world of four, each a 1-D mesh of its own with a model and data of its own: train this rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    tidy()
    model = net()
    dmuon.dedicate_params(model, mesh, reshard_after_forward=zero == 3)
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3)
    optimizer, record = dmuon.Muon(model, **OPTIONS), []
    for step in batches(2, steps):
        optimizer.zero_grad()
        loss = loss_of(model, step[mesh.get_local_rank()])
        loss.backward()
        dmuon.clip_grad_norm_(model, math.inf)
        mean, grads = loss.detach().clone(), snapshot(model)["grads"]
        dist.all_reduce(mean, group=mesh.get_group())
        optimizer.step()
        record.append({**snapshot(model, optimizer), "grads": grads, "loss": mean.item() / 2})
    return record


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
@pytest.mark.parametrize("made", ["by all", "by rank 0 alone", "by some, other ones"])
def test_ranks_may_have_made_groups_of_their_own(made, layout, spread):
    """Whatever groups the ranks have made and hold, in equal or unequal numbers, dedicate_params makes ours."""

    def law(rank, *args):
        original = dmuon.dedicate_params

        def dedicate_params(*args, **options):  # the mesh is there; torch 2.14 cannot make one after local groups
            if made == "by all":
                dist.new_group([0])  # which rank 0 alone holds afterwards
            for _ in range({"by all": 0, "by rank 0 alone": 3 * (rank == 0)}.get(made, rank)):
                dist.new_group([rank], use_local_synchronization=True)
            return original(*args, **options)

        dmuon.dedicate_params = dedicate_params
        return train(rank, *args, layout=layout)

    ranks = prod(LAYOUTS[layout].values())
    exact(ranks, law, 3, 2, steps=2, data_ranks=ranks // tp_size(layout))


def test_two_meshes_may_make_their_groups_at_once(spread):
    """The rows of a 2x2 mesh as two meshes of their own, whose ranks hold other numbers of groups: both are exact."""

    def law(rank):
        def tidy():
            for _ in range((0, 2, 5, 1)[rank]):
                dist.new_group([rank], use_local_synchronization=True)

        return members_only(rank, tidy=tidy)

    results = run(4, law)
    expected = run(1, lambda rank: reference(2, 2))[0]
    for row in (results[:2], results[2:]):
        assert_same(merged(row), expected)


def test_a_mesh_needs_nobody_outside_of_it(spread):
    """The mesh of ranks 2 and 3 makes its groups and trains while ranks 0 and 1 are elsewhere and never take part."""

    def law(rank):
        if rank >= 2:
            return members_only(rank)
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
        return []

    assert_same(merged(run(4, law)[2:]), run(1, lambda rank: reference(2, 2))[0])


@pytest.mark.parametrize("zero", [3, 2])
def test_a_grouped_launch_gives_the_same_bits(zero, spread):
    """What NCCL does: a layer's broadcasts in one launch, into one tensor. A double counts them; gloo sends them."""

    def law(rank, grouped):
        model = shard(net(), zero)
        optimizer = dmuon.Muon(model, **OPTIONS)
        launches, original = [], dist.broadcast

        @contextlib.contextmanager
        def coalescing_manager(group, device, async_ops):
            inside = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "broadcast", lambda *a, **options: inside.append((a[0], original(*a, **options))))
                yield (launch := Launch(inside))
            launches.append((len(inside), len({tensor.untyped_storage().data_ptr() for tensor, _ in inside})))

        class Launch:
            def __init__(self, inside):
                self.inside = inside

            def wait(self):
                while self.inside:
                    self.inside.pop()[1].wait()

        if grouped:
            model._dmuon.mesh.on_nccl = True
            dist._coalescing_manager = coalescing_manager
        record = [train_step(model, optimizer, step[rank]) for step in batches(4, 3)]
        return record, launches

    usual, grouped = run(4, law, False), run(4, law, True)
    assert_same(merged([r for r, _ in grouped]), merged([r for r, _ in usual]), tolerance=0.0)
    for _, launches in grouped:  # a layer has three matrices with three owners; three layers, once or twice a step
        assert launches == [(3, 1)] * 3 * 3 * (2 if zero == 3 else 1)


def test_an_hsdp_model_that_is_dropped_is_freed(spread):
    """Hooks, groups and broadcasts in flight keep nothing alive."""

    def law(rank):
        model = shard(net(), layout="2x2")
        optimizer = dmuon.Muon(model, **OPTIONS)
        loss_of(model, batches(4, 1)[0][rank]).backward()
        optimizer.step()
        gone = weakref.ref(model)
        model.state_dict()
        del model, optimizer
        gc.collect()
        return gone() is None

    assert run(4, law) == [True] * 4


@pytest.mark.parametrize("layout", ["2x2", "2 tp2"])
@pytest.mark.parametrize("wrong", [0, 3])
def test_one_rank_of_the_mesh_that_disagrees_or_fails_stops_all(wrong, layout):
    """Another model, or an error, on one rank: its row, its column and the others raise; none waits."""

    def law(rank):
        mesh, tp_mesh = meshes(layout)

        def parallel(*widths):
            model = net(make=lambda: Net(widths=(widths,)))
            if tp_mesh is not None:
                parallelize_module(model.layers[0].maps, tp_mesh, {"0": ColwiseParallel()})
            return model

        other = parallel(8, 12)
        if rank == wrong:
            other.register_buffer("mask", torch.ones(3))
        with pytest.raises(ValueError, match="ranks disagree. Rank 0 of the"):
            dmuon.dedicate_params(other, mesh)
        with pytest.raises((ValueError, ZeroDivisionError), match="by zero"):
            dmuon.dedicate_params(parallel(8, 12), mesh, lambda fqn, p: 1 // 0 if rank == wrong else is_matrix(fqn))
        dmuon.dedicate_params(parallel(8, 12), mesh)
        if layout == "2x2":
            for unfit, message in ((mesh, "expected a 1-D DeviceMesh"), (mesh["shard"], "share ranks")):
                with pytest.raises(ValueError, match=message):
                    dmuon.dedicate_params(net(), mesh["shard"], replicate_mesh=unfit)
        return True

    assert run(4, law) == [True] * 4


# --------------------------------------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize("zero", [3, 2])
def test_tensor_parallelism_of_size_one_is_none(zero, spread):
    """The same bits in losses, gradients, momenta and weights."""
    assert_same(merged(run(2, partial(train, layout="2 tp1"), zero, 5)), merged(run(2, train, zero, 5)), tolerance=0.0)


class Uneven(Net):
    """13 and 3 columns, which no number of ranks cuts evenly; of 3, the fourth rank has none."""

    def __init__(self):
        super().__init__(Block, ((8, 13, 20), (8, 3, 16)))


@pytest.mark.parametrize("layout", ["2 tp2", "tp4"])
def test_uneven_and_empty_shards_train_like_one_process(layout, spread):
    """A cut that does not come out even, and one that leaves a rank nothing, are exact."""
    exact_layout(layout, 3, 3, Uneven)


class SequenceBlock(Block):
    """Every rank of the tensor-parallel mesh has the whole matrices and works on its part of the sequence."""

    def forward(self, x):
        weight = self.maps[0].weight
        if not isinstance(weight, DTensor):
            return super().forward(x)
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        hidden = self.norm(x.to_local())
        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        hidden = hidden.redistribute(placements=[Shard(1)])
        for linear in self.maps:
            hidden = torch.tanh(linear(hidden))
        return (x + hidden.redistribute(placements=[Replicate()])).to_local()


def test_partial_gradients_are_summed_over_the_tensor_parallel_mesh(spread):
    """A whole matrix that each rank uses on its part of the sequence: exact, and the same update on all ranks."""
    make = lambda: Net(SequenceBlock)
    partials = []

    def law(rank, zero):
        mesh, tp_mesh = meshes("2 tp2")
        model = net(make=make)
        for layer in model.layers:
            for linear in layer.maps:
                linear.weight = nn.Parameter(distribute_tensor(linear.weight, tp_mesh, [Replicate()]))
        shard_again = dict(reshard_after_forward=zero == 3)
        dmuon.dedicate_params(model, mesh, **shard_again)
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh, **shard_again)
        optimizer = dmuon.Muon(model, **OPTIONS)
        redistribute = DTensor.redistribute
        DTensor.redistribute = lambda tensor, *args, **options: (
            partials.append(tensor.placements), redistribute(tensor, *args, **options))[1]
        record = [train_step(model, optimizer, step[rank // 2]) for step in batches(2, 3)]
        assert (Partial(),) in partials
        return record

    for zero in (3, 2):
        exact(4, law, zero, steps=3, data_ranks=2, make=make)


def test_a_step_sends_over_the_tensor_parallel_mesh_what_the_formula_says(spread):
    """An all-reduce of the norms, a reduce and a broadcast of d x d where s >= d, a gather and a scatter where s < d."""

    def law(rank):
        mesh, tp_mesh = meshes("2 tp2")
        model = shard(net(), layout="2 tp2")
        groups = [{"params": [p]} for p in model.parameters()]  # of one matrix each: still one all-reduce of the norms
        optimizer = dmuon.Muon(model, **OPTIONS, param_groups=groups)
        expected = []
        for step in batches(2, 2):
            loss_of(model, step[rank // 2]).backward()
            with Collectives() as collectives:
                optimizer.step()
            owned = dmuon.owned_params(model)
            assert all(isinstance(p, DTensor) for n, p in owned.items() if ".maps.2" not in n)
            cut = [p for p in owned.values() if ns.sharded_dim(p) is not None]
            expected = [("allreduce_", len(cut))] * bool(cut)
            for p in cut:
                numel, kinds = min(p.shape) ** 2, ("reduce_", "broadcast_")
                if not ns.sums_grams(p):
                    numel, kinds = p.to_local().numel(), ("gather_", "scatter_")
                expected += [(kind, numel) for kind in kinds]
            assert sorted(collectives.sent) == sorted(expected)
        planned = sum(partition.tensor_parallel_cost(tuple(p.shape), ns.sharded_dim(p), 2)[2] for p in owned.values())
        # T = 2: an all-reduce sends n, all others half of it on average
        assert planned == sum(numel / (1 if name == "allreduce_" else 2) for name, numel in expected)
        return expected

    sent = [name for result in run(4, law) for name, _ in result]
    assert {"reduce_", "gather_"} <= {*sent}  # 20x12 is cut along its 12 columns


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_fixed_gradient_gives_one_update_for_any_tensor_parallelism(tp):
    """Row and column cuts, tall, wide, square and whole matrices: weights and momenta equal one process (C15)."""
    shapes = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16), "stack": (3, 12, 20)}
    start = {name: gaussian(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    gradients = {name: gaussian(*shape, seed=1, dtype=torch.float64) for name, shape in shapes.items()}

    def law(rank, placement, options):
        mesh = init_device_mesh("cpu", (1, tp), mesh_dim_names=("shard", "tp"))
        place = lambda tensor: distribute_tensor(tensor, mesh["tp"], [placement])
        model = nn.ParameterDict({name: nn.Parameter(place(tensor)) for name, tensor in start.items()})
        dmuon.dedicate_params(model, mesh["shard"], lambda *_: True, hook_boundary_strict=False,
                              hook_boundary_predicate=lambda module: False)
        optimizer = dmuon.Muon(model, 0.02, weight_decay=0.1, **options)
        for scale in (1, 2):
            for name, p in dmuon.owned_params(model).items():
                p.grad = place(scale * gradients[name])
            optimizer.step()
        owned = dmuon.owned_params(model)
        return {n: whole(p) for n, p in owned.items()}, {n: whole(optimizer.state[p]["momentum_buffer"])
                                                         for n, p in owned.items()}

    for options in ({}, {"adjust_lr_fn": "original", "nesterov": False}):
        momenta = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        expected = {name: tensor.clone() for name, tensor in start.items()}
        for scale, name in itertools.product((1, 2), shapes):
            momenta[name].lerp_(scale * gradients[name], 0.05)
            ahead = (scale * gradients[name]).lerp(momenta[name], 0.95) if options == {} else momenta[name]
            m, n = shapes[name][-2:]
            rate = 0.02 * (0.2 * max(m, n) ** 0.5 if options == {} else max(1, m / n) ** 0.5)
            expected[name].mul_(1 - 0.02 * 0.1).sub_(rate * ns.newton_schulz(ahead))
        for placement in (Shard(0), Shard(1), Replicate()):
            for weights, state in run(tp, law, placement, options):
                for name in shapes:
                    assert torch.allclose(weights[name], expected[name], rtol=0, atol=1e-10), (placement, name)
                    assert torch.allclose(state[name], momenta[name], rtol=0, atol=1e-12), (placement, name)


def cut_over(*names: str) -> Callable:
    """A 12x8 matrix cut over these dimensions of a mesh."""
    return lambda mesh: distribute_tensor(torch.ones(12, 8), mesh[names] if names else mesh,
                                          [Shard(0), Shard(1), Replicate()][: len(names) or 3])


TP_REFUSALS = {  # names of the mesh's dimensions, the matrix from the mesh, the mesh that dedicate_params gets
    "two dimensions": (("shard", "a", "b"), cut_over("a", "b"), lambda mesh: mesh["shard"],
                       r"'layers.0.maps.0.weight' is a DTensor over \('a', 'b'\), but only one tensor-pa"),
    "two meshes": (("shard", "a", "b"), cut_over("a"), lambda mesh: mesh["shard"],
                   r"'layers.0.maps.1.weight' .*\('b',\), but only one .* the same for all"),
    "tp taken for shard": (("shard", "a", "b"), cut_over("a"), lambda mesh: mesh["shard", "a"],
                           r"'layers.0.maps.0.weight' .*the mesh has \['a', 'shard'\]; pass data-parallel dimensions"),
    "no names": (None, cut_over(), lambda mesh: None, r"but the tensor-parallel mesh has no names; pass slices of one"),
    "a flat data mesh": (("shard", "a", "b"), cut_over("a"), lambda mesh: None,
                         r"DTensor over \('a',\), but the data-parallel mesh has no names"),
    "partial": (("shard", "a", "b"), lambda mesh: DTensor.from_local(torch.ones(12, 8), mesh["a"], [Partial()]),
                lambda mesh: mesh["shard"], r"'layers.0.maps.0.weight' has placements \(Partial\(sum\),\); tensor par"),
}


@pytest.mark.parametrize("case", TP_REFUSALS)
def test_tensor_parallelism_that_cannot_work_is_refused_by_name(case):
    """Two dimensions, two meshes, a mesh without names, one that has the tensor-parallel dimension in it."""
    names, make, choose, message = TP_REFUSALS[case]

    def law(rank):
        mesh, model = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=names), net()
        model.layers[0].maps[0].weight = nn.Parameter(make(mesh))
        if case == "two meshes":
            model.layers[0].maps[1].weight = nn.Parameter(distribute_tensor(torch.ones(20, 12), mesh["b"], [Shard(0)]))
        with pytest.raises(ValueError, match=message):
            dmuon.dedicate_params(model, choose(mesh) or init_device_mesh("cpu", (2,)))
        return True

    assert run(2, law) == [True] * 2


@pytest.mark.parametrize("kind", ["plain", "plain shard", "other cut", "whole", "FSDP2's"])
def test_what_takes_a_cut_matrixs_place_must_be_cut_alike(kind, spread):
    """A plain tensor, another cut, or FSDP2's in a tensor-parallel matrix's place: refused by name on every rank."""

    def law(rank):
        mesh, tp_mesh = meshes("2 tp2")
        model, weight = shard(net(), layout="2 tp2"), gaussian(12, 8, dtype=torch.float64)
        model.layers[0].maps[0].weight = nn.Parameter({
            "plain": lambda: weight, "plain shard": lambda: weight[:6], "FSDP2's": lambda: distribute_tensor(
                weight, mesh, [Shard(0)]), "other cut": lambda: distribute_tensor(weight, tp_mesh, [Shard(1)]),
            "whole": lambda: distribute_tensor(weight, tp_mesh, [Replicate()])}[kind]())
        message = "FSDP2 sharded it" if kind == "FSDP2's" else "assign an nn.Parameter of the old shape and placements"
        with pytest.raises(RuntimeError, match=f"'layers.0.maps.0.weight' of shape .* has become a .*{message}"):
            model(torch.zeros(2, 6, dtype=torch.int64))
        return True

    assert run(4, law) == [True] * 4


@pytest.mark.parametrize("layout", ["2x2", "2 tp2"])
def test_a_model_from_the_meta_device_trains_like_one_process(layout, spread):
    """meta, (parallelize_module,) dedicate_params, fully_shard, to_empty, weights written under unshard, Muon."""

    def law(rank):
        tp, weights = tp_size(layout), net().state_dict()
        with torch.device("meta"):
            model = Net().double()
        shard(model, layout=layout)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for part in (*model.layers, model):
                with dmuon.unshard(part):
                    for name, p in model.named_parameters():
                        new = weights[name]
                        if isinstance(p, DTensor):
                            p.copy_(distribute_tensor(new, p.device_mesh, p.placements, src_data_rank=None))
                        elif p.numel():
                            p.copy_(new)
        optimizer = dmuon.Muon(model, **OPTIONS)
        return [train_step(model, optimizer, step[rank // tp]) for step in batches(4 // tp, 2)]

    exact(4, law, steps=2, data_ranks=4 // tp_size(layout))


def test_parameters_that_tensor_parallelism_left_whole_must_start_equal():
    """What is no DTensor and differs between the ranks of a tensor-parallel mesh is refused by name, on every rank."""

    def law(rank):
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match=r"\[embed.weight \(11, 8\), no DTensor, .* seed tp ranks alike\]"):
            shard(Net(), layout="2 tp2")
        torch.manual_seed(rank // 2)  # only the data-parallel ranks differ
        model = shard(Net(), layout="2 tp2")
        with torch.no_grad():
            return model(torch.arange(6)[None])

    outputs = run(4, law)
    assert all(torch.allclose(output, outputs[0], rtol=1e-5) for output in outputs)


@pytest.mark.parametrize("layout", ["2", "2 tp2"])
def test_a_conversion_does_not_take_a_matrix_from_its_owner(layout):
    """After `.float()`, before or after fully_shard, FSDP2 has no dedicated matrix and Muon has them all."""

    def law(rank):
        mesh, tp_mesh = meshes(layout)
        models = [net(), net()]
        for model in models:
            if tp_mesh is not None:
                parallelize_module(model.layers[0].maps, tp_mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            dmuon.dedicate_params(model, mesh)
        models[0].float()
        for model in models:
            fully_shard(model, mesh=mesh)
        models[1].float()
        for model in models:
            families = {id(p): g["family"] for g in dmuon.Muon(model).param_groups for p in g["params"]}
            for name, p in model.named_parameters():
                assert p.dtype == torch.float32 and families[id(p)] == ("muon" if is_matrix(name) else "adamw"), name
        return True

    ranks = prod(LAYOUTS[layout].values())
    assert run(ranks, law) == [True] * ranks


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
def test_an_eval_in_inference_mode_changes_nothing(layout, spread):
    """Steps with a forward under inference_mode after each equal steps without."""

    def law(rank, evaluate):
        tp = tp_size(layout)
        model = shard(net(), layout=layout)
        optimizer, record = dmuon.Muon(model, **OPTIONS), []
        for step in batches(dist.get_world_size() // tp, 3):
            record.append(train_step(model, optimizer, step[rank // tp]))
            optimizer.step()  # new weights are in flight
            with torch.inference_mode() if evaluate else contextlib.nullcontext():
                if evaluate:
                    model(step[rank // tp][0])
        return record

    ranks = prod(LAYOUTS[layout].values())
    assert_same(merged(run(ranks, law, True)), merged(run(ranks, law, False)), tolerance=0.0)


# ----------------------------------------------------------------------------------------------- torch.compile, meta


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("order", ["compile first", "dedicate first"])
def test_blocks_compile(order, zero, spread):
    """`layer.compile()` on every block, before and after dedicate_params: right numbers, no warning from our hooks."""

    def law(rank):
        model = net()
        if order == "compile first":
            [layer.compile(backend="aot_eager") for layer in model.layers]
        shard(model, zero)
        if order == "dedicate first":
            [layer.compile(backend="aot_eager") for layer in model.layers]
        optimizer = dmuon.Muon(model, **OPTIONS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            record = [train_step(model, optimizer, step[rank]) for step in batches(2, 3)]
        ours = [str(w.message) for w in caught if "hooks.py" in f"{w.message} {w.filename}"]
        assert not ours, ours
        assert any(frames for frames in torch._dynamo.utils.counters["frames"].values()), "nothing was compiled"
        return record

    exact(2, law, steps=3)


class WrappedCheckpoint(Net):
    """torch's `checkpoint_wrapper` around each block: what is compiled is the wrapper, with our hooks inside it."""

    def __init__(self):
        super().__init__(lambda *widths: checkpoint_wrapper(Block(*widths)))


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("make", [InnerCheckpoint, OuterCheckpoint, WideCheckpoint, WrappedCheckpoint])
def test_checkpointed_blocks_compile(make, zero, spread, traffic):
    """Activation checkpointing and `layer.compile()` together are exact; two broadcasts a buffer in Z3, one in Z2 (C9).

    After each backward nothing is unsharded. Our hooks cause no warning.
    """

    def law(rank):
        model = net(make=make)
        [layer.compile(backend="aot_eager") for layer in model.layers]
        optimizer, record, states = dmuon.Muon(shard(model, zero), **OPTIONS), [], []
        optimizer.register_step_pre_hook(lambda *_: states.extend(b.state for b in model._dmuon.boundaries))
        for step in batches(2, 3):
            traffic.clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seen = train_step(model, optimizer, step[rank])
            assert not [w for w in caught if "hooks.py" in f"{w.message} {w.filename}"]
            for kind in ("grads", "weights", "momenta"):  # without `_checkpoint_wrapped_module`
                seen[kind] = {dmuon.clean(name): tensor for name, tensor in seen[kind].items()}
            record.append(seen)
            buffers = sum(len(boundary.buffers) for boundary in model._dmuon.boundaries)
            counts = Counter(name for name, _, _ in traffic)
            assert counts == {"broadcast": buffers * (zero - 1), "reduce": buffers}, (counts, buffers)
        assert states == [hooks.BufferState.EMPTY] * 12, states  # three steps, three layers and the root
        assert torch._dynamo.utils.counters["frames"]["ok"] >= 3, "nothing was compiled"
        return record

    exact(2, law, steps=3, make=Net)


def test_a_meta_parameter_is_named_when_it_is_used():
    """A dedicated model on the meta device says so in its first forward."""

    def law(rank):
        with torch.device("meta"):
            model = Net()
        dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)))
        assert all(p.is_meta for p in model.parameters())
        with pytest.raises(RuntimeError, match="'layers.0.maps.0.weight' is on the meta device; materialise it first"):
            model(torch.zeros(1, 3, dtype=torch.long, device="meta"))
        return True

    assert run(2, law) == [True, True]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations in this context have made and that live, and the most there ever were.

    It looks at every operation's results, inside DTensors too; a storage counts with its size of the moment. What a
    kernel or gloo takes for itself while it runs is no tensor and does not count.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakSet(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        result = function(*args, **kwargs or {})
        storages = [tensor.untyped_storage() for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        self.storages.update(storage for storage in storages if storage.device.type != "meta")  # fake tensors' is meta
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)

    def falls_to(self, most: int) -> bool:
        """Whether it does within five seconds: gloo's thread drops a tensor a moment after the wait for it is over."""
        deadline = time.monotonic() + 5
        while self.now() > most and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.now() <= most


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("family", ["Muon", "AdamW"])
def test_a_step_needs_the_scratch_of_one_batch_whatever_it_owns(family, nesterov, monkeypatch):
    """The most bytes beside weights, gradients and state are the same for 2 and for 8 layers of equal parameters."""
    monkeypatch.setitem(ns.BATCH_NUMEL, "cpu", 2 * 640 * 8)

    def law(rank, layers):
        model = net(torch.float32, lambda: Net(widths=((8, 640),) * layers))
        predicate = None if family == "Muon" else lambda fqn, p: fqn == "layers.0.maps.0.weight"
        shard(model, predicate=predicate)
        optimizer = dmuon.Muon(model, nesterov=nesterov)
        scratch = []
        for _ in range(3):
            loss_of(model, batches(1, 1)[0][0]).backward()
            held = [local(t) for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
            with train_gpt.Meter(held) as meter:
                optimizer.step()
            scratch.append(meter.peak_bytes - sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                                                   for t in held}.values()))
            optimizer.zero_grad()
        return scratch[1:]  # the first step makes the momenta

    few, many = run(1, law, 2)[0], run(1, law, 8)[0]
    assert few[0] == few[1] and many[0] == many[1]
    assert 640 * 8 * 4 <= many[0] <= few[0] + 2048, (few, many)  # the small ones of a layer fill batches, too


def allocated(function: Callable) -> int:
    """The most bytes that torch's allocator had given out while the function ran, kernels' own scratch included."""
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function()
        profile.export_chrome_trace(os.path.join(folder, "trace.json"))
        with open(os.path.join(folder, "trace.json")) as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in events))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_makes_no_copy_of_what_it_measures(dtype):
    """Norms are float64, of any matrix or batch, and take a bounded number of bytes for that; so do those of a model."""
    bound = 3 * 8 * ns.NORM_NUMEL["cpu"]
    for G in (gaussian(2048, 1024, dtype=dtype), gaussian(64, 256, 128, dtype=dtype), gaussian(7, 300_001, dtype=dtype)):
        norms = [ns.float64_norm(G), *(ns.float64_norm(G, order) for order in (1.0, 3.0, math.inf))]
        for order, norm in zip((2.0, 1.0, 3.0, math.inf), norms):
            expected = torch.linalg.vector_norm(G.double(), order, dim=(-2, -1), keepdim=True)
            torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        rows = 8 * G.shape[-1] * G[..., 0, 0].numel()  # a row of each matrix is the least that is copied
        peak, copied = (allocated(lambda: norm(G)) for norm in (ns.float64_norm, Tensor.double))
        assert peak <= max(bound, 3 * rows) < copied == 8 * G.numel(), (G.shape, peak)

    def law(rank):
        model = shard(net(torch.float32, lambda: Net(widths=((8, 20_000),) * 2)))
        loss_of(model, batches(1, 1)[0][0]).backward()
        return allocated(lambda: dmuon.clip_grad_norm_(model, 1.0))

    assert run(1, law)[0] <= bound < 8 * 8 * 20_000 * 4


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
def test_a_model_from_the_meta_device_needs_what_a_rank_holds_and_one_layer(layout, spread):
    """Built and initialised layer by layer, a rank never has more bytes than its share and one layer's matrices.

    Until `to_empty` there is nothing but meta tensors. Inside `unshard(layer)` there is, beside the share, what the
    rank lacks of the layer, and afterwards the share alone. `unshard(model)` breaks the bound (negative control).
    """
    slack = 1024  # does not grow with the model: hashes that ranks compare, random states, FSDP2's padding of a bias

    def held(module):
        return sum(local(p).nbytes for p in module.parameters())

    def law(rank):
        with LiveBytes() as live, torch.no_grad():
            with torch.device("meta"):
                model = Net(Block, ((8, 96, 160),) * 6).double()
            shard(model, layout=layout)
            assert live.peak <= slack
            model.to_empty(device="cpu")
            share = held(model)
            assert share <= live.peak <= share + slack
            for part in (*model.layers, model.embed, model.head):
                before = held(part)
                with dmuon.unshard(part):
                    assert live.falls_to(share + held(part) - before + slack)
                    [p.normal_() for p in part.parameters()]
                assert live.falls_to(share + slack)
            layer = sum(8 * p.numel for p in model._dmuon.boundaries[1].params)  # the root is boundary 0
            assert live.peak <= share + layer + slack, (live.peak - share, layer)
            with dmuon.unshard(model):
                assert live.now() > share + 2 * layer
        return True

    ranks = prod(LAYOUTS[layout].values())
    assert run(ranks, law) == [True] * ranks


# ----------------------------------------------------------------------------------------- dmuon.py, the FSDP2 patch


def sharded_names(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if isinstance(p, DTensor)}


def test_fsdp_leaves_dedicated_matrices_alone_and_nothing_else():
    """No dedicated weight is a DTensor, every other is, but for the user's own ignored_params (C6)."""

    def law(rank):
        mesh = init_device_mesh("cpu", (2,))
        model, second = net(), net()
        slots = dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.head.bias})
        fully_shard(second, mesh=mesh)
        names = set(dict(net().named_parameters()))
        assert sharded_names(model) == names - slots.keys() - {"head.bias"}
        assert sharded_names(second) == names
        return set(slots) == {n for n in names if is_matrix(n)}

    assert run(2, law) == [True, True]


def test_the_patch_works_whichever_is_imported_first():
    """`fully_shard` imported before `import dmuon` (here) or after it (a fresh interpreter): no difference (C6)."""
    script = (
        "import dmuon, test_dmuon as t\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "t.dist.init_process_group('gloo', store=t.dist.HashStore(), rank=0, world_size=1)\n"
        "model, mesh = t.net(), t.init_device_mesh('cpu', (1,))\n"
        "slots = dmuon.dedicate_params(model, mesh)\n"
        "assert not slots.keys() & t.sharded_names(fully_shard(model, mesh=mesh))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_an_unknown_fsdp_is_refused_at_import_and_the_patch_is_applied_once(monkeypatch):
    """Another `_fsdp_init` raises with torch's version and the public way out; patching twice wraps once."""
    patched = _fsdp_init._get_managed_states
    dmuon._patch_fsdp()
    assert _fsdp_init._get_managed_states is patched
    monkeypatch.setattr(_fsdp_init, "_get_modules_and_states", lambda: None)
    with pytest.raises(ImportError, match=rf"torch {re.escape(torch.__version__)}.*ignored_params"):
        dmuon._patch_fsdp()
    monkeypatch.delattr(_fsdp_init, "_get_managed_states")
    with pytest.raises(ImportError, match="ignored_params"):
        dmuon._patch_fsdp()


def test_a_patch_that_missed_shows_in_the_first_forward(monkeypatch):
    """A dedicated parameter that FSDP2 sharded all the same is named, instead of training a piece of it."""

    def law(rank):
        mesh, model = init_device_mesh("cpu", (2,)), net()
        dmuon.dedicate_params(model, mesh)
        monkeypatch.setattr(_fsdp_init, "_get_managed_states", _fsdp_init._get_managed_states.__wrapped__)
        fully_shard(model.layers[0], mesh=mesh)
        for use in (lambda: model(batches(2, 1)[0][rank][0]), lambda: dmuon.Muon(model)):
            with pytest.raises(RuntimeError, match="'layers.0.maps.0.weight' .* has become a DTensor"):
                use()
        return True

    assert run(2, law) == [True, True]


# ---------------------------------------------------------------------------------- dmuon.py, which matrices are chosen


def tree(**names: nn.Module) -> nn.Module:
    """A module with the given dotted children, `__` for a dot: tree(model__layers=...)."""
    root = nn.Module()
    root.forward = lambda: None
    for name, child in names.items():
        *path, last = name.split("__")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, child)
    return root


class Mixed(nn.Module):
    """One of everything that can lie in a block."""

    def __init__(self):
        super().__init__()
        self.q, self.norm, self.embed = nn.Linear(8, 4), nn.LayerNorm((2, 8)), nn.Embedding(5, 8)
        self.conv1, self.conv2 = nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 8))
        self.row, self.column = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.randn(8, 1))
        self.empty, self.scalar = nn.Parameter(torch.randn(0, 8)), nn.Parameter(torch.tensor(1.0))
        self.bias_table = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Linear(8, 4, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.experts.sum() * self.q(x).sum() * self.row.sum() * self.column.sum()


@pytest.mark.parametrize("names", ["model__layers", "transformer__h", "bert__encoder__layer", "blocks"])
def test_the_default_takes_the_linear_maps_inside_layers(names):
    """Llama, GPT-2, BERT and ViT names: matrices and stacked matrices, nothing else, nothing outside a layer."""

    def law(rank):
        model = tree(**{names: nn.ModuleList([Mixed()]), "head": nn.Linear(8, 8)})
        prefix = names.replace("__", ".") + ".0."
        return {name.removeprefix(prefix) for name in dmuon.dedicate_params(model, init_device_mesh("cpu", (1,)))}

    assert run(1, law)[0] == {"q.weight", "experts"}


@pytest.mark.parametrize("wrap", [
    lambda layer: torch.compile(layer, backend="eager"),
    lambda layer: checkpoint_wrapper(layer),
    lambda layer: torch.compile(checkpoint_wrapper(layer), backend="eager"),
])
def test_names_never_carry_a_wrapper(wrap):
    """torch.compile(layer) and checkpoint_wrapper(layer) leave the FQNs, and the training, as they were."""

    class Wrapped(Net):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(wrap(layer) for layer in self.layers)

    def law(rank):
        model = shard(net(make=Wrapped))
        loss_of(model, batches(2, 1)[0][rank]).backward()
        grads = {n: p.grad for n, p in dmuon.owned_params(model).items()}
        return list(dmuon.owners(model)), grads

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(2, 1)[0]).div(2).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    expected = run(1, one)[0]
    for names, grads in run(2, law):
        assert names == [n for n in expected if is_matrix(n)]
        assert all(torch.allclose(g, expected[n], rtol=1e-10) for n, g in grads.items())


def test_a_stack_of_matrices_is_dedicated_as_one_and_trained_as_many(spread):
    """(E, m, n), 1xN and Nx1 may be dedicated; each matrix of a stack takes its own Muon step (C16)."""

    def law(rank):
        torch.manual_seed(0)
        model = tree(layers=nn.ModuleList([Mixed().double()]))
        del model.layers[0].scalar, model.layers[0].empty  # FSDP2 refuses them
        model.forward = lambda x: model.layers[0](x)
        wanted = ("experts", "row", "column")
        dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)), lambda fqn, p: fqn.endswith(wanted))
        before = {n: p.detach().clone() for n, p in dmuon.owned_params(model).items()}
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = dmuon.Muon(model, lr=1.0)
        model(torch.ones(2, 8, dtype=torch.float64)).backward()
        optimizer.step()
        for name, p in dmuon.owned_params(model).items():
            for old, new, grad in zip(*(t.detach().reshape(-1, *t.shape[-2:]) for t in (before[name], p, p.grad))):
                step = dmuon.newton_schulz(grad) * 0.2 * max(grad.shape) ** 0.5
                assert torch.allclose(old - step, new, rtol=1e-10), name
        return list(before)

    assert sorted(n for names in run(2, law) for n in names) == [f"layers.0.{n}" for n in ("column", "experts", "row")]


# ---------------------------------------------------------------------------------------- dmuon.py, what bad input gets


REFUSED_PARAMETERS = {
    "q.bias": r"'layers.0.q.bias' has shape \(4,\): a vector", "scalar": r"'layers.0.scalar' has shape \(\): a scalar",
    "conv1.weight": "'layers.0.conv1.weight'.*convolution", "conv2.weight": "'layers.0.conv2.weight'.*convolution",
    "empty": r"'layers.0.empty' has shape \(0, 8\): an empty matrix",
}


@pytest.mark.parametrize("name", REFUSED_PARAMETERS)
def test_what_is_no_matrix_is_refused_by_name(name):
    """A predicate that is true for a vector, a scalar, a kernel or an empty matrix raises on every rank (C16)."""

    def law(rank):
        with pytest.raises(ValueError, match=REFUSED_PARAMETERS[name]):
            dmuon.dedicate_params(tree(layers=nn.ModuleList([Mixed()])), init_device_mesh("cpu", (2,)),
                                  lambda fqn, p: fqn.endswith(name))
        return True

    assert run(2, law) == [True, True]


def two_boundaries_tied():
    model = net()
    model.layers[1].maps[0].weight = model.layers[0].maps[0].weight
    return model


def boundaryless():
    return tree(stack=nn.ModuleList([Mixed()]), head=nn.Linear(8, 8))


def dedicated_once():
    model = net()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def sharded_before(part: Callable):
    model = net()
    fully_shard(part(model), mesh=init_device_mesh("cpu", (2,)))
    return model


REFUSED_CALLS = {
    "nothing chosen": (boundaryless, {}, "no trainable matrix was chosen.*stack.0.q.weight"),
    "predicate chooses nothing": (net, {"predicate": lambda *_: False}, "no trainable matrix.*layers.0.maps.0.weight"),
    "all frozen": (lambda: net().requires_grad_(False), {}, "no trainable matrix"),
    "no boundary": (boundaryless, {"predicate": lambda fqn, p: fqn.endswith("q.weight")},
                    "no hook boundary around 'stack.0.q.weight'.*hook_boundary_strict=False"),
    "boundary without forward": (net, {"hook_boundary_predicate": lambda m: isinstance(m, nn.ModuleList)},
                                 "true for 'layers.0.maps', a ModuleList without a forward"),
    "tied across boundaries": (two_boundaries_tied, {},
                               "tied across hook boundaries, as 'layers.0.maps.0.weight' and 'layers.1.maps.0.weight'"),
    "twice": (dedicated_once, {}, "already called on 'the model'"),
    "twice, inside": (lambda: nn.Sequential(dedicated_once()), {}, "already called on '0'"),
    "sharded before": (lambda: sharded_before(lambda m: m), {}, "fully_shard was already applied to 'the model'"),
    "a layer before": (lambda: sharded_before(lambda m: m.layers[0]), {}, "already applied to 'layers.0'"),
    "3-D mesh": (net, {"mesh": (1, 1, 2)}, r"mesh has shape \(1, 1, 2\); expected the mesh that fully_shard gets"),
    "complex": (lambda: net().to(torch.complex64), {"predicate": lambda fqn, p: is_matrix(fqn)}, "complex64"),
    "predicate raises": (net, {"predicate": lambda fqn, p: {}[fqn]}, "embed.weight"),
}


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_a_wrong_call_is_refused_on_every_rank(case):
    """The exception names the parameter or module and the way out, before any collective that could hang."""

    def law(rank):
        make, options, message = REFUSED_CALLS[case]
        mesh = init_device_mesh("cpu", options.get("mesh", (2,)))
        with pytest.raises((ValueError, KeyError), match=f"(?s){message}"):
            dmuon.dedicate_params(make(), mesh, **{k: v for k, v in options.items() if k != "mesh"})
        return True

    assert run(2, law) == [True, True]


def test_a_matrix_without_a_layer_may_be_its_own_boundary():
    """hook_boundary_strict=False: the module that holds the matrix unshards it, and it trains exactly."""

    def law(rank):
        model = net()
        mesh = init_device_mesh("cpu", (2,))
        slots = dmuon.dedicate_params(model, mesh, lambda fqn, p: is_matrix(fqn) or fqn == "head.weight",
                                      hook_boundary_strict=False)
        fully_shard(model, mesh=mesh)
        loss_of(model, batches(2, 1)[0][rank]).backward()
        assert "head.weight" in slots
        return {n: p.grad for n, p in dmuon.owned_params(model).items()}

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(2, 1)[0]).div(2).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    grads, expected = {n: g for result in run(2, law) for n, g in result.items()}, run(1, one)[0]
    assert all(torch.allclose(g, expected[n], rtol=1e-10) for n, g in grads.items()) and "head.weight" in grads


DISAGREEMENTS = {
    "shape": (lambda rank: net(make=lambda: Net(widths=((8, 12 + rank),))), None,
              r"Rank 0 of the shard group has \[layers.0.maps.0.weight \(12, 8\).* 1 has .*weight \(13, 8\)"),
    "names": (lambda rank: net(make=lambda: Net(widths=((8, 12),) * (1 + rank))), None,
              r"has \[head.weight.*rank 1 has \[layers.1.norm.weight"),
    "dtype": (lambda rank: net(dtype=torch.float64 if rank else torch.float32), None, "float32.*float64"),
    "owners": (lambda rank: net(), lambda rank: lambda fqn, p: is_matrix(fqn) and (rank == 0 or "layers.0" not in fqn),
               r"\[layers.0.maps.0.weight .* owner \(\d, 0\)\].*owner None"),
    "an error": (lambda rank: net(), lambda rank: lambda fqn, p: is_matrix(fqn) if rank else 1 // 0, "by zero"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_raise_instead_of_hanging(case):
    """Other shapes, names, dtypes, owners, or an error on one rank only: every rank says what differs."""

    def law(rank):
        make, predicate, message = DISAGREEMENTS[case]
        with pytest.raises((ValueError, ZeroDivisionError), match=f"(?s){message}"):
            dmuon.dedicate_params(make(rank), init_device_mesh("cpu", (2,)), predicate and predicate(rank))
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("layout", ["1", "4", "2x2", "2 tp2"])
def test_a_model_without_owners_is_clipped_like_one_process(layout, spread):
    """FSDP2 alone, also with tensor parallelism, and a plain model: one rule for norms of all."""

    def law(rank):
        tp = tp_size(layout)
        model, (mesh, tp_mesh) = net(), meshes(layout)
        for layer in model.layers if tp > 1 else []:
            plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
            parallelize_module(layer.maps, tp_mesh, plan)
        if layout != "1":
            fully_shard(model, mesh=mesh)
        ranks = dist.get_world_size() // tp
        loss_of(model, batches(ranks, 1)[0][rank // tp]).backward()
        norms = {order: dmuon.clip_grad_norm_(model, math.inf, order) for order in (1.0, 2.0, math.inf)}
        dmuon.clip_grad_norm_(model, norms[2.0].item() / 2)
        return norms, dmuon.clip_grad_norm_(model, math.inf)

    def one(rank):
        model = net()
        steps = batches(prod(LAYOUTS[layout].values()) // tp_size(layout), 1)[0]
        sum(loss_of(model, batch) for batch in steps).div(len(steps)).backward()
        gradients = [p.grad for p in model.parameters()]
        return {order: nn.utils.get_total_norm(gradients, order) for order in (1.0, 2.0, math.inf)}

    expected, = run(1, one)
    for norms, clipped in run(prod(LAYOUTS[layout].values()), law):
        for order, norm in norms.items():
            torch.testing.assert_close(norm, expected[order], rtol=1e-10, atol=0)
        torch.testing.assert_close(clipped, expected[2.0] / 2, rtol=1e-5, atol=0)



REFUSED_OPTIMIZERS = {
    "lr": ({"lr": -1.0}, "lr must be >= 0, not -1.0"), "nan": ({"lr": math.nan}, "lr must be"),
    "momentum": ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
    "decay": ({"weight_decay": -0.1}, "weight_decay must be"), "eps": ({"eps": -1.0}, "eps must be"),
    "steps": ({"ns_steps": 3}, "steps=3 with 5 coefficient triples"),
    "adjust_lr_fn": ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn must be one of .* not 'spectral'"),
    "ns_backend": ({"ns_backend": "svd"}, "ns_backend must be one of"),
    "adamw_lr": ({"adamw_lr": -1.0}, "Invalid learning rate"), "betas": ({"adamw_betas": (0.9, 1.0)}, "Invalid beta"),
}


def test_a_wrong_optimizer_is_refused():
    """Negative rates, momentum outside [0, 1), unknown names, a model that was not dedicated or not sharded."""

    def law(rank):
        model = net()
        with pytest.raises(ValueError, match="Net has no dedicated parameters; call dmuon.dedicate_params first"):
            dmuon.Muon(model)
        for ask in (dmuon.owners, dmuon.owned_params, dmuon.ownership_table, lambda m: dmuon.no_sync(m).__enter__()):
            with pytest.raises(ValueError, match="call dmuon.dedicate_params first"):
                ask(model)
        dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="call fully_shard on the model before dmuon.Muon"):
            dmuon.Muon(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        for options, message in REFUSED_OPTIMIZERS.values():
            with pytest.raises(ValueError, match=message):
                dmuon.Muon(model, **options)
        return True

    assert run(2, law) == [True, True]


# -------------------------------------------------------------------------------------------- dmuon.py, the optimizer


class Maps(nn.Module):
    """Two tall matrices and a wide one in one layer, in float32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(
            nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False), nn.Linear(64, 128, bias=False)
        )])

    def forward(self, x):
        return self.layers[0](x)


FUSED = {  # by the end of a name in `Net`: heads, grouped queries, gate and up, Conv1D's (in, out), a whole one
    "0.maps.0.weight": (-2, (6, 2, 4)), "0.maps.1.weight": (-2, (10, 10)), "0.maps.2.weight": (-1, [4, 4, 12]),
    "1.maps.0.weight": (-2, (4, 4, 4, 4)), "1.maps.1.weight": (-1, (8, 8)), "1.maps.2.weight": (-2, (8,)),
    "2.maps.0.weight": (-2, (6, 6)),
}


def fused(fqn: str, parameter: nn.Parameter) -> tuple | None:
    return FUSED.get(fqn.removeprefix("layers."))


def test_a_rate_that_is_no_number_is_refused_on_every_rank(spread):
    """When the group is made, by name and shape: in a step only the owner would see it."""

    def fails(lr, m, n):
        return {(12, 8): lr}[m, n]

    def law(rank):
        model = shard(net())
        for wrong in (fails, lambda lr, m: lr, *(lambda lr, m, n, value=value: value for value in (
                None, "x", math.nan, 1j, torch.ones(2)))):
            with pytest.raises(ValueError, match=r"adjust_lr_fn gives .* for a \(\d+, \d+\) matrix"):
                dmuon.Muon(model, adjust_lr_fn=wrong)
        dmuon.Muon(model, adjust_lr_fn=lambda lr, m, n: torch.tensor(lr))
        return True

    assert run(2, law) == [True] * 2


def test_a_callable_rate_is_nobodys_state(spread, tmp_path):
    """It gets (rate, m, n) of the whole matrix as stored; loading keeps the group's own, whatever was saved."""

    def law(rank):
        seen = set()

        def mup(lr, m, n):
            seen.add((lr, m, n))
            return lr * 0.2 * max(m, n) ** 0.5

        record = train(rank, 3, 2, layout="2 tp2", adjust_lr_fn=mup)
        model = shard(net(), layout="2 tp2")
        assert seen == {(0.02, *p.shape) for n, p in net().named_parameters() if is_matrix(n)}
        assert_same([record[-1]], [train(rank, 3, 2, layout="2 tp2")[-1]], tolerance=0.0)
        optimizer = dmuon.Muon(model, **OPTIONS, adjust_lr_fn=mup)
        train_step(model, optimizer, batches(2, 1)[0][rank // 2])
        assert all("adjust_lr_fn" not in group for group in optimizer.state_dict()["param_groups"])
        dmuon.save_checkpoint(tmp_path / "mup", model, optimizer, 1)
        usual = dmuon.Muon(model, **OPTIONS, adjust_lr_fn="original")
        usual.load_state_dict(optimizer.state_dict())
        dmuon.load_checkpoint(tmp_path / "mup", model, usual)
        dmuon.save_checkpoint(tmp_path / "usual", model, usual, 1)
        optimizer.load_state_dict(usual.state_dict())
        dmuon.load_checkpoint(tmp_path / "usual", model, optimizer)
        own = [[group.get("adjust_lr_fn") for group in each.param_groups] for each in (usual, optimizer)]
        assert own == [["original", None], [mup, None]] and "adjust_lr_fn" not in usual.param_groups[1]
        return True

    assert run(4, law) == [True] * 4


@pytest.mark.parametrize("layout, zero", [("1", 3), ("4", 3), ("4", 2), ("2x2", 3), ("2 tp2", 3), ("2x1 tp2", 2)])
def test_blocks_of_a_fused_matrix_are_matrices_of_their_own(layout, zero, spread):
    """Unequal and equal sizes, along either dimension, cut by tensor parallelism along it or the other (C28)."""
    exact_layout(layout, zero, 3, blocks=fused)


def test_a_rank_that_fails_before_it_looks_at_tensor_parallelism_is_not_waited_for():
    """Its peers along every dimension hear of it."""

    def law(rank):
        mesh, tp_mesh = meshes("2 tp2")
        model = net()
        for layer in model.layers:
            parallelize_module(layer.maps, tp_mesh, {"0": ColwiseParallel(use_local_output=False)})
        if rank == 3:
            model.layers[0]._dmuon = None
        with pytest.raises(ValueError, match="already called on 'layers.0'" + ("" if rank == 3 else "|rank . of the ")):
            dmuon.dedicate_params(model, mesh)
        return True

    assert run(4, law, timeout_s=40) == [True] * 4


@pytest.mark.parametrize("layout", ["4", "2x2"])
def test_a_fused_model_trains_like_the_one_with_separate_matrices(layout, spread):
    """q, k, v in one Linear, gate and up in one, c_attn as (in, 3 out): the bits of twelve separate ones."""

    class Separate(nn.Module):
        def __init__(self, is_fused: bool):
            super().__init__()
            sizes = {"qkv": (16, 4, 4), "gate_up": (24, 24), "c_attn": (8, 8, 8)}
            parts = {kind: [torch.randn(size, 8, dtype=torch.float64) for size in of_kind]
                     for kind, of_kind in sizes.items()}
            parts["c_attn"] = [part.mT.contiguous() for part in parts["c_attn"]]
            if is_fused:
                parts = {kind: [torch.cat(of_kind, -1 if kind == "c_attn" else -2)] for kind, of_kind in parts.items()}
            self.parts = nn.ModuleDict({kind: nn.ParameterList(of_kind) for kind, of_kind in parts.items()})
            self.shift = nn.Parameter(torch.zeros(8, dtype=torch.float64))

        def forward(self, x):
            x = x + self.shift
            whole = {kind: torch.cat([*of_kind], -1 if kind == "c_attn" else -2)
                     for kind, of_kind in self.parts.items()}
            left, right = F.linear(x, whole["gate_up"]).chunk(2, -1)
            return F.linear(x, whole["qkv"]), left.sigmoid() * right, (x @ whole["c_attn"]).tanh()

    sizes = {"qkv": (-2, (16, 4, 4)), "gate_up": (-2, (24, 24)), "c_attn": (-1, (8, 8, 8))}

    def law(rank, is_fused):
        torch.manual_seed(0)
        model = nn.Sequential(Separate(is_fused), nn.Identity())
        boundary = lambda module: isinstance(module, Separate)
        blocks = (lambda fqn, p: sizes[fqn.split(".")[2]]) if is_fused else None
        mesh, _ = meshes(layout)
        dmuon.dedicate_params(model, mesh, lambda fqn, p: p.ndim == 2, blocks=blocks, hook_boundary_predicate=boundary)
        optimizer = dmuon.Muon(fully_shard(model, mesh=mesh), **OPTIONS)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(5, 8, generator=generator, dtype=torch.float64)
            sum((output - 1).square().mean() for output in model(x)).backward()
            optimizer.step()
        state = dmuon.full_state_dict(model, rank0_only=False)
        return {kind: torch.cat([t for n, t in state.items() if kind in n], dim) for kind, (dim, _) in sizes.items()}

    for ours, theirs in zip(run(4, law, True), run(4, law, False)):
        for kind in sizes:
            torch.testing.assert_close(ours[kind], theirs[kind], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("blocks", [None, fused])
def test_a_step_in_inference_mode_is_the_same_step(blocks, spread):
    """Also of blocks that tensor parallelism has cut."""

    def law(rank, inference):
        model = shard(net(), layout="2 tp2", blocks=blocks)
        optimizer = dmuon.Muon(model, **OPTIONS)
        for i, step in enumerate(batches(2, 3)):
            optimizer.zero_grad()
            loss_of(model, step[rank // 2]).backward()
            with torch.inference_mode() if inference and i else contextlib.nullcontext():
                optimizer.step()
        return snapshot(model)["weights"]

    for ours, theirs in zip(run(4, law, True), run(4, law, False)):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_directions_of_many_blocks_cost_one_each(spread):
    """Cut across by tensor parallelism: twice the blocks, twice the calls."""

    def law(rank, size):
        model = shard(net(), layout="tp2", blocks=lambda fqn, p: (-2, (size,) * (20 // size)) if len(p) == 20 else None)
        optimizer = dmuon.Muon(model, **OPTIONS)
        calls, original = [], dmuon.muon_direction
        dmuon.muon_direction = lambda gradients, *args: calls.append(gradients[0].numel()) or original(gradients, *args)
        loss_of(model, batches(1, 1)[0][0]).backward()
        optimizer.step()
        return sum(calls)

    assert run(2, law, 10) == run(2, law, 1)  # elements, each four times


def test_blocks_decide_what_a_matrix_costs(spread):
    """Owners, loads and the picture go by the blocks' Newton-Schulz, not by the fused matrix's."""
    shapes = {"qkv": (48, 16), "o": (16, 16), "up": (16, 64), "down": (64, 16)}
    layers, blocks = dict.fromkeys(shapes, "layers.0"), {"qkv": (-2, (16, 16, 16)), "up": (-1, (32, 32))}
    costs = {name: partition.ns_flops(shape) for name, shape in shapes.items()}
    costs |= {"qkv": 3 * partition.ns_flops((16, 16)), "up": 2 * partition.ns_flops((16, 32))}
    assert partition.matrix_flops(shapes, blocks) == costs
    owners = partition.assign_owners(shapes, layers, 2, blocks=blocks)
    loads = partition.slot_loads(shapes, owners, 2, blocks)
    assert loads == [costs["qkv"] + costs["o"], costs["up"] + costs["down"]]
    assert owners != partition.assign_owners(shapes, layers, 2)
    mean = f"NS FLOPs: mean {sum(loads) / 2:.2e}, max/mean {2 * max(loads) / sum(loads):.3f}"
    assert mean in partition.ownership_map(shapes, layers, owners, 2, blocks=blocks)


def test_blocks_that_do_not_fit_are_refused_on_every_rank(spread):
    """By name, whatever they are; also a block that tensor parallelism cuts, and one that ranks know differently."""
    wrong = {"sizes that do not add up": (-2, (6, 5)), "dim 0": (0, (12,)), "no pair": 12, "a zero": (-2, (12, 0)),
             "a half": (-2, (6.5, 5.5)), "no sizes": (-2, 12), "a tensor": torch.tensor([[1, 2], [3, 4]])}

    def law(rank):
        for given in wrong.values():
            with pytest.raises(ValueError, match=r"blocks of 'layers.0.maps.0.weight' of shape \(12, 8\): "):
                blocks = lambda fqn, p: given if fqn == "layers.0.maps.0.weight" else None
                dmuon.dedicate_params(net(), meshes("2")[0], blocks=blocks)
        with pytest.raises(ValueError, match=r"rank [01] .*blocks.*\(-2, \(6, 6\)\)"):
            dmuon.dedicate_params(net(), meshes("2")[0], blocks=lambda fqn, p: (-2, (6, 6)) if len(p) == 12 and rank
                                  else None)
        with pytest.raises(ValueError, match=r"blocks of 'layers.0.maps.0.weight'.*cuts dim -2 at 6, within a block"):
            shard(net(), layout="tp2", blocks=lambda fqn, p: (-2, (5, 7)) if len(p) == 12 else None)
        model = net()
        for broken in ((lambda fqn, p: 1 / (1 - rank) and None), {} if rank else None):
            with pytest.raises(ValueError, match="blocks of 'layers.0.maps.0.weight'"):
                dmuon.dedicate_params(model, meshes("2")[0], blocks=broken)
        return all(isinstance(p, nn.Parameter) and p.numel() for p in model.parameters())  # untouched

    assert run(2, law) == [True] * 2



@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_process_equals_torch_optim_muon(adjust_lr_fn, nesterov, monkeypatch):
    """With torch's NS replaced by ours, three float32 steps are the same bits; as it is, within 0.03 adjusted rates."""
    options = dict(lr=0.02, momentum=0.95, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn,
                   ns_coefficients=dmuon.KELLER_COEFFICIENTS, eps=1e-7)

    def law(rank, patched):
        if patched:
            monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", dmuon.newton_schulz)
        torch.manual_seed(0)
        theirs = Maps()
        ours = copy.deepcopy(theirs)
        dmuon.dedicate_params(ours, init_device_mesh("cpu", (1,)))
        optimizers = (torch.optim.Muon(theirs.parameters(), **options),
                      dmuon.Muon(ours, ns_backend="direct", **options))
        x, y = torch.randn(512, 64), torch.randn(512, 128)
        differences = []
        for _ in range(3):
            for model, optimizer in zip((theirs, ours), optimizers):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
            for p, q in zip(theirs.parameters(), ours.parameters()):
                m, n = p.shape
                rate = 0.02 * (0.2 * max(m, n) ** 0.5 if adjust_lr_fn != "original" else max(1, m / n) ** 0.5)
                differences.append((p - q).abs().max().item() / rate)
            if not patched:
                return differences  # later steps start from different weights
        return differences

    assert run(1, law, True)[0] == [0.0] * 9
    assert max(run(1, law, False)[0]) <= 0.03


def test_the_optimizer_behaves_like_torchs(spread):
    """Groups, a scheduler, a closure, hooks, add_param_group, zero_grad: as code written for torch.optim expects."""

    def law(rank):
        model = shard(net())
        first = [p for n, p in model.named_parameters() if n.startswith("layers.0.")]
        rest = [p for n, p in model.named_parameters() if not n.startswith(("layers.0.", "head"))]
        optimizer = dmuon.Muon(model, **OPTIONS, param_groups=[{"params": first, "lr": 0.5}, {"params": rest}])
        optimizer.add_param_group({"params": model.head.parameters(), "weight_decay": 0.25})
        assert [(g["family"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
            ("muon", 0.5, 0.1, 3), ("adamw", 0.5, 0.0, 1), ("muon", 0.02, 0.1, 6), ("adamw", 0.01, 0.0, 3),
            ("adamw", 0.01, 0.25, 2)]
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": first})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))

        def closure():
            optimizer.zero_grad()
            calls.append("closure")
            loss = loss_of(model, batches(2, 1)[0][rank])
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            scheduler.step()
        assert calls == ["pre", "closure", "post"] * 3
        assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125, 0.005, 0.0025, 0.0025]
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return losses[2] < losses[0]

    assert run(2, law) == [True, True]


def test_a_group_may_be_a_layer_with_a_rate_of_its_own(spread):
    """Layer i steps by 2^-i of what it steps by with one rate: groups by layer, both families in each (no decay)."""

    def law(rank, factor):
        model = shard(net())
        before = snapshot(model)["weights"]
        layers = [*model.layers, nn.ModuleList([model.embed, model.head])]
        groups = [{"params": layer.parameters(), "lr": 0.5 * factor**i} for i, layer in enumerate(layers)]
        optimizer = dmuon.Muon(model, adamw_weight_decay=0.0, param_groups=groups)
        loss_of(model, batches(2, 1)[0][rank]).backward()
        optimizer.step()
        after = snapshot(model)["weights"]
        return {name: after[name] - before[name] for name in after}

    for uniform, by_layer in zip(run(2, law, 1.0), run(2, law, 0.5)):
        for name in uniform:
            i = int(name.split(".")[1]) if name.startswith("layers.") else 3
            assert uniform[name].any() and torch.allclose(by_layer[name], uniform[name] * 0.5**i, rtol=1e-9, atol=1e-14)


SCHEDULERS = {
    "CosineAnnealingLR": lambda o: scheduling.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: scheduling.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: scheduling.OneCycleLR(o, [1.0, 0.1], total_steps=8, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: scheduling.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: scheduling.SequentialLR(
        o, [scheduling.LinearLR(o, 0.1, total_iters=2), scheduling.ExponentialLR(o, 0.5)], [2]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_set_the_rates_of_both_families(name):
    """Step by step the rates that the scheduler gives `torch.optim.SGD` with groups of the same rates."""

    def rates(optimizer):
        scheduler, found = SCHEDULERS[name](optimizer), []
        for _ in range(5):
            optimizer.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    def law(rank):
        model = shard(net())
        loss_of(model, batches(2, 1)[0][rank]).backward()
        theirs = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.02, 1e-2)]
        expected = rates(torch.optim.SGD(theirs))
        assert len({*map(tuple, expected)}) > 1
        return rates(dmuon.Muon(model, **OPTIONS)) == expected

    assert run(2, law) == [True, True]


def test_hooks_of_the_optimizers_state_dict_run(spread):
    """`register_state_dict_post_hook` and `register_load_state_dict_pre_hook`, as in torch.optim."""

    def law(rank):
        optimizer = dmuon.Muon(shard(net()))
        optimizer.register_state_dict_post_hook(lambda _, state: state.update(note=7))
        notes = []
        optimizer.register_load_state_dict_pre_hook(lambda _, state: notes.append(state["note"]))
        optimizer.load_state_dict(optimizer.state_dict())
        return notes

    assert run(2, law) == [[7], [7]]


@pytest.mark.parametrize("sharded", [False, True])
def test_copies_are_refused_as_fsdp2_refuses_them(sharded):
    """`copy.deepcopy` and pickle of a dedicated model, a part of it, or its optimizer raise; before, nothing has."""

    def law(rank):
        model = net()
        copy.deepcopy(model)
        if sharded:
            shard(model)
        else:
            dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)))
        for what in (model, model.layers[0]):
            with pytest.raises((RuntimeError, AssertionError), match="full_state_dict|FSDP does not support deepcopy"):
                copy.deepcopy(what)
        with pytest.raises(RuntimeError, match="full_state_dict"):
            pickle.dumps(model.layers[0]._dmuon)
        if sharded:
            for way in (copy.deepcopy, pickle.dumps):
                with pytest.raises(RuntimeError, match="state_dict"):
                    way(dmuon.Muon(model))
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("layout", ["4", "2x2", "2 tp2"])
def test_parameters_have_their_names_and_a_helper_their_true_shapes(layout, spread):
    """`named_parameters` has a plain model's names, in its order, on every rank; `parameter_shapes` its shapes."""
    plain = {name: p.shape for name, p in net().named_parameters()}

    def law(rank):
        model = shard(net(), layout=layout)
        assert dmuon.parameter_shapes(net()) == plain  # no dedicated model: its own shapes
        assert [name for name, _ in model.named_parameters()] == [*plain]
        assert len([*model.parameters()]) == len(plain)
        empty = {name for name, p in model.named_parameters() if not p.numel()}
        assert {*dmuon.owned_params(model)} <= {*dmuon.owners(model)} - empty
        found = [dmuon.parameter_shapes(model)]
        with dmuon.unshard(model):
            found.append(dmuon.parameter_shapes(model))
        model.layers[0].register_forward_hook(lambda *_: found.append(dmuon.parameter_shapes(model)))
        loss_of(model, batches(4, 1)[0][0]).backward()
        found.append(dmuon.parameter_shapes(model))
        assert [*found[0]] == [*plain] and found == [plain] * 4
        part = dmuon.parameter_shapes(model.layers[1])
        assert {f"layers.1.{name}": shape for name, shape in part.items()}.items() <= plain.items() and len(part) == 4
        return sum(shape.numel() for shape in found[0].values())

    assert run(4, law) == [sum(shape.numel() for shape in plain.values())] * 4


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2", "2x2 tp2"])
def test_gradient_norms_by_name_are_those_of_one_process(layout, norm_type, spread):
    """Each parameter's, the same bits on every rank; the clip norm is the norm of them; a NaN stays with its name."""
    ranks, data_ranks = prod(LAYOUTS[layout].values()), prod(LAYOUTS[layout].values()) // tp_size(layout)

    def law(rank):
        model = shard(net(), layout=layout)
        assert not any(dmuon.grad_norms(model).values())
        for wrong in (0, -1.0, math.nan):
            with pytest.raises(ValueError, match="norm_type is .*; expected 2.0"):
                dmuon.clip_grad_norm_(model, 1.0, wrong)
        loss_of(model, batches(data_ranks, 1)[0][rank // tp_size(layout)]).backward()
        norms = dmuon.grad_norms(model, norm_type)
        total = torch.linalg.vector_norm(torch.stack([*norms.values()]), norm_type)
        assert torch.equal(total, dmuon.clip_grad_norm_(model, math.inf, norm_type))
        owned = dmuon.owned_params(model)
        if "layers.1.maps.1.weight" in owned:
            local(owned["layers.1.maps.1.weight"].grad).view(-1)[0] = math.nan
        bad = [name for name, norm in dmuon.grad_norms(model, norm_type).items() if not norm.isfinite()]
        assert bad == ["layers.1.maps.1.weight"]
        assert not dmuon.clip_grad_norm_(model, 1e-3, norm_type).isfinite()  # and scales nothing
        again = dmuon.grad_norms(model, norm_type)
        assert all(torch.equal(norm, again[name]) for name, norm in norms.items() if name not in bad)
        return norms

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(data_ranks, 1)[0]).div(data_ranks).backward()
        return {n: torch.linalg.vector_norm(p.grad, norm_type).item() for n, p in model.named_parameters()}

    expected, results = run(1, one)[0], run(ranks, law)
    assert results == [results[0]] * ranks
    assert {n: norm.item() for n, norm in results[0].items()} == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("zero", [3, 2])
def test_an_eval_hides_no_parameter_from_the_optimizer_or_the_norms(zero, spread):
    """FSDP2 leaves parameters whole after an eval, in Z3 the root's: `Muon` and the norms find the sharded ones."""

    def law(rank, evals):
        model, mesh = net(), init_device_mesh("cpu", (2,))
        dmuon.dedicate_params(model, mesh, reshard_after_forward=zero == 3)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3)
        fully_shard(model, mesh=mesh)  # without saying how: the root stays whole

        def evaluate():
            with torch.no_grad():
                loss_of(model, batches(2, 1)[0][rank]) if evals else None

        evaluate()
        optimizer, norms = dmuon.Muon(model, **OPTIONS), []
        for step in batches(2, 2):
            optimizer.zero_grad()
            loss_of(model, step[rank]).backward()
            evaluate()
            norms += [dmuon.grad_norms(model), dmuon.clip_grad_norm_(model, 0.1)]
            optimizer.step()
        return [norms, snapshot(model)["weights"]]

    for (norms, weights), (expected_norms, expected) in zip(run(2, law, True), run(2, law, False)):
        assert norms == expected_norms and all(norms[0].values())
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_set_of_parameters_is_refused_as_torch_refuses_it():
    """Its order differs between ranks: TypeError; an empty group stays a group, for schedulers' lists."""

    def law(rank):
        model = shard(net())
        with pytest.raises(TypeError, match="a set, whose order differs between ranks"):
            dmuon.Muon(model, param_groups=[{"params": {*model.parameters()}}])
        optimizer = dmuon.Muon(model, param_groups=[{"params": []}, {"params": model.parameters()}])
        loss_of(model, batches(2, 1)[0][rank]).backward()
        optimizer.step()
        return [group["family"] for group in optimizer.param_groups]

    assert run(2, law) == [["adamw", "muon", "adamw"]] * 2


def test_optimizer_state_goes_through_state_dict(spread):
    """Three steps, state_dict into a new optimizer, three more: the bits of six steps."""

    def law(rank, interrupted):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        for i, step in enumerate(batches(2, 6)):
            if i == 3 and interrupted:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = dmuon.Muon(model, lr=9.0)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, step[rank]).backward()
            optimizer.step()
        return snapshot(model, optimizer)

    for straight, resumed in zip(run(2, law, False), run(2, law, True)):
        for key in ("weights", "momenta"):
            assert all(torch.equal(straight[key][n], resumed[key][n]) for n in straight[key])


def test_a_tiny_gradient_still_gives_a_full_update(spread):
    """A gradient scaled by 1e-10 takes the same Muon step: eps is far below any gradient."""

    def law(rank, scale):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        (loss_of(model, batches(2, 1)[0][rank]) * scale).backward()
        optimizer.step()
        return {n: p.detach() for n, p in dmuon.owned_params(model).items()}

    for full, tiny in zip(run(2, law, 1.0), run(2, law, 1e-10)):
        assert all(torch.allclose(full[n], tiny[n], rtol=1e-6) for n in full)


@pytest.mark.parametrize("layout", ["4", "2x2", "2 tp2"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_the_clip_norm_is_that_of_one_process(norm_type, layout, spread):
    """The same norm on every rank, the reference's to 1e-6; one factor for both families, or untouched (C4)."""
    data_ranks = 4 // tp_size(layout)

    def law(rank, fraction):
        model = shard(net(), layout=layout)
        loss_of(model, batches(data_ranks, 1)[0][rank // tp_size(layout)]).backward()
        before = snapshot(model)["grads"]
        norm = dmuon.clip_grad_norm_(model, math.inf, norm_type)
        assert dmuon.clip_grad_norm_(model, fraction * norm, norm_type) == norm
        after = snapshot(model)["grads"]
        assert all(torch.allclose(after[n], before[n] * min(1, fraction), rtol=1e-5) for n in before)
        for p in model.parameters():
            if p.grad is not None and rank == 1:
                (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).fill_(math.nan)
        assert not dmuon.clip_grad_norm_(model, 1.0, norm_type).isfinite()
        with pytest.raises(RuntimeError, match="not finite"):
            dmuon.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        return norm.item()

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(data_ranks, 1)[0]).div(data_ranks).backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, norm_type).item()

    expected = run(1, one)[0]
    for fraction in (0.5, 10.0):
        assert run(4, law, fraction) == [pytest.approx(expected, rel=1e-6)] * 4


def test_the_clip_norm_does_not_depend_on_who_owns_what():
    """A rank that owns nothing, mixed dtypes, the user's ignored_params: one value and dtype, counted once."""

    def idle(rank):
        model = nn.ModuleList([nn.Linear(8, 8, bias=False)])
        dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)), lambda *_: True, hook_boundary_strict=False)
        model[0](torch.ones(1, 8)).sum().backward()
        return dmuon.clip_grad_norm_(model, 1.0)

    def mixed(rank):
        model = net(dtype=torch.float32)
        for layer in model.layers:
            layer.maps.to(torch.bfloat16)
        mesh = init_device_mesh("cpu", (2,))
        dmuon.dedicate_params(model, mesh)
        for p in dmuon.owned_params(model).values():
            p.grad = torch.ones_like(p)
        return dmuon.clip_grad_norm_(model, math.inf)

    def ignored(rank):
        model, mesh = net(), init_device_mesh("cpu", (2,))
        dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.head.weight})
        loss_of(model, batches(2, 1)[0][rank]).backward()
        dist.all_reduce(model.head.weight.grad, op=dist.ReduceOp.AVG)
        return dmuon.clip_grad_norm_(model, math.inf)

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(2, 1)[0]).div(2).backward()
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    count = sum(p.numel() for n, p in net().named_parameters() if is_matrix(n))
    for law, expected in ((idle, 8.0), (mixed, count**0.5), (ignored, run(1, one)[0].item())):
        first, second = run(2, law)
        assert torch.equal(first, second) and first.dtype == second.dtype
        assert first.item() == pytest.approx(expected, rel=1e-6), law.__name__


def test_the_clip_norm_counts_what_the_user_keeps_from_fsdp_once(spread):
    """A tensor-parallel head in ignored_params, whose gradient the user averages: the norm of one process."""

    def law(rank):
        mesh, tp_mesh = meshes("2 tp2")
        model = parallelize_module(net(), tp_mesh, {"head": RowwiseParallel(input_layouts=Replicate())})
        dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.head.weight, model.head.bias})
        loss_of(model, batches(2, 1)[0][rank // 2]).backward()
        for p in model.head.parameters():
            dist.all_reduce(p.grad.to_local(), op=dist.ReduceOp.AVG, group=mesh.get_group())
        return dmuon.clip_grad_norm_(model, math.inf).item()

    def one(rank):
        model = net()
        sum(loss_of(model, batch) for batch in batches(2, 1)[0]).div(2).backward()
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    assert run(4, law) == [pytest.approx(run(1, one)[0], rel=1e-10)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_step_has_the_bits_of_torchs_operations_one_by_one(dtype, monkeypatch):
    """Momentum, direction, decay and update of each matrix as `torch.optim.Muon` writes them, AdamW as torch's loop."""

    def law(rank):
        torch.manual_seed(0)
        model = shard(net(dtype, lambda: Net(widths=((8, 12), (8, 12)))))
        plain = copy.deepcopy(net(dtype, lambda: Net(widths=((8, 12), (8, 12)))))
        options = dict(lr=0.02, momentum=0.95, weight_decay=0.1)
        optimizer = dmuon.Muon(model, **options, adamw_lr=1e-2, adamw_weight_decay=0.1)
        adamw = torch.optim.AdamW([p for n, p in plain.named_parameters() if not is_matrix(n)], 1e-2, (0.9, 0.95),
                                  weight_decay=0.1, foreach=False)
        momenta = {n: torch.zeros_like(p) for n, p in plain.named_parameters() if is_matrix(n)}
        for step in range(20):
            for seed, (p, q) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
                q.grad = gaussian(*q.shape, seed=100 * step + seed).to(dtype)
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else q.grad
            optimizer.step()
            adamw.step()
            with torch.no_grad():
                for name, q in plain.named_parameters():
                    if is_matrix(name):
                        momenta[name].lerp_(q.grad, 1 - 0.95)
                        update = ns.gram_newton_schulz(q.grad.lerp(momenta[name], 0.95))
                        q.mul_(1 - 0.02 * 0.1).add_(update, alpha=-0.02 * 0.2 * max(q.shape) ** 0.5)
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert torch.equal(whole(p), q), name
        return True

    assert run(1, law) == [True]


class Biased(Net):
    """With tensor parallelism the biases of cut maps are DTensors on two dimensions, other AdamW parameters on one."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            for linear in layer.maps:
                linear.bias = nn.Parameter(torch.randn(linear.weight.shape[0]))


def is_biased_matrix(name: str) -> bool:
    return "layers." in name and "norm" not in name and "bias" not in name


@pytest.mark.parametrize("layout", ["2", "2 tp2"])
@pytest.mark.parametrize("how", [{}, {"lr": torch.tensor(1e-2, dtype=torch.float64)}, {"fused": True},
                                 {"foreach": False}, {"amsgrad": True}])
def test_adamw_takes_parameters_of_several_meshes_and_torchs_options(layout, how, spread, monkeypatch):
    """One process's steps, with a tensor rate, fused, a loop or AMSGrad as the user asks for AdamW's group."""
    if layout == "2 tp2" and how.get("fused"):
        pytest.skip("one fused operation takes one mesh, in torch as here")
    monkeypatch.setitem(globals(), "is_matrix", is_biased_matrix)
    amsgrad = how.get("amsgrad", False)

    def law(rank):
        tp = tp_size(layout)
        model = shard(net(make=Biased), layout=layout)
        matrices = [p for p in model.parameters() if hasattr(p, "_dedicated_owner_rank")]
        rest = [p for p in model.parameters() if not hasattr(p, "_dedicated_owner_rank")]
        assert len({p.device_mesh for p in rest}) == tp
        optimizer = dmuon.Muon(model, **OPTIONS, param_groups=[{"params": matrices}, {"params": rest, **how}])
        return [train_step(model, optimizer, step[rank // tp]) for step in batches(2, 3)]

    def expected(rank):
        original = torch.optim.AdamW
        monkeypatch.setattr(torch.optim, "AdamW", partial(original, amsgrad=amsgrad))
        return reference(2, 3, make=Biased)

    assert_same(merged(run(2 * tp_size(layout), law)), run(1, expected)[0])


def test_families_are_told_apart_whatever_came_before(spread):
    """Named parameters, and an optimizer made after a backward that raised: every matrix is Muon's."""

    def law(rank):
        model = shard(net(make=Raising))
        model.fails = "backward"
        with pytest.raises(Failure):
            loss_of(model, batches(2, 1)[0][rank]).backward()
        groups = []
        for named in (False, True):
            params = [{"params": model.named_parameters()}] if named else None
            optimizer = dmuon.Muon(model, param_groups=params)
            groups.append([(g["family"], len(g["params"])) for g in optimizer.param_groups])
        matrices = len(dmuon.owners(model))
        others = len(list(model.parameters())) - matrices
        return groups == [[("muon", matrices), ("adamw", others)]] * 2

    assert run(2, law) == [True, True]


def test_what_is_no_dedicated_model_is_refused():
    """A wrong type is named; two models that were dedicated one by one are not taken for one; contexts nest."""

    def law(rank):
        mesh, model = init_device_mesh("cpu", (2,)), net()
        for options in ({"mp_policy": None}, {"reshard_after_forward": None}):
            with pytest.raises(TypeError, match=f"{next(iter(options))} is a NoneType; expected a"):
                dmuon.dedicate_params(model, mesh, **options)
        with pytest.raises(TypeError, match="model is a generator; expected a Module"):
            dmuon.dedicate_params(model.parameters(), mesh)
        with pytest.raises(TypeError, match="expected a module, got a generator"):
            dmuon.Muon(model.parameters())
        for call in (dmuon.full_state_dict, dmuon.owners, lambda model: dmuon.no_sync(model).__enter__()):
            with pytest.raises(ValueError, match="Net has no dedicated parameters; call dmuon.dedicate_params first"):
                call(model)
        pair = nn.ModuleList([shard(net()), shard(net())])
        with pytest.raises(ValueError, match="holds 2 models dedicated one by one"):
            dmuon.owners(pair)
        with dmuon.unshard(pair[0]):
            with dmuon.unshard(pair[0].layers[0]):
                pass
            assert all(pair[0].get_parameter(name).numel() for name in dmuon.owners(pair[0]))
        return True

    assert run(2, law) == [True, True]


def test_the_ownership_table_names_every_rank():
    """It prints the same map on every rank, with a column a rank."""
    tables = run(3, lambda rank: dmuon.ownership_table(shard(net())))
    assert tables[0] == tables[1] == tables[2] and "maps.*" in tables[0]


# ------------------------------------------------------------------------------------------------ dmuon.py, state dicts


def other_net(make: Callable = Net) -> nn.Module:
    """One process, one piece, other weights than `net`'s."""
    torch.manual_seed(1)
    return make().double()


class WrappedNet(Net):
    """One layer in torch.compile's wrapper, one in checkpoint_wrapper, one in both; a buffer that is kept, one not."""

    def __init__(self):
        super().__init__()
        first, second, third = self.layers
        self.layers[0] = torch.compile(first, backend="eager")
        self.layers[1] = checkpoint_wrapper(second)
        self.layers[2] = torch.compile(checkpoint_wrapper(third), backend="eager")
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(3), persistent=False)


@pytest.mark.parametrize("layout", ["4", "2x2", "2 tp2"])
@pytest.mark.parametrize("make", [Net, WrappedNet])
def test_a_state_dict_has_what_the_rank_owns(make, layout, spread):
    """Every matrix is in the state dict of its owner and of no other, whole, by FQN; it loads where it came from.

    With tensor parallelism the ranks of one data-parallel place own it together.
    """

    def law(rank):
        plain = {n.replace("_orig_mod.", "") for n in net(make=make).state_dict()}
        model = shard(net(make=make), layout=layout)
        mine = copy.deepcopy(model.state_dict())
        owned = {*dmuon.owned_params(model)}
        assert {n for n in mine if is_matrix(n)} == owned and {*mine} - owned == {n for n in plain if not is_matrix(n)}
        other = shard(other_net(make), layout=layout)
        assert other.load_state_dict(mine) == ([], [])
        for name, tensor in other.state_dict().items():
            assert torch.equal(local(tensor), local(mine[name])), name
        return owned, dmuon.full_state_dict(model, rank0_only=False), dmuon.full_state_dict(other, rank0_only=False)

    results = run(4, law)
    names = [name for owned, _, _ in results for name in owned]
    assert len(names) == 9 * tp_size(layout) and len({*names}) == 9
    for _, first, second in results:
        assert first.keys() == results[0][1].keys() == second.keys()
        assert all(torch.equal(first[n], results[0][1][n]) and torch.equal(second[n], first[n]) for n in first)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("layout, zero", [("4", 3), ("2", 2), ("2x2", 2), ("2 tp2", 3), ("2x2 tp2", 3)])
def test_a_plain_models_state_dict_loads_and_the_full_one_goes_back(layout, zero, assign, spread):
    """`torch.save` of a plain model loads on any mesh, also over weights in flight; `full_state_dict` loads there."""
    ranks, tp = prod(LAYOUTS[layout].values()), tp_size(layout)

    def law(rank):
        plain, file = other_net(), io.BytesIO()
        torch.save(plain.state_dict(), file)
        file.seek(0)
        model = shard(net(), zero, layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        batch = batches(ranks // tp, 1)[0][rank // tp]
        train_step(model, optimizer, batch)
        loss_of(model, batch).backward()
        with torch.no_grad():
            model(batch[0])  # in Z2 FSDP2 keeps whole parameters after it
        optimizer.step()  # on HSDP its replicate broadcasts are still in flight
        assert model.load_state_dict(torch.load(file), assign=assign) == ([], [])
        torch.testing.assert_close(model(batch[0]), plain(batch[0]), rtol=1e-12, atol=1e-12)
        full = dmuon.full_state_dict(model)
        assert {*full} == ({*plain.state_dict()} if rank == 0 else set())
        if rank == 0:
            again = net()
            again.load_state_dict(full)
            assert all(torch.equal(tensor, plain.state_dict()[n]) for n, tensor in again.state_dict().items())
            assert all(type(tensor) is Tensor for tensor in full.values())
        return True

    assert run(ranks, law) == [True] * ranks


def test_loading_reaches_whatever_has_copies_of_the_weights(spread):
    """Z2 under `no_sync` keeps whole matrices: after a load forwards see the new ones; so do replicas after a step."""

    def law(rank):
        model = shard(net(), zero=2, layout="2x2")
        batch = batches(4, 1)[0][rank]
        with dmuon.no_sync(model):
            loss_of(model, batch).backward()
        plain = other_net()
        model.load_state_dict(plain.state_dict())
        torch.testing.assert_close(model(batch[0]), plain(batch[0]), rtol=1e-12, atol=1e-12)
        return True

    assert run(4, law) == [True] * 4


@pytest.mark.parametrize("layout", ["4", "2x2", "2 tp2"])
def test_what_a_state_dict_lacks_is_reported_alike_on_every_rank(layout, spread):
    """Missing and unexpected names, by FQN, whoever owns them; a wrong shape before anything is written."""

    def law(rank):
        model, texts = shard(net(), layout=layout), []
        full = other_net().state_dict()
        wrong = {n: tensor for n, tensor in full.items() if n not in ("layers.1.maps.2.weight", "head.bias")}
        wrong["layers.7.maps.0.weight"] = torch.zeros(2, 2)
        missing, unexpected = model.load_state_dict(wrong, strict=False)
        assert {*missing} == {"layers.1.maps.2.weight", "head.bias"} and unexpected == ["layers.7.maps.0.weight"]
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(wrong)
        texts.append(str(caught.value))
        before = dmuon.full_state_dict(model, rank0_only=False)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict({**net().state_dict(), "layers.0.maps.1.weight": torch.zeros(3, 4)})
        texts.append(str(caught.value))
        after = dmuon.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(after[n], before[n]) for n in before)
        model.load_state_dict(full)
        return texts

    results = run(4, law)
    assert results.count(results[0]) == 4
    strict, shape = results[0]
    assert all(text in strict for text in ("Missing key(s) in state_dict: ", '"layers.1.maps.2.weight"', '"head.bias"'))
    assert 'Unexpected key(s) in state_dict: "layers.7.maps.0.weight"' in strict
    assert "size mismatch for layers.0.maps.1.weight: (3, 4) in the state dict, (20, 12) in the model" in shape


def test_a_part_of_the_model_has_a_state_dict_too(spread):
    """`model.layers[1].state_dict()` is its part, and an ordinary one of a plain layer loads into it."""

    def law(rank):
        model, plain = shard(net()), other_net()
        model.layers[1].load_state_dict(plain.layers[1].state_dict())
        mine = model.layers[1].state_dict()
        owned = {n for n in dmuon.owned_params(model) if n.startswith("layers.1.")}
        assert {"layers.1." + n for n in mine if "maps" in n} == owned
        expected = {**net().state_dict(), **{f"layers.1.{n}": t for n, t in plain.layers[1].state_dict().items()}}
        full = dmuon.full_state_dict(model, rank0_only=False)
        return all(torch.equal(full[n], expected[n]) for n in expected)

    assert run(2, law) == [True, True]


# ------------------------------------------------------------------------------------------------ dmuon.py, checkpoints


class Dropping(Net):
    """Dropout, whose masks every rank draws by itself."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2)
        return self.head(x)


def continued(rank: int, layout: str, zero: int, folder: str, first: int, last: int,
              make: Callable = Net) -> list[dict]:
    """Steps `first` to `last` of four micro-batches, from the checkpoint there if `first` is not 0; saved at `last`."""
    model, tp = shard(net(make=make), zero, layout), tp_size(layout)
    optimizer, record = dmuon.Muon(model, **OPTIONS), []
    torch.manual_seed(rank)
    ranks = dist.get_world_size() // tp
    if first:  # into a model that has been trained: nothing of that may stay
        train_step(model, optimizer, batches(ranks, 1)[0][rank // tp])
        assert dmuon.load_checkpoint(folder, model, optimizer) == first
    for step in batches(4, 6)[first:last]:
        optimizer.zero_grad()
        mean = torch.zeros((), dtype=torch.float64)
        for batch in step[rank // tp :: ranks]:
            loss = loss_of(model, batch) * ranks / 4
            loss.backward()
            mean += loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        grads = snapshot(model)["grads"]
        optimizer.step()
        record.append({**snapshot(model, optimizer), "grads": grads, "loss": mean.item()})
    if not first:
        dmuon.save_checkpoint(folder, model, optimizer, last)  # on HSDP with new weights still in flight
    return record


@pytest.mark.parametrize("saved, zero, loaded", [
    ("4", 3, ("4", "1", "2", "2x2", "2 tp2", "2x1 tp2")), ("2x2", 2, ("2x2", "4", "2 tp2")),
    ("2 tp2", 3, ("2 tp2", "4", "1")), ("2x2 tp2", 3, ("2x2 tp2", "2x2")),
])
def test_a_checkpoint_goes_on_on_any_mesh(saved, zero, loaded, spread, tmp_path):
    """Saved after three of six steps: on the same mesh the bits of six steps, on others 1e-10 in float64 (C12, C14)."""
    ranks = {layout: prod(LAYOUTS[layout].values()) for layout in loaded}
    six = run(ranks[saved], continued, saved, zero, str(tmp_path / "never"), 0, 6)
    run(ranks[saved], continued, saved, zero, str(tmp_path), 0, 3)
    for layout in loaded:
        got = run(ranks[layout], continued, layout, zero, str(tmp_path), 3, 6)
        assert_same(merged(got), merged(six)[3:], tolerance=0.0 if layout == saved else 1e-10)


def test_a_checkpoint_restores_each_ranks_random_numbers(spread, tmp_path):
    """Dropout draws the masks of an uninterrupted run; on fewer ranks it draws those of the first."""
    six = run(2, continued, "2", 3, str(tmp_path / "never"), 0, 6, Dropping)
    run(2, continued, "2", 3, str(tmp_path), 0, 3, Dropping)
    assert_same(merged(run(2, continued, "2", 3, str(tmp_path), 3, 6, Dropping)), merged(six)[3:], tolerance=0.0)
    run(1, continued, "1", 3, str(tmp_path), 3, 6, Dropping)


def test_a_checkpoint_knows_names_and_no_ranks_and_loads_in_plain_pytorch(spread, tmp_path):
    """Its keys are FQNs; `dcp_to_torch_save` makes a file of it whose "model" a plain model loads, to the bit."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    weights = run(4, continued, "2x2", 3, str(tmp_path), 0, 3)[0][-1]["weights"]
    keys = {*FileSystemReader(tmp_path / "step_00000003").read_metadata().state_dict_metadata}
    names = [n for n, _ in net().named_parameters()]
    expected = {"step", "groups", "rng.cpu", *(f"model.{n}" for n in names)}
    expected |= {f"optimizer.{n}.momentum_buffer" for n in names if is_matrix(n)}
    expected |= {f"optimizer.{n}.{key}" for n in names if not is_matrix(n) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert keys == expected
    dcp_to_torch_save(tmp_path / "step_00000003", tmp_path / "one.pt")
    plain = net()
    plain.load_state_dict(torch.load(tmp_path / "one.pt")["model"])
    assert all(torch.equal(plain.state_dict()[n], weight) for n, weight in weights.items()) and weights


def test_a_tied_matrix_has_both_names_in_checkpoints_and_state_dicts(spread, tmp_path):
    """Saved and loaded on two ranks and on one: the bits of an uninterrupted run; a plain model takes the full one."""
    six = run(2, continued, "2", 3, str(tmp_path / "never"), 0, 6, Tied)
    run(2, continued, "2", 3, str(tmp_path), 0, 3, Tied)
    assert_same(merged(run(2, continued, "2", 3, str(tmp_path), 3, 6, Tied)), merged(six)[3:], tolerance=0.0)
    assert_same(merged(run(1, continued, "1", 3, str(tmp_path), 3, 6, Tied)), merged(six)[3:])

    def law(rank):
        model, plain = shard(net(make=Tied)), other_net(Tied)
        model.load_state_dict(plain.state_dict())
        full = dmuon.full_state_dict(model, rank0_only=False)
        return net(make=Tied).load_state_dict(full) == ([], []) and all(
            torch.equal(full[n], tensor) for n, tensor in plain.state_dict().items())

    assert run(2, law) == [True, True]


def test_a_checkpoint_from_before_the_first_step_has_no_momenta(tmp_path):
    """Loaded into a trained model it gives the fresh one: no state of the optimizer stays."""

    def law(rank):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        dmuon.save_checkpoint(tmp_path, model, optimizer, 0)
        train_step(model, optimizer, batches(2, 1)[0][rank])
        assert optimizer.state and dmuon.load_checkpoint(tmp_path, model, optimizer) == 0
        full = dmuon.full_state_dict(model, rank0_only=False)
        return not optimizer.state and all(torch.equal(full[n], tensor) for n, tensor in net().state_dict().items())

    assert run(2, law) == [True, True]


def test_a_scheduler_goes_on_from_a_checkpoint(tmp_path):
    """Rates come back with the groups: `last_epoch=step - 1` continues the schedule, as in torch.

    Groups that a scheduler has given an initial rate take saved ones with or without it, and the other way round.
    """

    def law(rank):
        model = shard(net())
        optimizer, rates = dmuon.Muon(model, **OPTIONS), []
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(1, 5):
            rates.append([group["lr"] for group in optimizer.param_groups])
            loss_of(model, batches(2, 1)[0][rank]).backward()
            optimizer.step()
            schedule.step()
            if step == 2:
                dmuon.save_checkpoint(tmp_path, model, optimizer, step)
        other = dmuon.Muon(model, lr=9.0)
        other.param_groups[0]["lr"] = held = torch.tensor(9.0, dtype=torch.float64)
        step = dmuon.load_checkpoint(tmp_path, model, other)
        assert held is other.param_groups[0]["lr"]  # whoever has the tensor goes on changing the rate
        schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1 / (1 + step), last_epoch=step - 1)
        for expected in rates[step:]:
            assert [group["lr"] for group in other.param_groups] == expected
            other.step()
            schedule.step()
        for fresh in (False, True):
            again = dmuon.Muon(model, lr=9.0)
            if not fresh:
                torch.optim.lr_scheduler.LambdaLR(again, lambda step: 1.0)
            assert dmuon.load_checkpoint(tmp_path, model, again) == 2
            folder = dmuon.save_checkpoint(tmp_path / str(fresh), model, dmuon.Muon(model), 1)  # without
            assert dmuon.load_checkpoint(folder, model, again) == 1
        return True

    assert run(2, law) == [True, True]


def test_a_model_without_dedicated_matrices_has_checkpoints_too(tmp_path):
    """FSDP2 and torch's AdamW: the bits of an uninterrupted run; Muon does not take its state for its own."""

    def law(rank, first, last):
        mesh = init_device_mesh("cpu", (2,))
        model = fully_shard(net(), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if first:
            assert dmuon.load_checkpoint(tmp_path, model, optimizer) == first
        for step in batches(2, 4)[first:last]:
            optimizer.zero_grad()
            loss_of(model, step[rank]).backward()
            optimizer.step()
        if last == 2:
            dmuon.save_checkpoint(tmp_path, model, optimizer, 2)
        return {n: whole(p) for n, p in model.named_parameters()}

    four = run(2, law, 0, 4)[0]
    run(2, law, 0, 2)
    assert all(torch.equal(weight, four[n]) for n, weight in run(2, law, 2, 4)[0].items())

    def muon(rank):
        model = shard(net())
        with pytest.raises(ValueError, match="has other groups of parameters, or is of another optimizer"):
            dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model))
        return {n: torch.equal(tensor, net().state_dict()[n]) for n, tensor in dmuon.full_state_dict(model).items()}

    assert all(run(2, muon)[0].values())


def write_checkpoints(folder: str, steps: tuple, make: Callable = Net, keep: int | None = None) -> None:
    """From two ranks; the weights tell the step: the head's bias is filled with it."""

    def law(rank):
        model = shard(net(make=make))
        optimizer = dmuon.Muon(model, **OPTIONS)
        loss_of(model, batches(2, 1)[0][rank]).backward()
        optimizer.step()
        for step in steps:
            torch.nn.init.constant_(model.head.bias, float(step))
            dmuon.save_checkpoint(folder, model, optimizer, step, keep)
        return True

    assert run(2, law) == [True, True]


def load_anywhere(folder: str, make: Callable = Net) -> list:
    """Per rank: the step, the filling of the head's bias, what was logged; or the error, and if all is as it was."""

    def law(rank):
        logged = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("dmuon").addHandler(handler)
        model = shard(net(make=make))
        optimizer = dmuon.Muon(model, **OPTIONS)
        try:
            return dmuon.load_checkpoint(folder, model, optimizer), whole(model.head.bias)[0].item(), logged
        except Exception as error:
            full = dmuon.full_state_dict(model, rank0_only=False)
            untouched = all(torch.equal(tensor, full[n]) for n, tensor in net(make=make).state_dict().items())
            return type(error).__name__, str(error), untouched and not optimizer.state

    return run(2, law)


def torn(kind: str, checkpoint: str) -> None:
    """Make the checkpoint what a power cut, a full disk or a broken copy leaves."""
    data = os.path.join(checkpoint, "__1_0.distcp")
    if kind == "unfinished":
        os.rename(checkpoint, f"{checkpoint}.part")
    elif kind == "short":
        os.truncate(data, os.path.getsize(data) - 1)
    elif kind == "file missing":
        os.remove(data)
    else:
        path = os.path.join(checkpoint, ".metadata")
        os.remove(path) if kind == "no metadata" else open(path, "wb").write(b"\x80 no pickle")


@pytest.mark.parametrize("kind", ["unfinished", "short", "file missing", "no metadata", "broken metadata"])
def test_a_torn_checkpoint_is_skipped_with_a_message(kind, tmp_path):
    """The newest complete one is loaded on every rank, and the reason is told once; alone, the torn one is an error."""
    write_checkpoints(tmp_path, (5, 6, 7))
    torn(kind, str(tmp_path / "step_00000007"))
    first, second = load_anywhere(tmp_path)
    assert first[:2] == second[:2] == (6, 6.0) and not second[2]
    assert len(first[2]) == 1 and re.search(r"^skipped: '.*/step_00000007(.part)?' is no complete check", first[2][0])
    if kind == "unfinished":
        return
    for error, text, untouched in load_anywhere(tmp_path / "step_00000007"):
        assert error == "FileNotFoundError" and "is no complete checkpoint: " in text and untouched


def test_what_is_no_checkpoint_of_this_model_is_refused_by_name(tmp_path):
    """No folder, an empty one, something else's checkpoint, another model's: an error on every rank, nothing loaded."""
    write_checkpoints(tmp_path / "more", (1,), lambda: Net(widths=((8, 12, 20),) * 4))
    write_checkpoints(tmp_path / "wide", (1,), lambda: Net(widths=((8, 12, 24), (8, 16, 16), (8, 12, 20))))
    (tmp_path / "empty").mkdir()

    def foreign(rank):
        import torch.distributed.checkpoint as dcp

        dcp.save({"weights": torch.zeros(3)}, checkpoint_id=tmp_path / "foreign")
        return True

    assert run(2, foreign) == [True, True]
    for folder, kind, message in (
        ("nowhere", "FileNotFoundError", "nowhere' is no complete checkpoint"),
        ("empty", "FileNotFoundError", "empty' is no complete checkpoint"),
        ("foreign", "FileNotFoundError", "save_checkpoint has not written it"),
        ("more", "ValueError", "another model; .*layers.3.norm.weight: \\(8,\\) in the checkpoint, nothing in the mo"),
        ("wide", "ValueError", "layers.0.maps.1.weight: \\(24, 12\\) in the checkpoint, \\(20, 12\\) in the model"),
    ):
        for error, text, untouched in load_anywhere(tmp_path / folder):
            assert error == kind and re.search(message, text) and untouched, (folder, error, text)


def test_a_model_on_the_meta_device_is_not_loaded_into(tmp_path):
    """Before `to_empty` there is nothing to load into: the error names a parameter and the call."""
    write_checkpoints(tmp_path, (1,))

    def law(rank):
        with torch.device("meta"):
            model = net()
        shard(model)
        with pytest.raises(ValueError, match="'embed.weight' is on the meta device; call model.to_empty"):
            dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model))
        return True

    assert run(2, law) == [True, True]


def test_ranks_that_see_different_checkpoints_raise(tmp_path):
    """Folders that are not shared hold other steps: every rank says so, none loads."""
    write_checkpoints(tmp_path / "0", (1,))
    write_checkpoints(tmp_path / "1", (1, 2))

    def law(rank):
        model = shard(net())
        with pytest.raises(ValueError, match=r"ranks disagree. Rank 0 .*/0/step_00000001\], rank 1 .*/1/step_00000002"):
            dmuon.load_checkpoint(tmp_path / str(rank), model, dmuon.Muon(model))
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("kind, failing", [("disk full", 0), ("disk full", 1), ("a file in the way", 0)])
def test_a_checkpoint_that_cannot_be_written_leaves_the_old_ones(kind, failing, tmp_path):
    """One rank cannot write: every rank raises with the reason; the old one is there and loads, no scrap is left."""
    resource = pytest.importorskip("resource")
    write_checkpoints(tmp_path, (1,))
    blocked = tmp_path / "blocked"
    blocked.write_text("")

    def law(rank):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        loss_of(model, batches(2, 1)[0][rank]).backward()
        optimizer.step()
        reason = "File too large" if kind == "disk full" else "File exists"
        if kind == "disk full" and rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # writes beyond it fail
        with pytest.raises(RuntimeError, match=f"cannot write .*step_00000002.*{reason}.*earlier ones are intact"):
            dmuon.save_checkpoint(tmp_path if kind == "disk full" else blocked, model, optimizer, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return True

    assert run(2, law) == [True, True]
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "order.txt", "blocked"}
    assert load_anywhere(tmp_path) == [(1, 1.0, [])] * 2


def test_the_newest_checkpoints_are_kept(tmp_path):
    """`keep` counts complete ones, in the order of writing; a step that is saved again replaces the old one."""
    write_checkpoints(tmp_path, (8, 9))
    write_checkpoints(tmp_path, (1, 2, 3), keep=2)
    assert {path.name for path in tmp_path.glob("step*")} == {"step_00000002", "step_00000003"}
    torn("no metadata", str(tmp_path / "step_00000003"))  # does not count
    write_checkpoints(tmp_path, (2, 4), keep=2)
    assert {path.name for path in tmp_path.glob("step*")} == {"step_00000002", "step_00000003", "step_00000004"}
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "step_00000002.old")  # of a run that was killed there
    write_checkpoints(tmp_path, (2,))
    assert load_anywhere(tmp_path) == [(2, 2.0, [])] * 2
    assert {path.name for path in tmp_path.glob("*.*")} == {"order.txt"}


def law_of_steps(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Tensor]:
    """Train on; the whole weights."""
    for step in batches(2, steps):
        optimizer.zero_grad()
        loss_of(model, step[rank]).backward()
        optimizer.step()
    full = dmuon.full_state_dict(model, rank0_only=False)
    return {n: t for n, t in full.items() if isinstance(t, Tensor)}


@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("between", ["an eval", "a backward that raised"])
def test_a_checkpoint_does_not_mind_what_came_before(between, zero, spread, tmp_path):
    """After an eval FSDP2 shows whole parameters, after a failed backward the matrices are there: save and load work.

    A state dict then still has the owned data.
    """

    def fail(*_):
        raise Failure

    def law(rank):
        model, mesh = net(torch.float32), init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        dmuon.dedicate_params(model, mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)  # as in the README: the root is not resharded after a forward
        optimizer = dmuon.Muon(model, **OPTIONS)
        law_of_steps(rank, model, optimizer, 1)

        def disturb():
            handle = model.layers[1].register_full_backward_hook(fail)
            with torch.no_grad() if between == "an eval" else contextlib.nullcontext():
                loss = loss_of(model, batches(2, 1)[0][rank])
            handle.remove()
            if between != "an eval":
                with pytest.raises(Failure):
                    loss.backward()
                assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}

        disturb()
        dmuon.save_checkpoint(tmp_path, model, optimizer, 1)
        before = {n: t.clone() for n, t in dmuon.full_state_dict(model, rank0_only=False).items()}
        optimizer.zero_grad()
        for p in model.parameters():
            p.data.mul_(2)
        disturb()
        dmuon.load_checkpoint(tmp_path, model, optimizer)
        after = dmuon.full_state_dict(model, rank0_only=False)
        assert {*optimizer.state} <= {*model.parameters()}
        return all(torch.equal(after[n], before[n]) for n in before) and bool(law_of_steps(rank, model, optimizer, 1))

    assert run(2, law) == [True, True]


def test_ranks_that_do_not_write_to_one_folder_raise(tmp_path):
    """A disk that is not shared, another step on one rank: an error on every rank, and what was there stays."""
    write_checkpoints(tmp_path / "0", (1,))

    def law(rank):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        for folder, step in ((tmp_path / str(rank), 2), (tmp_path / "0", 2 + rank)):
            with pytest.raises(RuntimeError, match="cannot write .*ranks disagree.*earlier ones are intact"):
                dmuon.save_checkpoint(folder, model, optimizer, step, keep=1)
        os.chdir(tmp_path / "hosts" / str(rank))  # one name, two disks: as far as a name can tell they are the same
        real = os.path.realpath
        os.path.realpath = lambda path, **options: "/data/run"
        with pytest.raises(RuntimeError, match="cannot write .*No such file or directory.*earlier ones are intact"):
            dmuon.save_checkpoint("run", model, optimizer, 2, keep=1)
        os.path.realpath = real
        return True

    for rank in (0, 1):
        (tmp_path / "hosts" / str(rank) / "run" / "step_00000002.part").mkdir(parents=True)
    assert run(2, law) == [True, True]
    assert load_anywhere(tmp_path / "0") == [(1, 1.0, [])] * 2


def test_what_the_user_keeps_beside_the_checkpoints_stays(tmp_path):
    """A copy, a folder, a file and a link whose names begin alike are neither checkpoints nor deleted."""
    write_checkpoints(tmp_path, (1,))
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000001_best")
    (tmp_path / "step_by_step").mkdir()
    (tmp_path / "step_times.csv").write_text("")
    (tmp_path / "step_latest").symlink_to("step_00000001")
    mine = {path.name for path in tmp_path.iterdir()} - {"step_00000001"}  # and the list
    write_checkpoints(tmp_path, (2, 3, 3, 3), keep=1)
    assert {path.name for path in tmp_path.iterdir()} == mine | {"step_00000003"}
    assert load_anywhere(tmp_path) == [(3, 3.0, [])] * 2


class Counting(nn.Identity):
    """A module with extra state."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_a_checkpoint_of_a_part_of_a_program(spread, tmp_path):
    """A dedicated model inside a bigger one, compiled as a whole, with extra state: what is saved is loaded."""

    def law(rank, first):
        inner = shard(net() if first else other_net())
        inner.add_module("counter", Counting())
        outer = nn.ModuleDict({"inner": torch.compile(inner, backend="eager")})
        optimizer = dmuon.Muon(inner, **OPTIONS)
        if first:
            inner.counter.count = 7
            law_of_steps(rank, inner, optimizer, 2)
            dmuon.save_checkpoint(tmp_path, outer, optimizer, 2)
        else:
            assert dmuon.load_checkpoint(tmp_path, outer, optimizer) == 2 and inner.counter.count == 7
        return law_of_steps(rank, inner, optimizer, 1)

    for straight, resumed in zip(run(2, law, True), run(2, law, False)):
        assert all(torch.equal(straight[n], resumed[n]) for n in straight) and straight


def test_a_checkpoint_of_another_dtype_is_cast(tmp_path):
    """Saved in float64, loaded in float32, as torch's load_state_dict does: weights and momenta; training goes on."""
    write_checkpoints(tmp_path, (1,))

    def law(rank):
        model = shard(net(torch.float32))
        optimizer = dmuon.Muon(model, **OPTIONS)
        dmuon.load_checkpoint(tmp_path, model, optimizer)
        assert all(t.dtype == torch.float32 for state in optimizer.state.values() for t in state.values())
        return bool(law_of_steps(rank, model, optimizer, 1))

    assert run(2, law) == [True, True]


def test_options_are_not_given_to_other_parameters(tmp_path):
    """Groups in another order or with other members: refused on every rank, before anything is loaded."""

    def law(rank):
        model = shard(net())
        first = [{"params": [*layer.parameters()], "lr": 0.1 / (1 + i)} for i, layer in enumerate(model.layers)]
        rest = [{"params": [*model.embed.parameters(), *model.head.parameters()]}]
        dmuon.save_checkpoint(tmp_path, model, dmuon.Muon(model, param_groups=[*first, *rest]), 1)
        dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model, param_groups=[*first, *rest]))
        for groups in ([*first[::-1], *rest], [*first]):
            with pytest.raises(ValueError, match="has other groups of parameters"):
                dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model, param_groups=groups))
        with dmuon.no_sync(model):
            loss_of(model, batches(2, 1)[0][rank]).backward()
        with pytest.raises(ValueError, match="gradients of no_sync wait for a backward outside of it"):
            dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model, param_groups=[*first, *rest]))
        for wrong in (dict(step=-1), dict(step=1, keep=0), dict(step=1, keep=-1)):
            with pytest.raises(ValueError, match="expected step >= 0, and keep >= 1 or None"):
                dmuon.save_checkpoint(tmp_path, model, dmuon.Muon(model), **wrong)
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("layout, meta, dtype", [("2", True, torch.float64), ("2x2", True, torch.float64),
                                                 ("2", False, torch.float32), ("2 tp2", False, torch.float32)])
def test_assigned_weights_bring_their_dtype_and_device(layout, meta, dtype, spread):
    """`load_state_dict(plain, assign=True)`: into a model on the meta device; of another dtype, before any forward."""
    ranks, tp = prod(LAYOUTS[layout].values()), tp_size(layout)

    def law(rank):
        plain = other_net().to(dtype)
        with torch.device("meta" if meta else "cpu"):
            model = net()
        shard(model, layout=layout)
        model.load_state_dict(plain.state_dict(), assign=True)
        batch = batches(ranks // tp, 1)[0][rank // tp]
        torch.testing.assert_close(model(batch[0]), plain(batch[0]), rtol=1e-5, atol=1e-5)
        loss_of(model, batch).backward()
        return all(p.dtype == p.grad.dtype == dtype for p in dmuon.owned_params(model).values())

    assert run(ranks, law) == [True] * ranks


def test_a_matrix_that_is_frozen_while_its_gradient_waits_loses_it(spread):
    """Micro-batch under `no_sync`, freeze, reduce, unfreeze: the next gradient is that of its own batch alone."""

    def law(rank, waits):
        model, batch = shard(net()), batches(2, 1)[0][rank]
        weight = [model.layers[0].maps[0].weight]
        if waits:
            with dmuon.no_sync(model):
                loss_of(model, batch).backward()
            weight[0].requires_grad_(False)
            loss_of(model, batch).backward()
            weight[0].requires_grad_(True)
            model.zero_grad()
        loss_of(model, batch).backward()
        return {n: p.grad for n, p in dmuon.owned_params(model).items()}

    for after, expected in zip(run(2, law, True), run(2, law, False)):
        assert after.keys() == expected.keys() and all(torch.equal(after[n], expected[n]) for n in expected)


# ------------------------------------------------------------------------ dmuon.py, what trainers do to a model


def batches_of_steps(optimizer: torch.optim.Optimizer, step: Callable) -> None:
    """Three steps with gradients that do not depend on the weights."""
    for seed in range(3):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if p.numel():
                torch.manual_seed(100 * seed + i)
                p.grad = torch.randn_like(p)
        step()


@pytest.mark.parametrize("groups", ["one", "each layer its own"])
def test_a_compiled_step_has_the_bits_of_the_step(groups, spread):
    """`torch.compile(optimizer.step)`, with batches of one shape in several groups and with several shapes (C17)."""

    def law(rank, compiles):
        model = shard(net(make=lambda: Net(widths=((8, 16, 16), (8, 16, 16), (8, 12, 20)))))
        layers = [[p for p in layer.parameters()] for layer in model.layers]
        rest = [*model.embed.parameters(), *model.head.parameters()]
        given = None if groups == "one" else [{"params": part} for part in (*layers, rest)]
        optimizer = dmuon.Muon(model, **OPTIONS, param_groups=given)
        step = torch.compile(lambda: optimizer.step(), backend="eager") if compiles else optimizer.step
        batches_of_steps(optimizer, step)
        return snapshot(model, optimizer)

    for plain, compiled in zip(run(1, law, False), run(1, law, True)):
        assert plain["weights"].keys() == compiled["weights"].keys() and len(plain["momenta"]) == 9
        for key in ("weights", "momenta"):
            assert all(torch.equal(tensor, compiled[key][n]) for n, tensor in plain[key].items()), key


@pytest.mark.parametrize("trained", [False, True])
def test_torchs_state_dict_helpers_are_refused_before_anything_changes(trained, spread):
    """Each helper, full and sharded, of the model, a layer and the optimizer: an error that names the way out (C18)."""
    from torch.distributed.checkpoint import state_dict as helpers

    def law(rank):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        if trained:
            train_step(model, optimizer, batches(2, 1)[0][rank])
            optimizer.zero_grad()
        before = snapshot(model), {p: {k: t.clone() for k, t in s.items()} for p, s in optimizer.state.items()}
        for options in (helpers.StateDictOptions(full_state_dict=full, cpu_offload=full) for full in (False, True)):
            for call in (
                lambda: helpers.get_model_state_dict(model, options=options),
                lambda: helpers.get_model_state_dict(model.layers[0], options=options),
                lambda: helpers.get_state_dict(model, optimizer, options=options),
                lambda: helpers.get_optimizer_state_dict(model, optimizer, options=options),
                lambda: helpers.set_model_state_dict(model, model.state_dict(), options=options),
                lambda: helpers.set_optimizer_state_dict(model, optimizer, optimizer.state_dict(), options=options),
                lambda: helpers.set_state_dict(model, optimizer, model_state_dict=model.state_dict(),
                                               optim_state_dict=optimizer.state_dict(), options=options),
            ):
                with pytest.raises(RuntimeError, match="use model.state_dict and load_state_dict, dmuon.full_state_di"):
                    call()
        assert all(p.grad is None for p in model.parameters())
        after = snapshot(model)
        assert all(torch.equal(tensor, after["weights"][n]) for n, tensor in before[0]["weights"].items())
        same = {p: {k: torch.equal(whole(t), whole(before[1][p][k])) for k, t in s.items()}
                for p, s in optimizer.state.items()}
        assert same.keys() == before[1].keys() and all(all(s.values()) for s in same.values())
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
@pytest.mark.parametrize("zero", [3, 2])
def test_hooks_on_parameters_run_on_the_owner_once_a_backward(layout, zero, spread):
    """`register_post_accumulate_grad_hook` sees the average in `.grad`, `register_hook` may change it first (C19)."""

    def law(rank):
        tp = tp_size(layout)
        ranks = dist.get_world_size() // tp
        model = shard(net(), zero, layout)
        optimizer, called = dmuon.Muon(model, **OPTIONS), []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: called.append((name, whole(p.grad))))
        micro_batches = batches(ranks, 2)
        expected = []
        for step in micro_batches:
            loss_of(model, step[rank // tp]).backward()
            expected.append(snapshot(model)["grads"])  # the second time the sum of both
        owned = dmuon.owned_params(model)
        assert Counter(name for name, _ in called) == Counter(2 * [*expected[0]])
        for name in owned:
            seen = [grad for called_name, grad in called if called_name == name]
            assert all(map(torch.equal, seen, (grads[name] for grads in expected)))
        called.clear()
        with dmuon.no_sync(model):
            loss_of(model, micro_batches[0][rank // tp]).backward()
        assert not called
        optimizer.zero_grad()
        for p in owned.values():
            p.register_hook(lambda grad: 3 * grad)
        loss_of(model, micro_batches[1][rank // tp]).backward()  # reduces both
        after = snapshot(model)["grads"]
        return all(torch.allclose(after[n], 3 * expected[1][n], rtol=1e-12, atol=0) for n in owned)

    assert all(run(prod(LAYOUTS[layout].values()), law))


def scaled(rank: int, layout: str, unscales: bool, scale: float | None, poison: tuple = ()) -> tuple[list, list]:
    """Steps with `torch.amp.GradScaler`; `poison` names (step, parameter): its owner's gradient overflows there."""
    tp = tp_size(layout)
    ranks = dist.get_world_size() // tp
    model = shard(net(), 3, layout)
    optimizer = dmuon.Muon(model, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    record, scales = [], []
    for i, step in enumerate(batches(ranks, 6)):
        optimizer.zero_grad()
        loss = loss_of(model, step[rank // tp])
        scaler.scale(loss).backward()
        for at, name in poison:
            p = dict(model.named_parameters())[name]
            here = is_matrix(name) or rank // tp == ranks - 1  # one owner, one rank of many
            if at == i and here and p.grad is not None and local(p.grad).numel():
                local(p.grad).view(-1)[0] = math.inf
        if unscales:
            scaler.unscale_(optimizer)
            dmuon.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        record.append({**snapshot(model), "loss": 0.0, "grads": {}})
    return record, scales


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_changes_no_number_and_all_ranks_skip_alike(layout, unscales, spread):
    """Scaled by powers of two: the bits without a scaler; an overflow on one rank is one on all (C20)."""
    ranks = prod(LAYOUTS[layout].values())
    plain = run(ranks, scaled, layout, unscales, None)
    for (record, scales), (expected, _) in zip(run(ranks, scaled, layout, unscales, 1024.0), plain):
        assert scales == [1024.0, 2048.0, 2048.0, 4096.0, 4096.0, 8192.0]
        assert all(torch.equal(a["weights"][n], t) for a, b in zip(record, expected) for n, t in b["weights"].items())
    poison = ((1, "layers.0.maps.0.weight"), (2, "layers.1.maps.1.weight"), (4, "embed.weight"))
    for record, scales in run(ranks, scaled, layout, unscales, 1024.0, poison):
        assert scales == [1024.0, 512.0, 256.0, 256.0, 128.0, 128.0]  # back, and up again after two good ones
        for step, skips in enumerate([True, True, False, True, False], 1):
            before, after = record[step - 1]["weights"], record[step]["weights"]
            assert all(torch.equal(before[n], after[n]) for n in before) == skips, step


def test_a_grad_scaler_works_with_torchs_optimizers_over_matrices(spread):
    """SGD over the matrices and AdamW over the rest, an overflow that one owner sees: one scale, all skip (C20)."""

    def law(rank):
        model = shard(net())
        matrices = [p for n, p in model.named_parameters() if is_matrix(n)]
        rest = [p for n, p in model.named_parameters() if not is_matrix(n)]
        optimizers = torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, batches(2, 1)[0][rank])).backward()
        before = snapshot(model)["weights"]
        if rank == 0:
            next(iter(dmuon.owned_params(model).values())).grad[0, 0] = math.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        after = snapshot(model)["weights"]
        return scaler.get_scale(), {n for n in before if not torch.equal(before[n], after[n])}

    for scale, changed in run(2, law):
        assert scale == 4.0 and changed == {n for n, _ in net().named_parameters() if not is_matrix(n)}


def test_a_grad_scaler_of_a_rank_that_owns_nothing():
    """One matrix, two ranks: the one without a matrix skips with its owner."""

    def law(rank):
        model = shard(net(make=lambda: Net(widths=((8,),))))
        optimizer = dmuon.Muon(model, **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, batches(2, 1)[0][rank])).backward()
        owned = dmuon.owned_params(model)
        for p in owned.values():
            p.grad[0, 0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(AssertionError):  # torch's own: the scaler has seen no gradient of this one
            scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        return len(owned), scaler.get_scale(), bool(optimizer.state)

    assert sorted(run(2, law)) == [(0, 4.0, False), (1, 4.0, False)]


SCHEDULES = {
    "OneCycleLR": lambda optimizer: scheduling.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "CyclicLR": lambda optimizer: scheduling.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum=False),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=5),
    "LambdaLR": lambda optimizer: scheduling.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_whether_it_is_made_before_or_after_loading(name, tmp_path):
    """Options that a scheduler adds to groups are no other groups; the rates are those of an unbroken run (C21)."""

    def law(rank):
        model = shard(net())
        optimizer, rates = dmuon.Muon(model, **OPTIONS), []
        schedule = SCHEDULES[name](optimizer)
        dmuon.save_checkpoint(tmp_path / "bare", model, dmuon.Muon(model, **OPTIONS), 3)
        for step in range(8):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
            if step == 2:
                dmuon.save_checkpoint(tmp_path / "run", model, optimizer, 3)
                saved = copy.deepcopy(schedule.state_dict())
        for before in (True, False):
            other = dmuon.Muon(model, lr=9.0)
            schedule = SCHEDULES[name](other) if before else None
            assert dmuon.load_checkpoint(tmp_path / "bare", model, other) == 3  # whose groups have nothing added
            assert dmuon.load_checkpoint(tmp_path / "run", model, other) == 3
            held = [group["lr"] for group in other.param_groups]
            assert held == rates[3]
            schedule = schedule or SCHEDULES[name](other)
            schedule.load_state_dict(copy.deepcopy(saved))  # CyclicLR takes things out of it
            for group, lr in zip(other.param_groups, held):
                group["lr"] = lr  # a scheduler sets its first rate when it is made: torch says to load after that
            for expected in rates[3:]:
                assert [group["lr"] for group in other.param_groups] == pytest.approx(expected, rel=1e-12)
                other.step()
                schedule.step()
        return True

    assert run(2, law) == [True, True]


def test_everything_works_on_a_mesh_that_is_not_the_world(spread, tmp_path):
    """Ranks 2 and 3 train, clip, save, load and gather while 0 and 1 are elsewhere; the first of them writes (C22)."""

    def law(rank, dedicates):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
        if rank < 2:
            return None
        runs = []
        for save in (False, True):
            model = net()
            if dedicates:
                dmuon.dedicate_params(model, mesh)
            fully_shard(model, mesh=mesh)
            optimizer = dmuon.Muon(model, **OPTIONS) if dedicates else torch.optim.AdamW(model.parameters(), 1e-2)
            for i, step in enumerate(batches(2, 4)):
                optimizer.zero_grad()
                loss_of(model, step[rank - 2]).backward()
                if dedicates:
                    dmuon.clip_grad_norm_(model, 0.5)
                    assert all(norm.isfinite() for norm in dmuon.grad_norms(model).values())
                optimizer.step()
                if save and i == 1:
                    torch.manual_seed(rank)
                    dmuon.save_checkpoint(tmp_path, model, optimizer, 2)
                    expected = torch.rand(3)
                    for p in model.parameters():
                        p.data.mul_(2)
                    torch.manual_seed(9)
                    assert dmuon.load_checkpoint(tmp_path, model, optimizer) == 2
                    assert torch.equal(torch.rand(3), expected)
            runs.append({n: whole(p) for n, p in model.named_parameters() if p.numel()})
        assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
        return [*dmuon.full_state_dict(model)] if dedicates else None

    keys = [*net().state_dict()]
    assert run(4, law, True) == [None, None, keys, []]
    shutil.rmtree(tmp_path / "step_00000002")
    run(4, law, False)


@pytest.mark.parametrize("makes", [(Net, Net), (Net, Tied)])
def test_two_meshes_do_not_write_to_one_folder(makes, spread, tmp_path):
    """Stages that start in one folder at once, with equal or other names: one of them is refused on all its ranks.

    A run that resumes on other ranks goes on in its folder. Each in a folder of its own is right.
    """

    def law(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
        model = net(make=makes[rank // 2])
        dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh)
        optimizer, message = dmuon.Muon(model, **OPTIONS), None
        dmuon.save_checkpoint(tmp_path / str(rank // 2), model, optimizer, 1)
        dist.barrier()
        try:
            dmuon.save_checkpoint(tmp_path / "both", model, optimizer, 1)
        except RuntimeError as error:
            message = str(error)
        dist.barrier()
        if message and makes[0] is makes[1]:  # as if the first had stopped: these ranks resume from what it wrote
            assert dmuon.load_checkpoint(tmp_path / "both", model, optimizer) == 1
            dmuon.save_checkpoint(tmp_path / "both", model, optimizer, 2)
        return message

    messages = run(4, law)
    assert (messages[0] is None, messages[2] is None) == (messages[1] is None, messages[3] is None)
    refused = [message for message in messages if message]
    assert len(refused) == 2 and all("a folder of its own" in message for message in refused)
    assert [p.name for p in (tmp_path / "both").glob("*.part")] == []


def test_a_folder_of_another_model_is_refused_for_writing(spread, tmp_path):
    """The newest complete checkpoint has other names or widths: every rank raises, and it stays as it is.

    A buffer that has grown meanwhile is no other model.
    """
    write_checkpoints(tmp_path, (1,))

    def law(rank):
        for widths, name in ((((8, 12, 20),) * 2, "layers.2"), (((8, 12, 24), (8, 16, 16), (8, 12, 20)), "layers.0")):
            model = shard(net(make=lambda: Net(widths=widths)))
            with pytest.raises(RuntimeError, match=f"is of another model; .*{name}.*a folder of its own"):
                dmuon.save_checkpoint(tmp_path, model, dmuon.Muon(model), 2, keep=1)
        model = shard(net())
        for step in (1, 2):
            model.register_buffer("history", torch.zeros(step))
            dmuon.save_checkpoint(tmp_path / "grows", model, dmuon.Muon(model), step)
        assert dmuon.load_checkpoint(tmp_path / "grows", model, dmuon.Muon(model)) == 2
        return True

    assert run(2, law) == [True, True]
    assert load_anywhere(tmp_path) == [(1, 1.0, [])] * 2


class Rows(torch.optim.Optimizer):
    """A user's optimizer: SGD with a Python number, a tensor a row, a 0-D tensor and a flag as state."""

    partial = False

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(count=0, rows=p.grad.new_zeros(p.shape[:1]), total=torch.zeros(()), flag=True)
                        state["whole"] = torch.ones(p.shape)
                        if isinstance(p, DTensor):
                            rows = torch.zeros(p.shape[:1], dtype=p.dtype)
                            state["rows"] = distribute_tensor(rows, p.device_mesh, [Shard(0)] * p.device_mesh.ndim)
                    state["count"] += 1
                    state["total"] += 0.5
                    state["rows"] += p.grad.square().flatten(1).sum(1) if p.ndim > 1 else p.grad.square()
                    scale = (state["rows"] + 1).rsqrt() / state["count"]
                    p -= group["lr"] * (scale.view(-1, *[1] * (p.ndim - 1)) * p.grad)
                    if self.partial:
                        state["columns"] = p.grad.sum(0)


ADAFACTOR = dict(lr=0.05, weight_decay=0.0)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, **ADAFACTOR),
    "the user's": Rows,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizers_state_comes_back_as_it_was(name, tmp_path):
    """A model without dedicated matrices: every value, type and placement, and the bits of the run (C23)."""

    def law(rank, first, last, layout="2"):
        model = net()
        if name != "Adafactor":  # which makes operations that DTensors lack
            fully_shard(model, mesh=meshes(layout)[0])
        optimizer = OPTIMIZERS[name](model.parameters())
        names = {p: n for n, p in model.named_parameters()}
        describe = lambda t: (type(t).__name__, whole(t) if isinstance(t, Tensor) else t, getattr(t, "dtype", None),
                              getattr(t, "placements", None))
        if first:
            assert dmuon.load_checkpoint(tmp_path, model, optimizer) == first
        loaded = {names[p]: {k: describe(t) for k, t in s.items()} for p, s in optimizer.state.items()}
        for step in batches(dist.get_world_size(), 4)[first:last]:
            optimizer.zero_grad()
            loss_of(model, step[0 if name == "Adafactor" else rank]).backward()
            optimizer.step()
        saved = {names[p]: {k: describe(t) for k, t in s.items()} for p, s in optimizer.state.items()}
        if last == 2:
            dmuon.save_checkpoint(tmp_path, model, optimizer, 2)
        return loaded, saved, {n: whole(p) for n, p in model.named_parameters()}

    four = run(2, law, 0, 4)[0][2]
    saved = run(2, law, 0, 2)[0][1]
    loaded, _, weights = run(2, law, 2, 4)[0]
    assert loaded.keys() == saved.keys() and saved
    for n, values in saved.items():
        assert loaded[n].keys() == values.keys(), n
        for key, (kind, value, *layout) in values.items():
            assert loaded[n][key][0] == kind and loaded[n][key][2:] == tuple(layout), (n, key, loaded[n][key], kind)
            same = torch.equal(value, loaded[n][key][1]) if isinstance(value, Tensor) else value == loaded[n][key][1]
            assert same, (n, key)
    assert all(torch.equal(weight, four[n]) for n, weight in weights.items())
    loaded = run(4, law, 2, 3, "2x2")[0][0]  # another mesh: the same values
    for n, values in saved.items():
        for key, (_, value, *_) in values.items():
            same = torch.equal(value, loaded[n][key][1]) if isinstance(value, Tensor) else value == loaded[n][key][1]
            assert same, (n, key)


@pytest.mark.parametrize("kind", ["a local tensor", "another order", "a list", "a dot", "a sum in parts",
                                  "unlike numbers"])
def test_state_that_would_not_come_back_is_refused_by_name(kind, tmp_path):
    """What each rank has for itself, what is not added up, what is no tensor or number: nothing is written (C23)."""

    def law(rank):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
        optimizer = Rows(model.parameters())
        optimizer.partial = kind == "a sum in parts"
        loss_of(model, batches(2, 1)[0][rank]).backward()
        optimizer.step()
        p = model.head.weight
        if kind == "a local tensor":
            optimizer.state[p]["mine"] = p.grad.to_local().square().sum(1)
        elif kind == "another order":
            optimizer.state[p]["mine"] = F.one_hot(torch.tensor(rank), 2)
        elif kind == "a list":
            optimizer.state[p]["mine"] = [1, 2]
        elif kind == "a dot":
            optimizer.state[p]["a.mine"] = torch.zeros(())
        elif kind == "unlike numbers":
            optimizer.state[p]["mine"] = rank
        with pytest.raises(RuntimeError, match=r"cannot write .*\.(mine|columns)"):
            dmuon.save_checkpoint(tmp_path / "never", model, optimizer, 1)
        dist.barrier()  # the first rank has tidied up
        return not [*(tmp_path / "never").glob("*")]

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
def test_the_optimizer_state_of_another_rank_is_refused(layout, spread):
    """`optimizer.state_dict` is this rank's: its own loads, that of another says whose it is, and nothing changes."""

    def law(rank):
        model, tp = shard(net(), 3, layout), tp_size(layout)
        optimizer = dmuon.Muon(model, **OPTIONS)
        train_step(model, optimizer, batches(dist.get_world_size() // tp, 1)[0][rank // tp])
        momenta = {n: m.clone() for n, m in snapshot(model, optimizer)["momenta"].items()}
        given = [optimizer.state_dict() if rank == source else None for source in range(dist.get_world_size())]
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, optimizer.state_dict()["place"])
        for source, place in enumerate(places):
            if source != rank:
                with pytest.raises(ValueError, match="every rank loads its own, or use dmuon.save_checkpoint"):
                    optimizer.load_state_dict(optimizer.state_dict() | {"place": place})
        optimizer.load_state_dict(given[rank])
        after = snapshot(model, optimizer)["momenta"]
        return all(torch.equal(after[n], momentum) for n, momentum in momenta.items())

    assert all(run(prod(LAYOUTS[layout].values()), law))


@pytest.mark.parametrize("layout", ["2", "2x2", "4x1"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_another_optimizer_reaches_the_replicate_peers(kind, layout, spread):
    """torch's own optimizer over all parameters of a dedicated model: the weights of one process, on every rank."""
    make = lambda model: getattr(torch.optim, kind)(model.parameters(), lr=0.1, foreach=False)

    def law(rank):
        model = shard(net(), 2, layout)
        optimizer = make(model)
        for step in batches(dist.get_world_size(), 3):
            optimizer.zero_grad()
            loss_of(model, step[rank]).backward()
            optimizer.step()
        return loss_of(model, batches(1, 1)[0][0]).item(), dmuon.full_state_dict(model, rank0_only=False)

    def plain(rank, ranks):
        model = net()
        optimizer = make(model)
        for step in batches(ranks, 3):
            optimizer.zero_grad()
            (sum(loss_of(model, batch) for batch in step) / ranks).backward()
            optimizer.step()
        return loss_of(model, batches(1, 1)[0][0]).item(), model.state_dict()

    ranks = prod(LAYOUTS[layout].values())
    loss, weights = run(1, plain, ranks)[0]
    for got, full in run(ranks, law):
        assert got == pytest.approx(loss, rel=1e-10)
        assert all(torch.allclose(full[n], weight, rtol=1e-10, atol=1e-10) for n, weight in weights.items())


@pytest.mark.parametrize("layout", ["2", "2x2"])
def test_an_optimizer_may_step_inside_the_backward(layout, spread):
    """One optimizer a parameter, stepped by its hook, as fine-tuning recipes do: as after the backward; HSDP refuses."""

    def law(rank, inside):
        model = shard(net(make=lambda: Net(widths=((8, 16), (8, 12)) * 3)), 3, layout)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def hook(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers if inside else ():
            p.register_post_accumulate_grad_hook(hook)
        for step in batches(dist.get_world_size(), 3):
            try:
                loss_of(model, step[rank]).backward()
            except RuntimeError as error:
                return str(error)
            for p in () if inside else optimizers:
                hook(p)
        return dmuon.full_state_dict(model, rank0_only=False)

    ranks = prod(LAYOUTS[layout].values())
    got = run(ranks, law, True)
    if layout == "2x2":
        assert any("step it after the backward" in message for message in got if isinstance(message, str))
    else:
        for inside, after in zip(got, run(ranks, law, False)):
            assert all(torch.equal(weight, inside[n]) for n, weight in after.items())


def test_fsdp2s_divide_factor_is_refused():
    """It would hold for one half of the gradients alone; FSDP2's other switches leave the sum as it is."""

    def law(rank):
        model = shard(net())
        for module in (model, *model.layers):
            with pytest.raises(RuntimeError, match="scale the loss instead"):
                module.set_gradient_divide_factor(1.0)
        first, second = (step[rank] for step in batches(2, 2))
        with dmuon.no_sync(model):
            loss_of(model, first).backward()
        loss_of(model, second).backward()
        expected = snapshot(model)["grads"]
        model.zero_grad()
        model.set_requires_gradient_sync(False)  # of FSDP2's half; the matrices are reduced twice
        loss_of(model, first).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, second).backward()
        got = snapshot(model)["grads"]
        return all(torch.allclose(got[n], grad, rtol=1e-12, atol=1e-14) for n, grad in expected.items())

    assert run(2, law) == [True, True]


class Overlapping(Net):
    """Buffers and parameters whose elements share memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(1, 5).expand(6, 5))
        self.register_buffer("scalar", torch.rand(()).expand(3))
        self.bias = nn.Parameter(torch.rand(1).expand(5))
        self.layers[0].maps[0].weight = nn.Parameter(torch.rand(1, 8).expand(12, 8))
        self.layers[1].maps[0].weight = nn.Parameter(torch.rand(40).as_strided((16, 8), (2, 1)))

    def forward(self, tokens):
        return super().forward(tokens) * self.mask + self.bias * self.scalar.sum()


@pytest.mark.parametrize("zero", [3, 2])
def test_what_overlaps_itself_trains_as_under_fsdp2(zero, spread):
    """An expanded buffer, parameter and matrix: those of the first rank everywhere, and one process's numbers (C24)."""

    class Copied(Overlapping):
        def __init__(self):
            super().__init__()
            for module in self.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        module._parameters[name] = nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))

    def law(rank, *args):
        torch.manual_seed(0)
        model = shard(Overlapping().double(), zero)
        optimizer = dmuon.Muon(model, **OPTIONS)
        return [train_step(model, optimizer, step[rank]) for step in batches(2, 3)]

    expected = run(1, lambda rank: reference(2, 3, Copied))[0]
    assert_same(merged(run(2, law)), expected)

    def seeds(rank):
        torch.manual_seed(rank)
        model = Overlapping()
        first = model.mask.clone()
        dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)))
        return first, model.mask.clone(), model.mask.stride()

    (first, _, stride), (_, got, other) = run(2, seeds)
    assert torch.equal(first, got) and stride == other == (0, 1)


def test_the_folder_tells_which_checkpoint_was_written_last(tmp_path):
    """Copied in another order with other times, after a run that went back: found by the list, `keep` too (C25)."""
    write_checkpoints(tmp_path / "run", (7, 8, 9, 5))
    assert (tmp_path / "run" / "order.txt").read_text().split()[-1] == "step_00000005"
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("order.txt", "step_00000005", "step_00000009", "step_00000007", "step_00000008"):
        (shutil.copy if name == "order.txt" else shutil.copytree)(tmp_path / "run" / name, copied / name)
        for path in [copied / name, *(copied / name).glob("*")] if name != "order.txt" else []:
            os.utime(path, (1e9, 1e9) if name == "step_00000005" else None)
    assert load_anywhere(copied) == [(5, 5.0, [])] * 2
    write_checkpoints(copied, (6,), keep=3)
    assert {path.name for path in copied.glob("step*")} == {"step_00000006", "step_00000005", "step_00000009"}
    os.remove(copied / "order.txt")
    assert load_anywhere(copied) == [(9, 9.0, [])] * 2  # without the list, by step


@pytest.mark.parametrize("killed", ["before the list", "between the renames", "before a rename", "beside its old one"])
def test_a_run_killed_while_it_saves_loses_nothing(killed, tmp_path):
    """Wherever the kill falls, the checkpoint written last that is complete is found; the next save tidies up (C25)."""
    write_checkpoints(tmp_path, (7, 8, 9))
    names = {step: tmp_path / f"step_{step:08d}" for step in (2, 7, 8, 9)}
    if killed == "before the list":  # a lower step, which the list does not have
        write_checkpoints(tmp_path / "other", (2,))
        (tmp_path / "other" / "step_00000002").rename(names[2])
        expected = 2
    elif killed == "between the renames":  # step 9 is saved again
        names[9].rename(names[9].with_suffix(".old"))
        shutil.copytree(names[8], names[9].with_suffix(".part"))
        expected = 9
    elif killed == "before a rename":
        shutil.copytree(names[8], names[9].with_suffix(".part"))
        expected = 9
    else:  # step 7 was saved again, and is not listed yet
        names[7].rename(names[7].with_suffix(".old"))
        write_checkpoints(tmp_path / "other", (7,))
        (tmp_path / "other" / "step_00000007").rename(names[7])
        expected = 7
    for step, filling, logged in load_anywhere(tmp_path):
        assert (step, filling) == (expected, float(expected)) and all(".part" in line for line in logged)
    write_checkpoints(tmp_path, (1,), keep=2)
    assert {path.name for path in tmp_path.glob("step*")} == {"step_00000001", f"step_{expected:08d}"}
    assert load_anywhere(names[expected]) == [(expected, float(expected), [])] * 2


@pytest.mark.parametrize("deleted", [False, True])
def test_a_run_killed_at_any_call_while_it_saves_leaves_the_last_complete_checkpoint(deleted, tmp_path):
    """Step 1 is saved again after step 2, killed at every rename, replacement and deletion in turn (C25).

    Its first version is there, or has been deleted and is still on the list.
    """
    write_checkpoints(tmp_path / "start", (1, 2))
    if deleted:
        shutil.rmtree(tmp_path / "start" / "step_00000001")
    ended = []
    for calls in range(1, 12):
        folder, ranks = tmp_path / str(calls), tmp_path / f"ranks {calls}"
        shutil.copytree(tmp_path / "start", folder)
        ranks.mkdir()

        def law(rank):
            left = [calls]

            def counted(function):
                def call(*args, **options):
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(9)
                    return function(*args, **options)
                return call

            model = shard(net())
            torch.nn.init.constant_(model.head.bias, 3.0)
            os.rename, os.replace, shutil.rmtree = map(counted, (os.rename, os.replace, shutil.rmtree))
            dmuon.save_checkpoint(folder, model, dmuon.Muon(model, **OPTIONS), 1)

        child = multiprocessing.get_context("fork").Process(target=_child, args=(0, 1, str(ranks), law, ()))
        child.start()
        child.join(TIMEOUT_S)
        ended.append(child.exitcode == 9)
        again = load_anywhere(folder / "step_00000001")[0]
        expected = (1, 3.0) if again[1] == 3.0 else (2, 2.0)
        assert all((step, filling) == expected for step, filling, _ in load_anywhere(folder)), (calls, again)
    assert ended[:3] == [True] * 3 and not ended[-1], ended  # the last had no call left to be killed at


def test_a_url_is_no_folder(tmp_path, monkeypatch):
    """`s3://bucket/run` would be a local folder `s3:`: refused by saving and loading, as text and as a Path (C26)."""
    monkeypatch.chdir(tmp_path)

    def law(rank):
        model = shard(net())
        for url in ("s3://bucket/run", Path("gs://bucket/run"), "hf+file://x"):
            with pytest.raises(ValueError, match="is a URL"):
                dmuon.save_checkpoint(url, model, dmuon.Muon(model), 1)
            with pytest.raises(ValueError, match="is a URL"):
                dmuon.load_checkpoint(url, model, dmuon.Muon(model))
        return True

    assert run(2, law) == [True, True] and not [*tmp_path.iterdir()]


class Everything(Net):
    """Buffers between parameters, extra state, a tied matrix, other dtypes, a wrapper."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.counter = Counting()
        self.counter.count = 5
        self.layers[0].register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.layers[0].norm = nn.BatchNorm1d(8)
        self.layers[1].maps[0].weight.data = self.layers[1].maps[0].weight.data.bfloat16()
        self.layers[2] = checkpoint_wrapper(self.layers[2])
        self.last = nn.Linear(8, 5)


def test_a_state_dict_hook_that_changes_matrices_is_refused_or_seen(spread, tmp_path):
    """One that makes new tensors of them raises on every rank; one that drops keys holds for the full one, too."""

    def law(rank):
        model = shard(net())
        hooked = model.layers[0].maps[0]

        def halve(module, state, prefix, _):
            state[f"{prefix}half"] = module.weight.detach().half()
            state.pop(f"{prefix}weight", None)

        handle = hooked.register_state_dict_post_hook(halve)
        with pytest.raises(RuntimeError, match="layers.0.maps.0.half.*apply it to the result"):
            dmuon.full_state_dict(model)
        handle.remove()

        def drop(module, state, prefix, _):
            state.pop(f"{prefix}weight", None)

        hooked.register_state_dict_post_hook(drop)
        for step in (1, 2):  # a checkpoint of a model that leaves something out, twice
            dmuon.save_checkpoint(tmp_path, model, dmuon.Muon(model), step)
        assert dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model)) == 2
        return [*dmuon.full_state_dict(model, rank0_only=False)]

    assert run(2, law) == [[n for n in net().state_dict() if n != "layers.0.maps.0.weight"]] * 2


@pytest.mark.parametrize("layout", ["2", "2x2", "2 tp2"])
def test_a_full_state_dict_is_a_plain_models_in_every_respect(layout, spread, tmp_path):
    """Keys, their order, extra state, dtypes, strides, metadata; `torch.save` and `weights_only` take it (C27)."""

    def law(rank):
        torch.manual_seed(0)
        plain = Everything()
        torch.manual_seed(0)
        full = dmuon.full_state_dict(shard(Everything(), 3, layout), rank0_only=False)
        plain.layers[2] = plain.layers[2]._checkpoint_wrapped_module
        expected = plain.state_dict()
        assert [*full] == [*expected] and type(full) is type(expected)
        for key, value in expected.items():
            if isinstance(value, Tensor):
                assert type(full[key]) is Tensor and not full[key].requires_grad, key
                assert full[key].dtype == value.dtype and full[key].stride() == value.stride(), key
                assert torch.equal(full[key], value) and full[key].is_contiguous(), key
            else:
                assert full[key] == value, key
        path = tmp_path / f"{rank}.pt"
        torch.save(full, path)
        assert [*torch.load(path, weights_only=True)] == [*expected]
        with contextlib.suppress(ImportError):
            from safetensors.torch import save_file
            save_file({key: value for key, value in full.items() if isinstance(value, Tensor)}, path)
        return plain.load_state_dict(full) == ([], []) and full._metadata.keys() >= expected._metadata.keys() - {""}

    assert all(run(prod(LAYOUTS[layout].values()), law))


def test_the_full_state_dict_of_a_wrapped_model_has_no_wrappers_names():
    """`torch.compile(model)` and a module around the model: names as in `owners`, below a prefix."""

    def law(rank):
        model = shard(net())
        full = dmuon.full_state_dict(torch.compile(model), rank0_only=False)
        outer = dmuon.full_state_dict(nn.ModuleDict({"net": model}), rank0_only=False)
        return [*full], [*outer]

    for full, outer in run(2, law):
        assert full == [*net().state_dict()] and outer == [f"net.{name}" for name in full]


def test_what_one_rank_cannot_name_is_refused_on_all(tmp_path):
    """An optimizer with a parameter that is not the model's, on one rank: nobody waits for it."""

    def law(rank):
        model = shard(net())
        optimizer = dmuon.Muon(model, **OPTIONS)
        if rank == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(RuntimeError, match="save_checkpoint: cannot write"):
            dmuon.save_checkpoint(tmp_path, model, optimizer, 1)
        return True

    assert run(2, law, timeout_s=25) == [True] * 2


class Stage(nn.Module):
    """The first or the second half of `Net`."""

    def __init__(self, whole_net: Net, last: bool):
        super().__init__()
        self.layers = whole_net.layers[2:] if last else whole_net.layers[:2]
        if last:
            self.head = whole_net.head
        else:
            self.embed = whole_net.embed

    def forward(self, x):
        x = self.embed(x) if hasattr(self, "embed") else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("zero", [3, 2])
def test_pipeline_stages_train_like_one_process(schedule, zero, spread, tmp_path):
    """`torch.distributed.pipelining`, two stages of two ranks, each a mesh of its own, two micro-batches: 1e-10."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")

    def law(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
        last = mesh["pp"].get_local_rank() == 1
        model = Stage(net(), last)
        dmuon.dedicate_params(model, mesh["shard"], reshard_after_forward=zero == 3)
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=zero == 3)
        optimizer = dmuon.Muon(model, **OPTIONS)
        stage = pipelining.PipelineStage(model, int(last), 2, torch.device("cpu"), group=mesh.get_group("pp"))
        mean = lambda output, targets: (output - targets).square().mean()
        run_schedule = getattr(pipelining, schedule)(stage, 2, loss_fn=mean)
        for step in batches(2, 3):
            tokens, targets = step[mesh["shard"].get_local_rank()]
            optimizer.zero_grad()
            run_schedule.step(target=targets) if last else run_schedule.step(tokens)
            optimizer.step()
        return {n: t for n, t in dmuon.full_state_dict(model, rank0_only=False).items()}

    results = run(4, law)
    expected = run(1, lambda rank: reference(2, 3))[0][-1]["weights"]
    got = dict(results[0])
    for name, tensor in results[2].items():
        got[re.sub(r"layers\.(\d)", lambda match: f"layers.{int(match[1]) + 2}", name)] = tensor
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}")


def test_lora_adapters_of_peft_train_like_one_process(spread):
    """Only the adapters are dedicated; the frozen base stays with FSDP2: the weights of one process."""
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=r".*maps\.[01]")
        torch.manual_seed(0)
        model = peft.get_peft_model(Net(), config).double()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p)
        return model

    def law(rank, ranks):
        model = adapted()
        optimizer = None
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            dmuon.dedicate_params(model, mesh, lambda name, p: "lora_" in name)
            for layer in (*model.base_model.model.layers, model):
                fully_shard(layer, mesh=mesh)
            optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1)
            for step in batches(2, 3):
                optimizer.zero_grad()
                loss_of(model, step[rank]).backward()
                optimizer.step()
            return dmuon.full_state_dict(model, rank0_only=False)
        trained = [p for p in model.parameters() if p.requires_grad]
        momenta = [torch.zeros_like(p) for p in trained]
        for step in batches(2, 3):
            model.zero_grad()
            (sum(loss_of(model, batch) for batch in step) / 2).backward()
            with torch.no_grad():
                for p, momentum in zip(trained, momenta):
                    momentum.lerp_(p.grad, 0.05)
                    update = ns.newton_schulz(torch.lerp(p.grad, momentum, 0.95))
                    p.mul_(1 - 0.02 * 0.1).sub_(update, alpha=0.02 * 0.2 * max(p.shape) ** 0.5)
        return model.state_dict()

    plain = run(1, law, 1)[0]
    for full in run(2, law, 2):
        assert [*full] == [*plain]
        for name, tensor in plain.items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


# ------------------------------------------------------------------------------------------------------ train_gpt.py

TINY = ["--depth=2", "--n_embd=32", "--n_head=2", "--seq_len=16", "--total_batch_size=128", "--steps=3", "--device=cpu",
        "--eval_every=0"]


FIRST_LOSSES = [5.72964876, 4.68635288, 3.85478379, 3.35085219, 3.09735722,
                3.00929485, 2.77532259, 2.62181840, 2.54443475, 2.53236455]


def train_gpt_log(rank: int, out: str, *options: str) -> list[dict]:
    """Run the script's `main` on this rank; the records of its log.jsonl."""
    train_gpt.main([f"--out={out}", *options])
    with open(os.path.join(out, "log.jsonl")) as file:
        return [json.loads(line) for line in file]


def losses_of(records: list[dict]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def test_the_default_corpus_is_the_same_everywhere():
    """354,743 bytes of Unicode names, a tenth held out; the first ten losses in float64 are these numbers."""
    data = train_gpt.unicode_names()
    assert len(data) == 354_743 and data.count(b"\n") == 12_885

    def law(rank):
        with tempfile.TemporaryDirectory() as out:
            return train_gpt_log(rank, out, "--dtype=float64", "--steps=10", "--device=cpu")

    header, *records = run(1, law)[0]
    assert header["data_sha256"] == "b6f666dd7e364b61"
    assert losses_of(records) == pytest.approx(FIRST_LOSSES, abs=1e-6)
    assert [r["step"] for r in records if "val_loss" in r] == [10]


def test_the_script_logs_the_same_losses_on_any_number_of_ranks(monkeypatch):
    """Float64, five steps: 1, 2, 4, 8 ranks and two micro-steps agree to 1e-10, Z2 and Z3 to the last bit."""
    monkeypatch.setattr(train_gpt, "EVAL_WINDOWS", 1)
    monkeypatch.setattr(train_gpt, "sample", partial(train_gpt.sample, length=2))

    def law(rank, out, *options):
        return losses_of(train_gpt_log(rank, out, "--dtype=float64", "--steps=5", "--device=cpu", *options))

    with tempfile.TemporaryDirectory() as out:
        first = run(1, law, out)[0]
        assert len(first) == 5 and first[-1] < first[0] - 2
        z3, z2 = run(4, law, out)[0], run(4, law, out, "--zero=2")[0]
        assert z3 == z2
        others = [run(2, law, out)[0], run(2, law, out, "--device_batch_size=2")[0], run(8, law, out, timeout_s=180)[0]]
        for losses in (z3, *others):
            assert losses == pytest.approx(first, abs=1e-10, rel=0)


def test_the_script_logs_the_same_losses_and_norms_on_any_mesh(tmp_path, monkeypatch):
    """Float64: HSDP, tensor parallelism and both agree with one process to 1e-10; a late broadcast changes no bit."""
    monkeypatch.setattr(train_gpt, "EVAL_WINDOWS", 1)
    monkeypatch.setattr(train_gpt, "sample", partial(train_gpt.sample, length=2))

    def law(rank, *options):
        log = train_gpt_log(rank, str(tmp_path), *TINY, "--dtype=float64", "--steps=5", *options)
        return losses_of(log), [record["norm"] for record in log if "norm" in record]

    hsdp = run(4, law, "--replicate=2")[0]
    assert hsdp == run(4, law, "--replicate=2", "--replicate_async=0")[0]
    mesh, adamw = ["--replicate=2", "--tp=2"], "--optimizer=adamw"
    for expected, *others in ((run(1, law)[0], hsdp, run(4, law, "--tp=2", "--zero=2")[0],
                               run(8, law, *mesh, timeout_s=180)[0]),
                              (run(1, law, adamw)[0], run(4, law, *mesh, adamw)[0])):
        for losses, norms in others:
            assert losses == pytest.approx(expected[0], abs=1e-10, rel=0) and len(losses) == 5
            assert norms == pytest.approx(expected[1], rel=1e-9)


def test_two_hosts_form_one_mesh(tmp_path):
    """Two torchrun agents that meet over loopback train --replicate=2: 4 ranks, the losses of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [*TINY, "--dtype=float64", f"--out={tmp_path}"]
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_id=dmuon", f"--rdzv_endpoint=127.0.0.1:{port}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", *rendezvous]
    hosts = [subprocess.Popen([*command, train_gpt.__file__, *options, "--replicate=2"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    try:
        outputs = [host.communicate(timeout=120)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    header, *records = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert header["mesh"] == [2, 2] and "mesh   replicate 2 x shard 2 x tp 1" in "".join(outputs)
    assert losses_of(records) == pytest.approx(losses_of(run(1, train_gpt_log, str(tmp_path), *options)[0]), abs=1e-10)


def write_tokens(path, tokens: list[int], header: list[int] | None = None) -> None:
    with open(path, "wb") as file:
        if header:
            file.write(struct.pack("<256i", *header, *[0] * (256 - len(header))))
        file.write(struct.pack(f"<{len(tokens)}H", *tokens))


def test_every_kind_of_data_trains(tmp_path):
    """A text file, a folder, one with train and val, a glob, nanoGPT's .bin, llm.c's .bin: the loss falls."""
    tokens = [i * i % 97 for i in range(3000)]
    for name in ("book.txt", "folder/a.txt", "folder/b.txt", "split/train.txt", "split/val.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("To be, or not to be, that is the question: \xe4\n" * 30)
    for name in ("train.bin", "val.bin"):
        (tmp_path / "nano").mkdir(exist_ok=True)
        write_tokens(tmp_path / "nano" / name, tokens)
        (tmp_path / "nano" / "meta.pkl").write_bytes(b"a pickle is not read")
    write_tokens(tmp_path / "llmc.bin", tokens, [20240520, 1, len(tokens)])

    def law(rank, data, vocabulary):
        out = str(tmp_path / "out")
        records = train_gpt_log(rank, out, *TINY, "--steps=6", f"--data={data}", f"--vocab_size={vocabulary}")
        return records[0]["options"]["vocab_size"], losses_of(records)

    kinds = {"book.txt": "auto", "folder": "auto", "split": "auto", "folder/*.txt": "auto", "nano": 97, "llmc.bin": 128}
    for kind, vocabulary in kinds.items():
        size, losses = run(2, law, tmp_path / kind, vocabulary)[0]
        assert size == (256 if vocabulary == "auto" else vocabulary)
        assert losses[-1] < losses[0] < 8, kind


BROKEN_DATA = {
    "missing": (None, "no such file"),
    "empty.txt": (b"", "is empty"),
    "empty.bin": (b"", "is empty"),
    "short.txt": (b"to be", "gives one split 5 tokens, fewer than one sequence of --seq_len 16"),
    "zeros.npy": (b"\x93NUMPY\x01\x00" + b"\0" * 99, "neither text .* nor a .bin"),
    "odd.bin": (b"x" * 999, "999 bytes, an odd number"),
    "uint32.bin": (struct.pack("<i", 20240801) + b"\0" * 2000, "magic 20240801"),
    "hellaswag.bin": (struct.pack("<i", 20240522) + b"\0" * 2000, "magic 20240522"),
    "cut.bin": (struct.pack("<3i", 20240520, 1, 1000) + b"\0" * 2012, "broken llm.c file: .* 1000 tokens, 2024 bytes"),
    "version.bin": (struct.pack("<3i", 20240520, 2, 500) + b"\0" * 2012, "broken llm.c file: version 2"),
    "header.bin": (struct.pack("<2i", 20240520, 1), "broken llm.c file"),
    "other.bin": (struct.pack("<i", 20240999) + b"\0" * 2000, "magic 20240999"),
    "large.bin": (struct.pack("<1000H", *[7] * 999, 300), "has token 300 at position 999, outside .*vocab_size is 256"),
}


@pytest.mark.parametrize("name", BROKEN_DATA)
def test_broken_data_is_refused_by_name(name, tmp_path):
    """Missing, empty, short, of an unknown format, cut, or with a token outside the vocabulary: file and reason."""
    content, message = BROKEN_DATA[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    args = train_gpt.resolve(train_gpt.parse([*TINY, f"--data={path}", "--vocab_size=256"]), 1)
    with pytest.raises(train_gpt.UsageError, match=f"(?s){re.escape(name)}.*{message}"):
        corpus = train_gpt.load_corpus(args)
        for split in (corpus.train, corpus.val):
            for start in range(split.windows):
                split.window(start)


def test_all_ranks_stop_together(tmp_path):
    """A token outside the vocabulary in one rank's slice, a loss that is not finite: one error on every rank."""
    write_tokens(tmp_path / "train.bin", [*[1] * 300, 60000, *[1] * 300])

    def law(rank, options):
        with pytest.raises(train_gpt.UsageError) as caught:
            train_gpt.main([*TINY, "--steps=50", f"--out={tmp_path}/out", *options])
        return str(caught.value)

    for options, message in (([f"--data={tmp_path}/train.bin"], "has token 60000 at position 300, outside"),
                             (["--muon_lr=1e30", "--adamw_lr=1e30"], "step [2-9]: loss (nan|inf)")):
        first, second = run(2, law, options)
        assert first == second and re.search(message, first), first


def test_text_and_token_files_do_not_mix(tmp_path):
    """A folder with both kinds is refused."""
    (tmp_path / "a.txt").write_text("x" * 100)
    write_tokens(tmp_path / "b.bin", [1] * 100)
    with pytest.raises(train_gpt.UsageError, match="text and .bin files together"):
        train_gpt.load_corpus(train_gpt.resolve(train_gpt.parse([*TINY, f"--data={tmp_path}"]), 1))


REFUSED_OPTIONS = {
    "--total_batch_size=5000 --device_batch_size=8": "x seq_len = 4 x 8 x 128 = 4096; nearest: 4096, 8192",
    "--total_batch_size=100": "ranks x device_batch_size x seq_len = 4 x 1 x 128 = 512; nearest: 512",
    "--n_head=3": r"--n_head 3: 2 x it must divide --n_embd 128; n_head may be \[1, 2, 4",
    "--depth=0": "--depth: 0: must be int at least 1, or auto", "--depth=many": "--depth: many: must be int at least 1",
    "--muon_lr=-1": "--muon_lr: -1: must be float at least 0", "--adamw_lr=nan": "--adamw_lr: nan: must be float",
    "--momentum=1": "--momentum: 1: must be float between 0 and 0.9999", "--decay_frac=2": "between 0 and 1",
    "--tp=3": "--tp 3 with 4 ranks: replicate x shard x tp must be 4, and --n_head 4 a multiple of .* may be 1, 2, 4",
    "--tp=4 --n_head=2": "--n_head 2 a multiple of tp; tp may be 1, 2", "--replicate=0": "--replicate: 0: must be int",
    "--replicate=3": "--replicate 3 with 4 ranks: replicate x shard x tp must be 4; replicate may be 1, 2, 4",
    "--replicate=2 --tp=4": "--tp 4 with 4 ranks: .*; tp may be 1, 2",
    "--tp=2 --total_batch_size=100": "multiple of ranks / tp x device_batch_size x seq_len = 2 x 1 x 128 = 256; near",
    "--muon_lr=inf": "--muon_lr: inf: must be float", "--n_embd=63": "--n_embd 63: must be even",
    "--bench --bench_model=512,6,256": "--bench_model 512,6,256 --tp 1: expected four numbers, width,layers,T,B with",
    "--bench --bench_model=512,0,9,1": "expected four numbers", "--bench --bench_model=huge": "of toy, small, gpt2",
    "--bench --tp=2": "--bench_model small --tp 2: .* and tp 1", "--optimizer=naive --tp=2": "--optimizer naive --tp 2",
    "--bench --depth=8": "--depth 8: --bench has its own, and its model is --bench_model", "--bench --zero=2": "--zero",
    "--bench --bench_model=65,1,8,1": "--bench_model 65,1,8,1 .*with an even width",
    "--bench --bench_model=0,1,1,1": "--bench_model 0,1,1,1",
    "--verify --dtype=bfloat16": "--dtype bfloat16: --verify is in float64",
    "--bench --verify": "--bench, --verify and --profile: choose one",
    "--zero=1": "--zero: invalid choice", "--see=3": "unrecognized arguments: --see=3",
    "--colour=red": "unrecognized arguments: --colour=red",
}


@pytest.mark.parametrize("options", REFUSED_OPTIONS)
def test_wrong_options_are_refused_with_the_way_out(options):
    """One line that names the option, its value and what would do, before any process group."""
    with pytest.raises(train_gpt.UsageError, match=REFUSED_OPTIONS[options]):
        train_gpt.resolve(train_gpt.parse(["--device=cpu", *options.split()]), 4)
    assert not dist.is_initialized()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 16])
def test_no_option_is_needed_on_any_number_of_ranks(ranks):
    """The default batch is 1,024 tokens, or the next multiple that the ranks share equally."""
    args = train_gpt.resolve(train_gpt.parse(["--device=cpu"]), ranks)
    assert args.total_batch_size == -(-1024 // (128 * ranks)) * 128 * ranks
    assert args.total_batch_size == ranks * args.device_batch_size * args.seq_len * args.micro_steps


def test_all_ranks_see_one_global_batch(tmp_path):
    """The windows of a step, put together, are the same for 1, 2 and 4 ranks and micro-steps; steps differ."""

    def rows(step, ranks, size):
        args = train_gpt.resolve(train_gpt.parse([*TINY, "--device_batch_size", str(size)]), ranks)
        corpus = train_gpt.load_corpus(args)
        tokens = [x for r in range(ranks) for x, _ in train_gpt.batches(corpus, args, step, r)]
        return sorted(map(tuple, torch.cat(tokens).tolist()))

    first = rows(1, 1, 8)
    assert len(first) == 8 and first == rows(1, 2, 4) == rows(1, 2, 2) == rows(1, 4, 1)
    assert first != rows(2, 1, 8)


def test_the_sample_is_printable():
    """Bytes that are no UTF-8 and control characters come out escaped; all ranks draw the same text."""

    def law(rank):
        args = train_gpt.resolve(train_gpt.parse([*TINY, "--data=" + os.path.abspath(__file__)]), dist.get_world_size())
        corpus, model = train_gpt.load_corpus(args), train_gpt.build(args, 256)
        train_gpt.distribute(model, train_gpt.init_distributed(args), args)
        return train_gpt.sample(model, corpus, args)

    texts = run(2, law)
    assert texts[0] == texts[1] and "\\x" in texts[0] and all(c.isprintable() or c == "\n" for c in texts[0])


def test_the_script_imports_without_side_effects(tmp_path):
    """Importing prints and starts nothing, three steps train, nothing is on stderr."""
    script = (
        "import train_gpt, torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "print('imported', flush=True)\n"
        f"train_gpt.main({[*TINY, f'--out={tmp_path}']!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported\nrun    1 x cpu") and "val loss" in done.stdout
    assert done.stderr == ""


def test_help_is_printed_and_nothing_else():
    """`--help` names every option with its default, exits with 0 and leaves stderr alone."""
    command = [sys.executable, train_gpt.__file__, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    assert all(f"--{name}" in result.stdout for name in vars(train_gpt.parse([])))


def test_an_error_is_one_line_alone_and_under_torchrun(tmp_path):
    """Plain python prints the message only; torchrun shows it near the end of its report, with every rank's end."""
    wrong = ["train_gpt.py", "--device=cpu", "--data=nowhere.txt"]
    options = dict(cwd=HERE, capture_output=True, text=True, timeout=TIMEOUT_S)
    done = subprocess.run([sys.executable, *wrong], **options)
    assert done.returncode == 1
    assert done.stderr == "train_gpt.py: --data nowhere.txt: no such file, and no folder or glob with files in it\n"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, *wrong], **options)
    assert done.returncode == 1
    assert "--data nowhere.txt: no such file" in "\n".join(done.stderr.splitlines()[-12:])


def test_an_unwritable_folder_ends_every_rank(tmp_path):
    """Rank 0 cannot write the log: all ranks raise instead of waiting for it."""
    blocked = tmp_path / "file"
    blocked.write_text("")

    def law(rank):
        with pytest.raises(train_gpt.UsageError, match="cannot write log.jsonl there: .*Not a directory"):
            train_gpt.main([*TINY, f"--out={blocked}/out"])
        return True

    assert run(2, law) == [True, True]


# ------------------------------------------------------------------------------------ train_gpt.py, runs that survive

LONG = [*TINY, "--steps=150", "--eval_every=75"]


def launch(ranks: int, *options: str, restarts: int = 0) -> subprocess.Popen:
    """torchrun with the script, in a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               f"--max-restarts={restarts}", train_gpt.__file__, *options]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def end_of(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; nothing of it is left."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, stdout, stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def workers(process: subprocess.Popen) -> list[int]:
    """The process ids of torchrun's ranks."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [int(pid) for pid, parent, command in rows if int(parent) == process.pid and "train_gpt.py" in command]


def wait_until(condition: Callable, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate(timeout=5)
        time.sleep(0.01)


def curve(records: list[dict]) -> list[dict]:
    """What does not depend on the clock or on the header."""
    return [{key: value for key, value in record.items() if key != "step_ms"} for record in records if "step" in record]


def lines_of(folder) -> int:
    return (folder / "log.jsonl").read_text().count("\n") if (folder / "log.jsonl").exists() else 0


def log_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> list[dict]:
    """The log of an undisturbed run."""
    return run(2, train_gpt_log, str(tmp_path_factory.mktemp("straight")), *LONG)[0]


def test_a_killed_worker_does_not_change_a_bit(straight, tmp_path):
    """kill -9 of one of two workers: torchrun starts all again, they go on by themselves, with the same losses."""
    process = launch(2, *LONG, "--save_every=50", f"--out={tmp_path}", restarts=2)
    wait_until(lambda: lines_of(tmp_path) > 60, process)  # ten steps, which the log has, are done once more
    os.kill(workers(process)[1], signal.SIGKILL)
    code, stdout, stderr = end_of(process)
    assert code == 0 and "resume after step 50 of 150" in stdout, (stdout, stderr)
    assert curve(log_of(tmp_path)) == curve(straight)
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_00000100", "step_00000150"}


@pytest.mark.parametrize("number, whom", [(signal.SIGTERM, "a worker"), (signal.SIGTERM, "torchrun"),
                                          (signal.SIGINT, "all")])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(number, whom, straight, tmp_path):
    """SIGTERM or SIGINT, once: one line, a checkpoint, exit code 0; the same command goes on to the same losses."""
    folder = tmp_path / "stopped"
    process = launch(2, *LONG, f"--out={folder}")
    wait_until(lambda: lines_of(folder) > 20, process)
    if whom == "all":  # Ctrl-C reaches every process of the terminal
        os.killpg(process.pid, number)
    else:
        os.kill(workers(process)[1] if whom == "a worker" else process.pid, number)
    code, stdout, stderr = end_of(process)
    stopped = re.findall(r"^stopped by a signal after step (\d+), saved (.*); --resume=auto goes on$", stdout, re.M)
    assert len(stopped) == 1 and "val loss" not in stdout.split("stopped")[1], (stdout, stderr)
    step, path = stopped[0]
    assert log_of(folder)[-1]["step"] == int(step) < 150
    assert [str(found) for found in folder.glob("step_*")] == [path] and path.endswith(f"step_{int(step):08d}")
    assert (code == 0) == (whom == "a worker"), (code, stderr)  # torchrun itself reports its own signal as an error
    assert curve(run(2, train_gpt_log, str(folder), *LONG)[0]) == curve(straight)


def test_a_run_goes_on_on_other_ranks_and_with_other_rates(tmp_path):
    """`--resume=PATH` in another folder and mesh; the command line's rates win; at the last step nothing is trained."""
    first = run(2, train_gpt_log, str(tmp_path / "a"), *TINY, "--steps=6", "--save_every=3", "--dtype=float64")[0]
    options = [*TINY, "--steps=6", "--dtype=float64", f"--resume={tmp_path}/a/step_00000003"]
    run(2, train_gpt_log, str(tmp_path / "b"), *TINY)  # another run's log, which goes
    other = run(4, train_gpt_log, str(tmp_path / "b"), *options, "--replicate=2", "--tp=2")[0]
    assert losses_of(other) == pytest.approx(losses_of(first)[3:], abs=1e-10)
    faster = run(2, train_gpt_log, str(tmp_path / "c"), *options, "--muon_lr=0.1")[0]
    assert [r["lr"] for r in faster if "lr" in r] == pytest.approx([5 * r["lr"] for r in first if "lr" in r][3:])
    again = run(2, train_gpt_log, str(tmp_path / "a"), *TINY, "--steps=6", "--dtype=float64")[0]
    assert losses_of(again) == losses_of(first) and [r["step"] for r in again if "val_loss" in r] == [6]
    back = run(2, train_gpt_log, str(tmp_path / "a"), *options)[0]  # to an earlier one in the same folder
    assert losses_of(back) == losses_of(first)


def test_a_damaged_line_of_the_log_is_left_out(tmp_path):
    """A run that goes on drops what is no record, at the end or in the middle, and keeps the others."""
    options = [*TINY, "--save_every=3", "--dtype=float64"]
    first = run(1, train_gpt_log, str(tmp_path), *options)[0]
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    (tmp_path / "log.jsonl").write_text("\n".join([*lines[:2], lines[1][:30], *lines[2:], lines[-1][:20]]))
    again = run(1, train_gpt_log, str(tmp_path), *options, "--steps=5")[0]
    assert losses_of(again)[:3] == losses_of(first) and len(losses_of(again)) == 5


@pytest.mark.parametrize("resume, message", [
    ("auto", "is of another model; .*another --out starts anew"),
    ("none", "has checkpoints of another run, which --keep would delete; choose another --out"),
    ("nowhere", "--resume nowhere: --out .* has checkpoints of another run, which --keep would delete"),
])
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_script(resume, message, tmp_path):
    """One line on every rank, with the way out; the checkpoint stays."""
    run(2, train_gpt_log, str(tmp_path), *TINY, "--steps=1", "--save_every=1")

    def law(rank):
        with pytest.raises(train_gpt.UsageError, match=message):
            train_gpt.main([*TINY, f"--out={tmp_path}", f"--resume={resume}", "--n_embd=64"])
        with pytest.raises(train_gpt.UsageError, match="--resume nowhere: .*is no complete checkpoint: no such folder"):
            train_gpt.main([*TINY, f"--out={tmp_path}/empty", "--resume=nowhere"])
        return True

    assert run(2, law) == [True, True] and (tmp_path / "step_00000001" / ".metadata").exists()


def test_a_run_that_was_killed_in_its_first_checkpoint_starts_anew(tmp_path):
    """Only scraps in the folder: `--resume=auto` says so and begins at step 1."""
    run(2, train_gpt_log, str(tmp_path), *TINY, "--save_every=3")
    torn("unfinished", str(tmp_path / "step_00000003"))
    assert [r["step"] for r in run(2, train_gpt_log, str(tmp_path), *TINY)[0] if "loss" in r] == [1, 2, 3]


def test_what_is_not_finite_leaves_the_weights_and_the_last_checkpoint(tmp_path):
    """A step whose loss is NaN stops all ranks before it changes anything, and names a parameter."""
    options = [*TINY, "--steps=50", f"--out={tmp_path}", "--save_every=1", "--keep=99", "--muon_lr=1e30"]

    def law(rank):
        with pytest.raises(train_gpt.UsageError) as caught:
            train_gpt.main(options)
        return str(caught.value)

    first, second = run(2, law)
    step = int(re.match(r"step (\d+): loss (nan|inf), gradient norm \S+, first in [a-z_.0-9]+; check", first)[1])
    assert first == second and log_of(tmp_path)[-1]["step"] == step - 1

    def untouched(rank):
        args = train_gpt.resolve(train_gpt.parse(options), 2)
        corpus, mesh = train_gpt.load_corpus(args), train_gpt.init_distributed(args)
        model = train_gpt.build(args, 256)
        train_gpt.distribute(model, mesh, args)
        optimizer = train_gpt.make_optimizer(model, args)
        assert dmuon.load_checkpoint(tmp_path, model, optimizer) == step - 1
        states = [{**model.state_dict(), **{i: s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())
                                            if "momentum_buffer" in s}} for _ in range(2)]
        before = {name: local(tensor).clone() for name, tensor in states[0].items()}
        with pytest.raises(train_gpt.UsageError):
            micro_batches = train_gpt.batches(corpus, args, step, rank)
            train_gpt.train_step(model, optimizer, micro_batches, args, step, [])
        return all(torch.equal(local(tensor), before[name]) for name, tensor in states[1].items())

    assert run(2, untouched) == [True, True]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_gradient_that_is_not_finite_is_named(optimizer, tmp_path):
    """Clipping has not spread a NaN to the other gradients when the script looks for the first one."""

    def law(rank):
        original = dmuon.clip_grad_norm_

        def poisoned(model, max_norm):
            gradient = model.get_parameter("layers.1.down_proj.weight").grad
            if gradient is not None and gradient.numel():
                local(gradient).fill_(math.nan)
            return original(model, max_norm)

        dmuon.clip_grad_norm_ = poisoned
        with pytest.raises(train_gpt.UsageError, match="norm nan, first in layers.1.down_proj.weight;"):
            train_gpt.main([*TINY, f"--optimizer={optimizer}", f"--out={tmp_path}"])
        return True

    assert run(2, law) == [True, True]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_is_gone_ends_the_others_with_the_name_of_the_collective(how, spread):
    """Rank 1 is lost in layer 0: rank 0 raises within the process group's timeout, and says what it waited for."""

    def law(rank):
        dist.group.WORLD.set_timeout(timedelta(seconds=3))
        model = shard(net(make=Bare))  # FSDP2 has nothing in its layers, and does not wait there itself
        if rank == 1:
            gone = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if how == "dies" else lambda *_: time.sleep(99)
            model.layers[0].maps[0].register_forward_hook(gone)
        lacking = [n for n, slot in dmuon.owners(model).items() if slot == (1, 0) and n.startswith("layers.1.")]
        with pytest.raises(RuntimeError) as caught:
            loss_of(model, batches(2, 1)[0][rank]).backward()
        message = str(caught.value)
        assert message.startswith(f"dmuon: the broadcast of {', '.join(lacking)} from shard 1 did not end"), message
        os._exit(0)  # before the group's destructor, which waits for rank 1

    with contextlib.suppress(FileNotFoundError):
        run(2, law, lost=1, timeout_s=30)


@pytest.mark.parametrize("mesh", [[], ["--replicate=2"]])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_script_says_in_which_step_a_rank_was_lost(how, mesh, monkeypatch, tmp_path):
    """Rank 1 is killed or hangs before its third step: rank 0 names step and phase, within the script's timeout."""
    batches_of = train_gpt.batches

    def batches(corpus, args, step, rank):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "dies" else time.sleep(99)
        return batches_of(corpus, args, step, rank)

    monkeypatch.setattr(train_gpt, "batches", batches)
    monkeypatch.setattr(train_gpt, "TIMEOUT", timedelta(seconds=3))

    def law(rank):
        # The test's own process group would wait for 30000 ms
        timeout = "(3000ms|Application timeout)" if how == "hangs" else ""
        with pytest.raises(RuntimeError, match=f"^step 3, forward and backward: .*{timeout}"):
            train_gpt.main([*TINY, f"--out={tmp_path}", *mesh])
        return True

    assert run(2, law, lost=1) == [True]


@pytest.mark.parametrize("options", [["--activation_checkpointing"], ["--activation_checkpointing", "--zero=2"],
                                     ["--activation_checkpointing", "--compile", "--steps=2"]])
def test_activation_checkpointing_and_compile_log_the_same_losses(options, tmp_path):
    """To 1e-10 in float64: recomputing and compiling change when things are computed, not what."""
    if "--compile" in options and not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("torch.compile needs a C++ compiler")
    plain = run(1, train_gpt_log, str(tmp_path), *TINY, "--dtype=float64")[0]
    other = run(2, train_gpt_log, str(tmp_path), *TINY, "--dtype=float64", *options, timeout_s=300)[0]
    assert losses_of(other) == pytest.approx(losses_of(plain)[: len(losses_of(other))], abs=1e-10)


@pytest.mark.parametrize("options", [[], ["--replicate=2", "--zero=2"]])
def test_naive_muon_trains_like_dmuon(options, tmp_path):
    """Gathering every matrix everywhere gives the same losses, norms and evaluations, to 1e-10 in float64."""
    logs = [run(4, train_gpt_log, str(tmp_path), *TINY, "--dtype=float64", "--steps=5", "--weight_decay=0.1", *options,
                f"--optimizer={optimizer}")[0] for optimizer in ("naive", "muon")]
    naive, muon = ([(r.get("loss"), r.get("norm"), r.get("val_loss")) for r in log if "step" in r] for log in logs)
    assert len(naive) == 6
    for ours, theirs in zip(muon, naive, strict=True):
        assert [x or 0 for x in ours] == pytest.approx([x or 0 for x in theirs], abs=1e-10)


@pytest.mark.parametrize("ranks, options", [(1, []), (3, []), (4, ["--replicate=2"])])
def test_the_bench_counts_what_the_formulas_say(ranks, options, tmp_path):
    """Elements equal the formula in every row; a DMuon row sends what AdamW sends in its mode, less FSDP2's padding.

    The state is the largest share of the momenta, and the rows end in the table and in bench.jsonl.
    """
    def law(rank):
        tiny = ["--bench", "--bench_model=32,2,16,1", "--steps=1", "--device=cpu"]
        train_gpt.main([*tiny, f"--out={tmp_path}", *options])
        return [json.loads(line) for line in open(tmp_path / "bench.jsonl")]

    header, *rows = run(ranks, law)[0]
    assert header["options"]["steps"] == 1 and header["first_steps_differ_by"] < 1e-3
    rows = {row.pop("row"): row for row in rows}
    assert len(rows) == 5 + bool(options)
    for name, row in rows.items():
        assert row["sent"] == row["formula"] and (row["sent"] > 0) == (ranks > 1), (name, row)
        assert row["step_ms"] > row["optimizer_ms"] > 0 and row["peak_bytes"] > row["muon_state_bytes"]
        assert ("ns_ms" in row) == ("AdamW" not in name)
    for zero in (2, 3):
        ours, theirs = rows[f"DMuon Z{zero}"], rows[f"AdamW Z{zero}"]
        assert ours["sent"] < theirs["sent"] if ranks == 3 else ours["sent"] == theirs["sent"]
        assert theirs["ratio"] == 1 and theirs["muon_state_bytes"] == 0
    total = 4 * 2 * 12 * 32**2
    assert total / ranks <= rows["DMuon Z3"]["muon_state_bytes"] <= total
    assert rows["naive Muon Z3"]["sent"] > rows["AdamW Z3"]["sent"] or ranks == 1


def test_the_bench_gives_each_row_what_its_name_says(tmp_path, monkeypatch):
    """NS has the same batches in all rows, and a turn leaves no broadcast in flight."""
    monkeypatch.setitem(ns.BATCH_NUMEL, "cpu", 4 * 32 * 32)
    sizes = collections.defaultdict(set)
    step, turn, original = train_gpt.BenchRow.step, train_gpt.BenchRow.turn, ns.orthogonalise

    def watched_step(row):
        sizes["now"] = sizes[row.name]
        return step(row)

    def watched_turn(row):
        turn(row)
        assert not getattr(row.model._dmuon.mesh, "arriving", []) if row.args.optimizer == "muon" else True

    def watched_orthogonalise(updates, *args, **how):
        sizes["now"].add(len(updates))
        return original(updates, *args, **how)

    monkeypatch.setattr(train_gpt.BenchRow, "step", watched_step)
    monkeypatch.setattr(train_gpt.BenchRow, "turn", watched_turn)
    monkeypatch.setattr(train_gpt, "orthogonalise", watched_orthogonalise)
    monkeypatch.setattr(dmuon, "orthogonalise", watched_orthogonalise)

    def law(rank):
        tiny = ["--bench", "--bench_model=32,2,16,1", "--steps=1", "--device=cpu", "--replicate=2"]
        train_gpt.main([*tiny, f"--out={tmp_path}"])
        return {name: max(found) for name, found in sizes.items() if found}

    for batched in run(2, law):
        assert set(batched.values()) == {4} and "naive Muon Z3" in batched


def test_a_bench_of_rates_of_zero_is_no_error(tmp_path):
    """Steps that go nowhere do not differ."""
    run(1, lambda rank: train_gpt.main(["--bench", "--bench_model=32,1,8,1", "--steps=1", "--device=cpu", "--muon_lr=0",
                                        "--adamw_lr=0", f"--out={tmp_path}"]))


def test_the_meter_refuses_what_it_cannot_count():
    """A collective that it does not know is an error, not a zero."""

    def law(rank):
        with train_gpt.Meter([]) as meter:
            dist.all_reduce(torch.ones(6))
            assert meter.sent == 6.0  # twice half of it
            with pytest.raises(RuntimeError, match="cannot count what the collective allgather_ sends"):
                dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3))
        return True

    assert run(2, law) == [True] * 2


def test_the_bench_refuses_rows_that_train_unlike(tmp_path, monkeypatch):
    """A row whose first step is another one ends the bench, on every rank."""
    monkeypatch.setattr(train_gpt, "adjusted_lr", lambda lr, *_: lr)  # naive Muon's alone

    def law(rank):
        with pytest.raises(RuntimeError, match="the rows' first steps differ by"):
            train_gpt.main(["--bench", "--bench_model=32,2,16,1", "--device=cpu", f"--out={tmp_path}"])
        return True

    assert run(2, law) == [True] * 2


@pytest.mark.parametrize("ranks, options", [
    (1, []), (2, ["--zero=2", "--total_batch_size=256", "--device_batch_size=2"]), (4, ["--replicate=2"]),
    (4, ["--replicate=2", "--tp=2"]), (4, ["--tp=2", "--ns=direct"]), (2, ["--optimizer=adamw"]),
    (2, ["--optimizer=naive"])])
def test_verify_compares_the_layout_with_one_process(ranks, options, tmp_path):
    """`--verify` finds every kind of tensor, of both families, within 1e-10."""

    def law(rank):
        train_gpt.main([*TINY, "--verify", f"--out={tmp_path}", *options])
        return [json.loads(line) for line in open(tmp_path / "verify.jsonl")]

    found = run(ranks, law)[0][0]["largest_differences"]
    kinds = {"gradient", "weight", "momentum_buffer"} if "--optimizer=adamw" not in options else set()
    assert {key.split()[1] for key in found if key.startswith("Muon")} >= kinds
    of_adamw = {key.split()[1] for key in found if key.startswith("AdamW")}
    assert of_adamw == {"gradient", "weight", "exp_avg", "exp_avg_sq"}
    assert all(value <= 1e-10 for value in found.values())


def scale_gradients(scale: float) -> None:
    original = dmuon.clip_grad_norm_

    def clip(model, max_norm):
        norm = original(model, max_norm)
        for p in dmuon.owned_params(model).values() if hasattr(model, "_dmuon") else []:
            local(p.grad).mul_(scale)
        return norm

    dmuon.clip_grad_norm_ = clip


def scale_averages(scale: float) -> None:
    original = hooks.start_average
    hooks.start_average = lambda tensor, *group: original(tensor.mul_(scale), *group)


def spoil_gram() -> None:
    original = ns.gram_factor
    ns.gram_factor = lambda R, triples: original(R, triples) * (1 + 1e-6)


def decay_by_the_adjusted_rate() -> None:
    original = dmuon.adjusted_lr
    dmuon.adjusted_lr = lambda lr, *how: original(lr, *how) * (1 + 1e-6)


def lose_a_replica() -> None:
    hsdp.ReplicaMesh._broadcasts = lambda mesh, params: []


def forget_a_gradient() -> None:
    original = train_gpt.whole
    train_gpt.whole = lambda tensor: original(tensor) * (math.nan if tensor.shape == (256, 32) else 1)


@pytest.mark.parametrize("spoil", [partial(scale_gradients, 1 + 1e-6), partial(scale_averages, 0.5), spoil_gram,
                                   decay_by_the_adjusted_rate, lose_a_replica, forget_a_gradient])
def test_verify_notices_what_is_wrong(spoil, tmp_path):
    """A gradient, NS or a rate off by a millionth, a replica that hears of no step, a NaN: an error on every rank."""

    def law(rank):
        spoil()
        with pytest.raises(RuntimeError, match="this layout and one process differ by"):
            train_gpt.main([*TINY, "--verify", "--replicate=2", "--grad_clip=0.01", f"--out={tmp_path}"])
        return True

    assert run(4, law) == [True] * 4


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_trace_shows_what_hides_behind_what(prefetch, tmp_path, monkeypatch):
    """`--profile`: between a broadcast and the wait for it are matrix products, without prefetch there are none.

    There is a trace a rank, of three steps, with ranges by name. AdamW's step stands between a replicate broadcast and
    its wait.
    """
    monkeypatch.setattr(hooks.DedicatedModel, "prefetch", int(prefetch))
    run(4, train_gpt_log, str(tmp_path), *TINY, "--steps=6", "--replicate=2", f"--profile={tmp_path / 'traces'}")
    found = set()
    for rank in range(4):
        with open(tmp_path / "traces" / f"rank{rank}.json") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        names = Counter(event["name"] for event in events)
        starts = lambda name: sorted(event["ts"] for event in events if event["name"].startswith(name))
        between = lambda name, low, high: any(low < moment < high for moment in starts(name))
        for layer in (0, 1):
            issued, waited = starts(f"dmuon.unshard layers.{layer}"), starts(f"dmuon.wait broadcast of layers.{layer}.")
            assert len(issued) == len(waited) == 6 and names[f"dmuon.reduce layers.{layer}"] == 3
            hidden = [between("aten::mm", *pair) for pair in zip(issued, waited)]
            expected = [prefetch and layer == 1, prefetch] * 3  # forward, backward; no product comes before layer 0's
            assert hidden == expected, (rank, layer)
            sent = starts(f"dmuon.replicate_broadcast layers.{layer}")
            arrived = starts(f"dmuon.wait replicate broadcast of layers.{layer}.")
            arrived = [moment for moment in arrived if moment > sent[0]]
            assert len(sent) == 3 and all(between("Optimizer.step#AdamW", *pair) for pair in zip(sent, arrived))
        found |= {name for name in names if name.startswith("dmuon.newton_schulz")}
    assert found >= {"dmuon.newton_schulz 4x(32,32)", "dmuon.newton_schulz 1x(128,32)"}


def test_a_profile_does_not_end_a_run_that_has_few_steps(tmp_path, capfd):
    """It says that nothing is traced; a folder that cannot be made is refused by name."""
    traces = tmp_path / "traces"
    records = run(2, train_gpt_log, str(tmp_path), *TINY, f"--profile={traces}")[0]
    assert len(losses_of(records)) == 3 and not traces.exists()
    assert "nothing is traced; this run has less than six steps" in capfd.readouterr().out
    traces.write_text("a file")

    def law(rank):
        with pytest.raises(train_gpt.UsageError, match="--profile .*traces: cannot write there: "):
            train_gpt_log(rank, str(tmp_path), *TINY, "--steps=6", f"--profile={traces}")
        return True

    assert run(2, law) == [True] * 2


def test_a_step_on_cuda_never_waits_for_the_device():
    """`Muon.step` and `clip_grad_norm_` queue their work: nothing in them synchronises the host."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    code = (
        "import torch, torch.distributed as dist, dmuon, train_gpt; from torch.distributed.fsdp import fully_shard; "
        "dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1); "
        "mesh = dist.device_mesh.init_device_mesh('cuda', (1,)); model = train_gpt.GPT(256, 2, 128, 2).cuda(); "
        "dmuon.dedicate_params(model, mesh); [fully_shard(m, mesh=mesh) for m in (*model.layers, model)]; "
        "optimizer = dmuon.Muon(model)\n"
        "for step in range(3):\n"
        "    model(torch.zeros(2, 16, dtype=torch.int64, device='cuda')).float().logsumexp(-1).mean().backward()\n"
        "    torch.cuda.set_sync_debug_mode('error' if step else 'default')\n"
        "    dmuon.clip_grad_norm_(model, 1.0); optimizer.step(); optimizer.zero_grad()\n"
        "    torch.cuda.set_sync_debug_mode('default')\n"
        "dist.destroy_process_group()"
    )
    folder = os.path.dirname(os.path.abspath(dmuon.__file__))
    subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=300, check=True)


@pytest.mark.parametrize("options", [[], ["--optimizer=adamw"], ["--zero=2", "--device_batch_size=1"]])
def test_a_training_step_asks_the_device_once(options, tmp_path, monkeypatch):
    """Loss, norm and signals are one read, after clipping: on CUDA each read would wait for what is in flight."""
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        def counted(tensor, *args, _original=getattr(Tensor, name), _name=name):
            if Path(sys._getframe(1).f_code.co_filename).parent == HERE:
                reads.append((_name, sys._getframe(1).f_code.co_name))
            return _original(tensor, *args)

        monkeypatch.setattr(Tensor, name, counted)
    original = train_gpt.train_step

    def train_step(*args):
        reads.clear()
        result = original(*args)
        seen.append([place for place in reads if place[1] not in ("batches", "window")])  # tokens, on the host
        return result

    seen: list = []
    monkeypatch.setattr(train_gpt, "train_step", train_step)

    def law(rank):
        train_gpt_log(rank, str(tmp_path), *TINY, *options)
        return seen

    for steps in run(2, law):
        assert steps == [[("tolist", "train_step")]] * 3


# ------------------------------------------------------------------------------------------------------- the repository

CODE = ("newton_schulz.py", "partition.py", "hooks.py", "hsdp.py", "dmuon.py", "train_gpt.py")


def code_tokens(path: Path) -> int:
    """Tokens of the code, without comments and docstrings: they cannot be packed away."""
    source, documentation = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in layout and t.start[0] not in documentation for t in tokens)


DEMONSTRATIONS = {"newton_schulz.py": 1, "partition.py": 1, "hooks.py": 4, "hsdp.py": 4}  # on so many ranks


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_a_demonstration_prints_what_its_docstring_shows(name, tmp_path):
    """What a concept file's docstring shows is printed, but for rounding; at most 30 lines, and nothing on stderr.

    newton_schulz.py and partition.py run alone in a folder: they can be lifted as they are.
    """
    command, folder = [sys.executable, name], HERE
    if DEMONSTRATIONS[name] == 1:
        folder = shutil.copy(HERE / name, tmp_path) and tmp_path
    else:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={DEMONSTRATIONS[name]}"]
    environment = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    documentation = ast.get_docstring(ast.parse((HERE / name).read_text()))
    shown = [line.strip() for line in documentation.split(name)[-1].splitlines()[1:] if line.strip()]
    rounded = lambda line: re.sub(r"\de-\d\d", "#", line.strip())
    output = [rounded(line) for line in done.stdout.splitlines()]
    assert len(shown) >= 3 and [line for line in shown if rounded(line) not in output] == []
    assert 6 <= len(output) <= 30 and max(map(len, output)) <= 120


def test_importing_dmuon_starts_nothing():
    """No CUDA, no process group, no warning."""
    script = (
        "import torch, torch.distributed as dist, dmuon\n"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=HERE, capture_output=True, text=True,
                          timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stderr


def test_the_script_runs_with_warnings_as_errors(tmp_path):
    """`python -W error` on every rank: neither we nor torch on our behalf warn, and nothing is on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    environment = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    options = [*TINY, "--replicate=2", "--tp=2", "--save_every=2", f"--out={tmp_path}"]
    done = subprocess.run([*command, "train_gpt.py", *options], cwd=HERE, text=True, capture_output=True,
                          timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr


def readme_code() -> dict[str, str]:
    """The README's python and diff blocks, of these what a reader has afterwards, by line and first words."""
    blocks = {}
    for block in re.finditer(r"^```(python|diff)\n(.*?)^```$", README, re.M | re.S):
        kind, code = block.groups()
        if kind == "diff":
            code = "".join(line[1:] for line in code.splitlines(keepends=True) if not line.startswith("-"))
        line = README[: block.start()].count("\n") + 2
        blocks[f"line {line}: {block[2].splitlines()[0][:40].strip()}"] = code.replace('"cuda"', '"cpu"')
    return blocks


@pytest.mark.parametrize("name", readme_code())
def test_the_readmes_code_runs(name, tmp_path):
    """Each block as it stands, after the first one; of one batch a recipe makes the same of it on twice the ranks."""
    first, code = next(iter(readme_code().values())), readme_code()[name]
    for package in ("transformers", "timm"):
        if f"{package} import" in code or f"import {package}" in code:
            pytest.importorskip(package)

    def law(rank):
        os.chdir(tmp_path)
        generator = torch.Generator().manual_seed(0)
        whole = torch.randint(512, (4, 16), generator=generator), torch.randn(4, 3, 32, 32, generator=generator)
        tokens, images = (batch.chunk(dist.get_world_size() // tp)[rank // tp] for batch in whole)  # each has its own
        make = lambda *_: train_gpt.GPT(512, 2, 64, 2)
        names = {"torch": torch, "tokens": tokens, "images": images, "model": make(), "GPT": make, "steps": 2,
                 "loss_of": lambda model, batch: train_gpt.loss_of(model, *batch), "data": [(tokens, tokens)] * 2,
                 "multiplier": lambda step: 0.5, "LambdaLR": scheduling.LambdaLR}
        names["init_weights"] = lambda part: [nn.init.normal_(p, std=0.02) for p in part.parameters()]
        names["train_step"] = lambda step: (names["model"](tokens).mean().backward(), names["optimizer"].step())
        torch.manual_seed(0)
        exec(first, names)
        torch.manual_seed(0)
        names["model"] = names["model"] if "load_checkpoint" in code else make()
        exec(code, names)
        loss = names["loss"] if "loss = " in code else names["model"](tokens).square().mean()
        loss.backward()
        norms = {name: norm.item() for name, norm in dmuon.grad_norms(names["model"]).items()}
        assert dmuon.owners(names["model"]) and dmuon.clip_grad_norm_(names["model"], 1.0) > 0
        names["optimizer"].step()
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        return [loss.item(), norms]

    ranks, tp = 4 if '"replicate"' in code else 2 if '"tp"' in code else 1, 2 if '"tp"' in code else 1
    (loss, norms), *_ = run(ranks, law)
    if "loss = " in code:
        for other_loss, other_norms in run(2 * ranks, law):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert other_norms == pytest.approx(norms, rel=1e-3, abs=1e-6)


def test_the_readmes_fork_trains_like_one_process(spread):
    """NorMuon with cautious weight decay on 2 x 2 ranks, against a loop over whole matrices: 1e-10."""
    code = next(code for code in readme_code().values() if "class NorMuon" in code)

    class PlainNorMuon(PlainMuon):
        @torch.no_grad()
        def step(self):
            self.adamw.step()
            for name, p in self.matrices.items():
                buffer = self.momenta[name]
                buffer.mul_(0.95).add_(p.grad, alpha=0.05)
                x = ns.newton_schulz(p.grad * 0.05 + buffer * 0.95)
                squares = self.__dict__.setdefault("squares", {}).setdefault(name, torch.zeros(len(p), 1).double())
                squares.mul_(0.95).add_(0.05 * x.pow(2).mean(1, keepdim=True))
                x = x / (squares.sqrt() + 1e-8)
                x = x * 0.2 * (len(p) * p.shape[1]) ** 0.5 / x.pow(2).sum().sqrt()
                decayed = torch.where(x.sign() == p.sign(), p * (1 - 0.02 * 0.1), p)
                p.copy_(decayed - 0.02 * x)

    def law(rank, ranks):
        names = {"dmuon": dmuon, "torch": torch}
        exec(code[: code.index("\nshard(")], names)
        model = shard(net(), layout="2x2") if ranks == 4 else net()
        optimizer = names["NorMuon"](model, **OPTIONS) if ranks == 4 else PlainNorMuon(model, **OPTIONS)
        for step in batches(4, 4):
            model.zero_grad()
            if ranks == 4:
                loss_of(model, step[rank]).backward()
            else:
                (sum(loss_of(model, batch) for batch in step) / 4).backward()
            optimizer.step()
        return dmuon.full_state_dict(model, rank0_only=False) if ranks == 4 else model.state_dict()

    plain = run(1, law, 1)[0]
    for full in run(4, law, 4):
        for name, tensor in plain.items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}")


def planned(options: str) -> str:
    """What `python partition.py` prints for these options."""
    given = dict(re.findall(r"--(\w+)=([\w-]+)", options))
    numbers = {name: int(given.get(name, default)) for name, default in
               (("shard", 8), ("replicate", 1), ("tp", 1), ("tokens", 4194304))}
    return "\n".join(partition.plan(given["model"], **numbers)) + "\n"


def test_the_readmes_plans_are_what_the_planner_prints():
    """The output below its command, each row of 'Which mode?', and the planned rows of 'Growth'."""
    (options, output), = re.findall(r"```\npython partition.py (--model.*)\n```\n\n```\n(.*?)```", README, re.S)
    assert planned(options) == output
    modes = re.findall(r"^\| `(--model=.*?)` \| (.*) \|$", README, re.M)
    growth = re.findall(r"^\| [\d,]+ \| (\d+) \| (\d+) \|" + r" ([\d.]+)e9 \|" * 3 + r" (\S+) \|$", README, re.M)
    assert len(modes) == 6 and len(growth) == 4

    def figures(options):
        text = planned(options)
        rows = [[float(n.replace(",", "")) for n in re.search(rf"^  {kind} +([\d, ]+)$", text, re.M)[1].split()]
                for kind in ("Z2", "Z3", "naive Z3")]
        kinds = ("weights", "gradients", "momenta", "AdamW's")
        kept = sum(float(re.search(rf"{kind} ([\d.]+)", text)[1]) for kind in kinds)
        return rows, kept, re.findall(r" in Z\d ([\d.]+)", text), re.search(r"[\d.]+%", text)[0]

    for options, row in modes:
        (z2, z3, _), kept, full, share = figures(options)
        assert row == " | ".join([f"{kept:.2f}", *full, *(f"{n / 1e6:,.0f}" for n in (sum(z2), sum(z3), z3[2])), share])
    for replicate, tp, *sent, share in growth:
        rows, _, _, planned_share = figures(f"--model=llama3-70b --replicate={replicate} --tp={tp}")
        assert [f"{sum(row) / 1e9:.1f}" for row in rows] == sent and planned_share == share


def test_files_are_read_in_the_order_of_their_imports():
    """Each file uses what a reader has read; hooks.py explains one dimension without hsdp.py."""
    may = {name: {each.removesuffix(".py") for each in CODE[:i]} for i, name in enumerate(CODE)}
    may["newton_schulz.py"] = may["partition.py"] = set()
    may["train_gpt.py"] = {"dmuon", "partition", "newton_schulz"}
    project = {name.removesuffix(".py") for name in CODE}
    for name in CODE:
        used = set()
        for node in ast.walk(ast.parse((HERE / name).read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used.add(node.module)
        assert used & project <= may[name], (name, used & project)


def test_the_script_uses_the_public_api_alone():
    """What it takes from dmuon is in `__all__`."""
    names = {node.attr for node in ast.walk(ast.parse((HERE / "train_gpt.py").read_text()))
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
             and node.value.id == "dmuon"}
    assert names and names <= {*dmuon.__all__}, names


def test_every_file_keeps_its_size_promise():
    """Tokens without comments and docstrings; lines of 100 columns; docstrings of 40 lines."""
    tokens = {name: code_tokens(HERE / name) for name in CODE}
    for name in CODE:
        lines = (HERE / name).read_text().splitlines()
        assert f"| `{name}` | {tokens[name]:,} |" in README, (name, tokens[name])
        assert [line for line in lines if len(line) > 100] == [], name
        documentation = ast.get_docstring(ast.parse("\n".join(lines)), clean=False)
        assert len(documentation.splitlines()) <= 40, name
    assert "@@" not in README
    assert sum(tokens.values()) <= 39_000
