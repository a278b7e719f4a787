"""Kernels for the simulator's own tests."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .build import fatbin

ARCHITECTURES = (75, 80, 90, 100, 120)


@lru_cache
def sample(*options: str) -> bytes:
    """``kernels/sample.cu`` for every architecture; with other compiler options for one."""
    source = Path(__file__).parent / "kernels" / "sample.cu"
    return fatbin(source, (90,) if options else ARCHITECTURES, options).read_bytes()


def kernel(body: str, parameters: str = ".param .u64 p", target: int = 90, declarations: str = "") -> bytes:
    """PTX text of one kernel ``k`` around a body.

    Registers: ``%p0-7``, ``%h0-7`` (16 bits), ``%r0-15``, ``%f0-7``, ``%d0-7`` (64 bits).  ``%d0`` starts as the first
    parameter.
    """
    return f"""
.version 7.8
.target sm_{target}
.address_size 64
{declarations}
.visible .entry k({parameters})
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<16>;
    .reg .f32 %f<8>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [p];
    {body}
    ret;
}}
""".encode()
