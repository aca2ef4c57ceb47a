# SPDX-License-Identifier: Apache-2.0
"""Operations among the members of a group: which messages they consist of, and who sends them."""
