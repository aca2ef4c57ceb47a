# SPDX-License-Identifier: Apache-2.0
"""Kernels of codecs, which encode and decode; ../_coder.pxi calls them."""
