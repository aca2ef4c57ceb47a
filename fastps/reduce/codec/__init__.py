# SPDX-License-Identifier: Apache-2.0
"""Codecs: kernels that encode and decode, and the coder of one partition that calls them."""
