# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled by Numba, and their machine code on its own.

The only file of which library.py asks for what it has not kept; importing it imports Numba (118 MB
and a third of a second). Numba's own callbacks reach into it where a function could raise; no
kernel does, so `code_of()` puts an entry of its own before the function, drops everything that
the entry does not need, and has LLVM emit the rest for linking (machine_code.py).
"""

from __future__ import annotations

import importlib
from typing import Any

from llvmlite import binding
from numba.core.registry import cpu_target

from fastps.reduce.machine_code import Code, link

# Numba's types are incomplete.
_cpu: Any = cpu_target
_llvm: Any = binding
ENTRY = "fastps_kernel"
# Module and function that compile each family; few jobs need more than the first.
FAMILIES = {
    "reduce": ("kernels", "compile_kernel"),
    "robust": ("robust", "compile_robust"),
    "ordered": ("combine_kernels", "compile_ordered"),
    "codec": ("codec.kernels", "compile_codec"),
    "byteps": ("codec.byteps", "compile_codec"),
    "pairs": ("codec.pairs", "compile_codec"),
    "sparse": ("codec.sparse", "compile_codec"),
}

# LLVM calls memset() for zeros; so code has its own, by the instruction that is made for it.
_MEMSET = """
define hidden ptr @memset(ptr %to, i32 %what, i64 %count) {
  %byte = trunc i32 %what to i8
  %end = call { ptr, i64 } asm sideeffect "rep stosb",
    "={di},={cx},0,1,{al},~{memory},~{dirflag},~{fpsr},~{flags}"(ptr %to, i64 %count, i8 %byte)
  ret ptr %to
}
"""
_ENTRY = """
declare i32 @"{name}"({types})
define i64 @{entry}({parameters}) {{
  %result = alloca i64
  %error = alloca ptr
  store i64 0, ptr %result
  %status = call i32 @"{name}"(ptr %result, ptr %error, {arguments})
  %found = load i64, ptr %result
  ret i64 %found
}}
"""


def compile_kernel(family: str, *what: Any) -> Any:
    """Compile one kernel of a family of library.py; return Numba's callback object.

    Its address is valid as long as it lives. Takes about 0.1 s, the first in a process 0.5 s.
    """
    module, name = FAMILIES[family]
    return getattr(importlib.import_module(f"fastps.reduce.{module}"), name)(*what)


def code_of(kernel: Any) -> Code:
    """Return the machine code of a kernel; CannotLink where it needs more than itself."""
    name = kernel._wrapper_name.removeprefix("cfunc.")
    module = _llvm.parse_assembly(kernel._library.get_llvm_str())
    types = [str(argument.type) for argument in module.get_function(name).arguments]
    named = [f"{kind} %a{place}" for place, kind in enumerate(types[2:])]
    entry = _ENTRY.format(
        entry=ENTRY, name=name, types=", ".join(types), parameters=", ".join(named),
        arguments=", ".join(named),
    )  # fmt: skip
    machine = _machine()
    is_amd64 = machine.triple.startswith("x86_64")
    module.link_in(_llvm.parse_assembly(entry + _MEMSET * is_amd64))
    _keep_only(module, machine)
    return link(machine.emit_object(module), ENTRY)


def _machine() -> Any:
    """Make the target that Numba compiles for, with position-independent code."""
    _llvm.initialize_native_asmparser()  # of which memset() has need
    triple, name, features = _cpu.target_context.codegen().magic_tuple()
    return _llvm.Target.from_triple(triple).create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="default"
    )


def _keep_only(module: Any, machine: Any) -> None:
    """Drop what neither our entry nor memset() needs."""
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name not in (ENTRY, "memset"):
            one.linkage = "internal"
    passes = _llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, _llvm.create_pass_builder(machine, _llvm.create_pipeline_tuning_options(0)))
