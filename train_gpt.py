"""Train a GPT with dedicated ownership, from raw text to a sample: the one training script.

    torchrun --nproc_per_node=8 train_gpt.py                       # any number of ranks, CPU (gloo) or CUDA (NCCL)
    python train_gpt.py                                            # one process, no launcher
    torchrun --nproc_per_node=8 train_gpt.py --optimizer=adamw     # the base line: FSDP2 and AdamW only
    torchrun --nproc_per_node=8 train_gpt.py --data=book.txt       # your own text, a folder, or GPT-2 tokens in .bin
    torchrun --nproc_per_node=8 train_gpt.py --replicate=2 --tp=2  # HSDP, tensor parallelism: a 2x2x2 mesh
    torchrun --nproc_per_node=8 --max-restarts=2 train_gpt.py --save_every=100   # goes on where a killed run stopped
    torchrun --nproc_per_node=4 train_gpt.py --bench               # what ownership saves, against AdamW and naive Muon
    torchrun --nproc_per_node=8 train_gpt.py --replicate=2 --tp=2 --verify   # is this layout exact, on this machine?

Before this file: dmuon.py, which it uses as your own trainer would (see `shard`). After it: test_dmuon.py.

The default data are the names of the Unicode characters, one a line, which Python itself contains: 355 kB, learned to a
legible sample in a few minutes on two cores. It is small, so a large model overfits.

The same seed gives the same weights and the same batches on any number of ranks: every rank builds the whole model
from the seed, draws the whole step's batch from (seed, step), and keeps its slice. In float64, 1, 2, 4 and 8 ranks on
any mesh log the same losses to ten digits. (3 ranks cannot share the default batch equally: theirs has 1,152 tokens.)
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
import warnings
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median

# Nothing here uses numpy, and torch warns at its first tensor if it is missing
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

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
import hooks
from hooks import local
from newton_schulz import adjusted_lr, equal_shapes, orthogonalise
from partition import ns_flops, step_traffic

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16, for MFU
UNICODE_SHA256 = "b6f666dd7e364b61"  # of the default corpus on CPython 3.8 to 3.13
TIMEOUT = timedelta(minutes=5)  # of a collective: a rank that hangs ends the run
BENCH_MODELS = {"toy": "128,4,128,1", "small": "512,6,256,4", "gpt2": "768,12,1024,16"}  # width, layers, T, B a rank
BENCH_HEAD = """\
                            step     to  optim.      NS  NS to  elements that a rank sends    Muon    peak
                              ms  AdamW      ms      ms     mm       counted       formula     MiB     MiB"""
EVAL_WINDOWS = 128  # held-out sequences, evenly spaced; rounded up to a multiple of ranks x device_batch_size


class UsageError(ValueError):
    """What the user can mend, an option or a file, in one line. Whatever can be seen at the start is raised there."""


# ------------------------------------------------------------------------------------------------- settings


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(message)  # `record` shows an exception under torchrun, an exit code it does not


def number(kind: type, low: float, high: float = math.inf, auto: bool = False) -> Callable[[str], float | str]:
    """An argparse type: an int or float in [low, high], or 'auto' if that is allowed."""

    def convert(text: str) -> float | str:
        try:
            value = low if auto and text == "auto" else kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value < math.inf):
            bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"{text}: must be {kind.__name__} {bounds}" + ", or auto" * auto)
        return text if auto and text == "auto" else value

    return convert


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options as given; `resolve` fills in what depends on the device and the ranks."""
    parser = Parser(description="Train a GPT: Muon with one owner per matrix, FSDP2 and AdamW for the rest.",
                    allow_abbrev=False,
                    epilog="example: torchrun --nproc_per_node=4 train_gpt.py --data=book.txt --depth=6 --steps=2000")
    auto, share, rate = number(int, 1, auto=True), number(float, 0, 1), number(float, 0)

    def group(title: str, **options: tuple) -> None:
        section = parser.add_argument_group(title)
        for name, (default, kind, text) in options.items():
            how = dict(choices=kind, type=type(kind[0])) if isinstance(kind, tuple) else dict(type=kind, metavar="X")
            how = dict(action="store_true") if kind is bool else how
            section.add_argument(f"--{name}", default=default, help=f"{text} [{default}]", **how)

    group("data",
          data=("unicode", str, "'unicode', a text file, a .bin file, a folder or a glob, e.g. --data='books/*.txt'"),
          vocab_size=("auto", auto, "tokens in the vocabulary; auto: 256 for bytes, 50304 for .bin"),
          seq_len=("auto", auto, "tokens in a sequence; auto: 128 on CPU, 1024 on CUDA"))
    group("model, e.g. --depth=6",
          depth=("auto", auto, "layers; auto: 4 on CPU, 12 on CUDA"),
          n_embd=("auto", auto, "width; auto: 32 x depth on CPU, 64 x depth on CUDA"),
          n_head=("auto", auto, "attention heads; auto: depth"))
    group("batch, e.g. --total_batch_size=8192 --device_batch_size=4",
          total_batch_size=("auto", auto, "tokens in a step over all ranks; auto: 1024 (CUDA: 524288) or just above"),
          device_batch_size=("auto", auto, "sequences a rank takes through the model at once; auto: at most 32"),
          steps=("auto", auto, "optimizer steps; auto: 400 on CPU, 1000 on CUDA; rounds of --bench, auto: 5"))
    group("optimizer, e.g. --muon_lr=0.01 --ns=direct",
          optimizer=("muon", ("muon", "adamw", "naive"), "muon: matrices by Muon, the rest by AdamW; adamw: all by "
                     "AdamW; naive: as muon, but without owners"),
          muon_lr=(0.02, rate, "rate of the matrices, before --adjust_lr_fn"),
          adamw_lr=(3e-3, rate, "rate of what AdamW trains"),
          weight_decay=(0.0, rate, "decoupled weight decay of the matrices (adamw: of everything)"),
          momentum=(0.95, number(float, 0, 0.9999), "Muon's momentum"),
          ns=("gram", ("gram", "direct"), "Newton-Schulz on the Gram matrix or directly"),
          adjust_lr_fn=("match_rms_adamw", ("match_rms_adamw", "original"), "how a matrix's shape scales its rate"),
          grad_clip=(1.0, rate, "largest norm of the whole gradient; 0: no clipping"))
    group("schedule, one multiplier for both rates, e.g. --warmup_frac=0.05",
          warmup_frac=(0.0, share, "fraction of the steps that rise from 0"),
          decay_frac=(0.4, share, "fraction of the steps that fall at the end"),
          final_lr_frac=(0.0, share, "where the fall ends, as a fraction of the rate"))
    group("parallel, e.g. --replicate=2 --tp=2: ranks form a mesh, replicate x shard x tp",
          replicate=(1, number(int, 1), "HSDP: replicas of the group of ranks that shards the model"),
          tp=(1, number(int, 1), "tensor parallelism: ranks that cut each matrix; divides n_head"),
          replicate_async=(1, (1, 0), "1: new weights travel behind AdamW and the next forward; 0: within the step"),
          zero=(3, (3, 2), "3: free full weights after the forward; 2: keep them for the backward"))
    group("memory and speed, e.g. --activation_checkpointing --compile",
          activation_checkpointing=(False, bool, "recompute each layer in the backward instead of keeping its tensors"),
          compile=(False, bool, "torch.compile each layer"))
    group("instead of training, e.g. --bench --bench_model=768,12,1024,8",
          bench=(False, bool, "time AdamW, naive Muon and DMuon in turns, beside what they send and hold"),
          bench_model=("auto", str, f"width,layers,T,B or {', '.join(BENCH_MODELS)}; auto: small, on CUDA gpt2"),
          verify=(False, bool, "three float64 steps of this layout against one process, which every rank repeats"))
    group("run, e.g. --dtype=float64 --out=check --save_every=50",
          out=("out", str, "folder of log.jsonl and of the checkpoints"),
          save_every=(0, number(int, 0), "steps between checkpoints; also saves at the end; 0: only on a signal"),
          keep=(2, number(int, 1), "newest checkpoints to keep; older ones in --out are deleted"),
          resume=("auto", str, "auto: the newest checkpoint in --out, if any; none; or a path to one, or to a folder"),
          eval_every=(100, number(int, 0), "steps between evaluations; 0: only at the end"),
          sample_every=(0, number(int, 0), "steps between samples; 0: only at the end"),
          log_every=(10, number(int, 1), "steps between printed lines"),
          seed=(0, number(int, 0, 2**31), "of weights and batches"),
          profile=("", str, "folder for torch.profiler's traces of steps 4 to 6, one a rank, for ui.perfetto.dev"),
          dtype=("auto", ("auto", *DTYPES), "bfloat16: compute, on float32 weights; auto: float32, on CUDA bfloat16"),
          device=("auto", ("auto", "cpu", "cuda"), "auto: cuda if there is one"))
    return parser.parse_args(argv)


