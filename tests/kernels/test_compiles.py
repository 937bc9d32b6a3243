"""The kernel compiles for a GPU, down to machine code, on a machine without one; the interpreter can't show that."""

import os
import subprocess
import sys

import pytest

CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from alambique.kernels import topk_rows as module
from alambique.losses.config import LossConfig

def compiles(objective, logits, gradient, absent):
    pointers = ["z_ptr", "dz_ptr", "bias_ptr", "ids_ptr", "log_p_ptr", "log_r_ptr", "label_ptr", "grad_scale_ptr"]
    types = dict.fromkeys([*pointers, "rows_ptr"], "*" + logits)
    types |= {"dz_ptr": "*" + gradient, "ids_ptr": "*i64", "label_ptr": "*i64"}
    constants = {**objective, "BLOCK_V": module.BLOCK_COLUMNS, "BLOCK_K": 128, **dict.fromkeys(absent)}
    names = module._topk_rows.arg_names
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        module._topk_rows,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": module._WARPS, "num_stages": 1})
    assert len(compiled.asm["cubin"]) > 0

for divergence in module.DIVERGENCES:
    plain = module.constants(LossConfig(divergence=divergence), None)
    compiles(plain, "fp32", "bf16", ["bias_ptr", "label_ptr"])
everything = LossConfig(
    divergence="reverse_kl", tail="truncate", temperature=2, kd_weight=0.5, ce_weight=0.5, z_loss=1e-4,
    logit_scale=0.5, logit_softcap=30,
)
everything = module.constants(everything, 1e-7)
compiles(everything, "fp32", "fp16", [])
compiles(everything, "fp64", "fp64", ["grad_scale_ptr"])
print("compiled")
"""


@pytest.mark.slow
def test_for_hopper() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr
