"""Dtypes: torch's names, and what they are called in Zarr and in safetensors files."""

from __future__ import annotations

import torch

_ZARR = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "uint16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint64: "uint64",
    torch.uint32: "uint32",
    torch.uint16: "uint16",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.float8_e4m3fn: "uint8",
    torch.float8_e5m2: "uint8",
}
"""Zarr v3 has no bfloat16 and no float8: their bits are kept as unsigned integers, and an attribute says which."""

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_OF_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _ZARR}
_OF_ZARR = {name: _OF_NAME[name] for name in set(_ZARR.values())}
_OF_SAFETENSORS = {code: dtype for dtype, code in _SAFETENSORS.items()}


def name_of(dtype: torch.dtype) -> str:
    """torch's name of it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def of_name(name: str) -> torch.dtype | None:
    """The dtype of torch's name; None for one that can't be kept here."""
    return _OF_NAME.get(name)


def zarr_name(dtype: torch.dtype) -> str | None:
    """The Zarr data type that keeps its bits; None where there is none."""
    return _ZARR.get(dtype)


def of_zarr(name: str) -> torch.dtype | None:
    """The dtype of an array that says nothing else of itself."""
    return _OF_ZARR.get(name)


def safetensors_code(dtype: torch.dtype) -> str | None:
    """Its code in a safetensors header; None where there is none."""
    return _SAFETENSORS.get(dtype)


def of_safetensors(code: str) -> torch.dtype | None:
    """The dtype of a safetensors code."""
    return _OF_SAFETENSORS.get(code)
