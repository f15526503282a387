"""Train a GPT with dedicated ownership, from raw text to a sample: the one training script.

    torchrun --nproc_per_node=8 train_gpt.py                   # any number of ranks, CPU or CUDA
    python train_gpt.py                                        # one process, no launcher
    torchrun --nproc_per_node=8 train_gpt.py --optimizer=adamw # the base line: FSDP2 and AdamW
    torchrun --nproc_per_node=8 train_gpt.py --data=book.txt   # your text, a folder, GPT-2 tokens
    torchrun --nproc_per_node=8 train_gpt.py --replicate=2 --tp=2  # a 2 x 2 x 2 mesh
    torchrun --nproc_per_node=8 --max-restarts=2 train_gpt.py --save_every=100  # survives kills
    torchrun --nproc_per_node=4 train_gpt.py --bench           # what ownership saves
    torchrun --nproc_per_node=8 train_gpt.py --replicate=2 --tp=2 --verify  # is this layout exact?

Before this file: dmuon.py, which it uses as your own trainer would (see `distribute`). After it:
test_dmuon.py. The order here: settings, data, model, optimizer, loop, what a run prints,
evaluation, verify, bench, main.

The default data are the names of the Unicode characters, one a line, which Python itself contains:
355 kB, learned to a legible sample in a few minutes on two cores. It is small, so a large model
overfits.

The same seed gives the same weights and the same batches on any number of ranks: every rank builds
the whole model from the seed, draws the whole step's batch from (seed, step), and keeps its slice.
In float64, 1, 2, 4 and 8 ranks on any mesh log the same losses to ten digits. (3 ranks cannot share
the default batch equally: theirs has 1,152 tokens.)
"""

import argparse
import glob
import hashlib
import json
import math
import os
import random
import re
import signal
import sys
import time
import unicodedata
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import dmuon
from newton_schulz import adjusted_lr, equal_shapes, local, muon_update, orthogonalise
from partition import ns_flops, step_traffic

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# Dense bfloat16, for MFU
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
UNICODE_SHA256 = "b6f666dd7e364b61"  # of the default corpus on CPython 3.8 to 3.13
TIMEOUT = timedelta(minutes=5)  # of a collective: a rank that hangs ends the run
# Width, layers, T, B a rank
BENCH_MODELS = {"toy": "128,4,128,1", "small": "512,6,256,4", "gpt2": "768,12,1024,16"}
BENCH_HEAD = (
    f"{'':24}    step     to  optim.      NS  NS to  elements that a rank sends    Muon    peak\n"
    f"{'':24}      ms  AdamW      ms      ms     mm       counted       formula     MiB     MiB"
)
EVAL_WINDOWS = 128  # held-out sequences; rounded up to a multiple of ranks x device_batch_size


class UsageError(ValueError):
    """What the user can mend, an option or a file, in one line.

    Whatever can be seen at the start is raised there.
    """


# --------------------------------------------------------------------------------------- settings


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        # `record` shows an exception under torchrun, an exit code it does not
        raise UsageError(message)


