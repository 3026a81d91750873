"""What a run trains on: strings to copy, text, or chats. The data files make the batches; a task says which."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import data_copy
import data_dclm
import data_text
from data_copy import CopyConfig, MicroBatches
from data_text import TextCopyConfig
from rope2d import break_table
from tokenizer import load_tokenizer


class Task(NamedTuple):
    """What a run trains on."""

    batch: Callable[..., MicroBatches]  # (step, "train" or "validation", rank, world, pieces)
    breaks: Tensor  # (3, vocab_size), where units of text end (rope2d.break_table)
    fingerprint: dict[str, Any]  # must be the same when a run goes on, and on all ranks
    contents: dict[str, str] = {}  # must be the same on all ranks; may have been mended when a run goes on
    weight: Tensor | None = None  # (vocab_size,) of each token as a target of training; None: all count the same


def copy_task(config: CopyConfig, batch_size: int, seed: int, block_size: int, vocab_size: int | None) -> Task:
    longest = data_copy.longest(config.copy_task, config.max_length)
    if longest > block_size:
        given = f"max_length={config.max_length} makes sequences of {longest} tokens"
        raise ValueError(f"{given}, block_size={block_size} is too short: give --block_size={longest}")

    def batch(step: int, stream: str, *shard: int) -> MicroBatches:
        return data_copy.copy_batch(config, batch_size, step, seed, stream, *shard)

    breaks, weight = break_table(data_copy.TOKEN_BYTES, vocab_size), None
    if config.closing_weight != 1:
        weight = torch.ones(breaks.shape[1])  # a separator is a target where it ends a copy or a line of it
        weight[data_copy.SEPARATORS[config.separator]] = config.closing_weight
    return Task(batch, breaks, {"vocabulary": data_copy.VOCAB}, weight=weight)


def pretrain_task(
    tokenizer_name: str,
    train_data: str,
    val_data: str,
    validation_rows: int,
    batch_size: int,
    seed: int,
    block_size: int,
    vocab_size: int | None,
) -> Task:
    """Trains on one corpus in an order of `seed`; validates on the first rows of another, whatever the seed."""
    if not train_data or not val_data:
        raise ValueError("task='pretrain' needs --train_data=DIR and --val_data=DIR, folders of shards (data_dclm.py)")
    tokenizer = load_tokenizer(tokenizer_name)
    corpora = {
        "train": data_dclm.open_corpus(train_data, tokenizer.fingerprint, block_size),
        "validation": data_dclm.open_corpus(val_data, tokenizer.fingerprint, block_size, validation_rows),
    }

    def batch(step: int, stream: str, *shard: int) -> MicroBatches:
        return data_dclm.text_batch(corpora[stream], batch_size, step, seed if stream == "train" else 0, *shard)

    digests = {f"{stream} corpus": corpus.digest for stream, corpus in corpora.items()}
    breaks = break_table(tokenizer.token_bytes, vocab_size)
    return Task(batch, breaks, {"tokenizer": tokenizer.fingerprint} | digests)


def finetune_task(
    config: TextCopyConfig,
    tokenizer_name: str,
    chats: str,
    val_chats: str,
    replay: float,
    train_data: str,
    batch_size: int,
    seed: int,
    block_size: int,
    vocab_size: int | None,
) -> Task:
    """Chats, from files or made as they are needed; the loss is on what the assistant says. A share `replay` of the
    rows of each training step are sequences of the corpus train_data instead, all of whose tokens are targets."""
    tokenizer, files = load_tokenizer(tokenizer_name), {"train": chats, "validation": val_chats}
    chat, facts, contents = data_text.chat_source(config, files, seed, tokenizer.chat, block_size)
    replayed = round(replay * batch_size)  # rows of a step
    if (replay > 0) != (replayed > 0):
        raise ValueError(f"replay={replay} of batch_size={batch_size} is no whole row: give more of one of them")
    if (replay > 0) != bool(train_data):
        raise ValueError(f"{replay=} with {train_data=}: give both, or none")
    if replay:
        corpus = data_dclm.open_corpus(train_data, tokenizer.fingerprint, block_size)
        facts["train corpus"] = corpus.digest

    def row(stream: str, index: int) -> data_text.Chat:
        if stream == "validation":
            return chat(stream, index)
        step, place = divmod(index, batch_size)
        if place >= replayed:
            return chat(stream, step * (batch_size - replayed) + place - replayed)
        ids = corpus.read(corpus.order([step * replayed + place], seed))[0]
        return ids, np.ones(len(ids), bool)

    def batch(step: int, stream: str, *shard: int) -> MicroBatches:
        return data_text.chat_batch(partial(row, stream), batch_size, step, *shard)

    breaks = break_table(tokenizer.token_bytes, vocab_size)
    return Task(batch, breaks, {"tokenizer": tokenizer.fingerprint} | facts, contents)
