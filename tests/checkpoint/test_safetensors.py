"""Our safetensors files against Hugging Face's own library: byte-identical writing, reading both ways, the same refusals."""

import json
import struct

import pytest
import safetensors
import safetensors.torch
import torch
from tool import run

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32,
    torch.complex64, torch.float64,
    torch.int64, torch.uint64,
]  # fmt: skip


def random_bytes(dtype, shape, generator):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def every_dtype():
    """Byte order, natural order and insertion order of the names all differ; shapes with scalars, zeros and odd sizes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for i, dtype in enumerate(DTYPES):
        for j, shape in enumerate([(), (3,), (0, 5), (7, 1, 3)]):
            tensors[f'model.layers.{(i * 7 + j * 3) % 23}.w{j}é"\\\n.{i}'] = random_bytes(dtype, shape, generator)
    return tensors


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_rewritten_file_is_byte_identical(tmp_path, metadata):
    tensors = every_dtype()
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata=metadata)
    run("copy-file", tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    back = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


def raw_file(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


FILES = {
    "good": raw_file({"a": entry("F32", [1], 0, 4), "b": entry("U8", [3], 4, 7)}, b"1234567"),
    "other order": raw_file({"b": entry("U8", [3], 4, 7), "a": entry("F32", [1], 0, 4)}, b"1234567"),
    "empty": raw_file({}, b""),
    "spaces": raw_file(b'{ "a" : {"shape":[2],"dtype":"U8","data_offsets":[0,2]} }      ', b"12"),
    "packed": raw_file(
        {"a": entry("F4", [2, 3], 0, 3), "b": entry("F6_E2M3", [4], 3, 6), "c": entry("F6_E3M2", [8], 6, 12)}, b"123456789012"
    ),
    "null metadata": raw_file(b'{"__metadata__":null}', b""),
    "unknown field": raw_file({"a": {**entry("U8", [2], 0, 2), "note": [1, {"x": None}]}}, b"12"),
    "half byte": raw_file({"a": entry("F4", [3], 0, 2)}, b"12"),
    "hole": raw_file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, b"12345"),
    "overlap": raw_file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
    "trailing": raw_file({"a": entry("U8", [2], 0, 2)}, b"123"),
    "truncated": raw_file({"a": entry("U8", [2], 0, 2)}, b"1"),
    "size": raw_file({"a": entry("F32", [2], 0, 4)}, b"1234"),
    "dtype": raw_file({"a": entry("Q4", [2], 0, 2)}, b"12"),
    "negative": raw_file({"a": entry("U8", [-2], 0, 2)}, b"12"),
    "float": raw_file({"a": entry("U8", [2.0], 0, 2)}, b"12"),
    "overflow": raw_file({"a": entry("U8", [2**33, 2**33], 0, 0)}, b""),
    "overflow zero": raw_file({"a": entry("U8", [2**33, 2**33, 0], 0, 0)}, b""),
    "metadata number": raw_file({"__metadata__": {"a": 1}}, b""),
    "list": raw_file(b"[]", b""),
    "leading space": raw_file(b" {}", b""),
    "text after": raw_file(b"{}x", b""),
    "long": struct.pack("<Q", 100) + b"{}",
    "huge": struct.pack("<Q", 1 << 63) + b"{}",
    "field twice": raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"12"),
}


@pytest.mark.parametrize("kind", FILES)
def test_same_verdict_as_the_reference_reader(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    path.write_bytes(FILES[kind])
    try:
        with safetensors.safe_open(path, "pt") as file:
            file.keys()
        accepted = True
    except safetensors.SafetensorError:
        accepted = False
    if accepted:
        run("copy-file", path, tmp_path / "copy.safetensors")
    else:
        assert str(path) in run("copy-file", path, tmp_path / "copy.safetensors", code=2)
        assert not (tmp_path / "copy.safetensors").exists()
