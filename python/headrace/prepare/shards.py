"""Shards: writes one split of tokenised documents as flat little-endian files. The format is in docs/data.md.

Flow: Tokens -> [shards] -> <split>-<5 digits>.{input_ids,loss_mask,bounds} -> memory-mapped by the C++ program.
"""

import os
from pathlib import Path

import numpy as np

from headrace.prepare.formats import Tokens

TOKENS_PER_SHARD = 1 << 28  # 1 GiB of ids; documents are never divided


class SplitWriter:
    """Writes the documents of one split into `folder`; close() returns the split's entry of the manifest."""

    def __init__(self, folder: Path, split: str, tokens_per_shard: int = TOKENS_PER_SHARD):
        self._folder, self._split, self._tokens_per_shard = folder, split, tokens_per_shard
        self._shards: list[dict] = []
        self._files: list = []
        self._bounds = [0]
        self.num_documents = self.num_tokens = self.num_trained_tokens = 0

    def add(self, tokens: Tokens) -> None:
        if not self._files:
            name = f"{self._split}-{len(self._shards):05d}"
            self._files = [open(self._folder / f"{name}.{column}", "wb") for column in ("input_ids", "loss_mask", "bounds")]
        input_ids, loss_mask, _ = self._files
        input_ids.write(np.asarray(tokens.input_ids, dtype="<u4").tobytes())
        loss_mask.write(np.asarray(tokens.loss_mask, dtype="u1").tobytes())
        self._bounds.append(self._bounds[-1] + len(tokens.input_ids))
        self.num_documents += 1
        self.num_tokens += len(tokens.input_ids)
        self.num_trained_tokens += sum(tokens.loss_mask)
        if self._bounds[-1] >= self._tokens_per_shard:
            self._finish_shard()

    def close(self) -> dict:
        self._finish_shard()
        counts = {name: getattr(self, name) for name in ("num_documents", "num_tokens", "num_trained_tokens")}
        return {**counts, "shards": self._shards}

    def abandon(self) -> None:
        """Closes the files of an unfinished shard; the folder is thrown away by its owner."""
        for file in self._files:
            file.close()

    def _finish_shard(self) -> None:
        if not self._files:
            return
        self._files[2].write(np.asarray(self._bounds, dtype="<u8").tobytes())
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        name = f"{self._split}-{len(self._shards):05d}"
        self._shards.append({"name": name, "num_documents": len(self._bounds) - 1, "num_tokens": self._bounds[-1]})
        self._files, self._bounds = [], [0]


def sizes_agree(folder: Path, manifest: dict) -> bool:
    """Whether every shard file of the manifest is there and has its size."""
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            expected = {"input_ids": 4 * shard["num_tokens"], "loss_mask": shard["num_tokens"]}
            expected["bounds"] = 8 * (shard["num_documents"] + 1)
            for column, size in expected.items():
                file = folder / f"{shard['name']}.{column}"
                if not file.is_file() or file.stat().st_size != size:
                    return False
    return True
