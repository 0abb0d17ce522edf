"""Compile the Gluon score kernel for Hopper, without a GPU, and print what came out as JSON.

Run as a program: an interpreter of Triton must not be active. Arguments: head_dim.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from patternsearch.kernels.score.gluon_hopper import BLOCK_KEYS, score_hopper_fwd_kernel


def compile_for_hopper(head_dim):
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, head_dim], gl.bfloat16)
    types = {
        "d_q": f"tensordesc<bf16[1,64,{head_dim}],{layout!r}>",
        "d_k": f"tensordesc<bf16[1,{BLOCK_KEYS // 2},{head_dim}],{layout!r}>",
        "neg_lse2": "*fp32", "segment_mass": "*fp32", "scale_log2": "fp32",
        **{f"bucket_{i}": "*u8" for i in range(3)}, **{f"mass_{i}": "*fp32" for i in range(3)},
    }  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "HAS_SEGMENTS": True, "num_warps": 4,
        "KIND_0": 0, "TILE_0": 64, "KIND_1": 0, "TILE_1": 128, "KIND_2": 1, "TILE_2": 64,
    }  # fmt: skip
    signature, attributes = {}, {}
    for place, name in enumerate(score_hopper_fwd_kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or name.startswith("stride"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    names = score_hopper_fwd_kernel.arg_names
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(score_hopper_fwd_kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def disassemble(cubin):
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(program), "-sass", "-res-usage", file.name]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    kernel = compile_for_hopper(int(sys.argv[1]))
    text = disassemble(kernel.asm["cubin"])
    found = {
        "registers": int(re.search(r"REG:(\d+)", text).group(1)),
        "shared": kernel.metadata.shared,
        "products": len(re.findall(r"HGMMA", text)),
        "waits": len(re.findall(r"WARPGROUP\.DEPBAR", text)),
    }
    print(json.dumps(found))
