"""What the generic checks cannot say of `nf4_lora_linear` and `dequantize_nf4`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tigon
from tigon.ops._nf4 import TABLE


def packed(device: torch.device, *shape: int, nested: bool = False, block_size: int = 64) -> dict[str, Any]:
    num_elements = torch.Size(shape).numel()
    num_blocks = -(-num_elements // block_size)
    given: dict[str, Any] = {
        "packed": torch.randint(256, (-(-num_elements // 2), 1), dtype=torch.uint8, device=device),
        "absmax": torch.rand(num_blocks, device=device) + 0.5,
        "block_size": block_size,
    }
    if nested:
        given["absmax"] = torch.randint(256, (num_blocks,), dtype=torch.uint8, device=device)
        given["nested_absmax"] = torch.rand(-(-num_blocks // 4), device=device)
        given["nested_code"] = torch.linspace(-1, 1, 256, device=device)
        given["nested_offset"] = torch.tensor(1.5, device=device)
        given["nested_block_size"] = 4
    return given


def test_values_stand_where_they_were_packed(backend: str, device: torch.device) -> None:
    """Every byte there is, by hand: the upper half first, one scale for each 64 numbers."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    absmax = torch.arange(1, 9, device=device).float()
    weight = tigon.dequantize_nf4(every, absmax, (16, 32), dtype=torch.float32)
    expected = [TABLE[half] * (1 + i // 32) for i in range(256) for half in (i // 16, i % 16)]
    assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(64, 128), (33, 70), (3, 5), (3000,)])
@pytest.mark.parametrize("nested", [False, True])
def test_the_kernel_is_the_reference(nested: bool, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
    given = packed(device, *shape, nested=nested, block_size=32)
    weight = tigon.dequantize_nf4(**given, shape=shape, dtype=dtype)
    with tigon.backend("torch"):
        expected = tigon.dequantize_nf4(**given, shape=shape, dtype=dtype)
    torch.testing.assert_close(weight, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_one_buffer_serves_many(backend: str, device: torch.device) -> None:
    buffer = torch.full((8, 40), float("nan"), device=device)
    for _ in range(2):
        given = packed(device, 8, 40)
        assert tigon.dequantize_nf4(**given, shape=(8, 40), out=buffer) is buffer
        assert torch.equal(buffer, tigon.dequantize_nf4(**given, shape=(8, 40), dtype=torch.float32))


@pytest.mark.parametrize("shape", [(8, 40), (3, 5)])
def test_nothing_is_written_beyond_a_buffer(shape: Any, device: torch.device) -> None:
    memory = torch.full((8192,), 7.0, device=device)
    buffer = memory[4096 : 4096 + torch.Size(shape).numel()].view(shape)
    tigon.dequantize_nf4(**packed(device, *shape), shape=shape, out=buffer)
    assert int((memory != 7).sum()) == buffer.numel() == int((buffer != 7).sum())


def test_bytes_may_be_held_as_another_dtype(backend: str, device: torch.device) -> None:
    """As wrappers that shard parameters want them: all of one floating dtype."""
    given = packed(device, 8, 64)
    other = {**given, "packed": given["packed"].view(-1).view(torch.bfloat16).unsqueeze(1)}
    expected = tigon.dequantize_nf4(**given, shape=(8, 64), dtype=torch.float32)
    assert torch.equal(tigon.dequantize_nf4(**other, shape=(8, 64), dtype=torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (40, 192), (33, 71)])
@pytest.mark.filterwarnings("ignore")
def test_numbers_are_those_of_bitsandbytes(shape: Any, nested: bool, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape).to(dtype)
    quantised, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    expected = functional.dequantize_4bit(quantised, state)
    scales: dict[str, Any] = {"block_size": state.blocksize}
    if nested:
        scales |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        scales |= {"nested_offset": state.offset, "nested_block_size": state.state2.blocksize}
    for backend in ("torch", "auto"):
        with tigon.backend(backend):
            made = tigon.dequantize_nf4(quantised, state.absmax, state.shape, dtype=dtype, **scales)
        assert torch.equal(made, expected)


def test_only_bytes_are_kept_of_the_weight(device: torch.device) -> None:
    given, found = packed(device, 40, 48, nested=True), []
    x = torch.randn(3, 5, 48, device=device, requires_grad=True)
    low = [torch.randn(shape, device=device, requires_grad=True) for shape in ((8, 48), (40, 8))]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        y = tigon.nf4_lora_linear(x, given.pop("packed"), given.pop("absmax"), *low, **given)
    sizes = sorted(t.numel() * t.element_size() for t in found)
    # x, both factors, 256 values of scales, and the bytes: of the weight, 7680 as numbers, there is nothing else.
    assert sizes[-5:] == [960, 1024, 1280, 1536, 2880]
    y.sum().backward()
    assert all(t.grad is not None for t in (x, *low))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": torch.zeros(100, dtype=torch.uint8)}, "packed: expected 256 bytes, got 100"),
        ({"absmax": torch.ones(7)}, "absmax: expected 8 elements, got 7"),
        ({"block_size": 63}, "block_size: expected a positive even number, got 63"),
        ({"absmax": torch.ones(8, dtype=torch.uint8)}, "nested_absmax, nested_code, nested_offset: expected tensors"),
        ({"nested_offset": torch.ones(())}, "nested_absmax, nested_code, nested_offset: expected None for scales that"),
        ({"out": torch.ones(8, 63)}, r"out: expected contiguous, shape \(8, 64\), got shape \(8, 63\)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = packed(torch.device("cpu"), 8, 64)
    with pytest.raises(ValueError, match=f"dequantize_nf4: {message}"):
        tigon.dequantize_nf4(**{**given, **change}, shape=(8, 64))
