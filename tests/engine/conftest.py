import pytest
import torch


@pytest.fixture
def real_bfloat16(monkeypatch):
    """Triton's interpreter cuts bfloat16 off where devices round, and multiplies it as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_rounding(data, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.tensor(data).bfloat16().view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.tensor(data).view(torch.bfloat16).float().numpy()
        return convert(data, source, target, mode)

    def widened(builder, handle):
        is_bfloat16 = handle.dtype.scalar == tl.bfloat16
        return builder.create_fp_ext(handle, tl.float32) if is_bfloat16 else handle

    def create_wide_dot(self, a, b, *rest):
        return create_dot(self, widened(self, a), widened(self, b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", convert_rounding)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_wide_dot)
