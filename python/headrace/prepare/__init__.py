"""Turns a dataset into token shards: memory-mapped files of token ids, loss mask and document bounds.

Flow: settings -> formats (records) -> templates (text with trained spans) -> tokenize (ids with loss mask) -> shards -> cache.
Read next: pipeline.py, the main path. The formats and the loss mask are described in docs/data.md.
"""
