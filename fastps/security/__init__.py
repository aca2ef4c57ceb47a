# SPDX-License-Identifier: Apache-2.0
"""Authentication and encryption: handshakes, the tokens that prove a role, ciphers.

Decides what both sides of a connection prove to each other and in which order, and how records are
sealed. Must never know a socket (transport/handshake_gate.py and control/dial.py carry the bytes),
nor what a record means. handshake.py has the messages and their proofs, tokens.py the tokens of
members, ciphers.py the ciphers of the machine's libcrypto, which _cipher.pyx calls.
"""