class Settings(argparse.Namespace):
    """The options, and what follows from them and the number of ranks."""

    ranks = 1

    @property
    def data_ranks(self) -> int:
        """Ranks that have data of their own."""
        return self.ranks // self.tp

    @property
    def shard(self) -> int:
        """Ranks of a row of the data-parallel mesh."""
        return self.data_ranks // self.replicate

    @property
    def micro_steps(self) -> int:
        return self.total_batch_size // (self.data_ranks * self.device_batch_size * self.seq_len)

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward; the products of the attention come last."""
        matrices = 12 * self.depth * self.n_embd**2 + self.vocab_size * self.n_embd
        return 6 * matrices + 12 * self.depth * self.n_embd * self.seq_len

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard} x tp {self.tp}"

    def but(self, **changes: object) -> "Settings":
        return Settings(**{**vars(self), **changes})

    def fill(self, **values: object) -> None:
        """Give options that are 'auto' their values."""
        for name, value in values.items():
            if getattr(self, name) == "auto":
                setattr(self, name, value)


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: an int or float in [low, high]."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if low <= value <= high and value < math.inf:
            return value
        bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise argparse.ArgumentTypeError(f"{text}: must be {kind.__name__} {bounds}")

    return convert


def auto(text: str) -> int | str:
    """An argparse type: an int of at least 1, or 'auto'."""
    if text == "auto":
        return text
    try:
        return number(int, 1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from error


share, rate = number(float, 0, 1), number(float, 0)

# name: (default, type or choices, what it is); bool: a flag
OPTIONS = {
    "data": {
        "data": ("unicode", str, "'unicode', a text file, a .bin file, a folder or a glob, e.g. "
                 "--data='books/*.txt'"),
        "vocab_size": ("auto", auto, "tokens in the vocabulary; auto: 256 for bytes, 50304 for "
                       ".bin"),
        "seq_len": ("auto", auto, "tokens in a sequence; auto: 128 on CPU, 1024 on CUDA"),
    },
    "model, e.g. --depth=6": {
        "depth": ("auto", auto, "layers; auto: 4 on CPU, 12 on CUDA"),
        "n_embd": ("auto", auto, "width; auto: 32 x depth on CPU, 64 x depth on CUDA"),
        "n_head": ("auto", auto, "attention heads; auto: depth"),
    },
    "batch, e.g. --total_batch_size=8192 --device_batch_size=4": {
        "total_batch_size": ("auto", auto, "tokens in a step over all ranks; auto: 1024 (CUDA: "
                             "524288) or just above"),
        "device_batch_size": ("auto", auto, "sequences a rank takes through the model at once; "
                              "auto: at most 32"),
        "steps": ("auto", auto, "optimizer steps; auto: 400 on CPU, 1000 on CUDA; rounds of "
                  "--bench, auto: 5"),
    },
    "optimizer, e.g. --muon_lr=0.01 --ns=direct": {
        "optimizer": ("muon", ("muon", "adamw", "naive"), "muon: matrices by Muon, the rest by "
                      "AdamW; adamw: all by AdamW; naive: as muon, but without owners"),
        "muon_lr": (0.02, rate, "rate of the matrices, before --adjust_lr_fn"),
        "adamw_lr": (3e-3, rate, "rate of what AdamW trains"),
        "weight_decay": (0.0, rate, "decoupled weight decay of the matrices (adamw: of "
                         "everything)"),
        "momentum": (0.95, number(float, 0, 0.9999), "Muon's momentum"),
        "ns": ("gram", ("gram", "direct"), "Newton-Schulz on the Gram matrix or directly"),
        "adjust_lr_fn": ("match_rms_adamw", ("match_rms_adamw", "original"), "how a matrix's shape "
                         "scales its rate"),
        "grad_clip": (1.0, rate, "largest norm of the whole gradient; 0: no clipping"),
    },
    "schedule, one multiplier for both rates, e.g. --warmup_frac=0.05": {
        "warmup_frac": (0.0, share, "fraction of the steps that rise from 0"),
        "decay_frac": (0.4, share, "fraction of the steps that fall at the end"),
        "final_lr_frac": (0.0, share, "where the fall ends, as a fraction of the rate"),
    },
    "parallel, e.g. --replicate=2 --tp=2: ranks form a mesh, replicate x shard x tp": {
        "replicate": (1, number(int, 1), "HSDP: replicas of the group of ranks that shards the "
                      "model"),
        "tp": (1, number(int, 1), "tensor parallelism: ranks that cut each matrix; divides n_head"),
        "replicate_async": (1, (1, 0), "1: new weights travel behind AdamW and the next forward; "
                            "0: within the step"),
        "zero": (3, (3, 2), "3: free full weights after the forward; 2: keep them for the "
                 "backward"),
    },
    "memory and speed, e.g. --activation_checkpointing --compile": {
        "activation_checkpointing": (False, bool, "recompute each layer in the backward instead of "
                                     "keeping its tensors"),
        "compile": (False, bool, "torch.compile each layer"),
    },
    "instead of training, e.g. --bench --bench_model=768,12,1024,8": {
        "bench": (False, bool, "time AdamW, naive Muon and DMuon in turns, beside what they send "
                  "and hold"),
        "bench_model": ("auto", str, f"width,layers,T,B or {', '.join(BENCH_MODELS)}; auto: small, "
                        "on CUDA gpt2"),
        "verify": (False, bool, "three float64 steps of this layout against one process, which "
                   "every rank repeats"),
    },
    "run, e.g. --dtype=float64 --out=check --save_every=50": {
        "out": ("out", str, "folder of log.jsonl and of the checkpoints"),
        "save_every": (0, number(int, 0), "steps between checkpoints; also saves at the end; 0: "
                       "only on a signal"),
        "keep": (2, number(int, 1), "newest checkpoints to keep; older ones in --out are deleted"),
        "resume": ("auto", str, "auto: the newest checkpoint in --out, if any; none; or a path to "
                   "one, or to a folder"),
        "eval_every": (100, number(int, 0), "steps between evaluations; 0: only at the end"),
        "sample_every": (0, number(int, 0), "steps between samples; 0: only at the end"),
        "log_every": (10, number(int, 1), "steps between printed lines"),
        "seed": (0, number(int, 0, 2**31), "of weights and batches"),
        "profile": ("", str, "folder for torch.profiler's traces, one a rank, from the optimizer "
                    "of step 3 to that of step 6, for ui.perfetto.dev"),
        "dtype": ("auto", ("auto", *DTYPES), "bfloat16: compute, on float32 weights; auto: "
                  "float32, on CUDA bfloat16"),
        "device": ("auto", ("auto", "cpu", "cuda"), "auto: cuda if there is one"),
    },
}


def parse(argv: list[str] | None = None) -> Settings:
    """The options as given; `resolve` fills in what depends on the device and the ranks."""
    parser = Parser(
        description="Train a GPT: Muon with one owner per matrix, FSDP2 and AdamW for the rest.",
        epilog="example: torchrun --nproc_per_node=4 train_gpt.py --data=book.txt --depth=6 "
        "--steps=2000", allow_abbrev=False)
    for title, options in OPTIONS.items():
        section = parser.add_argument_group(title)
        for name, (default, kind, text) in options.items():
            if kind is bool:
                how = dict(action="store_true")
            elif isinstance(kind, tuple):
                how = dict(choices=kind, type=type(kind[0]))
            else:
                how = dict(type=kind, metavar="X")
            section.add_argument(f"--{name}", default=default, help=f"{text} [{default}]", **how)
    return parser.parse_args(argv, Settings())


def resolve(args: Settings, ranks: int) -> Settings:
    """Replace every 'auto' by its value for this device and number of ranks.

    Raises:
        UsageError: options do not fit together; names the option, its value, the arithmetic and the
            nearest legal values.
    """
    args.ranks = ranks
    gpus, local_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and gpus < local_ranks:
        raise UsageError(f"--device cuda: {local_ranks} local ranks and {gpus} CUDA devices; use "
                         "--device=cpu")
    args.fill(device="cuda" if gpus >= local_ranks else "cpu")
    cuda = args.device == "cuda"
    if sum(map(bool, (args.bench, args.verify, args.profile))) > 1:
        raise UsageError("--bench, --verify and --profile: choose one of them")
    if args.bench:
        _resolve_bench(args)
    if args.verify:
        if args.dtype not in ("auto", "float64"):
            raise UsageError(f"--dtype {args.dtype}: --verify is in float64")
        args.dtype = "float64"
    if args.optimizer == "naive" and args.tp > 1:
        raise UsageError(f"--optimizer naive --tp {args.tp}: it knows no tensor parallelism; tp "
                         "may be 1")
    args.fill(dtype="bfloat16" if cuda else "float32", seq_len=1024 if cuda else 128,
              depth=12 if cuda else 4, steps=1000 if cuda else 400)
    args.fill(n_embd=(64 if cuda else 32) * args.depth, n_head=args.depth)
    _check_mesh(args)
    _resolve_batch(args)
    return args


def _resolve_bench(args: Settings) -> None:
    """`--bench` chooses the model and the batch itself."""
    args.fill(bench_model="gpt2" if args.device == "cuda" else "small", steps=5)
    numbers = BENCH_MODELS.get(args.bench_model, args.bench_model)
    if not re.fullmatch(r"(?!0)\d*[02468](,[1-9]\d*){3}", numbers) or args.tp > 1:
        raise UsageError(f"--bench_model {args.bench_model} --tp {args.tp}: expected four numbers, "
                         "width,layers,T,B with an even width, or one of "
                         f"{', '.join(BENCH_MODELS)}, and tp 1")
    width, depth, seq_len, sequences = map(int, numbers.split(","))
    heads = max(n for n in range(1, max(2, width // 64 + 1)) if width % (2 * n) == 0)
    model = dict(n_embd=width, depth=depth, n_head=heads, seq_len=seq_len,
                 device_batch_size=sequences, total_batch_size=args.ranks * sequences * seq_len)
    for name in (*model, "optimizer", "zero"):
        if getattr(args, name) not in ("auto", "muon", 3):  # what they are if nobody gave them
            raise UsageError(f"--{name} {getattr(args, name)}: --bench has its own, and its model "
                             "is --bench_model")
    args.fill(**model)


def _check_mesh(args: Settings) -> None:
    """The ranks must form the mesh, and the heads fit the width and the tensor parallelism."""
    if args.n_embd % 2:
        raise UsageError(f"--n_embd {args.n_embd}: must be even, a multiple of 2 x n_head")
    if args.n_embd % (2 * args.n_head):
        legal = [n for n in range(1, args.n_embd) if args.n_embd % (2 * n) == 0]
        raise UsageError(f"--n_head {args.n_head}: 2 x it must divide --n_embd {args.n_embd}; "
                         f"n_head may be {legal}")
    for name, taken in (("replicate", 1), ("tp", args.replicate)):
        legal = [n for n in range(1, args.ranks + 1) if args.ranks % (n * taken) == 0]
        rule = f"replicate x shard x tp must be {args.ranks}"
        if name == "tp":
            legal = [n for n in legal if args.n_head % n == 0]
            rule += f", and --n_head {args.n_head} a multiple of tp"
        if getattr(args, name) not in legal:
            raise UsageError(f"--{name} {getattr(args, name)} with {args.ranks} ranks: {rule}; "
                             f"{name} may be {', '.join(map(str, legal))}")


def _resolve_batch(args: Settings) -> None:
    """The step's tokens must be the same number of whole micro-batches on every rank."""
    sequences = 1 if args.device_batch_size == "auto" else args.device_batch_size
    unit = args.data_ranks * args.seq_len * sequences
    args.fill(total_batch_size=-(-(524288 if args.device == "cuda" else 1024) // unit) * unit)
    if args.total_batch_size % unit:
        low = args.total_batch_size // unit * unit
        nearest = ", ".join(str(n) for n in (low, low + unit) if n)
        ranks = "ranks / tp" if args.tp > 1 else "ranks"
        raise UsageError(f"--total_batch_size {args.total_batch_size}: must be a multiple of "
                         f"{ranks} x device_batch_size x seq_len = {args.data_ranks} x {sequences} "
                         f"x {args.seq_len} = {unit}; nearest: {nearest}")
    per_rank = args.total_batch_size // (args.data_ranks * args.seq_len)
    fits = [size for size in range(1, min(32, per_rank) + 1) if per_rank % size == 0]
    args.fill(device_batch_size=max(fits))


# ------------------------------------------------------------------------------------------- data


def unicode_names() -> bytes:
    """The names of Unicode 3.2's characters, one a line, shuffled.

    They are the same bytes on CPython 3.8 to 3.13.
    """
    ideographs = ("CJK UNIFIED IDEOGRAPH-", "CJK COMPATIBILITY IDEOGRAPH-", "HANGUL SYLLABLE ")
    names = [unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(sys.maxunicode + 1)]
    names = [name for name in names if name and not name.startswith(ideographs)]
    random.Random(0).shuffle(names)
    return "\n".join(names).encode()


class Split:
    """Token files as one stream of windows; nothing is read before it is asked for.

    Args:
        files: (name, tokens, offset of the first in the file), tokens (n,) uint8 or uint16, mapped
            from disk.
        seq_len: T; a window is T + 1 tokens of one file.
        vocab_size: tokens must be below it.
    """

    def __init__(self, files: list[tuple[str, Tensor, int]], seq_len: int, vocab_size: int):
        self.files, self.seq_len, self.vocab_size = files, seq_len, vocab_size
        self.ends, self.windows = [], 0  # windows up to and including each file
        for name, tokens, _ in files:
            if len(tokens) <= seq_len:
                raise UsageError(f"--data: '{name}' gives one split {len(tokens)} tokens, fewer "
                                 f"than one sequence of --seq_len {seq_len} and its target")
            self.windows += len(tokens) - seq_len
            self.ends.append(self.windows)
        self.numel = sum(len(tokens) for _, tokens, _ in files)

    def window(self, start: int) -> Tensor:
        """Window number `start`: (T + 1,) int64."""
        index = bisect_right(self.ends, start)
        name, tokens, offset = self.files[index]
        start -= self.ends[index - 1] if index else 0
        window = tokens[start : start + self.seq_len + 1].to(torch.int64)
        outside = (window >= self.vocab_size).nonzero()
        if len(outside):  # here, where the place is known; the embedding only says 'index'
            position = outside[0].item()
            raise UsageError(f"--data: '{name}' has token {window[position].item()} at position "
                             f"{offset + start + position}, outside the vocabulary; --vocab_size "
                             f"is {self.vocab_size}")
        return window

    def batches(self, starts: Tensor, rank: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
        """One rank's inputs and targets (B, T) from starts (batches, ranks, B).

        All ranks read all windows, so that all of them find what is wrong.
        """
        windows = [self.window(start) for start in starts.flatten().tolist()]
        for window in torch.stack(windows).view(*starts.shape, -1)[:, rank].to(device):
            yield window[:, :-1], window[:, 1:]


@dataclass
class Corpus:
    name: str
    train: Split
    val: Split
    vocab_size: int
    is_text: bool
    sha256: str  # of the first 2^20 tokens of each file: tells two runs' data apart


def load_corpus(args: Settings) -> Corpus:
    """The data that `--data` names, split into training and held-out files.

    Raises:
        UsageError: nothing there, an empty or too short file, an unknown format, text and .bin
            mixed.
    """
    if args.data == "unicode":
        names = torch.frombuffer(bytearray(unicode_names()), dtype=torch.uint8)
        train, val = _cut("the Unicode names", names, 0)
    else:
        train, val = _split_files(args.data)
    is_text = train[0][1].dtype == torch.uint8
    digest = hashlib.sha256()
    for _, tokens, _ in train + val:
        if (tokens.dtype == torch.uint8) != is_text:
            raise UsageError(f"--data {args.data}: text and .bin files together; name one kind")
        digest.update(tokens[: 1 << 20].view(torch.uint8).numpy())
    args.fill(vocab_size=256 if is_text else 50304)
    train, val = (Split(files, args.seq_len, args.vocab_size) for files in (train, val))
    return Corpus(args.data, train, val, args.vocab_size, is_text, digest.hexdigest()[:16])


def _cut(name: str, tokens: Tensor, offset: int) -> tuple[list, list]:
    """The only file's last tenth is held out."""
    middle = len(tokens) - len(tokens) // 10
    return [(name, tokens[:middle], offset)], [(name, tokens[middle:], offset + middle)]


def _split_files(data: str) -> tuple[list, list]:
    """By names, if there are both `*train*` and `*val*`; else the last tenth of the files."""
    if os.path.isdir(data):
        paths = sorted(Path(data).iterdir())
    else:  # a name with brackets in it is a glob that matches nothing
        paths = [Path(path) for path in sorted(glob.glob(data)) or [data]]
    paths = [path for path in paths if path.is_file() and path.suffix != ".pkl"
             and not path.name.startswith(".")]
    if not paths:
        raise UsageError(f"--data {data}: no such file, and no folder or glob with files in it")
    if len(paths) == 1:
        return _cut(str(paths[0]), *read_tokens(paths[0]))
    train, val = ([path for path in paths if word in path.name] for word in ("train", "val"))
    if not (train and val):
        held_out = max(1, len(paths) // 10)
        train, val = paths[:-held_out], paths[-held_out:]
    return tuple([(str(path), *read_tokens(path)) for path in files] for files in (train, val))


def read_tokens(path: Path) -> tuple[Tensor, int]:
    """A file's tokens, mapped from disk, and the position of the first one.

    Text is bytes (uint8), .bin files are those of nanoGPT or llm.c (uint16).

    Raises:
        UsageError: names the file and what is wrong with it.
    """
    size, problem = path.stat().st_size, None
    if size == 0:  # `torch.from_file` would return a tensor of nothing without a word
        raise UsageError(f"--data: '{path}' is empty")
    data = torch.from_file(str(path), size=size, dtype=torch.uint8)
    if path.suffix != ".bin":
        if (data[:4096] == 0).any():
            raise UsageError(f"--data: '{path}' is neither text (it has a zero byte) nor a .bin "
                             "token file")
        return data, 0
    header = [0, 0, 0]
    if size >= 4:
        header = (data[: min(12, size // 4 * 4)].view(torch.int32).tolist() + header)[:3]
    magic, version, tokens = header
    if magic == 20240520:
        if version != 1 or size != 1024 + 2 * tokens:
            problem = (f"is a broken llm.c file: version {version}, {tokens} tokens, {size} bytes; "
                       f"expected version 1 and 1024 + 2 x tokens = {1024 + 2 * tokens} bytes")
        data = data[1024:]
    elif 20240000 <= magic < 20250000:
        problem = (f"has llm.c's magic {magic} (uint32 tokens, an evaluation set); only its uint16 "
                   "token files, magic 20240520, and nanoGPT's can be read")
    if size % 2 and problem is None:
        problem = f"has {size} bytes, an odd number; a .bin file holds uint16 tokens"
    if problem:
        raise UsageError(f"--data: '{path}' {problem}")
    return data.view(torch.uint16), 0


def batches(corpus: Corpus, args: Settings, step: int,
            rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's micro-batches of a step: inputs and targets (B, T).

    It is the rank's slice of the windows that every rank draws alike from (seed, step). The ranks
    of a tensor-parallel group are neighbours and get the same slice.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    shape = (args.micro_steps, args.data_ranks, args.device_batch_size)
    starts = torch.randint(corpus.train.windows, shape, generator=generator)
    return corpus.train.batches(starts, rank // args.tp, args.device)


# ------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    """One layer: attention with rotated, normalised queries and keys, then a squared-ReLU MLP."""

    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.head_width = n_embd // n_head
        self.attention_norm, self.mlp_norm = nn.RMSNorm(n_embd), nn.RMSNorm(n_embd)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(n_embd, n_embd, bias=False))
        self.up_proj = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # (B, T, C)
        return x + self.down_proj(F.relu(self.up_proj(self.mlp_norm(x))).square())

    def attention(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (projection(x).view(B, T, -1, self.head_width).transpose(1, 2)
                   for projection in (self.q_proj, self.k_proj, self.v_proj))
        # (B, n_head / tp, T, D)
        q, k = (rotate(F.rms_norm(heads, heads.shape[-1:])) for heads in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (RoPE) of x (B, n_head, T, D).

    Pairs of elements turn by an angle that grows with the position.
    """
    T, D = x.shape[-2:]
    pairs, positions = (torch.arange(0, n, step, device=x.device, dtype=torch.float64)
                        for n, step in ((D, 2), (T, 1)))
    angles = torch.outer(positions, 10000.0 ** -(pairs / D))  # (T, D / 2)
    wide = torch.promote_types(x.dtype, torch.float32)  # positions do not fit 16 bits
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1).to(x.dtype)


class GPT(nn.Module):
    """Decoder-only transformer: RoPE, RMSNorm, QK-norm without weight, no biases, an untied head.

    `forward(tokens)`: tokens (B, T) int64 -> logits (B, T, vocab_size).
    """

    def __init__(self, vocab_size: int, depth: int, n_embd: int, n_head: int,
                 recompute: bool = False):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(Block(n_embd, n_head) for _ in range(depth))
        self.norm = nn.RMSNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # (B, T, C)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))  # (B, T, vocab_size)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; tokens and targets (B, T)."""
    logits = model(tokens)
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(args: Settings, vocab_size: int) -> GPT:
    """The whole model on every rank, from the seed alone."""
    torch.manual_seed(args.seed)
    model = GPT(vocab_size, args.depth, args.n_embd, args.n_head, args.activation_checkpointing)
    return model.to(args.device, torch.float64 if args.dtype == "float64" else torch.float32)


def distribute(model: GPT, mesh: DeviceMesh, args: Settings) -> None:
    """What a trainer adds for DMuon is `dedicate_params`; the rest is torch's, as ever."""
    if args.tp > 1:
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "up_proj")}
        plan |= {name: RowwiseParallel() for name in ("o_proj", "down_proj")}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    if args.compile:
        for layer in model.layers:
            layer.compile()
    mesh = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    how = dict(reshard_after_forward=args.zero == 3)
    if args.dtype == "bfloat16":
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if args.optimizer == "muon":
        dmuon.dedicate_params(model, mesh, **how)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **how)


# -------------------------------------------------------------------------------------- optimizer


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """Whether Muon trains it."""
    return name.startswith("layers.") and p.ndim == 2


def whole(tensor: Tensor) -> Tensor:
    """A collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class NaiveMuon(torch.optim.Optimizer):
    """Muon without owners: every rank gathers every matrix and runs all of Newton-Schulz.

    That is N times what is needed. It takes a model that FSDP2 alone has sharded, or a plain one:
    the reference of `verify`.
    """

    def __init__(self, model: GPT, args: Settings):
        matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
        others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
        self.args = args
        self.adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
        super().__init__([{"params": matrices, "lr": args.muon_lr}], {})
        self.add_param_group({**self.adamw.param_groups[0], "lr": args.adamw_lr})

    @torch.no_grad()
    def step(self) -> None:
        muon, adamw = self.param_groups
        lr, args = muon["lr"], self.args
        # Batches by the whole shape: that FSDP2 has cut the matrices does not matter here
        whole_of = {p.new_empty((), device="cpu").expand(p.shape): p for p in muon["params"]}
        for batch in equal_shapes(whole_of):
            batch = [whole_of[shape] for shape in batch]
            for p in batch:
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            momenta = [self.state[p]["momentum_buffer"] for p in batch]
            directions = muon_update([p.grad for p in batch], momenta, args.momentum, True)
            gathered = [*map(whole, directions)]  # (m, n) on every rank
            updates = orthogonalise(gathered, args.ns, dmuon.POLAR_EXPRESS_COEFFICIENTS)
            for p, update in zip(batch, updates):
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements,
                                               src_data_rank=None)
                adjusted = adjusted_lr(lr, args.adjust_lr_fn, *p.shape)
                p.mul_(1 - lr * args.weight_decay).add_(update, alpha=-adjusted)
        self.adamw.param_groups, self.adamw.state = [adamw], self.state
        self.adamw.step()


def make_optimizer(model: GPT, args: Settings) -> torch.optim.Optimizer:
    if args.optimizer == "naive":
        return NaiveMuon(model, args)
    if args.optimizer == "adamw":  # a foreach operation takes one mesh
        return torch.optim.AdamW(model.parameters(), args.adamw_lr, (0.9, 0.95),
                                 weight_decay=args.weight_decay, foreach=args.tp == 1)
    return dmuon.Muon(model, args.muon_lr, args.momentum, weight_decay=args.weight_decay,
                      ns_backend=args.ns, adjust_lr_fn=args.adjust_lr_fn, adamw_lr=args.adamw_lr,
                      replicate_async=bool(args.replicate_async))


def multiplier(args: Settings, step: int) -> float:
    """Of both rates at a step: up, flat, down to `final_lr_frac`, linearly."""
    rise = (step + 1) / max(1, args.warmup_frac * args.steps)
    fall = min(1.0, (args.steps - step) / max(1, args.decay_frac * args.steps))
    return min(1.0, rise, args.final_lr_frac + (1 - args.final_lr_frac) * fall)


# ------------------------------------------------------------------------------------------- loop


def train(model: GPT, optimizer: torch.optim.Optimizer, corpus: Corpus, args: Settings, log: "Log",
          done: int) -> None:
    """Steps `done` + 1 to `args.steps`, with what is due after each of them."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # preemption, Ctrl-C; torchrun passes them on
        signal.signal(number, lambda number, _: signals.append(number))
    rates = [group["lr"] for group in optimizer.param_groups]
    report(model, corpus, args, log, done)  # a run that was killed may not have come to it
    last = None  # moments of the step before
    bar = tqdm(total=args.steps, initial=done, disable=not log.shows_bar, leave=False)
    with bar, profiler(optimizer, args, log, done):
        for step in range(done + 1, args.steps + 1):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * multiplier(args, step - 1)
            micro_batches = batches(corpus, args, step, dist.get_rank())
            loss, norm, stops, moments = train_step(model, optimizer, micro_batches, args, step,
                                                    signals)
            ended = moments if args.device == "cpu" else last  # on CUDA this one may still run
            log.step(args, step, loss, norm, optimizer.param_groups[0]["lr"],
                     milliseconds(*moments[:2]), milliseconds(*ended[1:]) if ended else 0.0)
            last = moments
            bar.update()
            with phase(step, "checkpoint and evaluation"):
                is_due = args.save_every and (step == args.steps or step % args.save_every == 0)
                if stops or is_due:
                    path = dmuon.save_checkpoint(args.out, model, optimizer, step, args.keep)
                if stops:
                    log.print(f"stopped by a signal after step {step}, saved {path}; "
                              "--resume=auto goes on")
                    return
                report(model, corpus, args, log, step)
    if log.losses:
        log.print("loss\n" + loss_curve(log.losses))


def train_step(model: GPT, optimizer: torch.optim.Optimizer, micro_batches: Iterator,
               args: Settings, step: int,
               signals: list[int]) -> tuple[float, float, bool, list]:
    """One step on this rank's micro-batches.

    The host waits for the device once, after clipping, and so not for what the optimizer leaves in
    flight.

    Returns:
        The mean loss over ranks and micro-batches, the norm of the gradient, whether a rank has a
        signal, and three moments: the start, the end of the backward, the end of the optimizer.
    """
    moments = [moment(args.device)]
    optimizer.zero_grad()
    with phase(step, "forward and backward"):
        total = torch.zeros(2, dtype=torch.float64, device=args.device)
        total[0] = forward_backward(model, micro_batches, args)
        total[1] = len(signals)
        dist.all_reduce(total)
    moments.append(moment(args.device))
    with phase(step, "optimizer"):
        norm = dmuon.clip_grad_norm_(model, args.grad_clip or math.inf)
        loss, stops, norm = torch.hstack([total, norm]).tolist()
        loss /= args.ranks
        if not math.isfinite(loss + norm):  # the same on all ranks; a step would spoil the weights
            raise UsageError(f"step {step}: loss {loss}, gradient norm {norm}, first in "
                             f"{first_not_finite(model)}; checkpoints are as they were; try a "
                             "lower --muon_lr or --adamw_lr")
        optimizer.step()
    moments.append(moment(args.device))
    return loss, norm, stops > 0, moments


def forward_backward(model: GPT, micro_batches: Iterator, args: Settings) -> Tensor:
    """This rank's mean loss over its micro-batches; gradients are averaged over the ranks."""
    total = torch.zeros((), dtype=torch.float64, device=args.device)
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        # Z2 reduces once a step; Z3 after each micro-batch, which saves memory instead
        waits = args.optimizer == "muon" and args.zero == 2 and i < args.micro_steps
        with dmuon.no_sync(model) if waits else nullcontext():
            loss = loss_of(model, tokens, targets) / args.micro_steps
            loss.backward()
        total += loss.detach()
    return total


def first_not_finite(model: GPT) -> str:
    """The first parameter whose gradient is not finite; the loss may not be, and all of them."""
    norms = dmuon.grad_norms(model)
    return next((name for name, norm in norms.items() if not norm.isfinite()), "no gradient")


@contextmanager
def phase(step: int, name: str) -> Iterator[None]:
    """What fails on the way, a collective say, is told with its step."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"step {step}, {name}: {error}") from error


def moment(device: str):
    """Where the rank's work is now: a time on CPU, an event on CUDA, for which nobody waits."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end) -> float:
    """Between two moments that are over."""
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def profiler(optimizer: torch.optim.Optimizer, args: Settings, log: "Log", done: int):
    """torch.profiler on three steps of this run, if `--profile` asks for it.

    It goes from one optimizer's step to another, where no collective is in flight: torch writes the
    end of one that outlives the profiler into freed memory.
    """
    if not args.profile:
        return nullcontext()
    if args.steps - done < 6:
        log.print(f"--profile {args.profile}: nothing is traced; this run has less than six steps")
        return nullcontext()
    try:
        os.makedirs(args.profile, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--profile {args.profile}: cannot write there: {error}") from error
    path = os.path.join(args.profile, f"rank{dist.get_rank()}.json")
    trace = profile(schedule=schedule(wait=2, warmup=1, active=3, repeat=1),
                    on_trace_ready=lambda trace: trace.export_chrome_trace(path))
    optimizer.register_step_pre_hook(lambda *_: trace.step())
    return trace


def resume(model: GPT, optimizer: torch.optim.Optimizer, args: Settings, log: "Log") -> int:
    """Steps that are done, of the checkpoint that `--resume` names, if any.

    The options of the optimizer's groups are those of the command line.
    """
    step, given = 0, [dict(group) for group in optimizer.param_groups]
    found = on_rank_0(lambda: [path.suffix for path in Path(args.out).glob("step_*")])
    # torchrun starts a run that was killed again, with the same command
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    auto, place = args.resume == "auto" or is_restart and bool(found), Path(args.resume).resolve()
    same_run = auto or Path(args.out).resolve() in (place, place.parent)
    if found and not same_run:
        raise UsageError(f"--resume {args.resume}: --out {args.out} has checkpoints of another "
                         "run, which --keep would delete; choose another --out")
    if found if auto else args.resume != "none":
        try:
            source = args.out if auto else args.resume
            step = dmuon.load_checkpoint(source, model, optimizer)
        except (FileNotFoundError, ValueError) as error:
            # A run that was killed while it wrote its first checkpoint begins anew
            only_torn = isinstance(error, FileNotFoundError) and {*found} == {".part"}
            if not (auto and only_torn):
                way_out = "name another checkpoint, or a folder of them"
                if auto:
                    way_out = "another --out starts anew"
                raise UsageError(f"--resume {args.resume}: {error}; {way_out}") from error
            log.print(str(error))
        nothing = ""
        if step >= args.steps:
            nothing = (": nothing is left to do; more --steps go on, another --out starts anew")
        log.print(f"resume after step {step} of {args.steps}{nothing}")
    for group, options in zip(optimizer.param_groups, given):
        group.update(options)
    log.rewind(step, keep=same_run)
    return step


# -------------------------------------------------------------------------------- what a run prints


def gathered(value: object) -> list:
    """Every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_0(function: Callable[[], object]) -> object:
    """What the function returns there, or raises there, on every rank."""
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [function()]
        except Exception as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


class Log:
    """Rank 0 prints and writes `log.jsonl`: first the run's settings, then a record a step."""

    def __init__(self, args: Settings, name: str = "log.jsonl"):
        self.path, self.is_first = Path(args.out, name), dist.get_rank() == 0
        self.shows_bar = self.is_first and sys.stderr.isatty()
        self.started, self.done, self.losses = time.perf_counter(), 0, []
        try:
            on_rank_0(self._open)
        except (OSError, ValueError) as error:
            raise UsageError(f"--out {args.out}: cannot write {name} there: {error}") from error

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open(self.path, "a").close()

    def rewind(self, step: int, keep: bool) -> None:
        """Keep this run's records of steps that are done; of another run none."""
        self.started, self.done = time.perf_counter(), step

        def rewrite() -> list[float]:
            records = []
            for line in self.path.read_text().splitlines() if step and keep else []:
                with suppress(ValueError):  # torn by a kill, or by another run in the same folder
                    records.append(json.loads(line))
            # An evaluation after the step comes again
            records = [r for r in records if r.get("step", 0) < step + ("loss" in r)]
            beside = self.path.with_suffix(".part")  # a run that is killed here has the old log
            beside.write_text("".join(json.dumps(record) + "\n" for record in records))
            beside.replace(self.path)
            return [record["loss"] for record in records if "loss" in record]

        self.losses = on_rank_0(rewrite)

    def print(self, text: str) -> None:
        if self.is_first:
            tqdm.write(text)
            sys.stdout.flush()

    def write(self, **values) -> None:
        if self.is_first:
            with open(self.path, "a") as file:
                file.write(json.dumps(values) + "\n")

    def step(self, args: Settings, step: int, loss: float, norm: float, lr: float,
             model_ms: float, optimizer_ms: float) -> None:
        """A record for every step, a line for the first, every `log_every`-th and the last."""
        self.losses.append(loss)
        step_ms, tokens = model_ms + optimizer_ms, args.total_batch_size
        self.write(step=step, loss=loss, norm=norm, lr=lr, tokens=step * tokens,
                   step_ms=round(step_ms, 2))
        if step % args.log_every and step not in (1, args.steps):
            return
        seconds_a_step = (time.perf_counter() - self.started) / (step - self.done)
        line = (f"step {step:5d}/{args.steps} | loss {loss:.3f} | norm {norm:5.2f} | lr {lr:.4f} | "
                f"{step_ms:.0f} ms (fwd+bwd {model_ms:.0f}, opt {optimizer_ms:.0f}) | "
                f"{1000 * tokens / step_ms:,.0f} tok/s")
        if args.device == "cuda":
            name, achieved = torch.cuda.get_device_name(), args.flops_per_token * tokens / step_ms
            for key, peak in PEAK_FLOPS.items():
                if key in name:
                    line += f" | mfu {1000 * achieved / args.ranks / peak:.1%}"
            line += f" | mem {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        self.print(f"{line} | eta {seconds_a_step * (args.steps - step) / 60:.1f} min")


def describe(model: GPT, corpus: Corpus, args: Settings) -> Iterator[str]:
    """The start-up block, before sharding: where it runs, what it trains, what a step is."""
    yield (f"run    {args.ranks} x {args.device} ({torch.cuda.device_count()} CUDA devices for "
           f"{os.environ.get('LOCAL_WORLD_SIZE', 1)} local ranks), {dist.get_backend()}, "
           f"{args.dtype}, torch {torch.__version__}")
    yield f"mesh   {args}"
    yield (f"data   {corpus.name}: {corpus.train.numel:,} tokens to train, {corpus.val.numel:,} "
           f"held out, vocabulary {corpus.vocab_size}, sha256 {corpus.sha256}")
    if args.data == "unicode" and corpus.sha256 != UNICODE_SHA256:
        yield ("       this Python's Unicode names are not those that the README's losses were "
               "made with")
    total = sum(p.numel() for p in model.parameters())
    yield (f"model  {args.depth} layers, width {args.n_embd}, {args.n_head} heads, {total:,} "
           "parameters")
    families = {"Muon": [], "AdamW": []}
    for name, p in model.named_parameters():
        by_muon = args.optimizer != "adamw" and is_matrix(name, p)
        kind = f"{re.sub(r'[.][0-9]+[.]', '.*.', name)} {'x'.join(map(str, p.shape))}"
        families["Muon" if by_muon else "AdamW"].append((kind, p.shape))
    for family, tensors in families.items():
        counts = Counter(kind for kind, _ in tensors)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        yield f"{family:6} {len(tensors)} tensors: {kinds}"
    flops = sum(ns_flops(shape) for _, shape in families["Muon"])
    share = flops / (args.flops_per_token * args.total_batch_size)
    yield (f"step   {args.total_batch_size:,} tokens = {args.data_ranks} x "
           f"{args.device_batch_size} sequences x {args.seq_len} tokens x {args.micro_steps} "
           f"micro-steps; {args.steps} steps in Z{args.zero}; Newton-Schulz {flops:.1e} FLOPs, "
           f"{share:.1%} of forward and backward")


def loss_curve(losses: list[float], rows: int = 12, columns: int = 60) -> str:
    """The losses as text, each column the mean of its steps."""
    columns = min(columns, len(losses))
    edges = [len(losses) * c // columns for c in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(means), max(means)
    height = [round((rows - 1) * (mean - low) / ((high - low) or 1)) for mean in means]
    lines = []
    for row in reversed(range(rows)):
        label = " " * 7
        if row in (0, rows - 1):
            label = f"{low + (high - low) * row / (rows - 1):7.3f}"
        stars = "".join("*" if h == row else " " for h in height)
        lines.append(f"{label} |{stars}".rstrip())
    return "\n".join([*lines, "        +" + "-" * columns + f" {len(losses)} steps"])


# --------------------------------------------------------------------------------------- evaluation


def report(model: GPT, corpus: Corpus, args: Settings, log: Log, step: int) -> None:
    """Evaluation and sample, if they are due after the step."""
    if step == 0:
        return

    def is_due(every: int) -> bool:
        return step == args.steps or every > 0 and step % every == 0

    if is_due(args.eval_every):
        val = evaluate(model, corpus, args)
        log.write(step=step, val_loss=val)
        per_byte = f", {val / math.log(2):.3f} bits per byte" if corpus.is_text else ""
        log.print(f"step {step:5d}/{args.steps} | val loss {val:.4f} nats per token{per_byte}")
    if is_due(args.sample_every):
        log.print("sample\n" + sample(model, corpus, args))


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, args: Settings) -> float:
    """Mean loss of the held-out windows, the same on 1, 2, 4 and 8 ranks.

    The windows are evenly spaced, and every rank runs equally many batches.
    """
    ranks, size = args.data_ranks, args.device_batch_size
    count = -(-EVAL_WINDOWS // (ranks * size))
    starts = torch.linspace(0, corpus.val.windows - 1, count * ranks * size, dtype=torch.float64)
    starts = starts.long().view(count, ranks, size)
    total = torch.zeros((), dtype=torch.float64, device=args.device)
    for tokens, targets in corpus.val.batches(starts, dist.get_rank() // args.tp, args.device):
        total += loss_of(model, tokens, targets)
    dist.all_reduce(total)
    return total.item() / (count * args.ranks)


@torch.no_grad()
def sample(model: GPT, corpus: Corpus, args: Settings, rows: int = 8, length: int = 48) -> str:
    """`rows` texts that start after a newline (token 0 for .bin data).

    All ranks walk the forwards together.
    """
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.full((rows, 1), ord("\n") if corpus.is_text else 0, device=args.device)
    for _ in range(length):
        logits = model(tokens[:, -args.seq_len :])[:, -1].double().cpu()  # (rows, vocab_size)
        drawn = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        drawn = drawn.to(args.device)
        dist.broadcast(drawn, src=0)  # ranks on unlike machines may round unlike
        tokens = torch.cat([tokens, drawn], dim=1)
    texts = []
    for row in tokens[:, 1:].tolist():
        if not corpus.is_text:
            texts.append(" ".join(map(str, row)))
            continue
        text = bytes(row).decode(errors="backslashreplace")
        text = text.split("\n")[0] if args.data == "unicode" else text  # a name a line
        texts.append("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text))
    return "\n".join(texts)


# ------------------------------------------------------------------------------------------- verify


def verify(corpus: Corpus, mesh: DeviceMesh, args: Settings, log: Log) -> None:
    """Three float64 steps of this layout, and of one process with the whole model and batch.

    Every rank repeats the one process and compares what it holds: gradients (averaged, clipped),
    the optimizer's state, weights. The one process does Newton-Schulz by the other of the two ways,
    and there is weight decay, 0.1 if `--weight_decay` does not say how much. Prints the largest
    differences.

    Raises:
        RuntimeError: on every rank; one is above 1e-10, or nobody has some tensor's gradient.
    """
    args = args.but(weight_decay=args.weight_decay or 0.1)
    alone = args.but(ns="gram" if args.ns == "direct" else "direct",
                     optimizer="adamw" if args.optimizer == "adamw" else "naive")
    model, plain = build(args, corpus.vocab_size), build(args, corpus.vocab_size)
    distribute(model, mesh, args)
    optimizer, plain_optimizer = make_optimizer(model, args), make_optimizer(plain, alone)
    found = []  # (family, kind, name, difference)
    for step in (1, 2, 3):
        micro_batches = batches(corpus, args, step, dist.get_rank())
        loss, norm, *_ = train_step(model, optimizer, micro_batches, args, step, signals=[])
        plain_optimizer.zero_grad()
        for rank in range(args.data_ranks):
            for tokens, targets in batches(corpus, args, step, rank * args.tp):
                part = loss_of(plain, tokens, targets) / (args.micro_steps * args.data_ranks)
                part.backward()
                loss -= part.item()
        # Before clipping, which would hide a factor
        norm -= dmuon.clip_grad_norm_(plain, args.grad_clip or math.inf).item()
        found += [("both", "loss", "mean", abs(loss)), ("both", "norm", "whole", abs(norm))]
        plain_optimizer.step()
        model.state_dict()  # lets replicate broadcasts arrive
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            if p.numel() == 0:  # a placeholder
                continue
            ours, theirs = (dict(gradient=x.grad, weight=x.detach(), **of.state.get(x, {}))
                            for x, of in ((p, optimizer), (q, plain_optimizer)))
            for kind in theirs:  # in one order on all ranks, because `whole` is a collective
                if kind != "step" and ours.get(kind) is not None:
                    difference = (whole(ours[kind]) - theirs[kind]).abs().max().item()
                    family = "Muon" if is_matrix(name, p) else "AdamW"
                    found.append((family, kind, name, difference))
    most: dict[str, float] = {}
    lacking = {name for name, _ in plain.named_parameters()}
    for family, kind, name, difference in sum(gathered(found), []):
        if kind == "gradient":
            lacking.discard(name)
        difference = math.inf if math.isnan(difference) else difference
        key = f"{family} {kind}"
        most[key] = max(most.get(key, 0.0), difference)
    log.write(options=vars(args), largest_differences=most)
    log.print(f"three float64 steps on {args} in Z{args.zero} against one process, largest "
              "difference of an entry (at most 1e-10):")
    for key, value in sorted(most.items()):
        family, kind = key.split()
        log.print(f"  {family:6}{kind:16}{value:.1e}")
    if lacking or max(most.values()) > 1e-10:
        raise RuntimeError(f"--verify: this layout and one process differ by "
                           f"{max(most.values()):.1e}; at most 1e-10 is rounding; without a "
                           f"gradient: {', '.join(sorted(lacking)) or 'nothing'}")


# -------------------------------------------------------------------------------------------- bench


class Meter(TorchDispatchMode):
    """Watches what a rank does: elements it sends, most bytes in tensors, shapes of products.

    On a ring an element that must reach N ranks is sent N - 1 times: an all-gather, reduce-scatter,
    broadcast or reduce of n elements costs a rank (N - 1) / N n, on average, and an all-reduce
    twice that. Raises RuntimeError for a collective that it does not know.
    """

    TIMES = {"broadcast_": 1, "reduce_": 1, "allreduce_": 2, "_allgather_base_": 1,
             "_reduce_scatter_base_": 1, "all_gather_into_tensor": 1, "gather_": 1, "scatter_": 1}

    def __init__(self, held: list[Tensor]):
        super().__init__()
        self.sent, self.peak_bytes, self.products = 0.0, 0, []
        self.storages = weakref.WeakSet(tensor.untyped_storage() for tensor in held)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        result, name = function(*args, **kwargs or {}), function.__name__.split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        is_collective = function.namespace in ("c10d", "_c10d_functional")
        if is_collective and not re.search("wait|wrap", name):
            if name not in self.TIMES:
                raise RuntimeError(f"--bench: cannot count what the collective {name} sends")
            ranks = args[1]  # of DTensor's all-gather
            for arg in args:
                if isinstance(arg, torch.ScriptObject):
                    ranks = dist.ProcessGroup.unbox(arg).size()
                    break
            numel = max(tensor.numel() for tensor in tensors)
            self.sent += self.TIMES[name] * numel * (ranks - 1) / ranks
        if name in ("bmm", "baddbmm"):
            left, right = args[-2:]
            self.products.append((*left.shape, right.shape[-1], left.dtype))
        self.storages.update(tensor.untyped_storage() for tensor in tensors)
        live_bytes = sum(storage.nbytes() for storage in self.storages)
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        return result


def largest(args: Settings, *values: float) -> list[float]:
    """Of each over the ranks; nobody goes on before all have come."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    return [max(of_ranks) for of_ranks in zip(*gathered(values))]


class BenchRow:
    """One line of the table: a model, sharded, with its optimizer, and what was measured of it."""

    def __init__(self, name: str, corpus: Corpus, mesh: DeviceMesh, args: Settings,
                 **options: str | int):
        self.name, self.step_ms, self.optimizer_ms = name, [], []
        self.args = args.but(**options)
        self.micro_batches = [*batches(corpus, args, 1, dist.get_rank())]
        self.model = build(self.args, corpus.vocab_size)
        self.formula = self.expected_traffic()
        distribute(self.model, mesh, self.args)
        self.optimizer = make_optimizer(self.model, self.args)

    def expected_traffic(self) -> float:
        """Elements that a rank sends in a step, by `partition.step_traffic`."""
        args, numel = self.args, Counter()
        for name, p in self.model.named_parameters():
            rows = len(p)
            if not (args.optimizer == "muon" and is_matrix(name, p)):
                rows = -(-rows // args.shard) * args.shard  # FSDP2 pads to equal shards
            numel[is_matrix(name, p)] += rows * (p.numel() // len(p))
        links = step_traffic(numel[True], numel[False], args.shard, args.replicate, args.zero,
                             args.optimizer == "naive")
        return round(sum(links.values()) * args.ranks) / args.ranks  # whole over all ranks

    def step(self) -> tuple:
        """A training step without clipping and logging; start and end of the optimizer's part."""
        self.optimizer.zero_grad()
        forward_backward(self.model, self.micro_batches, self.args)
        start = moment(self.args.device)
        self.optimizer.step()
        return start, moment(self.args.device)

    def turn(self, steps: int = 2) -> None:
        """Some steps in a row; what they leave in flight ends within the time."""
        largest(self.args, 0)  # all start together
        start = time.perf_counter()
        parts = [self.step() for _ in range(steps)]
        self.model.state_dict()  # lets replicate broadcasts arrive
        largest(self.args, 0)
        step_ms = 1000 * (time.perf_counter() - start) / steps
        optimizer_ms = sum(milliseconds(*part) for part in parts) / steps
        step_ms, optimizer_ms = largest(self.args, step_ms, optimizer_ms)
        self.step_ms.append(step_ms)
        self.optimizer_ms.append(optimizer_ms)

    def count(self) -> dict[str, float]:
        """Of one step: what the ranks send, on average, and what the fullest rank holds."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = [*self.model.parameters(), *self.model.buffers(),
                *(value for value in states if isinstance(value, Tensor))]
        held = [*map(local, held)]
        self.optimizer.zero_grad()
        if self.args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in held)
        with Meter(held) as meter:
            self.step()
        peak = meter.peak_bytes
        if self.args.device == "cuda":
            peak = torch.cuda.max_memory_allocated() - others
        momenta = [local(self.optimizer.state[p]["momentum_buffer"]) for p in self.matrices()]
        peak, momenta = largest(self.args, peak, sum(tensor.nbytes for tensor in momenta))
        return dict(sent=round(sum(gathered(meter.sent))) / self.args.ranks, formula=self.formula,
                    muon_state_bytes=momenta, peak_bytes=peak)

    def matrices(self) -> list[nn.Parameter]:
        """Those that this rank runs Newton-Schulz on."""
        return [p for p, state in self.optimizer.state.items() if "momentum_buffer" in state]

    @torch.no_grad()
    def newton_schulz(self, rounds: int = 3) -> dict[str, float]:
        """Newton-Schulz of a step, and its products by plain torch.mm, on the slowest rank.

        The two take turns. All ranks run them at once, as in a step; the ratio is of processor time
        on a CPU, whose cores ranks may share.
        """
        device = self.args.device
        updates = [torch.randn(p.shape, device=device, dtype=p.dtype) for p in self.matrices()]
        alike = equal_shapes(updates)

        def run() -> None:
            for updates in alike:
                orthogonalise(updates, self.args.ns, dmuon.POLAR_EXPRESS_COEFFICIENTS)

        with Meter([]) as meter:
            run()
        operands = {key: [torch.randn(*shape, device=device).to(key[-1])
                          for shape in (key[1:3], key[2:4])] for key in meter.products}

        def run_plain() -> None:
            for key in meter.products:
                for _ in range(key[0]):
                    torch.mm(*operands[key])

        own_time = time.process_time if device == "cpu" else time.perf_counter
        ms, own_ms = [], []
        for function in (run, run_plain) * rounds:
            largest(self.args, 0)
            start, own_start = time.perf_counter(), own_time()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            ms.append(1000 * (time.perf_counter() - start))
            own_ms.append(1000 * (own_time() - own_start))
        flops = sum(2 * batch * m * k * n for batch, m, k, n, _ in meter.products)
        ratio = median(own_ms[::2]) / (median(own_ms[1::2]) or 1)
        ns_ms, ns_to_mm, flops = max(gathered((median(ms[::2]), ratio, flops)))
        if not flops:
            return {}
        return dict(ns_ms=ns_ms, ns_to_mm=ns_to_mm, ns_gflops=flops / ns_ms / 1e6)

    def weights(self) -> Tensor:
        """All of them, one after the other."""
        with dmuon.unshard(self.model):
            return torch.cat([whole(p).detach().flatten() for p in self.model.parameters()])


def bench(corpus: Corpus, mesh: DeviceMesh, args: Settings, log: Log) -> None:
    """AdamW, naive Muon and DMuon with one model, data and Newton-Schulz, in turns.

    There are `--steps` rounds.

    Raises:
        RuntimeError: on every rank; the rows of one rule have not made the same first step.
    """
    kinds = {"AdamW Z2": ("adamw", 2, 1), "AdamW Z3": ("adamw", 3, 1),
             "naive Muon Z3": ("naive", 3, 1), "DMuon Z2": ("muon", 2, 1),
             "DMuon Z3": ("muon", 3, 1)}
    if args.replicate > 1:
        kinds["DMuon Z3, sync replicas"] = ("muon", 3, 0)
    rows = [BenchRow(name, corpus, mesh, args, optimizer=optimizer, zero=zero,
                     replicate_async=replicate_async)
            for name, (optimizer, zero, replicate_async) in kinds.items()]
    distance = first_steps_distance(rows)
    if not distance < (0.1 if args.dtype == "bfloat16" else 0.01):
        raise RuntimeError(f"--bench: the rows' first steps differ by {distance:.1e} of the step")
    figures = [row.count() | row.newton_schulz() for row in rows]
    for _ in range(args.steps):
        for row in rows:
            row.turn()
    log.write(options=vars(args), torch=torch.__version__, mesh=mesh.shape,
              first_steps_differ_by=distance)
    log.print(f"bench  width {args.n_embd}, {args.depth} layers, {args.seq_len} tokens x "
              f"{args.device_batch_size} sequences x {args.data_ranks} ranks = "
              f"{args.total_batch_size:,} tokens a step, replicate {args.replicate}\n"
              f"run    {args.device}, {args.dtype}, {dist.get_backend()}, torch "
              f"{torch.__version__}, medians of {args.steps} rounds; first steps differ by "
              f"{distance:.0e}\n{BENCH_HEAD}")
    base = {row.args.zero: row.step_ms for row in rows if row.args.optimizer == "adamw"}
    for row, figure in zip(rows, figures):
        ratio = median(ours / adamw for ours, adamw in zip(row.step_ms, base[row.args.zero]))
        figure = dict(step_ms=median(row.step_ms), ratio=ratio,
                      optimizer_ms=median(row.optimizer_ms), **figure)
        log.write(row=row.name, **figure)
        ns = ""
        if "ns_ms" in figure:
            ns = f"{figure['ns_ms']:8.1f}{figure['ns_to_mm']:7.2f}"
        log.print(f"{row.name:24}{figure['step_ms']:8.1f}{ratio:7.2f}{figure['optimizer_ms']:8.1f}"
                  f"{ns:15}{figure['sent']:14,.0f}{figure['formula']:14,.0f}"
                  f"{figure['muon_state_bytes'] / 2**20:8.1f}"
                  f"{figure['peak_bytes'] / 2**20:8.1f}")


def first_steps_distance(rows: list[BenchRow]) -> float:
    """How far the first steps of rows of one rule are apart, as a part of the step."""
    start, firsts, distances = rows[0].weights(), {}, []
    for row in rows:
        row.step()
        weights = row.weights()
        first = firsts.setdefault(row.args.optimizer == "adamw", weights)
        distances.append((weights - first).norm() / (first - start).norm().clamp(min=1e-30))
    farthest = torch.stack(distances).nan_to_num(math.inf).max().item()
    return largest(rows[0].args, farthest)[0]


# --------------------------------------------------------------------------------------------- main


def init_distributed(args: Settings) -> DeviceMesh:
    """The group of torchrun, or of one process without it, and the mesh over all ranks.

    A dimension replicate or tp of size 1 is left out.
    """
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        # Checkpoints and texts are sent as objects, on the CPU
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        env, how = os.environ, {}
        if "RANK" not in env:
            how = dict(store=dist.HashStore(), rank=0, world_size=1)
        elif (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
              and env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"]):
            # torchrun 2.13 keeps its store when it starts workers again, and in it the addresses
            # of the dead ones
            store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
            store = dist.PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", store)
            how = dict(store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))
        dist.init_process_group(backend, timeout=TIMEOUT, **how)
    sizes = {"replicate": args.replicate, "shard": args.shard, "tp": args.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(args.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        group.set_timeout(TIMEOUT)  # FSDP2's, too, which else wait for half an hour
    return mesh


@record
def main(argv: list[str] | None = None) -> None:
    """Parse, load, build, distribute, train."""
    args = parse(argv)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    args = resolve(args, dist.get_world_size() if dist.is_initialized() else ranks)
    corpus = load_corpus(args)
    mesh = init_distributed(args)
    if args.bench or args.verify:
        run, name = (bench, "bench.jsonl") if args.bench else (verify, "verify.jsonl")
        log = Log(args, name)
        log.rewind(0, keep=False)
        run(corpus, mesh, args, log)
        return
    log = Log(args)
    model = build(args, corpus.vocab_size)
    log.print("\n".join(describe(model, corpus, args)))
    distribute(model, mesh, args)
    if args.optimizer == "muon":
        log.print(dmuon.ownership_table(model))
    optimizer = make_optimizer(model, args)
    done = resume(model, optimizer, args, log)
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    log.write(options=vars(args), torch=torch.__version__, python=sys.version.split()[0],
              mesh=mesh.shape, data_sha256=corpus.sha256,
              source_sha256=hashlib.sha256(sources).hexdigest()[:16])
    train(model, optimizer, corpus, args, log, done)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        if dist.is_torchelastic_launched():
            raise  # torchrun shows the recorded text
        sys.exit(f"train_gpt.py: {error}")
    if not dist.is_initialized():
        sys.exit()  # --help
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of tensors, and abort at the interpreter's end
