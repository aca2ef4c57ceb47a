# SPDX-License-Identifier: Apache-2.0
"""Horovod's functions about its build; fastps uses none of these libraries."""


def ccl_built() -> bool:
    """Return whether Intel's oneCCL is used: no."""
    return False


def cuda_built() -> bool:
    """Return whether tensors on CUDA devices are reduced there: no."""
    return False


def ddl_built() -> bool:
    """Return whether IBM's DDL is used: no."""
    return False


def gloo_built() -> bool:
    """Return whether Gloo is used: no."""
    return False


def gloo_enabled() -> bool:
    """Return whether this job uses Gloo: no."""
    return False


def mpi_built() -> bool:
    """Return whether MPI is used: no."""
    return False


def mpi_enabled() -> bool:
    """Return whether this job uses MPI: no."""
    return False


def mpi_threads_supported() -> bool:
    """Return whether MPI may be called from several threads: no."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL that is used: 0 for none."""
    return 0


def rocm_built() -> bool:
    """Return whether tensors on devices of ROCm are reduced there: no."""
    return False
