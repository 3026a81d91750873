"""What a training step holds: strings to copy, text, chats. A batch is a pure function of its step and the config.

data = text_data(config, text_config, block_size)     # or copy_data, chat_data
tokens, targets = data.batch(step, "train")           # (B, T) each, the same on every rank
for tokens, targets in micro_batches(tokens, targets, n, rank, world):    # what this rank computes
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import checkpoint
import configurator
import data_copy
import rope2d
from data_copy import IGNORE, CopyConfig, TextCopyConfig
from data_dclm import Corpus, TextConfig, load_tokenizer, pad_chats, permute
from model import Decoder

if TYPE_CHECKING:
    from train import TrainConfig


class Data(NamedTuple):
    """What a task trains on."""

    # Of (step, "train" or "validation"): tokens and targets (batch_size, T), short rows first, IGNORE for no target.
    batch: Callable[[int, str], tuple[NDArray[np.int64], NDArray[np.int64]]]
    newlines: Tensor  # (vocab_size,) line breaks in each token
    identity: dict  # what must be the same when a run goes on, and on all ranks: goes into checkpoints
    weight: Tensor | None = None  # (vocab_size,) of each token as a target of training; None: all count the same


def micro_batches(tokens: NDArray, targets: NDArray, n: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's n pieces of a batch (B, T), without the columns that are padding in all of a piece's rows."""
    ends = targets.shape[1] - (targets[:, ::-1] != IGNORE).argmax(1)  # behind the last target of each row
    pieces = np.array_split(np.arange(len(targets)), n * world)[rank::world]
    cut = [(tokens[piece, : ends[piece].max()], targets[piece, : ends[piece].max()]) for piece in pieces]
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in cut]


def copy_data(config: TrainConfig, copy_config: CopyConfig, block_size: int) -> Data:
    longest = 2 * copy_config.max_length + 5
    if longest > block_size:
        raise ValueError(
            f"max_length={copy_config.max_length} makes sequences of {longest} tokens: block_size={block_size} is too "
            "short"
        )

    def batch(step: int, stream: str) -> tuple[NDArray, NDArray]:
        return data_copy.batch(copy_config, config.batch_size, step, config.seed, stream)[:2]

    weight = torch.ones(len(data_copy.VOCAB))  # a separator is a target only where it ends a copy
    weight[data_copy.SEPARATORS[copy_config.separator]] = copy_config.closing_weight
    weight = None if copy_config.closing_weight == 1 else weight
    return Data(batch, rope2d.newline_table(data_copy.TOKEN_BYTES), {"vocabulary": data_copy.VOCAB}, weight)


def text_data(config: TrainConfig, text_config: TextConfig, block_size: int) -> Data:
    """Training on one corpus in an order of config.seed; validation on fixed windows of another, whatever the seed."""
    tokenizer = load_tokenizer(text_config.tokenizer)
    corpora = {}
    for stream, name in (("train", "train_data"), ("validation", "val_data")):
        if not getattr(text_config, name):
            raise ValueError(f"task='pretrain' needs --{name}=DIR, a folder of shards: data_dclm.py makes them")
        corpus = corpora[stream] = Corpus(getattr(text_config, name), tokenizer.identity)
        if not corpus.complete:
            raise ValueError(f"{corpus.folder}: its build was stopped; the same data_dclm.py command goes on with it")
        if corpus.length > block_size:
            raise ValueError(
                f"{corpus.folder} has sequences of {corpus.length} tokens: block_size={block_size} is too short"
            )
    if config.eval_steps * config.batch_size > corpus.rows:
        raise ValueError(
            f"eval_steps={config.eval_steps} x batch_size={config.batch_size}: {corpus.folder} has only {corpus.rows} "
            "sequences"
        )

    def batch(step: int, stream: str) -> tuple[NDArray, NDArray]:
        places = np.arange(step * config.batch_size, (step + 1) * config.batch_size)
        order = corpora[stream].order(places, config.seed if stream == "train" else 0)
        rows = corpora[stream].read(order)
        return rows[:, :-1], rows[:, 1:]

    identity = {"tokenizer": tokenizer.identity} | {f"{name} corpus": corpus.digest for name, corpus in corpora.items()}
    return Data(batch, rope2d.newline_table(tokenizer.token_bytes), identity)


def chat_data(
    config: TrainConfig, text_config: TextConfig, text_copy_config: TextCopyConfig, start: Decoder, identity: dict
) -> Data:
    """Chats, from files or made as they are needed; the loss is on what the assistant says."""
    tokenizer = load_tokenizer(text_config.tokenizer)
    if lines := configurator.diff(identity, tokenizer.identity):
        raise ValueError(f"tokenizer={tokenizer.name!r}: {config.init_from} has another: {'; '.join(lines)}")
    files = {"train": config.chats, "validation": config.val_chats}
    records = {stream: data_copy.read_jsonl(file) for stream, file in files.items() if file}

    def chat(index: int, stream: str) -> tuple[NDArray, NDArray]:
        if stream in records:
            epoch, place = divmod(index, len(records[stream]))
            key = config.seed + epoch if stream == "train" else 0
            record = records[stream][permute(place, len(records[stream]), key)[0]]
        else:
            record = data_copy.text_example(text_copy_config, index, config.seed, stream)
        ids, said = tokenizer.chat(record["messages"])
        if len(ids) - 1 > start.config.block_size:
            longest = start.config.block_size
            raise ValueError(f"example {record.get('id')} has {len(ids)} tokens: block_size={longest} is too short")
        return ids, said

    def batch(step: int, stream: str) -> tuple[NDArray, NDArray]:
        chats = [chat(step * config.batch_size + i, stream) for i in range(config.batch_size)]
        return pad_chats(sorted(chats, key=lambda pair: len(pair[0])))

    digests = {f"{s} chats": sha256(Path(f).read_bytes()).hexdigest() for s, f in files.items() if f}
    return Data(batch, start.newlines.cpu(), {"tokenizer": tokenizer.identity} | digests)


def load_start(config: TrainConfig, changes: dict) -> tuple[Decoder, dict, str]:
    """The model to finetune, with `changes` of its config that leave the shapes of its weights alone, the identity of
    its tokenizer, and its encoding before the changes."""
    folder = Path(config.init_from)
    if not config.init_from:
        raise ValueError("task='finetune' needs --init_from=DIR, a run directory of ours or a folder of a Qwen3")
    if (folder / "config.json").exists():
        import qwen3

        return qwen3.load(folder, **changes), load_tokenizer(config.init_from).identity, "rope"
    saved = checkpoint.read(folder / "last.pt" if folder.is_dir() else folder)
    if "tokenizer" not in saved["data"]:
        raise ValueError(f"{config.init_from}: not trained on text, it has no tokenizer")
    return checkpoint.load_model(saved, **changes), saved["data"]["tokenizer"], saved["config"]["pos_encoding"]
