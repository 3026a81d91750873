"""What a run trains on: strings to copy, text, or chats. The data files make the batches; a task says which."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import data_copy
import data_dclm
import data_text
from data_copy import IGNORE, CopyConfig, MicroBatches
from data_text import TextCopyConfig
from model import ModelConfig
from rope2d import break_table
from tokenizer import load_tokenizer


class Task(NamedTuple):
    """What a run trains on."""

    batch: Callable[..., MicroBatches]  # (step, "train" or "validation", rank, world, grad_accum)
    breaks: Tensor  # (3, vocab_size), where units of text end (rope2d.break_table)
    fingerprint: dict[str, Any]  # must be the same when a run goes on, and on all ranks
    contents: dict[str, str] = {}  # must be the same on all ranks; may have been mended when a run goes on
    weights: Callable[[NDArray], NDArray] | None = None  # (n, T) of targets (n, T) in training; None: all 1


def make_task(model: ModelConfig, copy: CopyConfig, text: TextCopyConfig, config: Any) -> Task:
    """The task of a train.TrainConfig. ValueError for data that is missing or does not fit the model."""
    if config.task == "copy":
        return copy_task(model, copy, config)
    return pretrain_task(model, config) if config.task == "pretrain" else finetune_task(model, text, config)


def copy_task(model: ModelConfig, copy: CopyConfig, config: Any) -> Task:
    longest = data_copy.longest(copy.copy_task, copy.max_length)
    if longest > model.block_size:
        given = f"max_length={copy.max_length} makes sequences of {longest} tokens"
        raise ValueError(f"{given}, block_size={model.block_size} is too short: give --block_size={longest}")

    def batch(step: int, stream: str, *shard: int) -> MicroBatches:
        return data_copy.copy_batch(copy, config.batch_size, step, config.seed, stream, *shard)

    def weights(targets: NDArray) -> NDArray:  # a separator is a target where it ends a copy or a line of it
        return np.where(targets == data_copy.SEPARATORS[copy.separator], copy.closing_weight, 1).astype(np.float32)

    breaks = break_table(data_copy.TOKEN_BYTES, model.vocab_size)
    return Task(batch, breaks, {"vocabulary": data_copy.VOCAB}, weights=weights if copy.closing_weight != 1 else None)


def pretrain_task(model: ModelConfig, config: Any) -> Task:
    """Trains on one corpus in an order of the seed; validates on the first rows of another, whatever the seed."""
    if not config.train_data or not config.val_data:
        raise ValueError("task='pretrain' needs --train_data=DIR and --val_data=DIR, folders of shards (data_dclm.py)")
    tokenizer = load_tokenizer(config.tokenizer)
    rows = config.eval_steps * config.batch_size
    corpora = {
        "train": data_dclm.open_corpus(config.train_data, tokenizer.fingerprint, model.block_size),
        "validation": data_dclm.open_corpus(config.val_data, tokenizer.fingerprint, model.block_size, rows),
    }

    def batch(step: int, stream: str, *shard: int) -> MicroBatches:
        seed = config.seed if stream == "train" else 0
        return data_dclm.text_batch(corpora[stream], config.batch_size, step, seed, *shard)

    digests = {f"{stream} corpus": corpus.digest for stream, corpus in corpora.items()}
    breaks = break_table(tokenizer.token_bytes, model.vocab_size)
    return Task(batch, breaks, {"tokenizer": tokenizer.fingerprint} | digests)


def finetune_task(model: ModelConfig, text: TextCopyConfig, config: Any) -> Task:
    """Chats, from files or made as they are needed; the loss is on what the assistant says. A share `replay` of the
    rows of each training step are sequences of the corpus train_data instead, all of whose tokens are targets."""
    if not config.init_from:
        raise ValueError("task='finetune' needs --init_from=DIR, a run directory of ours or a Hugging Face folder")
    tokenizer, files = load_tokenizer(config.tokenizer), {"train": config.chats, "validation": config.val_chats}
    chat, facts, contents = data_text.chat_source(text, files, config.seed, tokenizer.chat, model.block_size)
    replayed = round(config.replay * config.batch_size)  # rows of a step
    if (config.replay > 0) != (replayed > 0):
        given = f"replay={config.replay} of batch_size={config.batch_size}"
        raise ValueError(f"{given} is no whole row: give more of one of them")
    if (config.replay > 0) != bool(config.train_data):
        raise ValueError(f"replay={config.replay} with train_data={config.train_data!r}: give both, or none")
    if replayed:
        corpus = data_dclm.open_corpus(config.train_data, tokenizer.fingerprint, model.block_size)
        facts["train corpus"] = corpus.digest

    def row(stream: str, index: int) -> data_text.Chat:
        if stream == "validation":
            return chat(stream, index)
        step, place = divmod(index, config.batch_size)
        if place >= replayed:
            return chat(stream, step * (config.batch_size - replayed) + place - replayed)
        ids = corpus.read(corpus.order([step * replayed + place], config.seed))[0]
        return ids, np.ones(len(ids), bool)

    def batch(step: int, stream: str, *shard: int) -> MicroBatches:
        return data_text.chat_batch(partial(row, stream), config.batch_size, step, *shard)

    def weights(targets: NDArray) -> NDArray:  # of replay's rows each token is a target, none of them the first
        first = (targets[:, 1:] != IGNORE) & (targets[:, :-1] == IGNORE)
        return np.pad(np.where(first, text.first_weight, 1), ((0, 0), (1, 0)), constant_values=1).astype(np.float32)

    breaks, facts = break_table(tokenizer.token_bytes, model.vocab_size), {"tokenizer": tokenizer.fingerprint} | facts
    return Task(batch, breaks, facts, contents, weights if text.first_weight != 1 else None)