def resolve(args: argparse.Namespace, ranks: int) -> argparse.Namespace:
    """Replace every 'auto' by its value for this device and number of ranks; refuse what does not fit together.

    Raises:
        UsageError: names the option, its value, the arithmetic and the nearest legal values.
    """
    if args.save_every and find_spec("numpy") is None:
        raise UsageError(f"--save_every {args.save_every}: checkpoints need numpy: pip install numpy")
    gpus, local_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and gpus < local_ranks:
        raise UsageError(f"--device cuda: {local_ranks} local ranks and {gpus} CUDA devices; use --device=cpu")
    args.why = "as asked" if args.device != "auto" else f"{gpus} CUDA devices for {local_ranks} local ranks"
    _fill(args, device="cuda" if gpus >= local_ranks else "cpu")
    cuda = args.device == "cuda"
    _resolve_modes(args, ranks)
    if args.optimizer == "naive" and args.tp > 1:
        raise UsageError(f"--optimizer naive --tp {args.tp}: it knows no tensor parallelism; tp may be 1")
    _fill(args, dtype="bfloat16" if cuda else "float32", seq_len=1024 if cuda else 128, depth=12 if cuda else 4)
    _fill(args, n_embd=(64 if cuda else 32) * args.depth, n_head=args.depth, steps=1000 if cuda else 400)
    if args.n_embd % 2:
        raise UsageError(f"--n_embd {args.n_embd}: must be even, a multiple of 2 x n_head")
    if args.n_embd % (2 * args.n_head):
        legal = [n for n in range(1, args.n_embd) if args.n_embd % (2 * n) == 0]
        raise UsageError(f"--n_head {args.n_head}: 2 x it must divide --n_embd {args.n_embd}; n_head may be {legal}")
    for name, taken in (("replicate", 1), ("tp", args.replicate)):
        legal = [n for n in range(1, ranks + 1) if ranks % (n * taken) == 0]
        legal = [n for n in legal if name == "replicate" or args.n_head % n == 0]
        if getattr(args, name) not in legal:
            rule = f"replicate x shard x tp must be {ranks}"
            rule += f", and --n_head {args.n_head} a multiple of tp" if name == "tp" else ""
            raise UsageError(f"--{name} {getattr(args, name)} with {ranks} ranks: {rule}; {name} may be "
                             f"{', '.join(map(str, legal))}")
    args.data_ranks = ranks // args.tp  # that have data of their own
    args.shard = args.data_ranks // args.replicate  # ranks of a row
    args.layout = f"replicate {args.replicate} x shard {args.shard} x tp {args.tp}"
    unit = args.data_ranks * args.seq_len * (1 if args.device_batch_size == "auto" else args.device_batch_size)
    _fill(args, total_batch_size=-(-(524288 if cuda else 1024) // unit) * unit)
    if args.total_batch_size % unit:
        low = args.total_batch_size // unit * unit
        factors = f"{args.data_ranks} x {unit // args.data_ranks // args.seq_len} x {args.seq_len} = {unit}"
        nearest = ", ".join(str(n) for n in (low, low + unit) if n)
        ranks_with_data = "ranks / tp" if args.tp > 1 else "ranks"
        raise UsageError(f"--total_batch_size {args.total_batch_size}: must be a multiple of {ranks_with_data} x "
                         f"device_batch_size x seq_len = {factors}; nearest: {nearest}")
    sequences = args.total_batch_size // (args.data_ranks * args.seq_len)
    _fill(args, device_batch_size=max(b for b in range(1, min(32, sequences) + 1) if sequences % b == 0))
    args.micro_steps = sequences // args.device_batch_size
    return args


def _resolve_modes(args: argparse.Namespace, ranks: int) -> None:
    """What `--bench`, `--verify` and `--profile` choose themselves."""
    if sum(map(bool, (args.bench, args.verify, args.profile))) > 1:
        raise UsageError("--bench, --verify and --profile: choose one of them")
    if args.bench:
        _fill(args, bench_model="gpt2" if args.device == "cuda" else "small", steps=5)
        numbers = BENCH_MODELS.get(args.bench_model, args.bench_model)
        if not re.fullmatch(r"\d*[02468](,[1-9]\d*){3}", numbers) or numbers[0] == "0" or args.tp > 1:
            raise UsageError(f"--bench_model {args.bench_model} --tp {args.tp}: expected four numbers, "
                             f"width,layers,T,B with an even width, or one of {', '.join(BENCH_MODELS)}, and tp 1")
        width, depth, seq_len, sequences = map(int, numbers.split(","))
        heads = max(n for n in range(1, max(2, width // 64 + 1)) if width % (2 * n) == 0)
        model = dict(n_embd=width, depth=depth, n_head=heads, seq_len=seq_len, device_batch_size=sequences,
                     total_batch_size=ranks * sequences * seq_len)
        for name in (*model, "optimizer", "zero"):
            if getattr(args, name) not in ("auto", "muon", 3):  # what they are if nobody gave them
                raise UsageError(f"--{name} {getattr(args, name)}: --bench has its own, and its model is --bench_model")
        _fill(args, **model)
    if args.verify:
        if args.dtype not in ("auto", "float64"):
            raise UsageError(f"--dtype {args.dtype}: --verify is in float64")
        args.dtype = "float64"


def _fill(args: argparse.Namespace, **values: int | str) -> None:
    """Give options that are 'auto' their values."""
    for name, value in values.items():
        if getattr(args, name) == "auto":
            setattr(args, name, value)


# ----------------------------------------------------------------------------------------------------- data


def unicode_names() -> bytes:
    """The names of Unicode 3.2's characters, one a line, shuffled; the same bytes on CPython 3.8 to 3.13."""
    ideographs = ("CJK UNIFIED IDEOGRAPH-", "CJK COMPATIBILITY IDEOGRAPH-", "HANGUL SYLLABLE ")
    names = [unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(sys.maxunicode + 1)]
    names = [name for name in names if name and not name.startswith(ideographs)]
    random.Random(0).shuffle(names)
    return "\n".join(names).encode()


class Split:
    """Token files as one stream of windows; nothing is read before it is asked for.

    Args:
        files: (name, tokens, offset of the first in the file), tokens (n,) uint8 or uint16, mapped from disk.
        seq_len: T; a window is T + 1 tokens of one file.
        vocab_size: tokens must be below it.
    """

    def __init__(self, files: list[tuple[str, Tensor, int]], seq_len: int, vocab_size: int):
        self.files, self.seq_len, self.vocab_size = files, seq_len, vocab_size
        self.ends, total = [], 0  # windows up to and including each file
        for name, tokens, _ in files:
            if len(tokens) <= seq_len:
                raise UsageError(f"--data: '{name}' gives one split {len(tokens)} tokens, fewer than one sequence of "
                                 f"--seq_len {seq_len} and its target")
            total += len(tokens) - seq_len
            self.ends.append(total)
        self.windows, self.numel = total, sum(len(tokens) for _, tokens, _ in files)

    def window(self, start: int) -> Tensor:
        """Window number `start`: (T + 1,) int64."""
        index = bisect_right(self.ends, start)
        name, tokens, offset = self.files[index]
        start -= self.ends[index - 1] if index else 0
        window = tokens[start : start + self.seq_len + 1].to(torch.int64)
        if window.max() >= self.vocab_size:  # here, where file and position are known; the embedding only says 'index'
            position = int((window >= self.vocab_size).nonzero()[0])
            token, position = int(window[position]), offset + start + position
            raise UsageError(f"--data: '{name}' has token {token} at position {position}, outside the vocabulary; "
                             f"--vocab_size is {self.vocab_size}")
        return window

    def batches(self, starts: Tensor, rank: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
        """One rank's inputs and targets (B, T) from starts (batches, ranks, B). All ranks read all windows."""
        windows = torch.stack([self.window(start) for start in starts.flatten().tolist()]).view(*starts.shape, -1)
        for window in windows[:, rank].to(device):
            yield window[:, :-1], window[:, 1:]


@dataclass
class Corpus:
    name: str
    train: Split
    val: Split
    vocab_size: int
    is_text: bool
    sha256: str  # of the first 2^20 tokens of each file: tells two runs' data apart


def load_corpus(args: argparse.Namespace) -> Corpus:
    """The data that `--data` names, split into training and held-out files.

    Raises:
        UsageError: nothing there, an empty or too short file, an unknown format, text and .bin mixed.
    """
    if args.data == "unicode":
        names = torch.frombuffer(bytearray(unicode_names()), dtype=torch.uint8)
        train, val = _cut([("the Unicode names", names, 0)])
    else:
        train, val = _split_files(_find_files(args.data))
    is_text = train[0][1].dtype == torch.uint8
    if any((tokens.dtype == torch.uint8) != is_text for _, tokens, _ in train + val):
        raise UsageError(f"--data {args.data}: text and .bin files together; name one kind")
    _fill(args, vocab_size=256 if is_text else 50304)
    digest = hashlib.sha256()
    for _, tokens, _ in train + val:
        digest.update(bytes(tokens[: 1 << 20].view(torch.uint8).tolist()))
    splits = [Split(files, args.seq_len, args.vocab_size) for files in (train, val)]
    return Corpus(args.data, *splits, args.vocab_size, is_text, digest.hexdigest()[:16])


def _find_files(data: str) -> list[Path]:
    paths = sorted(Path(data).iterdir()) if os.path.isdir(data) else [Path(p) for p in sorted(glob.glob(data))]
    paths = paths or [Path(data)] * os.path.exists(data)  # a name with brackets in it is a glob that matches nothing
    files = [path for path in paths if path.is_file() and not path.name.startswith(".") and path.suffix != ".pkl"]
    if not files:
        raise UsageError(f"--data {data}: no such file, and no folder or glob with files in it")
    return files


def _split_files(paths: list[Path]) -> tuple[list, list]:
    """By the names, if there are both `*train*` and `*val*`; else the last tenth of the files, or of the only file."""
    train, val = ([path for path in paths if word in path.name] for word in ("train", "val"))
    if not (train and val):
        held_out = max(1, len(paths) // 10)
        train, val = paths[:-held_out], paths[-held_out:]
    if not train:
        return _cut([(str(paths[0]), *read_tokens(paths[0]))])
    return tuple([(str(path), *read_tokens(path)) for path in files] for files in (train, val))


def _cut(files: list[tuple[str, Tensor, int]]) -> tuple[list, list]:
    """The only file's last tenth is held out."""
    name, tokens, offset = files[0]
    middle = len(tokens) - len(tokens) // 10
    return [(name, tokens[:middle], offset)], [(name, tokens[middle:], offset + middle)]


def read_tokens(path: Path) -> tuple[Tensor, int]:
    """A file's tokens, mapped: text as bytes (uint8), .bin of nanoGPT or llm.c as uint16; and the first one's position.

    Raises:
        UsageError: names the file and what is wrong with it.
    """
    size = path.stat().st_size
    if size == 0:  # `torch.from_file` would return a tensor of nothing without a word
        raise UsageError(f"--data: '{path}' is empty")
    data = torch.from_file(str(path), size=size, dtype=torch.uint8)
    if path.suffix != ".bin":
        if (data[:4096] == 0).any():
            raise UsageError(f"--data: '{path}' is neither text (it has a zero byte) nor a .bin token file")
        return data, 0
    magic = int(data[:4].view(torch.int32)) if size >= 4 else 0
    if 20240000 <= magic < 20250000 and magic != 20240520:
        raise UsageError(f"--data: '{path}' has llm.c's magic {magic} (uint32 tokens, an evaluation set); only its "
                         f"uint16 token files, magic 20240520, and nanoGPT's can be read")
    if magic == 20240520:
        version, tokens = data[4:12].view(torch.int32).tolist() if size >= 12 else (0, 0)
        if version != 1 or size != 1024 + 2 * tokens:
            raise UsageError(f"--data: '{path}' is a broken llm.c file: version {version}, {tokens} tokens, {size} "
                             f"bytes; expected version 1 and 1024 + 2 x tokens = {1024 + 2 * tokens} bytes")
        data = data[1024:]
    if len(data) % 2:
        raise UsageError(f"--data: '{path}' has {size} bytes, an odd number; a .bin file holds uint16 tokens")
    return data.view(torch.uint16), 0


def batches(corpus: Corpus, args: argparse.Namespace, step: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's micro-batches of a step: its slice of the windows that every rank draws alike from (seed, step).

    The ranks of a tensor-parallel group are neighbours and get the same slice.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    sequences = args.data_ranks * args.device_batch_size * args.micro_steps
    starts = torch.randint(corpus.train.windows, (sequences,), generator=generator)
    return corpus.train.batches(starts.view(args.micro_steps, args.data_ranks, -1), rank // args.tp, args.device)


# ---------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """One layer: attention with rotated, normalised queries and keys, then an MLP with squared ReLU."""

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
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (projection(x).view(B, T, -1, self.head_width).transpose(1, 2) for projection in projections)
        q, k = (rotate(F.rms_norm(heads, heads.shape[-1:])) for heads in (q, k))  # (B, n_head / tp, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (RoPE): pairs of x (B, n_head, T, D) turn by an angle that grows with the position."""
    T, D = x.shape[-2:]
    rates = 10000.0 ** -(torch.arange(0, D, 2, device=x.device, dtype=torch.float64) / D)
    angles = torch.outer(torch.arange(T, device=x.device, dtype=torch.float64), rates)  # (T, D / 2)
    wide = torch.promote_types(x.dtype, torch.float32)  # positions do not fit 16 bits
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1).to(x.dtype)


class GPT(nn.Module):
    """Decoder-only transformer: RoPE, RMSNorm, QK-norm without weight, no biases, an untied head.

    `forward(tokens)`: tokens (B, T) int64 -> logits (B, T, vocab_size).
    """

    def __init__(self, vocab_size: int, depth: int, n_embd: int, n_head: int, recompute: bool = False):
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


# --------------------------------------------------------------------------------- model and optimizer, sharded


def build(args: argparse.Namespace, vocab_size: int) -> GPT:
    """The whole model on every rank, from the seed alone."""
    torch.manual_seed(args.seed)
    model = GPT(vocab_size, args.depth, args.n_embd, args.n_head, args.activation_checkpointing)
    return model.to(args.device, torch.float64 if args.dtype == "float64" else torch.float32)


def shard(model: GPT, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """What a trainer adds for DMuon is the call of `dedicate_params`; the rest is torch's, as ever."""
    if args.tp > 1:
        for layer in model.layers:
            colwise = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "up_proj")}
            parallelize_module(layer, mesh["tp"], colwise | {n: RowwiseParallel() for n in ("o_proj", "down_proj")})
    for layer in model.layers if args.compile else []:
        layer.compile()
    mesh = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.dtype == "bfloat16" else MixedPrecisionPolicy()
    if args.optimizer == "muon":
        dmuon.dedicate_params(model, mesh, reshard_after_forward=args.zero == 3, mp_policy=policy)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=args.zero == 3, mp_policy=policy)


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """Whether Muon trains it."""
    return name.startswith("layers.") and p.ndim == 2


def whole(tensor: Tensor) -> Tensor:
    """A collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class NaiveMuon(torch.optim.Optimizer):
    """Muon without owners: every rank gathers every matrix and runs all of Newton-Schulz, N times what is needed.

    It takes a model that FSDP2 alone has sharded, or a plain one: the reference of `verify`.
    """

    def __init__(self, model: GPT, args: argparse.Namespace):
        matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
        others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
        self.args, self.adamw = args, torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
        super().__init__([{"params": matrices, "lr": args.muon_lr}], {})
        self.add_param_group({**self.adamw.param_groups[0], "lr": args.adamw_lr})

    def direction(self, p: nn.Parameter) -> Tensor:
        if p not in self.state:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - self.args.momentum)
        return p.grad.lerp(momentum, self.args.momentum)

    @torch.no_grad()
    def step(self) -> None:
        muon, adamw = self.param_groups
        # A matrix of the same shape without memory: that FSDP2 has cut them does not matter here
        of_shape = {torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape): p for p in muon["params"]}
        for batch in equal_shapes(of_shape):
            batch = [of_shape[shape] for shape in batch]
            gathered = [whole(self.direction(p)) for p in batch]  # (m, n) on every rank
            updates = orthogonalise(gathered, self.args.ns, dmuon.POLAR_EXPRESS_COEFFICIENTS)
            for p, update in zip(batch, updates):
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                adjusted = adjusted_lr(muon["lr"], self.args.adjust_lr_fn, *p.shape)
                p.mul_(1 - muon["lr"] * self.args.weight_decay).add_(update, alpha=-adjusted)
        self.adamw.param_groups, self.adamw.state = [adamw], self.state
        self.adamw.step()


def make_optimizer(model: GPT, args: argparse.Namespace) -> torch.optim.Optimizer:
    if args.optimizer == "naive":
        return NaiveMuon(model, args)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), args.adamw_lr, (0.9, 0.95), weight_decay=args.weight_decay,
                                 foreach=args.tp == 1)  # a foreach operation takes one mesh
    return dmuon.Muon(model, args.muon_lr, args.momentum, weight_decay=args.weight_decay, ns_backend=args.ns,
                      adjust_lr_fn=args.adjust_lr_fn, adamw_lr=args.adamw_lr,
                      replicate_async=bool(args.replicate_async))


def multiplier(args: argparse.Namespace, step: int) -> float:
    """Of both rates at a step: up, flat, down to `final_lr_frac`, linearly."""
    rise = (step + 1) / max(1, args.warmup_frac * args.steps)
    fall = (args.steps - step) / max(1, args.decay_frac * args.steps)
    return min(1.0, rise, args.final_lr_frac + (1 - args.final_lr_frac) * min(1.0, fall))


def clip(model: GPT, args: argparse.Namespace) -> Tensor:
    """Scale the gradients; the norm of the whole gradient before that. If it is not finite, they stay as they are."""
    limit = args.grad_clip or math.inf
    if args.optimizer == "muon":
        return dmuon.clip_grad_norm_(model, limit)
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in model.parameters():  # with tensor parallelism on two meshes, of which torch's clip_grad_norm_ takes one
        meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in of_mesh])) for of_mesh in meshes.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for of_mesh in meshes.values():  # by 1 for a norm that `first_not_finite` will ask them about
        torch.nn.utils.clip_grads_with_norm_(of_mesh, limit, norm.nan_to_num(0.0, posinf=0.0))
    return norm


def first_not_finite(model: GPT) -> str:
    """A parameter whose gradient is not finite, the first one of the first rank that has such."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not local(p.grad).isfinite().all()]
    return (dmuon.union(bad, [dist.group.WORLD]) or ["no gradient"])[0]


# ------------------------------------------------------------------------------------------- what a run prints


class Log:
    """Rank 0 prints and writes `log.jsonl`: first the run's settings, then a record a step. Other ranks are silent."""

    def __init__(self, args: argparse.Namespace):
        name = "bench.jsonl" if args.bench else "verify.jsonl" if args.verify else "log.jsonl"
        self.main, self.device = dist.get_rank() == 0, torch.device(args.device)
        self.started, self.first, self.losses, self.path = time.perf_counter(), 0, [], Path(args.out, name)
        try:
            with dmuon.together(name, dist.group.WORLD):
                if self.main:
                    os.makedirs(args.out, exist_ok=True)
                    open(self.path, "a").close()
        except (OSError, ValueError) as error:
            raise UsageError(f"--out {args.out}: cannot write {name} there: {error}") from error

    def rewind(self, step: int, keep: bool) -> None:
        """Keep this run's records of steps that are done, of another none; a killed run may have torn the last line."""
        self.started, self.first = time.perf_counter(), step
        with dmuon.together("log.jsonl", dist.group.WORLD):
            if self.main:
                found = []
                for line in self.path.read_text().splitlines() if step and keep else []:
                    with suppress(ValueError):  # torn by a kill, or by another run in the same folder
                        found.append(json.loads(line))
                kept = [r for r in found if r.get("step", 0) < step + ("loss" in r)]  # an evaluation comes again
                self.losses = [r["loss"] for r in kept if "loss" in r]
                beside = self.path.with_suffix(".part")  # a run that is killed here has the old log
                beside.write_text("".join(json.dumps(record) + "\n" for record in kept))
                beside.replace(self.path)

    def print(self, text: str) -> None:
        if self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def write(self, **values) -> None:
        if self.main:
            with open(self.path, "a") as file:
                file.write(json.dumps(values) + "\n")

    def step(self, args: argparse.Namespace, step: int, loss: float, norm: float, lr: float, ms: dict) -> None:
        """A record for every step, a line for the first, every `log_every`-th and the last."""
        self.losses.append(loss)
        step_ms, tokens = sum(ms.values()), args.total_batch_size
        self.write(step=step, loss=loss, norm=norm, lr=lr, tokens=step * tokens, step_ms=round(step_ms, 2))
        if step % args.log_every and step not in (1, args.steps):
            return
        left = (time.perf_counter() - self.started) / (step - self.first) * (args.steps - step)
        line = (f"step {step:5d}/{args.steps} | loss {loss:.3f} | norm {norm:5.2f} | lr {lr:.4f} | {step_ms:.0f} ms "
                f"(fwd+bwd {ms['fwd+bwd']:.0f}, opt {ms['opt']:.0f}) | {1000 * tokens / step_ms:,.0f} tok/s")
        if args.device == "cuda":
            name = torch.cuda.get_device_name()
            peak = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
            achieved = args.flops_per_token * tokens / step_ms * 1000 / dist.get_world_size()
            line += f" | mfu {achieved / peak:.1%}" if peak else ""
            line += f" | mem {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        self.print(f"{line} | eta {left / 60:.1f} min")


def describe(model: GPT, corpus: Corpus, args: argparse.Namespace) -> Iterator[str]:
    """The start-up block, before sharding: where it runs, what it trains, what a step is."""
    ranks = dist.get_world_size()
    yield f"run    {ranks} x {args.device} ({args.why}), {dist.get_backend()}, {args.dtype}, torch {torch.__version__}"
    yield f"mesh   {args.layout}"
    yield (f"data   {corpus.name}: {corpus.train.numel:,} tokens to train, {corpus.val.numel:,} held out, vocabulary "
           f"{corpus.vocab_size}, sha256 {corpus.sha256}")
    if find_spec("numpy") is None:
        yield "       without numpy no checkpoint can be written, also when a signal stops the run"
    if args.data == "unicode" and corpus.sha256 != UNICODE_SHA256:
        yield "       this Python's Unicode names are not those that the README's losses were made with"
    total = sum(p.numel() for p in model.parameters())
    yield f"model  {args.depth} layers, width {args.n_embd}, {args.n_head} heads, {total:,} parameters"
    families = {"Muon": [], "AdamW": []}
    for name, p in model.named_parameters():
        family = "Muon" if args.optimizer != "adamw" and is_matrix(name, p) else "AdamW"
        families[family].append((re.sub(r"\.\d+\.", ".*.", name), tuple(p.shape)))
    for family, tensors in families.items():
        kinds = ", ".join(f"{n} {name} {'x'.join(map(str, shape))}" for (name, shape), n in Counter(tensors).items())
        yield f"{family:6} {len(tensors)} tensors: {kinds}"
    flops = sum(ns_flops(shape) for _, shape in families["Muon"])
    share = flops / (args.flops_per_token * args.total_batch_size)
    yield (f"step   {args.total_batch_size:,} tokens = {args.data_ranks} x {args.device_batch_size} sequences x "
           f"{args.seq_len} tokens x {args.micro_steps} micro-steps; {args.steps} steps in Z{args.zero}; Newton-Schulz "
           f"{flops:.1e} FLOPs, {share:.1%} of forward and backward")


def loss_curve(losses: list[float], rows: int = 12, columns: int = 60) -> str:
    """The losses as text, each column the mean of its steps."""
    columns = min(columns, len(losses))
    edges = [len(losses) * c // columns for c in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(means), max(means)
    height = [round((rows - 1) * (mean - low) / ((high - low) or 1)) for mean in means]
    lines = []
    for row in reversed(range(rows)):
        label = f"{low + (high - low) * row / (rows - 1):7.3f} |" if row in (0, rows - 1) else "        |"
        lines.append(label + "".join("*" if h == row else " " for h in height).rstrip())
    return "\n".join([*lines, "        +" + "-" * columns + f" {len(losses)} steps"])


# --------------------------------------------------------------------------------------------- evaluate, sample


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, args: argparse.Namespace) -> float:
    """Mean loss of the held-out windows, the same on 1, 2, 4 and 8 ranks; every rank runs equally many batches."""
    rank, ranks, size = dist.get_rank() // args.tp, args.data_ranks, args.device_batch_size
    count = -(-EVAL_WINDOWS // (ranks * size))
    starts = torch.linspace(0, corpus.val.windows - 1, count * ranks * size, dtype=torch.float64).long()
    total = torch.zeros((), dtype=torch.float64, device=args.device)
    for tokens, targets in corpus.val.batches(starts.view(count, ranks, size), rank, args.device):
        total += loss_of(model, tokens, targets)
    dist.all_reduce(total)
    return total.item() / (count * dist.get_world_size())


@torch.no_grad()
def sample(model: GPT, corpus: Corpus, args: argparse.Namespace, rows: int = 8, length: int = 48) -> str:
    """`rows` texts that start after a newline (token 0 for .bin data). All ranks walk the forwards together."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.full((rows, 1), ord("\n") if corpus.is_text else 0, device=args.device)
    for _ in range(length):
        logits = model(tokens[:, -args.seq_len :])[:, -1].double().cpu()  # (rows, vocab_size)
        drawn = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator).to(args.device)
        dist.broadcast(drawn, src=0)  # ranks on unlike machines may round unlike
        tokens = torch.cat([tokens, drawn], dim=1)
    if not corpus.is_text:
        return "\n".join(" ".join(map(str, row)) for row in tokens[:, 1:].tolist())
    texts = [bytes(row).decode(errors="backslashreplace") for row in tokens[:, 1:].tolist()]
    texts = [text.split("\n")[0] if args.data == "unicode" else text for text in texts]  # a name a line
    return "\n".join("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text) for text in texts)


# ------------------------------------------------------------------------------------------------ verify, bench


def verify(corpus: Corpus, mesh: DeviceMesh, args: argparse.Namespace, log: Log) -> None:
    """Three float64 steps of this layout, and of one process that has the whole model and batch, side by side.

    Every rank repeats the one process and compares what it holds: gradients (averaged, clipped), the optimizer's state,
    weights. The one process does Newton-Schulz by the other of the two ways, and there is weight decay, 0.1 if
    `--weight_decay` does not say how much. Prints the largest differences.

    Raises:
        RuntimeError: on every rank; one is above 1e-10, or nobody has some tensor's gradient.
    """
    args.weight_decay = args.weight_decay or 0.1
    other_way = {"ns": "gram" if args.ns == "direct" else "direct"}
    other_way["optimizer"] = "adamw" if args.optimizer == "adamw" else "naive"
    plain_args = argparse.Namespace(**vars(args) | other_way)
    model, plain = build(args, corpus.vocab_size), build(args, corpus.vocab_size)
    shard(model, mesh, args)
    optimizer, plain_optimizer = make_optimizer(model, args), make_optimizer(plain, plain_args)
    found = []  # lines of family, kind, name and difference
    for step in (1, 2, 3):
        loss, norm, *_ = train_step(model, optimizer, corpus, args, step, signals=[])
        plain_optimizer.zero_grad()
        for rank in range(args.data_ranks):
            for tokens, targets in batches(corpus, args, step, rank * args.tp):
                part = loss_of(plain, tokens, targets) / (args.micro_steps * args.data_ranks)
                part.backward()
                loss -= part.item()
        norm -= clip(plain, plain_args).item()  # before clipping, which would hide a factor
        found += [f"both loss mean {abs(loss)}", f"both norm whole {abs(norm)}"]
        plain_optimizer.step()
        model.state_dict()  # lets replicate broadcasts arrive
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            ours, theirs = (dict(gradient=x.grad, weight=x.detach(), **of.state.get(x, {}))
                            for x, of in ((p, optimizer), (q, plain_optimizer)))
            for kind in theirs if p.numel() else ():  # else a placeholder
                if kind != "step" and ours.get(kind) is not None:
                    difference = (whole(ours[kind]) - theirs[kind]).abs().max().item()
                    found.append(f"{'Muon' if is_matrix(name, p) else 'AdamW'} {kind} {name} {difference}")
    most: dict[tuple[str, str], float] = {}
    lacking = {name for name, _ in plain.named_parameters()}
    for family, kind, name, difference in map(str.split, dmuon.union(found, [dist.group.WORLD])):
        lacking -= {name} if kind == "gradient" else set()
        most[family, kind] = max(most.get((family, kind), 0.0), float(difference.replace("nan", "inf")))
    log.write(options=vars(args), largest_differences={" ".join(key): value for key, value in most.items()})
    log.print(f"three float64 steps on {args.layout} in Z{args.zero} against one process, largest difference of an "
              "entry (at most 1e-10):")
    for (family, kind), value in sorted(most.items()):
        log.print(f"  {family:6}{kind:16}{value:.1e}")
    if lacking or max(most.values()) > 1e-10:
        raise RuntimeError(f"--verify: this layout and one process differ by {max(most.values()):.1e}; at most 1e-10 "
                           f"is rounding; without a gradient: {', '.join(sorted(lacking)) or 'nothing'}")


class Meter(TorchDispatchMode):
    """Watches what a rank does: elements it sends, the most bytes in tensors at once, shapes of batched products.

    On a ring an element that must reach N ranks is sent N - 1 times: an all-gather, reduce-scatter, broadcast or reduce
    of n elements costs a rank (N - 1) / N n, on average, and an all-reduce twice that. Raises RuntimeError for a
    collective that it does not know.
    """

    TIMES = {"broadcast_": 1, "reduce_": 1, "allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1,
             "all_gather_into_tensor": 1}

    def __init__(self, held: list[Tensor]):
        super().__init__()
        self.sent, self.peak_bytes, self.products = 0.0, 0, []
        self.storages = weakref.WeakSet(tensor.untyped_storage() for tensor in held)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        result, name = function(*args, **kwargs or {}), function.__name__.split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        if function.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", name):
            if name not in self.TIMES:
                raise RuntimeError(f"--bench: cannot count what the collective {name} sends")
            group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
            ranks = args[1] if group is None else dist.ProcessGroup.unbox(group).size()  # args[1]: DTensor's all-gather
            self.sent += self.TIMES[name] * max(tensor.numel() for tensor in tensors) * (ranks - 1) / ranks
        if name in ("bmm", "baddbmm"):
            left, right = args[-2:]
            self.products.append((*left.shape, right.shape[-1], left.dtype))
        self.storages.update(tensor.untyped_storage() for tensor in tensors)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self.storages))
        return result


def largest(*values: float, device: str) -> list[float]:
    """Of each over the ranks; nobody goes on before all have come."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.tolist()


class BenchRow:
    """One line of the table: a model, sharded, with its optimizer, and what was measured of it."""

    def __init__(self, name: str, corpus: Corpus, mesh: DeviceMesh, args: argparse.Namespace, prefetch: bool = True,
                 **options: str | int):
        self.name, self.prefetch, self.step_ms, self.optimizer_ms = name, prefetch, [], []
        self.args = argparse.Namespace(**vars(args) | options)
        self.data = [*batches(corpus, args, 1, dist.get_rank())]
        self.model = build(self.args, corpus.vocab_size)
        self.formula = self.expected_traffic()
        shard(self.model, mesh, self.args)
        self.optimizer = make_optimizer(self.model, self.args)

    def expected_traffic(self) -> float:
        """Elements that a rank sends in a step, by `partition.step_traffic`."""
        args, numel = self.args, Counter()
        ranks = args.shard
        for name, p in self.model.named_parameters():
            rows = len(p) if args.optimizer == "muon" and is_matrix(name, p) else -(-len(p) // ranks) * ranks
            numel[is_matrix(name, p)] += rows * (p.numel() // len(p))  # FSDP2 pads to equal shards
        links = step_traffic(numel[True], numel[False], ranks, args.replicate, args.zero, args.optimizer == "naive")
        return round(sum(links.values()) * args.data_ranks) / args.data_ranks  # a whole number over all ranks

    def step(self) -> tuple:
        """A training step without clipping and logging; start and end of the optimizer's part."""
        hooks.DedicatedModel.prefetch = int(self.prefetch)
        self.optimizer.zero_grad()
        for tokens, targets in self.data:
            loss_of(self.model, tokens, targets).backward()
        start = moment(self.args.device)
        self.optimizer.step()
        return start, moment(self.args.device)

    def turn(self, steps: int = 2) -> None:
        """Some steps in a row; what they leave in flight ends within the time."""
        device = self.args.device
        largest(0, device=device)  # all start together
        start = time.perf_counter()
        parts = [self.step() for _ in range(steps)]
        self.model.state_dict()  # lets replicate broadcasts arrive
        largest(0, device=device)
        step_ms = 1000 * (time.perf_counter() - start) / steps
        slowest = largest(step_ms, sum(milliseconds(*part) for part in parts) / steps, device=device)
        self.step_ms.append(slowest[0])
        self.optimizer_ms.append(slowest[1])

    def count(self) -> dict[str, float]:
        """Of one step: what the ranks send, on average, and beside it what the fullest rank holds."""
        states = [local(t) for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        held = [*map(local, self.model.parameters()), *self.model.buffers(), *states]
        self.optimizer.zero_grad()
        if self.args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in held)
        with Meter(held) as meter:
            self.step()
        peak = meter.peak_bytes if self.args.device == "cpu" else torch.cuda.max_memory_allocated() - others
        sent = torch.tensor(meter.sent, dtype=torch.float64, device=self.args.device)
        dist.all_reduce(sent)
        momenta = sum(local(self.optimizer.state[p]["momentum_buffer"]).nbytes for p in self.matrices())
        peak, momenta = map(int, largest(peak, momenta, device=self.args.device))
        return dict(sent=round(sent.item()) / self.args.data_ranks, formula=self.formula, muon_state_bytes=momenta,
                    peak_bytes=peak)

    def matrices(self) -> list[nn.Parameter]:
        """Those that this rank runs Newton-Schulz on."""
        return [p for p, state in self.optimizer.state.items() if "momentum_buffer" in state]

    def newton_schulz(self, rounds: int = 3) -> dict[str, float]:
        """Newton-Schulz of a step, and its products by plain torch.mm, in turns, on the rank that it takes longest.

        All ranks run them at once, as in a step; the ratio is of processor time on a CPU, whose cores ranks may share.
        """
        updates = equal_shapes(torch.randn(p.shape, device=p.device, dtype=p.dtype) for p in self.matrices())
        run = lambda: [orthogonalise(same, self.args.ns, dmuon.POLAR_EXPRESS_COEFFICIENTS) for same in updates]
        with Meter([]) as meter:
            run()
        operands = {key: [torch.randn(*shape, device=self.args.device).to(key[-1]) for shape in (key[1:3], key[2:4])]
                    for key in meter.products}
        plain = lambda: [torch.mm(*operands[key]) for key in meter.products for _ in range(key[0])]
        own_time = time.process_time if self.args.device == "cpu" else time.perf_counter
        ms, own_ms = [], []
        for function in (run, plain) * rounds:
            largest(0, device=self.args.device)
            start, own_start = time.perf_counter(), own_time()
            function()
            if self.args.device == "cuda":
                torch.cuda.synchronize()
            ms.append(1000 * (time.perf_counter() - start))
            own_ms.append(1000 * (own_time() - own_start))
        flops = sum(2 * batch * m * k * n for batch, m, k, n, _ in meter.products)
        figures = [median(ms[::2]), median(own_ms[::2]) / (median(own_ms[1::2]) or 1), flops]
        mine = torch.tensor(figures, dtype=torch.float64, device=self.args.device)
        ns_ms, ns_to_mm, flops = max(dmuon.gather_objects(mine.tolist(), dist.group.WORLD))
        return dict(ns_ms=ns_ms, ns_to_mm=ns_to_mm, ns_gflops=flops / ns_ms / 1e6) if flops else {}

    def weights(self) -> Tensor:
        """All of them, one after the other."""
        with dmuon.unshard(self.model):
            return torch.cat([whole(p).detach().flatten() for p in self.model.parameters()])


def bench(corpus: Corpus, mesh: DeviceMesh, args: argparse.Namespace, log: Log) -> None:
    """AdamW, naive Muon and DMuon with one model, data and Newton-Schulz: `--steps` rounds, the rows in turns.

    Raises:
        RuntimeError: on every rank; the rows of one rule have not made the same first step.
    """
    kinds = {"AdamW Z2": ("adamw", 2), "AdamW Z3": ("adamw", 3), "naive Muon Z3": ("naive", 3), "DMuon Z2": ("muon", 2),
             "DMuon Z3": ("muon", 3), "DMuon Z3, no prefetch": ("muon", 3)}
    kinds |= {"DMuon Z3, sync replicas": ("muon", 3)} if args.replicate > 1 else {}
    rows = [BenchRow(name, corpus, mesh, args, "no prefetch" not in name, optimizer=optimizer, zero=zero,
                     replicate_async=int("sync" not in name)) for name, (optimizer, zero) in kinds.items()]
    start, firsts, distances = rows[0].weights(), {}, []
    for row in rows:
        row.step()
        weights = row.weights()
        first = firsts.setdefault(row.args.optimizer == "adamw", weights)
        distances.append((weights - first).norm() / (first - start).norm().clamp(min=1e-30))
    distance, = largest(torch.stack(distances).nan_to_num(math.inf).max(), device=args.device)
    if not distance < (0.1 if args.dtype == "bfloat16" else 0.01):
        raise RuntimeError(f"--bench: the rows' first steps differ by {distance:.1e} of the step")
    del start, firsts, weights, first
    figures = [row.count() | row.newton_schulz() for row in rows]
    for _ in range(args.steps):
        for row in rows:
            row.turn()
    hooks.DedicatedModel.prefetch = 1
    log.write(options=vars(args), torch=torch.__version__, mesh=mesh.shape, first_steps_differ_by=distance)
    log.print(f"bench  width {args.n_embd}, {args.depth} layers, {args.seq_len} tokens x {args.device_batch_size} "
              f"sequences x {args.data_ranks} ranks = {args.total_batch_size:,} tokens a step, replicate "
              f"{args.replicate}\n"
              f"run    {args.device}, {args.dtype}, {dist.get_backend()}, torch {torch.__version__}, medians of "
              f"{args.steps} rounds; first steps differ by {distance:.0e}\n{BENCH_HEAD}")
    base = {row.args.zero: row for row in rows if row.args.optimizer == "adamw"}
    for row, figure in zip(rows, figures):
        ratio = median(map(float.__truediv__, row.step_ms, base[row.args.zero].step_ms))
        figure = dict(step_ms=median(row.step_ms), ratio=ratio, optimizer_ms=median(row.optimizer_ms), **figure)
        log.write(row=row.name, **figure)
        ns = f"{figure['ns_ms']:8.1f}{figure['ns_to_mm']:7.2f}" if "ns_ms" in figure else ""
        log.print(f"{row.name:24}{figure['step_ms']:8.1f}{ratio:7.2f}{figure['optimizer_ms']:8.1f}{ns:15}"
                  f"{figure['sent']:14,.0f}{figure['formula']:14,.0f}{figure['muon_state_bytes'] / 2**20:8.1f}"
                  f"{figure['peak_bytes'] / 2**20:8.1f}")


# ------------------------------------------------------------------------------------------------------- main


def init_distributed(args: argparse.Namespace) -> DeviceMesh:
    """The group of torchrun, or of one process without it; the mesh over all ranks; without replicate or tp of 1."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"  # checkpoints send objects, on the CPU
        env, how = os.environ, {}
        if "RANK" not in env:
            how = dict(store=dist.HashStore(), rank=0, world_size=1)
        elif env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"]:
            # torchrun 2.13 keeps its store when it starts workers again, and in it the addresses of the dead ones
            store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
            store = dist.PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", store)
            how = dict(store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))
        dist.init_process_group(backend, timeout=TIMEOUT, **how)
    sizes = (("replicate", args.replicate), ("shard", args.shard), ("tp", args.tp))
    sizes = {name: size for name, size in sizes if size > 1 or name == "shard"}
    mesh = init_device_mesh(args.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        group.set_timeout(TIMEOUT)  # FSDP2's, too, which else wait for half an hour
    return mesh


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


def train_step(model: GPT, optimizer: torch.optim.Optimizer, corpus: Corpus, args: argparse.Namespace, step: int,
               signals: list[int]) -> tuple[float, float, bool, list]:
    """Mean loss over ranks and micro-steps, norm of the gradient, whether a rank has a signal; three moments.

    The moments are the start, the end of the backward and the end of the optimizer's part. The host waits for the
    device once, after clipping, and so not for what the optimizer leaves in flight.
    """
    moments = [moment(args.device)]
    total = torch.zeros(2, dtype=torch.float64, device=args.device)
    optimizer.zero_grad()
    with phase(step, "forward and backward"):
        for i, (tokens, targets) in enumerate(batches(corpus, args, step, dist.get_rank()), start=1):
            waits = args.optimizer == "muon" and args.zero == 2 and i < args.micro_steps  # Z3 saves memory instead
            with dmuon.no_sync(model) if waits else nullcontext():
                loss = loss_of(model, tokens, targets) / args.micro_steps
                loss.backward()
            total[0] += loss.detach()
        total[1] = len(signals)
        dist.all_reduce(total)
    moments.append(moment(args.device))
    with phase(step, "optimizer"):
        loss, stops, norm = torch.hstack([total, clip(model, args)]).tolist()
        loss /= dist.get_world_size()
        if not math.isfinite(loss + norm):  # the same on every rank; the step would spoil weights and momenta
            where = first_not_finite(model)
            raise UsageError(f"step {step}: loss {loss}, gradient norm {norm}, first in {where}; checkpoints are "
                             f"as they were; try a lower --muon_lr or --adamw_lr")
        optimizer.step()
    moments.append(moment(args.device))
    return loss, norm, stops > 0, moments


def resume(model: GPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace, log: Log) -> int:
    """Steps that a checkpoint has behind it, if `--resume` names one; the options are those of the command line."""
    step, given = 0, [dict(group) for group in optimizer.param_groups]
    found = dmuon.union(map(str, Path(args.out).glob("step_*")), [dist.group.WORLD])  # the same on every rank
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun, with the same command
    auto, place = args.resume == "auto" or restarted and bool(found), Path(args.resume).resolve()
    same_run = auto or Path(args.out).resolve() in (place, place.parent)
    if found and not same_run:
        raise UsageError(f"--resume {args.resume}: --out {args.out} has checkpoints of another run, which --keep would "
                         f"delete; choose another --out")
    if found if auto else args.resume != "none":
        try:
            step = dmuon.load_checkpoint(args.out if auto else args.resume, model, optimizer)
        except (FileNotFoundError, ValueError, ImportError) as error:
            if not (auto and isinstance(error, FileNotFoundError) and all(path.endswith(".part") for path in found)):
                way_out = "another --out starts anew" if auto else "name another checkpoint, or a folder of them"
                raise UsageError(f"--resume {args.resume}: {error}; {way_out}") from error
            log.print(str(error))  # a run that was killed while it wrote its first
        nothing = ": nothing is left to do; more --steps go on, another --out starts anew" * (step >= args.steps)
        log.print(f"resume after step {step} of {args.steps}{nothing}")
    for group, options in zip(optimizer.param_groups, given):
        group.update(options)
    log.rewind(step, keep=same_run)
    return step


def report(model: GPT, corpus: Corpus, args: argparse.Namespace, log: Log, step: int) -> None:
    """Evaluation and sample, if they are due after the step."""
    last = step == args.steps
    if step and (last or args.eval_every and step % args.eval_every == 0):
        val = evaluate(model, corpus, args)
        log.write(step=step, val_loss=val)
        per_byte = f", {val / math.log(2):.3f} bits per byte" if corpus.is_text else ""
        log.print(f"step {step:5d}/{args.steps} | val loss {val:.4f} nats per token{per_byte}")
    if step and (last or args.sample_every and step % args.sample_every == 0):
        log.print("sample\n" + sample(model, corpus, args))


def train(model: GPT, optimizer: torch.optim.Optimizer, corpus: Corpus, args: argparse.Namespace, log: Log,
          done: int) -> None:
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # preemption, Ctrl-C; torchrun passes them on
        signal.signal(number, lambda number, _: signals.append(number))
    rates = [group["lr"] for group in optimizer.param_groups]
    report(model, corpus, args, log, done)  # a run that was killed may not have come to it
    latest = None  # moments of a step whose optimizer's part is over: on CUDA the step before, on CPU this one
    bar = tqdm(total=args.steps, initial=done, disable=not (log.main and sys.stderr.isatty()), leave=False)
    with profiler(args, log, done) as trace:
        for step in range(done + 1, args.steps + 1):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * multiplier(args, step - 1)
            loss, norm, stops, moments = train_step(model, optimizer, corpus, args, step, signals)
            latest = moments if args.device == "cpu" else latest
            ms = {"fwd+bwd": milliseconds(*moments[:2]), "opt": milliseconds(*latest[1:]) if latest else 0.0}
            latest = moments
            if trace:
                trace.step()
            log.step(args, step, loss, norm, optimizer.param_groups[0]["lr"], ms)
            bar.update()
            with phase(step, "checkpoint and evaluation"):
                if stops or args.save_every and (step == args.steps or step % args.save_every == 0):
                    path = dmuon.save_checkpoint(args.out, model, optimizer, step, args.keep)
                    if stops:
                        return log.print(f"stopped by a signal after step {step}, saved {path}; --resume=auto goes on")
                report(model, corpus, args, log, step)
    bar.close()
    if log.losses:
        log.print("loss\n" + loss_curve(log.losses))


def profiler(args: argparse.Namespace, log: Log, done: int):
    """torch.profiler on the fourth to sixth step of this run, if `--profile` asks for it."""
    if args.profile and args.steps - done < 4:
        log.print(f"--profile {args.profile}: nothing is traced; this run has less than four steps")
    if not args.profile or args.steps - done < 4:
        return nullcontext()
    try:
        os.makedirs(args.profile, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--profile {args.profile}: cannot write there: {error}") from error
    save = lambda trace: trace.export_chrome_trace(os.path.join(args.profile, f"rank{dist.get_rank()}.json"))
    return profile(schedule=schedule(wait=2, warmup=1, active=3, repeat=1), on_trace_ready=save)


@record
def main(argv: list[str] | None = None) -> None:
    """Parse, load, build, shard, train."""
    args = parse(argv)
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    args = resolve(args, ranks)
    corpus = load_corpus(args)
    mesh = init_distributed(args)
    log = Log(args)
    if args.bench or args.verify:
        log.rewind(0, keep=False)
        return bench(corpus, mesh, args, log) if args.bench else verify(corpus, mesh, args, log)
    model = build(args, corpus.vocab_size)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.embed.weight.numel()
    args.flops_per_token = 6 * matrices + 12 * args.depth * args.n_embd * args.seq_len  # attention's products last
    log.print("\n".join(describe(model, corpus, args)))
    shard(model, mesh, args)
    if args.optimizer == "muon":
        log.print(dmuon.ownership_table(model))
    optimizer = make_optimizer(model, args)
    done = resume(model, optimizer, args, log)
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    log.write(options=vars(args), torch=torch.__version__, python=sys.version.split()[0], mesh=mesh.shape,
              data_sha256=corpus.sha256, source_sha256=hashlib.sha256(sources).hexdigest()[:16])
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
    os._exit(0)  # gloo's threads may still let go of tensors, and abort if the interpreter is being torn down
